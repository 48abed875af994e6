"""The codec: what it carries comes back with its exact type; what it does not know it refuses."""

from __future__ import annotations

import enum
import math
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_like.sandbox import codec
from roll_like.sandbox.codec import CodecError, decode, encode

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.text()
    | st.text(st.characters(codec="utf-16", exclude_categories=()), max_size=5)
    | st.binary()
    | st.complex_numbers()
    | st.decimals(allow_nan=False)
    | st.fractions()
)


@st.composite
def scalars(draw: st.DrawFn) -> object:
    """A strategy with a short name: hypothesis writes it out for every level of those built on it."""
    return draw(PLAIN)


@st.composite
def keys(draw: st.DrawFn) -> object:
    nested = st.recursive(
        scalars(), lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3)
    )
    return draw(nested)


VALUES = st.recursive(
    scalars(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.sets(keys(), max_size=4)
        | st.frozensets(keys(), max_size=4)
        | st.dictionaries(keys(), inner, max_size=4)
    ),
    max_leaves=20,
)


def described(value: object) -> object:
    """A value with its types written out, NaN and −0.0 told apart, so that `==` compares everything."""
    kind = type(value).__name__
    if isinstance(value, (list, tuple, deque)):
        return (kind, [described(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (kind, sorted(repr(described(item)) for item in value))
    if isinstance(value, dict):
        return (kind, [(described(key), described(item)) for key, item in value.items()])
    return (kind, repr(value))


@given(VALUES)
@settings(max_examples=settings().max_examples)
def test_what_goes_in_comes_out_with_its_types(value: object) -> None:
    assert described(decode(encode(value))) == described(value)


@given(st.binary(max_size=200) | st.text('[]{}",:.-+eE0123456789nulltrfsidbcFDqz \\', max_size=200).map(str.encode))
@settings(max_examples=5 * settings().max_examples)
def test_any_bytes_are_a_value_or_a_codec_error(data: bytes) -> None:
    try:
        value = decode(data)
    except CodecError:
        return
    assert described(decode(encode(value))) == described(value)


HOSTILE_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([*"lisztqdfbcFD", "nan", "1", "-ff", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
)


@given(HOSTILE_JSON)
@settings(max_examples=5 * settings().max_examples)
def test_any_json_is_a_value_or_a_codec_error(tree: object) -> None:
    import json

    try:
        value = decode(json.dumps(tree).encode())
    except CodecError:
        return
    assert described(decode(encode(value))) == described(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, {1: [2]}), {1: [2]}),
        (Counter("aab"), {"a": 2, "b": 1}),
    ],
)
def test_known_dictionaries_become_plain_ones(value: object, plain: object) -> None:
    assert decode(encode(value)) == plain
    assert type(decode(encode(value))) is dict


class Sly(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Sly(3),
        type("SlyText", (str,), {})("x"),
        type("SlyList", (list,), {})(),
        type("SlyDict", (dict,), {})(),
        [1, {"a": (Sly(3),)}],
        {Sly(3): 1},
        Colour.RED,
        namedtuple("Point", "x y")(1, 2),
        range(3),
        iter([]),
        (item for item in ()),
        {}.keys(),
        bytearray(b"x"),
        memoryview(b"x"),
        len,
        int,
        ...,
        NotImplemented,
        ValueError("x"),
        Decimal("sNaN"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(CodecError):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nul",
        b"\xff\xfe",
        '"ä"'.encode(),
        b"[]",
        b"[1]",
        b"{}",
        b'["l",{"a":1}]',
        b'["no",1]',
        b"NaN",
        b"Infinity",
        b"1e999",
        b"9223372036854775808",
        b"1" * 5000,
        b'["i","xyz"]',
        b'["i","--1"]',
        b'["i",""]',
        b'["i","1_0"]',
        b'["i",5]',
        b'["i"]',
        b'["f","1.0"]',
        b'["f",["l"]]',
        b'["b","0"]',
        b'["b","zz"]',
        b'["c",1,2]',
        b'["c",1.0]',
        b'["c",["l"],["l"]]',
        b'["F","1","0"]',
        b'["F","1","-1"]',
        b'["D","x"]',
        b'["D","sNaN"]',
        b'["D",[0,[1],2]]',
        b'["d",1]',
        b'["d",["l"],1]',
        b'["d",1,2,1,3]',
        b'["d",1,2,true,3]',
        b'["s",["l"]]',
        b'["s",1,1]',
        b'["z",1,1.0]',
        b"[" * 100_000,
        b'["l",' * 65 + b"1" + b"]" * 65,
        b"1 2",
    ],
    ids=lambda data: data[:20].decode("latin1"),
)
def test_malformed_text_is_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_depth_is_limited_on_both_sides() -> None:
    assert decode(encode(nested(codec.MAX_DEPTH))) == nested(codec.MAX_DEPTH)
    with pytest.raises(CodecError, match="deeper than 64"):
        encode(nested(codec.MAX_DEPTH + 1))
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(CodecError, match="deeper than 64"):
        encode(endless)


def test_size_is_limited_on_both_sides() -> None:
    assert decode(encode("x" * 98, max_bytes=100), max_bytes=100) == "x" * 98
    with pytest.raises(CodecError, match="101 bytes, of at most 100"):
        encode("x" * 99, max_bytes=100)
    with pytest.raises(CodecError, match="101 bytes, of at most 100"):
        decode(encode("x" * 99), max_bytes=100)


def test_numbers_have_a_largest_size() -> None:
    assert decode(encode(1 << (codec.MAX_BITS - 1))) == 1 << (codec.MAX_BITS - 1)
    for value in (1 << codec.MAX_BITS, Fraction(1, (1 << codec.MAX_FRACTION_BITS) + 1), Decimal("1" * 5000)):
        with pytest.raises(CodecError):
            encode(value)
    for text in ('["i","1%s"]' % ("0" * (1 << 18)), '["F","1","1%s"]' % ("0" * 5000), '["D","%s"]' % ("1" * 5000)):
        with pytest.raises(CodecError):
            decode(text.encode())


@pytest.mark.parametrize("tag", ["s", "z", "d"])
def test_keys_made_to_collide_are_refused_quickly(tag: str) -> None:
    prime = (1 << 61) - 1  # hash(k * prime) == 0
    keys = ",".join(f'["i","{k * prime:x}"]' + (",0" if tag == "d" else "") for k in range(8, 40_000))
    begin = time.process_time()
    with pytest.raises(CodecError, match="share a hash"):
        decode(f'["{tag}",{keys}]'.encode())
    assert time.process_time() - begin < 5


def test_special_floats_are_tagged() -> None:
    assert encode([math.inf, -math.inf, 0.5]) == b'["l",["f","inf"],["f","-inf"],0.5]'
    nan = decode(encode(math.nan))
    assert isinstance(nan, float)
    assert math.isnan(nan)


def test_the_file_stands_alone() -> None:
    """It is copied into sandboxes: nothing but the standard library, and no other file of the package."""
    import ast
    import sys
    from pathlib import Path

    tree = ast.parse(Path(codec.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(module).split(".")[0] for module in modules} <= sys.stdlib_module_names


def test_scalars_and_arrays_of_numpy_are_what_they_list() -> None:
    class Array:  # numpy itself is not in the sandbox; on a server it may be
        __module__ = "numpy"

        def __init__(self, content: object) -> None:
            self.content = content

        def tolist(self) -> object:
            return self.content

    assert decode(encode([Array(3), Array([0.5, Array(None)])])) == [3, [0.5, None]]
    endless = Array(None)
    endless.content = endless
    with pytest.raises(CodecError, match="deeper"):
        encode(endless)
