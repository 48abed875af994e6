r"""The JSON object in a judge's answer, as models write it rather than as RFC 8259 wants it.

Models put the object into prose, fences or behind reasoning, break lines inside of strings, write LaTeX with
single backslashes, Python's quotes and constants, and commas before a closing brace. All of that is read. What
is cut off or ambiguous is refused: no completion and no guess, since a wrong score is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll_like.data.boxed import closing_braces
from roll_like.data.reasoning import ANY_CLOSE, ANY_OPEN

#: A brace that begins an object rather than a set, a LaTeX argument or code.
_OBJECT = re.compile(r"""\{\s*(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[“”][^“”\n]*[“”]|[A-Za-z_]\w*)\s*:""")
_BLANK = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/|#[^\n]*)*", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BARE = re.compile(r"""(?:(?!//|/\*)[^,{}\[\]"'\n#])+""")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_CLOSING_QUOTES = {'"': '"', "'": "'", "“": "“”", "”": "“”"}
#: Where a quote inside of a string that lacks its backslash cannot be the end: nothing of an object follows it.
_AFTER_KEY = r"(?=\s*:)"
_AFTER_VALUE = r"""(?=\s*(?:[}\]]|,\s*["'“”}\]{\[\d-]))"""

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
#: LaTeX commands that begin as JSON's escapes of line ends and tabs do; \b and \f before a letter always begin one.
_LATEX = re.compile(
    r"(?:n(?:abla|e|eg|eq|exists|i|ot|otin|parallel|u|less|geq|leq|mid|subseteq)"
    r"|r(?:ho|ight|angle|brace|brack|ceil|floor|m|ightarrow|oot|ule)"
    r"|t(?:au|an|anh|ext|extbf|extit|extrm|exttt|frac|heta|imes|ilde|o|op|riangle|hinspace|herefore|ag))(?![A-Za-z])"
)
_MAX_DEPTH = 50
#: Python refuses to read integers of some thousand digits.
_MAX_DIGITS = 300
_ALONE_BEFORE = re.compile(r"[\s>*`~]*(?:json\w*)?\s*", re.IGNORECASE)
_ALONE_AFTER = re.compile(r"[\s*`~.]*")


class MalformedError(ValueError):
    """A judge's answer does not have the required form."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What begins as an object does: where it stands, and what it says; None if that cannot be read."""

    start: int
    end: int
    content: Mapping[str, Any] | None


def parse_object(text: str, key: str | None = None) -> Mapping[str, Any]:
    r"""Return the JSON object of a judge's answer.

    Reasoning in front of the answer does not count. Of several objects (a judge may quote an example, or the
    response) those on lines of their own count before those within a sentence, and of these the last one.

    >>> parse_object('Format: {"score": 1}. Mine:\n```json\n{"reasoning": "uses \frac", "score": 8,}\n```')["score"]
    8

    Args:
        key: Only objects with this key count, in lower or upper case, or one level below the top; None: all.

    Raises:
        MalformedError: There is none, it is cut off, or two in succession contradict each other.
    """
    answer = _without_reasoning(text)
    found = [each for each in _objects(answer) if each.content is None or _with_key(each.content, key) is not None]
    if found and found[-1].content is None:
        raise MalformedError(f"a JSON object that is cut off or cannot be read: {text[-200:]!r}")
    chosen = [each for each in found if _stands_alone(answer, each)] or found
    last = _with_key(chosen[-1].content, key) if chosen else None
    if last is None:
        raise MalformedError(f"no JSON object{f' with {key!r}' if key else ''}: {text[:200]!r}")
    if len(chosen) > 1:
        before = _with_key(chosen[-2].content, key)
        between = answer[chosen[-2].end : chosen[-1].start]
        if not re.search(r"\w", between) and (before or {}).get(key or "", before) != last.get(key or "", last):
            raise MalformedError(f"two JSON objects that contradict each other: {text[-200:]!r}")
    return last


def _with_key(content: Mapping[str, Any] | None, key: str | None) -> Mapping[str, Any] | None:
    """Return the object that has `key`: this one, or the only one among its values; None if there is none."""
    if content is None or key is None:
        return content
    for name, value in content.items():
        if name.strip().casefold() == key:
            return {**content, key: value}
    inner = [value for value in content.values() if isinstance(value, Mapping)]
    held = [found for found in (_with_key(value, key) for value in inner) if found is not None]
    return held[0] if len(held) == 1 else None


def _without_reasoning(text: str) -> str:
    """Return what follows the reasoning; a closing tag that an object quotes does not end it."""
    objects = [found for found in _objects(text) if found.content is not None]
    for close in reversed(list(ANY_CLOSE.finditer(text))):
        if not any(found.start < close.start() < found.end for found in objects):
            return text[close.end() :]
    if ANY_OPEN.match(text.lstrip()):
        raise MalformedError(f"reasoning that does not end: {text[-200:]!r}")
    return text


def _objects(text: str) -> list[_Found]:
    """Return the outermost objects of a text, in order; those in a list are unreadable, as none counts more."""
    closing = closing_braces(text)
    found: list[_Found] = []
    at = text.find("{")
    while at >= 0:
        end = at + 1
        if _OBJECT.match(text, at):
            end = closing.get(at, len(text) - 1) + 1
            content = None
            for loose in (False, True):
                reader = _Reader(text, at, loose_quotes=loose)
                try:
                    content = reader.object()
                except MalformedError:
                    continue
                end = reader.at
                break
            previous = text[found[-1].end : at] if found else ""
            if text[:at].rstrip().endswith("[") or (found and found[-1].content is None and previous.strip() == ","):
                content = None
            found.append(_Found(at, end, content))
        at = text.find("{", end)
    return found


def _stands_alone(text: str, found: _Found) -> bool:
    """Return whether nothing but a fence or markup shares lines with an object."""
    before = text[text.rfind("\n", 0, found.start) + 1 : found.start]
    after = text[found.end :].partition("\n")[0]
    return _ALONE_BEFORE.fullmatch(before) is not None and _ALONE_AFTER.fullmatch(after) is not None


class _Reader:
    """Reads one object from `at` on.

    Args:
        text: Where it stands.
        at: Its opening brace; afterwards what follows its closing one.
        loose_quotes: A quote ends a string only where the object can go on behind it.
    """

    def __init__(self, text: str, at: int, *, loose_quotes: bool) -> None:
        self.at = at
        self._text = text
        self._loose = loose_quotes

    def object(self, depth: int = 0) -> dict[str, Any]:
        """Read an object; MalformedError if it is none, is cut off, or gives two values to one key."""
        found: dict[str, Any] = {}
        self._take("{")
        while self._next() != "}":
            name = self._string(_AFTER_KEY) if self._next() in _CLOSING_QUOTES else self._match(_NAME)
            self._take(":")
            value = self._value(depth)
            if found.setdefault(name, value) != value:
                raise MalformedError(f"two values of {name!r}")
            self._separate("}")
        self._take("}")
        return found

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise MalformedError(f"nested more than {_MAX_DEPTH} times")
        first = self._next()
        if first == "{":
            return self.object(depth + 1)
        if first == "[":
            items = []
            self._take("[")
            while self._next() != "]":
                items.append(self._value(depth + 1))
                self._separate("]")
            self._take("]")
            return items
        if first in _CLOSING_QUOTES:
            return self._string(_AFTER_VALUE)
        bare = self._match(_BARE).strip()
        if _NUMBER.fullmatch(bare):
            return int(bare) if len(bare) < _MAX_DIGITS and bare.lstrip("+-").isdecimal() else float(bare)
        return _CONSTANTS.get(bare.casefold(), bare)

    def _string(self, following: str) -> str:
        quote = self._text[self.at]
        ends = f"[{_CLOSING_QUOTES[quote]}]"
        inner = rf"(?!{ends}{following})." if self._loose else rf"(?!{ends})."
        pattern = re.compile(rf"((?:\\.|{inner})*){ends}", re.DOTALL)
        self.at += 1
        match = pattern.match(self._text, self.at)
        if match is None:
            raise MalformedError("a string that does not end")
        self.at = match.end()
        body = _ESCAPE.sub(_unescaped, match[1])
        return body.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _separate(self, closing: str) -> None:
        """Pass the comma behind a member; between lines it may be missing."""
        start = self.at
        if self._next() == ",":
            self._take(",")
        elif self._next() != closing and "\n" not in self._text[start : self.at]:
            raise MalformedError(f"no comma at {self.at}")

    def _next(self) -> str:
        """Pass blanks and comments, and return the character behind them; MalformedError at the end."""
        blank = _BLANK.match(self._text, self.at)
        self.at = self.at if blank is None else blank.end()
        if self.at >= len(self._text):
            raise MalformedError("cut off")
        return self._text[self.at]

    def _take(self, wanted: str) -> None:
        if self._next() != wanted:
            raise MalformedError(f"no {wanted!r} at {self.at}")
        self.at += 1

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.at)
        if match is None:
            raise MalformedError(f"nothing to read at {self.at}")
        self.at = match.end()
        return match[0]


def _unescaped(match: re.Match[str]) -> str:
    r"""Return what an escape stands for; a backslash that begins a LaTeX command or no escape of JSON stays."""
    code, char = match.groups()
    if code is not None:
        return chr(int(code, 16))
    if char in "bf" and match.string[match.end() : match.end() + 1].isalpha():
        return match[0]
    if char in "nrt" and _LATEX.match(match.string, match.start() + 1):
        return match[0]
    if char in _ESCAPES:
        return _ESCAPES[char]
    return str(char) if char in "\"'/\\\n" else match[0]
