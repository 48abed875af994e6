"""How values cross the border of a sandbox: a strict, tagged codec for plain types.

    decode(encode([1, (2.5, None), {"a": {3}}])) == [1, (2.5, None), {"a": {3}}]

The text is JSON. `None`, booleans, strings, finite floats and integers of up to 63 bits are JSON's own;
every other value is an array that begins with a tag: `["l", 1, 2]` is a list, `["t", 1]` a tuple,
`["d", key, value, …]` a dictionary. Types are exact: an instance of a subclass is refused, because what
a subclass does with `==` is for its author to say. `OrderedDict`, `defaultdict` and `Counter` become
`dict`, and numpy's scalars and arrays what their `tolist` returns. Decoding calls nothing that the text
names, and its cost is bounded: by the size and depth of the text, by the size of numbers, and by a limit
on colliding hashes.

The file needs only the standard library: the very same one runs inside the sandbox, where the program may
do with it what it likes. What protects is that `decode` outside believes nothing.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

#: Most bytes of one encoded value.
MAX_BYTES = 8 * 1024 * 1024
#: Deepest nesting: `[]` has depth 1.
MAX_DEPTH = 64
#: Most bits of an integer; of each part of a Fraction (their greatest common divisor takes quadratic time).
MAX_BITS, MAX_FRACTION_BITS = 1 << 20, 1 << 14
#: Most digits of a Decimal.
MAX_DECIMAL_DIGITS = 4096
#: Most elements of one set or dictionary that may share a hash: insertion takes quadratic time in it.
MAX_COLLISIONS = 64

_PLAIN_INT = 1 << 63
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z", deque: "q"}
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class CodecError(ValueError):
    """A value has no plain type, is too large or too deep; or a text is not what `encode` writes."""


def encode(value: object, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return `value` as ASCII text.

    Raises:
        CodecError: Some part of it is of no plain type, or a limit is passed.
    """
    try:
        data = json.dumps(_pack(value, MAX_DEPTH), separators=(",", ":"), allow_nan=False).encode("ascii")
    except RecursionError:
        raise CodecError("the value is nested too deeply for the stack that is left") from None
    if len(data) > max_bytes:
        raise CodecError(f"the value takes {len(data)} bytes, of at most {max_bytes}")
    return data


def decode(data: bytes, *, max_bytes: int = MAX_BYTES) -> object:
    """Return the value that `data` encodes, which may come from anyone.

    Raises:
        CodecError: `data` is not text of `encode`, or a limit is passed.
    """
    if len(data) > max_bytes:
        raise CodecError(f"the text has {len(data)} bytes, of at most {max_bytes}")
    try:
        tree = json.loads(data.decode("ascii"), parse_constant=_no_constant, object_pairs_hook=_no_object)
        return _unpack(tree, MAX_DEPTH)
    except CodecError:
        raise
    except RecursionError:
        raise CodecError("the text is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise CodecError(f"the text is malformed: {error}") from None


def _pack(value: Any, depth: int) -> Any:  # noqa: C901, PLR0911 - one case for each type
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_PLAIN_INT < value < _PLAIN_INT else ["i", _hex(value, MAX_BITS)]
    if kind is float:
        return value if math.isfinite(value) else ["f", repr(value)]
    if kind is bytes:
        return ["b", value.hex()]
    if kind is complex:
        return ["c", _pack(value.real, depth), _pack(value.imag, depth)]
    if kind is Fraction:
        return ["F", _hex(value.numerator, MAX_FRACTION_BITS), _hex(value.denominator, MAX_FRACTION_BITS)]
    if kind is Decimal:
        return ["D", _decimal_text(value)]
    if depth == 0:
        raise CodecError(f"the value is nested deeper than {MAX_DEPTH}")
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *[_pack(item, depth - 1) for item in value]]
    if kind in _DICTS:
        packed: list[Any] = ["d"]
        for key, item in value.items():
            packed += (_pack(key, depth - 1), _pack(item, depth - 1))
        return packed
    if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        return _pack(value.tolist(), depth - 1)
    raise CodecError(f"a value of type {kind.__module__}.{kind.__qualname__} is not plain")


