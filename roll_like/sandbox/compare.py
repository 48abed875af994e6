r"""Comparison of what a program gave with what was expected; it always happens outside the sandbox.

    Comparison().outputs("1 2 \n3\n\n", "1 2\n3") is None                      # the same
    Comparison().values([1, 2], (1, 2)) is None                                # the same, unless strict
    Comparison().values(True, 1)                                               # "at the value: expected 1, got True"

Both functions return `None` for a match, else where the first difference is. Values are those that
`codec.decode` gives: their types are exact, so no `==` of a program's own ever runs here.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import zip_longest
from typing import Any

from roll_like.errors import ConfigError

_SHOWN = 120  # characters of a value in a message
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What counts as the same.

    Attributes:
        float_tolerance: Largest relative (below 1: absolute) difference of two floats, and of two
            numbers in printed text; `None` asks for equal values and equal text.
        strict_types: A list is no tuple, a set no frozenset, 2 is not 2.0. A boolean is never a number.
    """

    float_tolerance: float | None = None
    strict_types: bool = False

    def __post_init__(self) -> None:
        if self.float_tolerance is not None and not 0 <= self.float_tolerance < 1:
            raise ConfigError(f"Comparison.float_tolerance should be in [0, 1), found {self.float_tolerance!r}")

    def outputs(self, got: str, expected: str) -> str | None:
        """Compare printed text line by line, without blanks at the ends of lines and newlines at the end."""
        pairs = zip_longest(_lines(got), _lines(expected))
        for number, (line, wanted) in enumerate(pairs, start=1):
            if line != wanted and not self._same_tokens(line, wanted):
                return f"line {number}: expected {_shown_line(wanted)}, got {_shown_line(line)}"
        return None

    def values(self, got: object, expected: object) -> str | None:
        """Compare two decoded values."""
        return self._difference(got, expected, "the value")

    def _same_tokens(self, line: str | None, wanted: str | None) -> bool:
        if self.float_tolerance is None or line is None or wanted is None:
            return False
        left, right = line.split(), wanted.split()
        return len(left) == len(right) and all(map(self._same_token, left, right))

    def _same_token(self, got: str, wanted: str) -> bool:
        if got == wanted:
            return True
        if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(wanted)) or (_is_whole(got) and _is_whole(wanted)):
            return False
        return self._close(float(got), float(wanted))

    def _close(self, got: float, wanted: float) -> bool:
        if got == wanted or (math.isnan(got) and math.isnan(wanted)):
            return True
        if self.float_tolerance is None or not (math.isfinite(got) and math.isfinite(wanted)):
            return False
        return abs(got - wanted) <= self.float_tolerance * max(1.0, abs(wanted))

    def _difference(self, got: Any, wanted: Any, where: str) -> str | None:
        different = f"at {where}: expected {shown(wanted)}, got {shown(got)}"
        if self._family(got) != self._family(wanted):
            return different
        if isinstance(wanted, (list, tuple, deque)):
            if len(got) != len(wanted):
                return f"at {where}: expected {len(wanted)} elements, got {len(got)}: {shown(got)}"
            pairs = enumerate(zip(got, wanted, strict=True))
            return _first(self._difference(a, b, f"{where}[{at}]") for at, (a, b) in pairs)
        if isinstance(wanted, (set, frozenset)):
            return None if {self._key(item) for item in got} == {self._key(item) for item in wanted} else different
        if isinstance(wanted, dict):
            return self._dict_difference(got, wanted, where)
        return None if self._same_scalar(got, wanted) else different

    def _dict_difference(self, got: dict[Any, Any], wanted: dict[Any, Any], where: str) -> str | None:
        keyed = {self._key(key): (key, item) for key, item in got.items()}
        wanted_keyed = {self._key(key): (key, item) for key, item in wanted.items()}
        missing = [name for key, (name, _) in wanted_keyed.items() if key not in keyed]
        if missing:
            return f"at {where}: the key {shown(missing[0])} is missing"
        surplus = [name for key, (name, _) in keyed.items() if key not in wanted_keyed]
        if surplus:
            return f"at {where}: the key {shown(surplus[0])} is not expected"
        return _first(
            self._difference(keyed[key][1], item, f"{where}[{shown(name)}]")
            for key, (name, item) in wanted_keyed.items()
        )

    def _same_scalar(self, got: Any, wanted: Any) -> bool:
        if isinstance(wanted, float) or isinstance(got, float):
            try:
                return bool(got == wanted) or self._close(float(got), float(wanted))
            except OverflowError:  # an integer beyond the range of floats
                return False
        if isinstance(wanted, complex):
            return self._close(got.real, wanted.real) and self._close(got.imag, wanted.imag)
        if isinstance(wanted, Decimal) and wanted.is_nan():
            return bool(got.is_nan())
        return bool(got == wanted)

    def _family(self, value: object) -> str:
        """Return the kind of a value; values of different kinds never match."""
        name = type(value).__name__
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


def shown(value: object) -> str:
    """Return a short text of a plain value; an integer too long to be printed is described."""
    try:
        text = repr(value)
    except ValueError:  # an integer beyond sys.get_int_max_str_digits
        text = f"a {type(value).__name__} with a very long integer"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _shown_line(line: str | None) -> str:
    return "the end" if line is None else shown(line)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _is_whole(token: str) -> bool:
    return token.lstrip("+-").isdigit()


def _first(differences: Iterable[str | None]) -> str | None:
    return next((difference for difference in differences if difference is not None), None)
