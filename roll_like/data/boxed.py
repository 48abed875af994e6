r"""`\boxed{…}`: where many models put a final answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BARE = re.compile(r"\\[A-Za-z]+(?:\s*\{[^{}]*\}|\d)*|[-+]?[^\s$\\{}]+")


class BoxedText(NamedTuple):
    """A box at `text[start:end]` and what it holds; `closed` unless its end is missing."""

    start: int
    end: int
    held: str
    closed: bool = True


def last_boxed(text: str, *, bare: bool = False) -> str | None:
    r"""Return what the last `\boxed{…}` holds, with nested braces balanced; None without a complete one.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}."), last_boxed(r"so $\boxed 5$"), last_boxed(r"so $\boxed 5$", bare=True)
    ('\\frac{1}{2}', None, '5')

    Args:
        bare: `\boxed 5`, without braces, is one too.
    """
    last = None
    for box in _boxes(text, bare=bare):
        last = box.held if box.closed else last
    return last


def outer_boxes(text: str, *, bare: bool = False) -> list[BoxedText]:
    """Return the boxes that are in no other one, in order; arguments are those of `last_boxed`."""
    found: list[BoxedText] = []
    for box in _boxes(text, bare=bare):
        if not found or box.start >= found[-1].end:
            found.append(box)
    return found


def _boxes(text: str, *, bare: bool) -> Iterator[BoxedText]:
    closing = closing_braces(text)
    for match in _BOX.finditer(text):
        start, begin = match.span()
        if text.startswith("{", begin):
            end = closing.get(begin)
            yield (
                BoxedText(start, begin, "", closed=False)
                if end is None
                else BoxedText(start, end + 1, text[begin + 1 : end])
            )
        elif bare and (held := _BARE.match(text, begin)) is not None:
            yield BoxedText(start, held.end(), held[0].rstrip(".,;"))


def has_box(text: str) -> bool:
    """Return whether there is a box at all, closed or not."""
    return _BOX.search(text) is not None


def closing_braces(text: str) -> dict[int, int]:
    r"""Return where each brace that is closed closes; one pass, however many are open. `\{` is none."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            found[opened.pop()] = match.start()
    return found
