"""The result of one comparison; apart from the grader, so that who reads it need not load sympy."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """The result of one comparison.

    Attributes:
        unreadable: Why the reference answer cannot be read; empty if it can.
        answer: The response's answer as text, equal for equal answers; empty where it has none.
        equal: It is the reference answer.
    """

    unreadable: str
    answer: str
    equal: bool


__all__ = ["Verdict"]
