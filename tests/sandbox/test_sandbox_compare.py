"""Comparison of output and values outside the sandbox."""

from __future__ import annotations

import math
from collections import deque
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_like.errors import ConfigError
from roll_like.sandbox.compare import Comparison

EXACT, NEAR, STRICT = Comparison(), Comparison(float_tolerance=1e-6), Comparison(strict_types=True)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("1 2\n3\n", "1 2\n3"),
        ("1 2  \n3\t\n\n\n", "1 2\n3"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("", "\n\n"),
        ("\n1", "\n1\n"),
    ],
)
def test_blanks_at_ends_do_not_count(got: str, expected: str) -> None:
    assert EXACT.outputs(got, expected) is None
    assert EXACT.outputs(expected, got) is None


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        ("1\n3", "1\n2", "line 2: expected '2', got '3'"),
        ("1", "1\n2", "line 2: expected '2', got the end"),
        ("1\n2", "1", "line 2: expected the end, got '2'"),
        (" 1", "1", "line 1: expected '1', got ' 1'"),
        ("1\n\n2", "1\n2", "line 2: expected '2', got ''"),
        ("", "1", "line 1: expected '1', got ''"),
        ("0.30000000000000004", "0.3", "line 1: expected '0.3', got '0.30000000000000004'"),
        ("١", "1", "line 1: expected '1', got '١'"),
    ],
)
def test_different_output_names_the_line(got: str, expected: str, message: str) -> None:
    assert EXACT.outputs(got, expected) == message


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("0.30000000000000004 x", "0.3 x", True),
        ("3.0", "3", True),
        ("1e3", "1000.0", True),
        ("0.31", "0.3", False),
        ("1000000000000000001", "1000000000000000000", False),  # whole numbers are exact
        ("1e999", "1e888", False),  # however large
        ("1e999", "5.0", False),
        ("nan", "0.5", False),
        ("inf", "1e5", False),
        ("0.3 0.3", "0.3", False),
        ("1_0", "10.0", False),
        ("1" * 5000, "1" * 4999 + "2", False),
    ],
)
def test_numbers_in_output_with_tolerance(got: str, expected: str, same: bool) -> None:
    assert (NEAR.outputs(got, expected) is None) is same


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (1, 1),
        (2, 2.0),
        ([1, (2, 3)], ([1, [2, 3]])),
        (deque([1]), [1]),
        ({1, 2}, frozenset({2, 1})),
        ({(1, 2.0)}, {(1.0, 2)}),
        ({"a": [1], "b": None}, {"b": None, "a": [1]}),
        (math.nan, math.nan),
        ([Decimal("NaN")], [Decimal("NaN")]),
        ({math.nan}, {math.nan}),
        (math.inf, math.inf),
        (Fraction(1, 3), Fraction(1, 3)),
        (1 << 5000, 1 << 5000),
        (complex(1, math.nan), complex(1, math.nan)),
    ],
)
def test_same_values(got: object, expected: object) -> None:
    assert EXACT.values(got, expected) is None
    assert EXACT.values(expected, got) is None


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (True, 1),
        (0, False),
        ([True], [1]),
        ({True}, {1}),
        ({True: "a"}, {1: "a"}),
        ({(True,)}, {(1,)}),
        (1, "1"),
        (b"1", "1"),
        (None, False),
        ([], None),
        ([1], {1}),
        ([1, 2], [1]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "c": 2}, {"a": 1}),
        (math.inf, -math.inf),
        (1.0, math.nan),
        (0.1 + 0.2, 0.3),
        (1 << 2000, math.inf),
        (Decimal("1"), 1),
        (Fraction(1), 1),
        (complex(1), 1),
        ("a", "a "),
    ],
)
def test_different_values(got: object, expected: object) -> None:
    assert EXACT.values(got, expected) is not None
    assert EXACT.values(expected, got) is not None


def test_tolerance_is_relative_and_absolute_below_one() -> None:
    assert NEAR.values([0.1 + 0.2, 1e9 + 1], [0.3, 1e9]) is None
    assert NEAR.values(1e-7, 0.0) is None
    assert NEAR.values(1e-5, 0.0) is not None
    assert NEAR.values(1e9 + 2e3, 1e9) is not None
    assert NEAR.values(10**9 + 1, 10**9) is not None  # integers are exact
    assert NEAR.values({"a": 1.0000001}, {"a": 1}) is None
    assert NEAR.values(math.inf, 1e300) is not None
    assert NEAR.values(complex(1, 1e-8), complex(1, 0)) is None


def test_strict_types_tell_sequences_apart() -> None:
    for got, expected in (((1,), [1]), (deque([1]), [1]), (frozenset({1}), {1}), (2, 2.0), ({2.0}, {2})):
        assert STRICT.values(got, expected) is not None
        assert STRICT.values(got, got) is None