def _unpack(tree: Any, depth: int) -> Any:
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    if isinstance(tree, int):
        if not -_PLAIN_INT < tree < _PLAIN_INT:
            raise CodecError("an integer of 64 bits or more is not tagged")
        return tree
    if isinstance(tree, float):
        if not math.isfinite(tree):
            raise CodecError("a float is out of range")
        return tree
    if not tree or not isinstance(tree[0], str):
        raise CodecError("an array has no tag")
    tag, items = tree[0], tree[1:]
    if tag == "c":
        return _complex(*items)
    if tag in _SCALARS:
        if not all(isinstance(item, str) for item in items):
            raise CodecError(f"what follows the tag {tag!r} is not text")
        return _SCALARS[tag](*items)
    if depth == 0:
        raise CodecError(f"the text is nested deeper than {MAX_DEPTH}")
    return _collect(tag, [_unpack(item, depth - 1) for item in items])


def _collect(tag: str, parts: list[Any]) -> Any:
    """Return the container that `tag` names, with `parts` in it."""
    if tag == "l":
        return parts
    if tag == "t":
        return tuple(parts)
    if tag == "q":
        return deque(parts)
    if tag in {"s", "z"}:
        _check_keys(parts)
        return set(parts) if tag == "s" else frozenset(parts)
    if tag != "d":
        raise CodecError(f"the tag {tag[:20]!r} is unknown")
    if len(parts) % 2:
        raise CodecError("a dictionary has a key without a value")
    _check_keys(parts[::2])
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _check_keys(keys: list[Any]) -> None:
    """Refuse what `encode` does not write (a key twice) and what would take quadratic time to insert."""
    hashes: dict[int, int] = {}
    for key in keys:
        slot = hash(key)  # TypeError for a list, which `decode` turns into its own
        hashes[slot] = hashes.get(slot, 0) + 1
        if hashes[slot] > MAX_COLLISIONS:
            raise CodecError(f"more than {MAX_COLLISIONS} keys share a hash")
    if len(set(keys)) != len(keys):
        raise CodecError("a key stands twice in a set or dictionary")


def _hex(value: int, bits: int) -> str:
    if value.bit_length() > bits:
        raise CodecError(f"an integer of {value.bit_length()} bits is larger than {bits}")
    return format(value, "x")


def _decimal_text(value: Decimal) -> str:
    text = str(value)
    if len(text) > MAX_DECIMAL_DIGITS or value.is_snan():
        raise CodecError(f"a Decimal is a signalling NaN or longer than {MAX_DECIMAL_DIGITS} digits")
    return text


def _int(text: str, bits: int = MAX_BITS) -> int:
    digits = text.removeprefix("-")
    if not digits or not set(digits) <= set("0123456789abcdef"):
        raise CodecError("an integer is malformed")
    if 4 * (len(digits) - 1) + int(digits[0], 16).bit_length() > bits:
        raise CodecError(f"an integer is larger than {bits} bits")
    return int(text, 16)


def _float(text: str) -> float:
    if text not in _SPECIAL_FLOATS:
        raise CodecError("a float is neither a number nor nan, inf or -inf")
    return _SPECIAL_FLOATS[text]


def _complex(real: Any, imaginary: Any) -> complex:
    parts = [_unpack(part, 0) for part in (real, imaginary)]
    if [type(part) for part in parts] != [float, float]:
        raise CodecError("a complex number has a part that is not a float")
    return complex(*parts)


def _fraction(numerator: str, denominator: str) -> Fraction:
    below = _int(denominator, MAX_FRACTION_BITS)
    if below < 1:
        raise CodecError("a Fraction has a denominator below 1")
    return Fraction(_int(numerator, MAX_FRACTION_BITS), below)


def _decimal(text: str) -> Decimal:
    if len(text) > MAX_DECIMAL_DIGITS:
        raise CodecError(f"a Decimal is longer than {MAX_DECIMAL_DIGITS} digits")
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise CodecError("a Decimal is malformed") from None
    if value.is_snan():
        raise CodecError("a Decimal is a signalling NaN")
    return value


_SCALARS: dict[str, Any] = {"i": _int, "f": _float, "b": bytes.fromhex, "F": _fraction, "D": _decimal}


def _no_constant(name: str) -> object:
    raise CodecError(f"the constant {name} is not tagged")


def _no_object(_: Iterable[tuple[str, Any]]) -> object:
    raise CodecError("the text holds an object; dictionaries are tagged arrays")
