"""JSON values, and Python literals where a model writes those; calls of Python functions with literal arguments."""

from __future__ import annotations

import json
import re
from typing import Any

_DEEPEST = 100  # of Python literals; the JSON decoder has its own limit

_SPACE = re.compile(r"\s*")
_STRING = re.compile(
    r"""[rRuU]?(?:'''(?P<a>.*?(?<!\\)(?:\\\\)*)'''|\"{3}(?P<b>.*?(?<!\\)(?:\\\\)*)\"{3}"""
    r"""|'(?P<c>[^'\\]*(?:\\.[^'\\]*)*)'|"(?P<d>[^"\\]*(?:\\.[^"\\]*)*)")"""
    r"""|<\|"\|>(?P<gemma>.*?)<\|"\|>|<escape>(?P<escape>.*?)<escape>""",
    re.DOTALL,
)
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*(?P<fraction>\.\d*)?|(?P<point>\.\d+))(?P<power>[eE][-+]?\d+)?(?![\w.])")
#: In Gemma's notation.
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"'<][^:,{}\[\]\"'<]*(?=:)")
_BARE = re.compile(r"[^,{}\[\]<]+")
_WORD = re.compile(r"[A-Za-z_]\w*")
_CONSTANTS: dict[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NAME = re.compile(r"[A-Za-z_][\w.-]*(?=\s*\()")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "/": "/", "\n": "", "\\": "\\",
    "'": "'", '"': '"',
}  # fmt: skip


class Unread(ValueError):
    """What cannot be read as a call, with the problem."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


#: Line ends within strings are taken as they are: models write them.
_DECODER = json.JSONDecoder(parse_constant=_no_constant, strict=False)


def read_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a place of a text, and where it ends.

    Raises:
        ValueError: There is none.
    """
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_value(text: str, at: int) -> tuple[Any, int]:
    """Return the value at a place of a text, and where it ends: JSON, or else a Python literal.

    >>> read_value("{'a': True, 'b': [None, 1,]}", 0)
    ({'a': True, 'b': [None, 1]}, 28)

    Raises:
        ValueError: There is none; says what is wrong with it as JSON.
    """
    try:
        return read_json(text, at)
    except ValueError as error:
        if not text.startswith(("{", "["), at):
            raise
        try:
            return _Literals(text).value(at, 0)
        except ValueError:
            raise error from None


def loads(text: str) -> Any:
    """Return the value that a whole text is.

    Raises:
        ValueError: It is none, or something follows it.
    """
    value, end = read_value(text, skip_space(text, 0))
    if skip_space(text, end) < len(text):
        raise ValueError(f"something follows it at character {end}")
    return value


def read_python_call(text: str, at: int) -> tuple[str, list[Any], dict[str, Any], int]:
    """Return a call's name, arguments by place and by name, and where it ends.

    >>> read_python_call('f(1, b="x")', 0)
    ('f', [1], {'b': 'x'}, 11)

    Raises:
        ValueError: There is no call, or one whose arguments are not literals.
    """
    return _Literals(text).call(at)


def read_bare_mapping(text: str, at: int) -> tuple[Any, int]:
    """Return the mapping at a place of a text in Gemma's notation, and where it ends.

    Keys are bare, and texts stand between marks of their own. Bare words that are no values are texts too.

    >>> read_bare_mapping('{a:<|"|>x, "y"<|"|>,b:[1,true],c:{d:warm}}', 0)
    ({'a': 'x, "y"', 'b': [1, True], 'c': {'d': 'warm'}}, 42)

    Raises:
        ValueError: There is none.
    """
    return _Literals(text, bare=True).value(at, 0)


