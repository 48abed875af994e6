"""Short answers against reference answers: as words with numbers by value, as numbers, and as a part of a text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_like.builtin.envs.qa import same
from roll_like.data.answers import answer_words, last_number, only_number


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # numbers count by value, however they are written
        *[
            ("42", text)
            for text in ("42.0", "42.", "４２", "٤٢", "+42", "42.00", " 42 ", "**42**", r"$42$", r"\boxed{42}")
        ],
        *[("1234567", text) for text in ("1,234,567", "1 234 567", "1\u202f234\u202f567", "1'234'567", "12,34,567")],
        *[("-5", text) for text in ("−5", "–5", "- 5", "-5.0", "－５")],
        *[
            ("-5", text)
            for text in ("-(5)", "−(5.0)", "- ( 5 )", "-((5))", "-[5]", r"-\left(5\right)", "+(-5)", "negative 5")
        ],
        *[("5", text) for text in ("-(-5)", "+(5)", "(5)")],
        *[("-0.5", "-(1/2)"), ("-5%", "-(5%)"), ("$-5", "-($5)"), ("it is minus 5", "it is -5"), ("x - (5)", "x - 5")],
        *[("It is 5", text) for text in ("It is 5!", "It is 5 !", "It is 5!!")],
        *[("5!", text) for text in ("5 !", "(5)!", "5 factorial")],
        *[("60", "5 dozen"), ("100", "5 score"), ("100000", "1 lakh"), ("5000", "5千"), ("5 bn", "5 billion")],
        *[("1/2", text) for text in ("0.5", ".5", "½", r"\frac{1}{2}", r"\dfrac12", r"$\tfrac{1}{2}$", "1 / 2")],
        *[("3.5", text) for text in ("3 1/2", "3½", r"3\frac{1}{2}", "7/2", "3.50")],
        *[("1500", text) for text in ("1.5 × 10^3", "1.5e3", "1.5·10³", r"1.5 \times 10^{3}", "1.5 thousand")],
        *[("50%", text) for text in ("50 %", r"50\%", "50 percent", "50.0%", "５０％")],
        *[("$1,200", text) for text in ("$1200", r"\$1,200.00", "1200$", "$1.2 thousand")],
        ("5 km", "5km"),
        ("25 °C", "25°C"),
        ("2^10", "1024"),
        ("2020-05-01", "2020–05–01"),
        ("3-5", "3–5"),
        ("1, 2, 3", "1,2,3"),
        # spelling
        ("U.S.A.", "usa"),
        ("don't", "DON’T"),
        ("Paris, France", "paris  france!"),
        ("Paris,France", "Paris (France)"),
        ("“quoted”", '"Quoted"'),
        ("well-known", "well\u2010known"),
        ("ﬁne café", "fine cafe\u0301"),
        ("ＡＢＣ", "abc"),
        ("北京", "北 京。"),
        ("Straße", "STRASSE"),
    ],
)
def test_answers_that_say_the_same(one: str, other: str) -> None:
    assert answer_words(one) == answer_words(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *[("3.14", "31.4"), ("3.14", "314"), ("3.14", "3 14"), ("-5", "5"), ("1/2", "12"), ("1/2", "2"), ("10", "1.0")],
        *[("1,2,3", "123"), ("1.5", "15"), ("1234567", "1234568"), ("1e-19", "1e-20"), ("10³", "103"), ("2^10", "210")],
        *[
            ("-√5", "√5"),
            ("-√(5)", "√5"),
            ("-2π", "2π"),
            ("-x", "x"),
            ("-(√2)", "√2"),
            ("-5!", "5!"),
            ("5!", "5"),
            ("5!!", "5!"),
        ],
        *[("5 squared", "5"), ("7-(5)", "75"), ("10 minus 5", "10, -5"), ("5千米", "5000 米"), ("5 score", "5")],
        *[("1/3", "0.33"), ("50%", "50"), ("50%", "0.5"), ("$5", "€5"), ("5", "5 km"), ("<5", "5"), ("√2", "2")],
        *[("2π", "2"), ("x^2", "x2"), ("5 m/s", "5 ms"), ("2*3", "2, 3"), ("0.1", "01"), ("5,5", "55")],
        # names with digits
        *[("007", "7"), ("02139", "2139"), ("3.1.4", "31.4"), ("2020-05-01", "20200501"), ("2020/05/01", "2020/10/2")],
        *[("12:30", "1230"), ("12:30", "12.30"), ("3-5", "35"), ("v3.10", "v31.0"), ("05/01", "5"), ("1:2", "12")],
        # names with marks
        *[("C#", "C"), ("C++", "C"), ("C#", "C++"), ("A+", "A"), ("A-", "A"), ("A+", "A-"), ("Na+", "Na"), ("O−", "O")],
        *[("5‰", "5"), ("-∞", "∞"), ("−∞", "∞"), ("√5", "5"), ("√ 5", "5"), ("0x10", "0"), ("x_5", "x 5"), ("5k", "5")],
        *[("Vitamin A", "vitamin"), ("R&D", "R D"), ("*", "/"), ("18+", "18"), ("हिन्दी", "हनद"), ("resume", "résumé")],
    ],
)
def test_answers_that_do_not(one: str, other: str) -> None:
    assert answer_words(one) != answer_words(other)


@settings(deadline=None)
@given(st.fractions(max_denominator=10_000), st.integers(0, 3))
def test_a_number_counts_by_its_value(value: Fraction, zeros: int) -> None:
    (written,) = answer_words(f"{value.numerator}/{value.denominator}")
    assert Fraction(written) == value
    decimal = f"{float(value):.3f}"
    assert answer_words(decimal + "0" * zeros) == answer_words(decimal)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("about 1,000", "1000"),
        ("The total is 72, altogether.", "72"),
        ("He has 12 - 5 = 7 apples.", "7"),
        ("I pay $18.50.", "18.5"),
        ("12 of 48 is 25%", "0.25"),
        ("#### 1,234", "1234"),
        ("#### 5\n7 is a check.", "5"),
        ("3 and 4 make 7", "7"),
        ("答案是5个。", "5"),
        ("共３万人", "30000"),
        ("It weighs 5kg.", "5"),
        ("$1.5 million", "1500000"),
        ("-2^2", "-4"),
        ("2^{-2}", "0.25"),
        ("2¹⁰", "1024"),
        ("= -\\frac{3}{4}", "-0.75"),
        ("the temperature fell to -3 °C", "-3"),
        ("Steps:\n- 5 apples", "5"),
        ("(-5)", "-5"),
        ("-(5)", "-5"),
        ("so x = -(5)", "-5"),
        ("-(-5)", "5"),
        ("it fell by -($5)", "-5"),
        ("The answer is negative 5.", "-5"),
        ("It is minus 5 degrees.", "-5"),
        ("10 minus 5 is 5", "5"),
        ("The answer is 5!", "5"),
        ("答案是5！", "5"),
        ("5! = 120", "120"),
        ("5 score", "100"),
        ("2 dozen eggs", "24"),
        ("3 crore", "30000000"),
        ("5千", "5000"),
        ("5千克", "5"),
        ("a score of 5", "5"),
        ("T=-5", "-5"),
        ("0.(3)", "1/3"),
    ],
)
def test_the_last_number(text: str, value: str) -> None:
    found = last_number(text)
    assert found is not None
    assert found.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        *["", "none", "1,2,3", "1, 2, 3", "(3, 4)", "[1; 2]", "3 or 5", "3 and 5", "5 to 10", "3-5", "3 km or 5 km"],
        *["12:30", "2020-05-01", "3.1.4", "COVID-19", "2π", "√2", "x^2", "3x", "1.234,56", "9^(10^10)", "9^9999999"],
        *["5!", "5 !", "(5)!", "-5!", "n = 5!", "5 factorial", "5 squared", "±5", "± 5", "10 ± 5", "7-(5)"],
        *["the 3rd", "H2O", "5k", "0x10", "0b101", "5‰", "5 ‰"],
    ],
)
def test_no_number_or_more_than_one(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("1234568", "1234567", False),
        ("1234567890124", "1234567890123", False),
        ("0.3333333", "1/3", True),
        ("0.3333", "1/3", False),
        ("3.1415927", "3.14159265", True),
        ("3.14", "3.14159265", False),
        ("1.6e-19", "1.6e-20", False),
        ("1.6021766e-19", "1.60217663e-19", True),
        ("0", "0.0000001", False),
        ("41.99999999999999", "42", True),
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("50", "50%", False),
        ("0.5", "50%", True),
        ("5", "5 books", True),
        ("-(5)", "5", False),
        ("5!", "5", False),
        ("5 score", "5", False),
        ("3", "1,2,3", False),
        ("18", "9 * 2 = 18 #### 18", True),
    ],
)
def test_numbers_are_compared_relatively(answer: str, reference: str, right: bool) -> None:
    assert same(answer, reference, "number") is right


@pytest.mark.parametrize("text", ["", "no number", "1,2", "3 to 5", "2020-05-01", "1 of 2"])
def test_a_reference_holds_one_number(text: str) -> None:
    assert only_number(text) is None


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("There are 5 of them.", "5", True),
        ("about 1,000 people", "1000", True),
        ("5.0", "5", True),
        ("it is 5kg", "5", True),
        ("-5", "5", False),
        ("5.5", "5", False),
        ("15", "5", False),
        ("1/5", "5", False),
        ("5/7", "5", False),
        ("2020-05-01", "5", False),
        ("12:05", "12", False),
        ("I like C++.", "C", False),
        ("I like C#.", "C", False),
        ("I like C.", "C", True),
        ("I like C++.", "C++", True),
        ("the answer is yes.", "Yes", True),
        ("yesterday", "yes", False),
        ("他住在北京市。", "北京", True),
        ("他住在北海市。", "北京", False),
        ("有5个苹果", "5", True),
        ("有15个苹果", "5", False),
        ("He’s “The Rock”.", "the rock", True),
        ("New  York\nCity", "new york", True),
        ("York, New", "new york", False),
    ],
)
def test_a_reference_stands_in_an_answer(answer: str, reference: str, right: bool) -> None:
    assert same(answer, reference, "contains") is right
