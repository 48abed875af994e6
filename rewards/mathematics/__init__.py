"""Reading and comparing mathematical answers: text → reading → equal or not. Used by `rewards.math_child`.

- `text`: one spelling for characters and LaTeX commands that mean the same
- `response`: where a response's final answer stands
- `expression`: an expression as sympy's
- `units`: units of measure, currencies and magnitudes
- `reading`: what a text is: a value, a list, a tuple, a set, an interval, an equation, …
- `special`: readings that are no expressions: times, dates, ratios, numbers of other bases, choices, words
- `comparison`: whether two readings are the same answer
"""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """The result of one comparison; here, so that who reads it need not load sympy.

    Attributes:
        unreadable: Why the reference answer cannot be read; empty if it can.
        answer: The response's answer as text, equal for equal answers; empty where it has none.
        equal: It is the reference answer.
    """

    unreadable: str
    answer: str
    equal: bool


class SameAnswer(NamedTuple):
    """A request to read a response's answer, and to find which of other responses give the same.

    Attributes:
        response: The response, without its reasoning.
        others: Further responses.
        boxed: As of `grade`.
        tolerance: As of `grade`.
        compare: As of `grade`.
    """

    response: str
    others: tuple[str, ...]
    boxed: bool
    tolerance: float
    compare: str


class GivenAnswer(NamedTuple):
    """The answer to it.

    Attributes:
        text: The response's answer; empty where it has none. Units are left out.
        read: How it was read: equal for answers that need no comparison.
        same: Places of the others that give the same answer.
    """

    text: str
    read: str
    same: tuple[int, ...]
