"""Regular expressions of a configuration, run on what a model wrote.

An unlucky pattern needs exponential time on text made to fit it, and Python's own `re` holds the
interpreter meanwhile; so each search here has a limit of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import regex

from roll_like.errors import RewardError

SECONDS = 1.0


def check_pattern(pattern: str | None) -> str | None:
    """Return `pattern`, for a pydantic validator.

    Raises:
        ValueError: It is not a valid regular expression.
    """
    if pattern is not None:
        try:
            regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from error
    return pattern


def find_match(pattern: str, text: str, which: Literal["first", "last"] = "last") -> str | None:
    """Return the first capturing group (or all) of the first or last match in `text`; None without a match.

    Raises:
        RewardError: The search did not end in time.
    """
    found: str | None = None
    try:
        for match in regex.finditer(pattern, text, flags=regex.DOTALL, timeout=SECONDS):
            found = match[1] if match.re.groups else match[0]
            if which == "first":
                break
    except TimeoutError as error:
        raise _too_slow(pattern, text) from error
    return found


def without_matches(patterns: Iterable[str], text: str) -> str:
    """Return `text` without what the patterns match, one pattern after the other.

    Raises:
        RewardError: A search did not end in time.
    """
    for pattern in patterns:
        try:
            text = regex.sub(pattern, "", text, flags=regex.DOTALL, timeout=SECONDS)
        except TimeoutError as error:
            raise _too_slow(pattern, text) from error
    return text


def matches_whole(pattern: str, text: str) -> bool:
    """Return whether the whole of `text` matches; `.` matches a line break too.

    Raises:
        RewardError: The search did not end in time.
    """
    try:
        match: Any = regex.fullmatch(pattern, text, flags=regex.DOTALL, timeout=SECONDS)
    except TimeoutError as error:
        raise _too_slow(pattern, text) from error
    return match is not None


def _too_slow(pattern: str, text: str) -> RewardError:
    return RewardError(
        f"the pattern {pattern!r} took more than {SECONDS:g} s on a response of {len(text)} characters",
        fix="write it without nested repetitions such as (a+)+",
    )
