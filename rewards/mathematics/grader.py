r"""The verdict on one response: reads the reference answer, finds and reads the response's, and compares them."""

from __future__ import annotations

import re
from functools import lru_cache

import sympy

from roll_like.builtin.rewards.mathematics.comparison import Comparison
from roll_like.builtin.rewards.mathematics.expression import UnreadableError
from roll_like.builtin.rewards.mathematics.kinds import (
    Named,
    Numbers,
    Proportion,
    Reading,
    Relation,
    Several,
    Table,
    Value,
)
from roll_like.builtin.rewards.mathematics.reading import read
from roll_like.builtin.rewards.mathematics.response import boxed_answer, boxes, candidates, has_box
from roll_like.builtin.rewards.mathematics.special import Based, Choice, Clock, Date, Phrase, Ratio, Residue, Word
from roll_like.builtin.rewards.mathematics.verdict import Verdict

_GSM8K = re.compile(r"^[ \t]*####[ \t]*(.+?)[ \t]*$", re.MULTILINE)
_WORDS_ALONE = re.compile(r"(?:[^\W\d_]{2,}[\s.,'!?-]*)+")
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\text")
_LONGEST = 2_000


def grade(reference: str, response: str | None, boxed: bool, tolerance: float = 0.0) -> Verdict:
    """Return the verdict on a response; on the reference answer alone if `response` is None.

    Args:
        reference: The row's answer.
        response: The response, without its reasoning.
        boxed: Look for the answer in boxes only.
        tolerance: As of `Comparison`.
    """
    try:
        expected = read_reference(reference)
    except UnreadableError as error:
        return Verdict(str(error) or "empty", "", False)
    if response is None:
        return Verdict("", "", False)
    comparison = Comparison(tolerance)
    for found in _answers(response, boxed, expected):
        if comparison.any_equal(expected, found):
            return Verdict("", written(expected[0]), True)
        return Verdict("", written(found[0]), False)
    return Verdict("", "", False)


@lru_cache(maxsize=1024)
def read_reference(text: str) -> tuple[Reading, ...]:
    r"""Return the readings of a reference answer: of what follows GSM8K's `#### `, of the last box, or of all of it.

    Raises:
        UnreadableError: It is none, or words: those are references only as `\text{yes}`, since prose would be read as
            a product of letters.
    """
    marked = _GSM8K.findall(text)
    answer = marked[-1] if marked else text
    if has_box(answer):
        answer = boxed_answer(answer) or ""
    answer = answer.strip()
    readings = read(answer, reference=True)
    if isinstance(readings[0], Phrase | Choice | Clock | Date):
        return tuple(readings)
    words = isinstance(readings[0], Word) or (_WORDS_ALONE.fullmatch(answer) and not isinstance(readings[0], Numbers))
    if words and not _DELIMITED.search(answer) and answer not in ("pi", "infinity"):
        raise UnreadableError("words; write \\text{…} if they are to be compared as words")
    if words and "\\text" in answer:
        return tuple(reading for reading in readings if isinstance(reading, Word)) or tuple(readings)
    return tuple(readings)


def _answers(response: str, boxed: bool, expected: tuple[Reading, ...]) -> list[list[Reading]]:
    """Return the readings of the response's final answer: one list, or none where it has no answer."""
    words = any(isinstance(reading, Word | Phrase | Choice) for reading in expected)
    if has_box(response):
        held = boxed_answer(response)
        if not held or len(held) > _LONGEST:
            return []
        texts = [held]
        every = boxes(response) or []
        wanted = expected[0]
        # parts of an answer, each in a box where it is derived
        if (
            isinstance(wanted, Several | Named)
            and len(every) == len(wanted.items) > 1
            and len(set(every)) == len(every)
        ):
            texts.insert(0, ", ".join(every))
    elif boxed:
        return []
    else:
        texts = [text for text in candidates(response) if 0 < len(text.strip()) <= _LONGEST]
    for text in texts:
        try:
            found = read(text)
        except UnreadableError:
            continue
        if words or not isinstance(found[0], Word):
            return [found]
    return []


def written(reading: Reading) -> str:
    """Return a reading as text: equal for answers that are equal, where sympy writes them alike."""
    if isinstance(reading, Value):
        return str(sympy.nsimplify(reading.expr, rational=True) if reading.expr.has(sympy.Float) else reading.expr)
    if isinstance(reading, Several):
        items = [written(item) for item in reading.items]
        if reading.kind == "tuple":
            return f"({', '.join(items)})"
        return ", ".join(sorted(set(items)))
    if isinstance(reading, Named):
        if len(reading.items) == 1:
            return written(reading.items[0][1])
        return ", ".join(sorted(f"{name} = {written(value)}" for name, value in reading.items))
    if isinstance(reading, Relation):
        return f"{reading.left} {reading.operator} {reading.right}"
    if isinstance(reading, Table):
        return "; ".join(", ".join(written(cell) for cell in row) for row in reading.rows)
    if isinstance(reading, Numbers):
        return str(reading.numbers)
    if isinstance(reading, Proportion):
        return ":".join([*map(written, reading.terms), "1"])
    return _special(reading)


def _special(reading: Reading) -> str:
    if isinstance(reading, Ratio):
        return ":".join(map(str, reading.terms))
    if isinstance(reading, Clock):
        hours, rest = divmod(reading.seconds, 3600)
        return f"{hours}:{rest // 60:02}" + (f":{rest % 60:02}" if rest % 60 else "")
    if isinstance(reading, Based):
        return f"{reading.digits}_{reading.base}"
    if isinstance(reading, Residue):
        return f"{reading.value} mod {reading.modulus}"
    if isinstance(reading, Choice):
        return reading.letter
    if isinstance(reading, Phrase):
        return {"empty": "no solution", "infinite": "infinitely many"}.get(reading.kind, reading.kind)
    return reading.text if isinstance(reading, Word) else f"{reading.year or ''}-{reading.month:02}-{reading.day:02}"  # type: ignore[union-attr]


__all__ = ["grade", "read_reference", "written"]
