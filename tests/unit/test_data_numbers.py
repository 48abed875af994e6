import doctest
from fractions import Fraction

import pytest

from roll_like.data import numbers
from roll_like.data.numbers import find_numbers, parse_number, read_number


def test_examples_of_the_module() -> None:
    tested = doctest.testmod(numbers)
    assert tested.attempted >= 6
    assert tested.failed == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42.0", 42),
        ("\u22125", -5),
        ("\u20135", -5),
        ("- 5", -5),
        ("+7", 7),
        ("-$5", -5),
        ("$-5", -5),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("12,34,567", 1234567),
        ("1 234 567", 1234567),
        ("1\u202f234", 1234),
        ("10'000", 10000),
        ("10\u2019000", 10000),
        ("1_000", 1000),
        ("3 1/2", Fraction(7, 2)),
        ("-3 1/2", Fraction(-7, 2)),
        ("3\u00bd", Fraction(7, 2)),
        ("\u2153", Fraction(1, 3)),
        ("0.(3)", Fraction(1, 3)),
        ("1.2(34)", Fraction(611, 495)),
        ("1.5E-3", Fraction(3, 2000)),
        ("5e-05", Fraction(1, 20000)),
        ("1.5 \u00d7 10\u207b\u00b3", Fraction(3, 2000)),
        ("1.5*10**3", 1500),
        ("50 percent", Fraction(1, 2)),
        ("\uff15", 5),
        ("\u0663\u0664", 34),
        (".5", Fraction(1, 2)),
        ("5.", 5),
    ],
)
def test_a_number_in_any_notation(text: str, value: Fraction | int) -> None:
    assert read_number(text) == value


NO_NUMBERS = ("", "-", ".", "5,", "1,2", "1,23", "0,123", "1,2345", "12 34", "1.000.000", "1/2/3", "1/0", "3rd", "x5")


@pytest.mark.parametrize("text", [*NO_NUMBERS, "5 km", "1:30"])
def test_what_is_no_number(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize("text", ["1e999999999", "9" * 10_000, "1,000" * 10_000])
def test_a_number_that_would_fill_the_memory_is_not_read(text: str) -> None:
    assert read_number(text) is None


def test_a_decimal_knows_its_last_place_and_other_numbers_are_exact() -> None:
    steps = [number and number.step for number in map(parse_number, ("3.14", "1.6e-19", "42", "1/3", "0.(3)", "12.5%"))]
    assert steps == [Fraction(1, 100), Fraction(1, 10**20), None, None, None, Fraction(1, 1000)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("from 3\u20135 or 5-3", [3, 5, 5, 3]),
        ("-7, x=-5 and (-2)", [-7, -5, -2]),
        ("(3)-5", [3, 5]),
        ("10 000 people in 2020", [10000, 2020]),
        ("7km, the 3rd of H2O", [7]),
        ("1,2,3", [1, 2, 3]),
        ("It costs $1,250.50.", [Fraction(2501, 2)]),
        ("5.5", [Fraction(11, 2)]),
    ],
)
def test_numbers_in_prose(text: str, values: list[Fraction | int]) -> None:
    assert [found.number.value for found in find_numbers(text)] == values


def test_a_found_number_knows_where_it_stands() -> None:
    (found,) = find_numbers("about -5.5%, no more")
    assert "about -5.5%, no more"[found.start : found.end] == "-5.5%"
