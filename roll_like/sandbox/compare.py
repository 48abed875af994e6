r"""Comparison of what a program gave with what was expected; it always happens outside the sandbox.

    Comparison().outputs("1 2 \n3\n\n", "1 2\n3") is None                      # the same
    Comparison().values([1, 2], (1, 2)) is None                                # the same, unless strict
    Comparison().values(True, 1)                                               # "at the value: expected 1, got True"
    Comparison(tokens=True, float_tolerance=1e-6).outputs("1 0.3333333", "1\n0.333333\n") is None      # as judges do

Both functions return `None` for a match, else where the first difference is. Values are those that
`codec.decode` gives: their types are exact, so no `==` of a program's own ever runs here.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from roll_like.errors import ConfigError

_SHOWN = 120  # characters of a value in a message
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
#: Digits that are rather text than a number, as in binary.
_PADDED = re.compile(r"[+-]?0\d")
#: What C and judges take for blanks; Unicode's others are text.
_TOKEN = re.compile(r"[^ \t\n\r\v\f]+")
#: What may stand around numbers within a token, as in a printed list.
_AROUND = re.compile(r"([\[\](){},;:=])")
#: Enough for the difference of two numbers; they themselves are exact.
_ARITHMETIC = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_BYTE_ORDER_MARK = "\ufeff"
#: Integers as keys of JSON are read up to here.
_KEY_BITS = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What counts as the same.

    Attributes:
        float_tolerance: Largest absolute or relative difference of two floats, and of two numbers in printed text.
            Against a whole number it is absolute, and two whole numbers have to be the same. `None` asks for equal
            values and equal text.
        tokens: Printed text is compared token by token, as judges do: blanks and line ends only separate. Without it,
            line by line, except for blanks at the ends of lines and newlines at the end.
        from_json: Expected values come from JSON. Its keys are text: the key "1" also stands for 1. Its numbers are
            of two kinds: 0.5 also stands for Decimal("0.5") and Fraction(1, 2).
        strict_types: A list is no tuple, a set no frozenset, 2 is not 2.0. A boolean is never a number.
    """

    float_tolerance: float | None = None
    tokens: bool = False
    from_json: bool = False
    strict_types: bool = False

    def __post_init__(self) -> None:
        if self.float_tolerance is not None and not 0 <= self.float_tolerance < 1:
            raise ConfigError(f"Comparison.float_tolerance should be in [0, 1), found {self.float_tolerance!r}")

    def outputs(self, got: str, expected: str) -> str | None:
        """Compare printed text, token by token or line by line."""
        got, expected = got.removeprefix(_BYTE_ORDER_MARK), expected.removeprefix(_BYTE_ORDER_MARK)
        if self.tokens:
            unit, found, wanted_units = "token", _TOKEN.findall(got), _TOKEN.findall(expected)
        else:
            unit, found, wanted_units = "line", _lines(got), _lines(expected)
        for number, (part, wanted) in enumerate(zip_longest(found, wanted_units), start=1):
            if part != wanted and (part is None or wanted is None or not self._same_tokens(part, wanted)):
                return f"{unit} {number}: expected {_shown_part(wanted)}, got {_shown_part(part)}"
        return None

    def values(self, got: object, expected: object) -> str | None:
        """Compare two decoded values."""
        return self._difference(got, expected, "the value")

    def _same_tokens(self, line: str, wanted: str) -> bool:
        if self.float_tolerance is None:
            return False
        left, right = _TOKEN.findall(line), _TOKEN.findall(wanted)
        return len(left) == len(right) and all(map(self._same_token, left, right))

    def _same_token(self, got: str, wanted: str) -> bool:
        if got == wanted:
            return True
        if self.float_tolerance is None:
            return False
        left, right = _AROUND.split(got), _AROUND.split(wanted)
        return len(left) == len(right) and all(map(self._same_number, left, right))

    def _same_number(self, got: str, wanted: str) -> bool:
        if got == wanted:
            return True
        if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(wanted)):
            return False
        whole = _WHOLE.fullmatch(wanted) is not None
        if _PADDED.match(wanted) or (whole and _WHOLE.fullmatch(got)):
            return {got, wanted} == {"0", "-0"}  # elsewhere leading zeros and signs count: they may be text
        return self._within(Decimal(got), Decimal(wanted), absolute=whole)

    def _within(self, got: Decimal, wanted: Decimal, *, absolute: bool) -> bool:
        """Compare two finite numbers by the tolerance; without overflow, whatever their exponents."""
        assert self.float_tolerance is not None
        if got == wanted:
            return True
        scale = Decimal(1) if absolute else max(Decimal(1), wanted.copy_abs())
        allowed = _ARITHMETIC.multiply(Decimal(repr(self.float_tolerance)), scale)
        return _ARITHMETIC.subtract(got, wanted).copy_abs() <= allowed

    def _close(self, got: Any, wanted: Any) -> bool:
        if got == wanted or (got != got and wanted != wanted):  # noqa: PLR0124 - both are NaN
            return True
        if self.float_tolerance is None or not (_is_finite(got) and _is_finite(wanted)):
            return False
        return self._within(_decimal(got), _decimal(wanted), absolute=isinstance(wanted, int))

    def _difference(self, got: Any, wanted: Any, where: str) -> str | None:
        different = f"at {where}: expected {short_repr(wanted)}, got {short_repr(got)}"
        if self._family(got) != self._family(wanted):
            return different
        if isinstance(wanted, (list, tuple, deque)):
            if len(got) != len(wanted):
                return f"at {where}: expected {len(wanted)} elements, got {len(got)}: {short_repr(got)}"
            pairs = enumerate(zip(got, wanted, strict=True))
            return _first(self._difference(a, b, f"{where}[{at}]") for at, (a, b) in pairs)
        if isinstance(wanted, (set, frozenset)):
            return None if {self._key(item) for item in got} == {self._key(item) for item in wanted} else different
        if isinstance(wanted, dict):
            return self._dict_difference(got, wanted, where)
        return None if self._same_scalar(got, wanted) else different

    def _dict_difference(self, got: dict[Any, Any], wanted: dict[Any, Any], where: str) -> str | None:
        wanted_keyed = {self._key(key): (key, item) for key, item in wanted.items()}
        keyed = {self._key(key): (key, item) for key, item in got.items()}
        if self.from_json:
            keyed = {key if key in wanted_keyed else self._key(_json_key(pair[0])): pair for key, pair in keyed.items()}
            if len(keyed) != len(got):
                return f"at {where}: two keys are the same in JSON: {short_repr(got)}"
        missing = [name for key, (name, _) in wanted_keyed.items() if key not in keyed]
        if missing:
            return f"at {where}: the key {short_repr(missing[0])} is missing"
        surplus = [name for key, (name, _) in keyed.items() if key not in wanted_keyed]
        if surplus:
            return f"at {where}: the key {short_repr(surplus[0])} is not expected"
        return _first(
            self._difference(keyed[key][1], item, f"{where}[{short_repr(name)}]")
            for key, (name, item) in wanted_keyed.items()
        )

    def _same_scalar(self, got: Any, wanted: Any) -> bool:
        if isinstance(wanted, float) or isinstance(got, float) or type(got) is not type(wanted):
            return self._close(got, wanted)
        if isinstance(wanted, complex):
            return self._close(got.real, wanted.real) and self._close(got.imag, wanted.imag)
        if isinstance(wanted, Decimal) and wanted.is_nan():
            return bool(got.is_nan())
        return bool(got == wanted)

    def _family(self, value: object) -> str:
        """Return the kind of a value; values of different kinds never match."""
        name = type(value).__name__
        if self.from_json and name in {"Decimal", "Fraction"}:
            return "number"
        return name if self.strict_types else _FAMILIES.get(name, name)

    def _key(self, value: Any) -> Any:
        """Return a stand-in that can be hashed and tells `True` from 1; tolerance does not reach into keys."""
        if isinstance(value, (tuple, frozenset)):
            parts = [self._key(item) for item in value]
            return (self._family(value), tuple(parts) if isinstance(value, tuple) else frozenset(parts))
        if value != value:  # noqa: PLR0124 - a NaN of any type
            return (self._family(value), "nan")
        return (self._family(value), value)


_FAMILIES = {"tuple": "list", "deque": "list", "frozenset": "set", "int": "number", "float": "number"}


def short_repr(value: object) -> str:
    """Return a short text of a plain value; an integer too long to be printed is described."""
    try:
        text = repr(value)
    except ValueError:  # an integer beyond sys.get_int_max_str_digits
        text = f"a {type(value).__name__} with a very long integer"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _shown_part(part: str | None) -> str:
    return "the end" if part is None else short_repr(part)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _is_finite(value: Any) -> bool:
    if isinstance(value, (int, Fraction)):
        return True  # they may be beyond the range of floats
    return value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)


def _decimal(value: Any) -> Decimal:
    if isinstance(value, Fraction):
        return _ARITHMETIC.divide(Decimal(value.numerator), Decimal(value.denominator))
    return Decimal(value)


def _json_key(key: object) -> object:
    """Return what becomes of a key in JSON: the text of a number, a truth value or nothing."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    short = isinstance(key, float) or (isinstance(key, int) and key.bit_length() < _KEY_BITS)
    return repr(key) if short else key


def _first(differences: Iterable[str | None]) -> str | None:
    return next((difference for difference in differences if difference is not None), None)
