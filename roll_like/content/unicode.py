r"""Text that no file and no tokenizer takes, and values that no reader of JSON would.

Python and JSON allow half of a surrogate pair in a text (`"\ud83d"`); UTF-8 has no form for it. In a row it is a
mistake, which is told. What environments and tools show during a run gets U+FFFD in its place, as decoders do, so
that no policy ends a run by what it makes a tool say.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar, cast

#: Levels that a row may be nested; what is deeper would end in a RecursionError in one place or another.
DEEPEST = 100
T = TypeVar("T")


def problem_of(fields: Mapping[str, Any]) -> str | None:
    r"""Return what in a row no tokenizer or file takes, with the name of its field; None where all is well.

    >>> problem_of({"prompt": "6 × 7?", "tags": ["a", "\ud83d"]})
    "'tags' holds half of a surrogate pair, '\\ud83d', which is no character"
    """
    for name, value in fields.items():
        problem = _problem(name, 1) or _problem(value, 1)
        if problem is not None:
            return f"{name!r} {problem}"
    return None


def whole_text(text: str) -> str:
    """Return a text with U+FFFD in the place of each half of a surrogate pair; two halves that belong together join."""
    return text if is_whole(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def whole_texts(value: T, *, levels: int = DEEPEST) -> T:
    """Return the same of every text in mappings, lists and tuples; other values are as they are.

    Args:
        value: Any value.
        levels: How deep it may be nested; what is deeper becomes `…`.
    """
    found: Any = value
    if isinstance(value, str):
        found = whole_text(value)
    elif isinstance(value, Mapping | list | tuple) and not levels:
        found = "…"
    elif isinstance(value, Mapping):
        found = {whole_texts(name): whole_texts(each, levels=levels - 1) for name, each in value.items()}
    elif isinstance(value, list | tuple):
        members = [whole_texts(each, levels=levels - 1) for each in value]
        found = members if isinstance(value, list) else tuple(members)
    return cast(T, found)


def _problem(value: Any, level: int) -> str | None:
    if isinstance(value, str):
        if is_whole(value):
            return None
        half = next(each for each in value if "\ud800" <= each <= "\udfff")
        return f"holds half of a surrogate pair, {half!r}, which is no character"
    if not isinstance(value, dict | list | tuple | Mapping):
        return None
    if level > DEEPEST and value:
        return f"is nested deeper than {DEEPEST} levels"
    members = value if isinstance(value, list | tuple) else chain(value, value.values())
    for each in members:
        # a row has many texts, of which most are ASCII
        if (each.__class__ is not str or not each.isascii()) and (problem := _problem(each, level + 1)) is not None:
            return problem
    return None


def is_whole(text: str) -> bool:
    """Return whether UTF-8 has a form for a text: Python and a policy can write half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