def skip_space(text: str, at: int) -> int:
    """Return the place of the next character that is no white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


class _Literals:
    """Reads Python literals: texts, numbers, constants (JSON's too), lists, tuples (as lists) and dictionaries.

    Args:
        text: Holds them.
        bare: Whether keys and texts may be bare, as Gemma writes them.
    """

    def __init__(self, text: str, *, bare: bool = False) -> None:
        self.text = text
        self.bare = bare

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        text = self.text
        at = skip_space(text, at)
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        if text.startswith(("[", "("), at):
            return self._sequence(at, "]" if text[at] == "[" else ")", depth)
        if text.startswith("{", at):
            return self._mapping(at, depth)
        if (string := _STRING.match(text, at)) is not None:
            raw = next(part for part in string.groups() if part is not None)
            return (raw if string[0][0] in "rR<" else _unescaped(raw)), string.end()
        return self._word(at) if not self.bare else self._bare_word(at)

    def _word(self, at: int) -> tuple[Any, int]:
        text = self.text
        if (number := _NUMBER.match(text, at)) is not None:
            whole = not any(number.group("fraction", "point", "power"))
            return (int(number[0]) if whole else float(number[0].replace("_", ""))), number.end()
        word = _WORD.match(text, at)
        if word is None or word[0] not in _CONSTANTS:
            raise ValueError(f"expected a value at character {at}")
        return _CONSTANTS[word[0]], word.end()

    def _bare_word(self, at: int) -> tuple[Any, int]:
        written = _BARE.match(self.text, at)
        if written is None:
            raise ValueError(f"expected a value at character {at}")
        word = written[0].strip()
        try:
            value, end = read_json(word, 0)
        except ValueError:
            return _CONSTANTS.get(word, word), written.end()
        return (value if end == len(word) else word), written.end()

    def call(self, at: int) -> tuple[str, list[Any], dict[str, Any], int]:
        head = _NAME.match(self.text, at)
        if head is None:
            raise ValueError(f"expected a call at character {at}")
        placed: list[Any] = []
        named: dict[str, Any] = {}

        def argument(at: int) -> int:
            keyword = _KEYWORD.match(self.text, at)
            if keyword is None:
                value, end = self.value(at, 0)
                placed.append(value)
            else:
                named[keyword[1]], end = self.value(keyword.end(), 0)
            return end

        end = self._items(skip_space(self.text, head.end()) + 1, ")", argument)
        return head[0], placed, named, end

    def _sequence(self, at: int, close: str, depth: int) -> tuple[Any, int]:
        items: list[Any] = []

        def item(at: int) -> int:
            value, end = self.value(at, depth + 1)
            items.append(value)
            return end

        end = self._items(at + 1, close, item)
        # (1) is a number, (1,) is a list
        grouped = close == ")" and len(items) == 1 and not self.text[at:end].rstrip(") \n").endswith(",")
        return (items[0] if grouped else items), end

    def _mapping(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        items: dict[str, Any] = {}

        def item(at: int) -> int:
            bare = _BARE_KEY.match(self.text, at) if self.bare else None
            key, end = (bare[0].strip(), bare.end()) if bare else self.value(at, depth + 1)
            end = skip_space(self.text, end)
            if not isinstance(key, str) or not self.text.startswith(":", end):
                raise ValueError(f"expected a text and a colon at character {at}")
            items[key], end = self.value(end + 1, depth + 1)
            return end

        return items, self._items(at + 1, "}", item)

    def _items(self, at: int, close: str, item: Any) -> int:
        """Read what is separated by commas up to a closing bracket, and return the place after it."""
        while True:
            at = skip_space(self.text, at)
            if self.text.startswith(close, at):
                return at + 1
            at = skip_space(self.text, item(at))
            if self.text.startswith(",", at):
                at += 1
            elif not self.text.startswith(close, at):
                raise ValueError(f"expected ',' or '{close}' at character {at}")


def _unescaped(raw: str) -> str:
    if "\\" not in raw:
        return raw

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8))
        return _ESCAPES.get(code, match[0])

    found = _ESCAPE.sub(one, raw)
    # \ud83d\ude00 are the two halves of one character
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