def test_messages_say_where_and_stay_short() -> None:
    assert EXACT.values({"a": [1, 2]}, {"a": [1, 3]}) == "at the value['a'][1]: expected 3, got 2"
    assert EXACT.values([1], [1, 2]) == "at the value: expected 2 elements, got 1: [1]"
    assert EXACT.values({"a": 1}, {"b": 1}) == "at the value: the key 'b' is missing"
    assert EXACT.values({"a": 1, "b": 1}, {"b": 1}) == "at the value: the key 'a' is not expected"
    long = EXACT.values("x" * 1000, "y" * 1000)
    assert long is not None
    assert len(long) < 300
    assert "very long integer" in str(EXACT.values(10**5000, 1))


@pytest.mark.parametrize("tolerance", [-1.0, 1.0, math.nan])
def test_a_tolerance_out_of_range_is_refused(tolerance: float) -> None:
    with pytest.raises(ConfigError, match="float_tolerance"):
        Comparison(float_tolerance=tolerance)


@given(
    st.recursive(
        st.integers() | st.text() | st.floats() | st.booleans(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
@settings(max_examples=2 * settings().max_examples)
def test_every_value_equals_itself_and_not_itself_in_a_list(value: object) -> None:
    for comparison in (EXACT, NEAR, STRICT):
        assert comparison.values(value, value) is None
        assert comparison.values([value, 0], [value, 1]) is not None


JUDGE = Comparison(float_tolerance=1e-6, tokens=True, from_json=True)


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1\n2\n3", "1 2 3", True),
        ("  1\t2\r\n\r\n3  ", "1 2\n3\n", True),
        ("12", "1 2", False),
        ("1 2 3 4", "1 2 3", False),
        ("1 2", "1 2 3", False),
        ("", " \n", True),
        ("0", "", False),
        ("1\u00a02", "1 2", False),
        ("\ufeff1", "1", True),
        # against a whole number the tolerance is absolute
        ("2.9999999999999996", "3", True),
        ("1000000006.5", "1000000007", False),
        ("100000000000000000001", "1e20", True),
        ("1e20", "100000000000000000001", False),
        ("100000000000000000000.0", "100000000000000000000", True),
        ("999999.5", "1000000.0", True),
        ("999998.5", "1000000.0", False),
        # what is text stays text
        ("007", "7", False),
        ("7.0", "007", False),
        ("+7", "7", False),
        ("-0", "0", True),
        ("-0.0", "0", True),
        ("-00", "0", False),
        ("1/3", "0.333333", False),
        ("0x10", "16", False),
        ("1.0.0", "1.0", False),
        ("1e", "1", False),
        ("YES", "Yes", False),
        ("True", "true", False),
        # neither nan nor infinity is near a number; equal words are equal
        ("nan", "nan", True),
        ("nan", "NaN", False),
        ("inf", "1e999999", False),
        ("9e999999", "8e999999", False),
        ("1e999999", "10e999998", True),
        ("1e9999999", "1e99999990", False),
        ("1e-999999", "0.0", True),
        # numbers in printed lists
        ("[0.30000000000000004, 2]", "[0.3, 2]", True),
        ("(0.3,1)", "[0.3,1]", False),
        ("x=0.30000000000000004;", "x=0.3;", True),
        ("[01]", "[1]", False),
    ],
)
def test_tokens_as_judges_compare_them(got: str, expected: str, same: bool) -> None:
    assert (JUDGE.outputs(got, expected) is None) is same


def test_tokens_say_which_differs() -> None:
    assert JUDGE.outputs("1 2", "1\n3") == "token 2: expected '3', got '2'"
    assert JUDGE.outputs("1", "1 3") == "token 2: expected '3', got the end"


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ({1: "a"}, {"1": "a"}, True),
        ({True: 1, None: 2, 1.5: 3}, {"true": 1, "null": 2, "1.5": 3}, True),
        ({"1": "a"}, {1: "a"}, False),
        ({1: "a", "1": "b"}, {"1": "a"}, False),
        ({(1,): "a"}, {"(1,)": "a"}, False),
        ([{1: 0.1 + 0.2}], [{"1": 0.3}], True),
        (10**17 + 1, 1e17, True),  # a float expected: it knows no better
        (1e17, 10**17 + 1, False),
        (3.0000001, 3, True),
        (1 << 5000, 1.0, False),
        (1.0, 1 << 5000, False),
        (math.nan, 0.0, False),
        (math.inf, 1e308, False),
        (Decimal("0.5"), 0.5, True),
        (Decimal("0.3000001"), 0.3, True),
        (Fraction(1, 3), 0.3333333, True),
        (Fraction(3), 3, True),
        ([Decimal(3)], [3], True),
        (Fraction(7, 2), 3, False),
        (Decimal("NaN"), 0.5, False),
        (Decimal("Infinity"), 3, False),
        (Decimal(1), True, False),
        ({Decimal(1): 2}, {"1": 2}, False),
    ],
)
def test_values_from_json(got: object, expected: object, same: bool) -> None:
    assert (JUDGE.values(got, expected) is None) is same
