r"""Grades one response: reads the reference answer, finds and reads the response's, and compares them."""

from __future__ import annotations

import re
from functools import lru_cache

from roll_like.builtin.rewards.mathematics import GivenAnswer, SameAnswer, Verdict
from roll_like.builtin.rewards.mathematics.comparison import AnswerComparison
from roll_like.builtin.rewards.mathematics.kinds import Named, Numbers, Reading, Several
from roll_like.builtin.rewards.mathematics.reading import parse_answer
from roll_like.builtin.rewards.mathematics.response import boxed_answer, boxes, candidates
from roll_like.builtin.rewards.mathematics.scanner import UnreadableError
from roll_like.builtin.rewards.mathematics.special import Choice, Clock, Date, Phrase, Word
from roll_like.builtin.rewards.mathematics.writing import written
from roll_like.data.boxed import has_box

_GSM8K = re.compile(r"^[ \t]*####[ \t]*(.+?)[ \t]*$", re.MULTILINE)
_WORDS_ALONE = re.compile(r"(?:[^\W\d_]{2,}[\s.,'!?-]*)+")
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\text")
_LONGEST = 2_000


def grade(
    reference: str, response: str | None, boxed: bool, tolerance: float = 0.0, compare: str = "mathematics"
) -> Verdict:
    """Return whether a response's answer is right; if `response` is None, only whether the reference can be read.

    Args:
        response: The response, without its reasoning.
        boxed: Look for the answer in boxes only.
        tolerance: As of `AnswerComparison`.
        compare: `math_verify`: as that library, whatever the other arguments.
    """
    if compare == "math_verify":
        return _of_math_verify(reference, response)
    try:
        expected = read_reference(reference)
    except UnreadableError as error:
        return Verdict(str(error) or "empty", "", False)
    if response is None:
        return Verdict("", "", False)
    comparison = AnswerComparison(tolerance)
    for found in _answers(response, boxed, expected):
        if comparison.any_equal(expected, found):
            return Verdict("", written(expected[0]), True)
        return Verdict("", written(found[0]), False)
    return Verdict("", "", False)


def _of_math_verify(reference: str, response: str | None) -> Verdict:
    """Return how math-verify grades a response; it reads a reference without delimiters as LaTeX.

    Its time-outs are off: they would set the alarm that ends this process (`rewards.math_child`).
    """
    import math_verify

    gold = math_verify.parse(reference if _DELIMITED.search(reference) else f"${reference}$", parsing_timeout=None)
    if not gold and "\\boxed" not in reference:  # MATH-500 has answers such as `\text{Evelyn}` and `\$18.90`
        gold = math_verify.parse(f"\\boxed{{{reference}}}", parsing_timeout=None)
    if not gold:
        return Verdict("math-verify finds no answer in it", "", False)
    found = math_verify.parse(response or "", parsing_timeout=None)
    answer = str(found[-1]) if found else ""
    return Verdict("", answer, bool(found) and math_verify.verify(gold, found, timeout_seconds=None))


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
    readings = parse_answer(answer, reference=True)
    if isinstance(readings[0], Phrase | Choice | Clock | Date):
        return tuple(readings)
    words = isinstance(readings[0], Word) or (_WORDS_ALONE.fullmatch(answer) and not isinstance(readings[0], Numbers))
    if words and not _DELIMITED.search(answer) and answer not in ("pi", "infinity"):
        raise UnreadableError("words; write \\text{…} if they are to be compared as words")
    if words and "\\text" in answer:
        return tuple(reading for reading in readings if isinstance(reading, Word)) or tuple(readings)
    return tuple(readings)


def same_answer(asked: SameAnswer) -> GivenAnswer:
    """Return a response's answer, and which of other responses give the same answer.

    Without a reference answer words count in a box only. Two answers are the same if each is right where the other is
    the reference: 1/3 and 0.333333 are, π and 3.14 are not. Words are compared as words, not as products.
    """
    if asked.compare == "math_verify":
        return _same_to_math_verify(asked)
    found = _read_response(asked.response, asked.boxed)
    if not found:
        return GivenAnswer("", "", ())
    comparison = AnswerComparison(asked.tolerance)
    others = [_read_response(other, asked.boxed) for other in asked.others]
    same = (place for place, other in enumerate(others) if _are_same(comparison, found, other))
    return GivenAnswer(written(found[0]), repr(found), tuple(same))


def _are_same(comparison: AnswerComparison, one: tuple[Reading, ...], other: tuple[Reading, ...]) -> bool:
    for kind in (Word, Choice):  # `HTH` is no product, and of `I` and `i` one is a letter
        if any(isinstance(reading, kind) for reading in one) and any(isinstance(reading, kind) for reading in other):
            one, other = (tuple(reading for reading in side if isinstance(reading, kind)) for side in (one, other))
    return comparison.any_equal(one, other) and comparison.any_equal(other, one)


def _same_to_math_verify(asked: SameAnswer) -> GivenAnswer:
    import math_verify

    found, *others = (math_verify.parse(text, parsing_timeout=None) for text in (asked.response, *asked.others))
    same = (
        place
        for place, held in enumerate(others)
        if all(math_verify.verify(*pair, timeout_seconds=None) for pair in ((held, found), (found, held)))
    )
    return GivenAnswer(str(found[-1]) if found else "", str(found), tuple(same))


@lru_cache(maxsize=1024)
def _read_response(response: str, boxed: bool) -> tuple[Reading, ...]:
    return tuple(reading for readings in _answers(response, boxed, ()) for reading in readings)


def _answers(response: str, boxed: bool, expected: tuple[Reading, ...]) -> list[list[Reading]]:
    """Return the readings of the response's final answer: one list, or none where it has no answer.

    Args:
        expected: The readings of the reference answer; empty where there is none.
    """
    words = any(isinstance(reading, Word | Phrase | Choice) for reading in expected)
    if has_box(response):
        words = words or not expected
        held = boxed_answer(response)
        if not held or len(held) > _LONGEST:
            return []
        texts = [held]
        every = boxes(response) or []
        wanted = expected[0] if expected else None
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
            found = parse_answer(text)
        except UnreadableError:
            continue
        if words or not isinstance(found[0], Word):
            return [found]
    return []
