"""Answers to DROP's questions: numbers, dates and spans of a passage (Dua et al. 2019, arXiv:1903.00161).

    {"answer": {"number": "3", "date": {"day": "", "month": "", "year": ""}, "spans": []}, "validated_answers": {…}}

The measures are those of the paper's evaluator for an answer that is one text. `validated_answers` hold what other
annotators answered; the best fitting answer counts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from roll_like import Completion, Outcome, Reward, RewardCase, RewardConfig, RewardResult, register_reward
from roll_like.errors import RewardError
from roll_like.rewards.base import refusing_row
from roll_like.sandbox.compare import short_repr
from roll_like.types import Task

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_KEYS = ("number", "date", "spans")
_KINDS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("number", (str, int, float), "a number or a text"),
    ("date", (Mapping,), "a mapping of day, month and year"),
    ("spans", (list, tuple), "a list of texts"),
)


class DropConfig(RewardConfig):
    """Settings of the `drop` reward."""

    type: Literal["drop"] = "drop"
    figure: Literal["em", "f1"] = Field(
        default="f1",
        description="f1: overlap of words with the reference, 0 where it has numbers and the answer none of them; of "
        "several spans the best one's, over their number. em: 1 for the same words, else 0.",
    )


@register_reward("drop")
class Drop(Reward):
    """Overlap of an answer with the best fitting reference of a row of DROP, from 0 to 1."""

    Config: ClassVar[type[RewardConfig]] = DropConfig
    per_sample: ClassVar[bool] = True
    required_fields: ClassVar[tuple[str, ...]] = ("validated_answers",)

    config: DropConfig

    def check_row(self, task: Task) -> None:
        """Check that the row has answers as DROP's rows have them.

        Raises:
            DataError: It has none.
        """
        with refusing_row(task, "give the row `answer` and `validated_answers` as in EleutherAI/drop"):
            drop_references(task.metadata)

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return a value from 0 to 1 for each completion."""
        return [self._score_one(completion) for completion in completions]

    def cases(self) -> Sequence[RewardCase]:
        """Return a question whose answer is a number."""
        date = {"day": "", "month": "", "year": ""}
        return (
            RewardCase(
                prompt="They scored 3 and 7 points. How many in total?",
                metadata={"answer": {"number": "10", "date": date, "spans": []}, "validated_answers": {}},
                gold=("10", "The 10", "10.0"),
                wrong=("7", "3 and 7"),
                hostile=("", ".", "the"),
            ),
        )

    def _score_one(self, completion: Completion) -> Outcome:
        try:
            known = drop_references(completion.metadata)
        except ValueError as error:
            return RewardError(str(error), fix="correct the row")
        found = normalised(completion.text)
        measure = exact if self.config.figure == "em" else overlap
        best = max(measure(found, spans) for spans in known) if found else 0.0
        return RewardResult(best, {"parsed": float(bool(found))}, found)


def drop_references(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the distinct answers of a row, each as its normalised spans; a number or a date is one span.

    One of which nothing is left, such as "the", is dropped.

    Raises:
        ValueError: There are none, or they are not as DROP's rows have them.
    """
    known = [spans for spans in (tuple(map(normalised, _spans(answer))) for answer in _answers(row)) if any(spans)]
    if not known:
        raise ValueError(
            "the field 'answer' holds no number, date or spans with a word but articles: "
            f"{short_repr(row.get('answer'))}"
        )
    return list(dict.fromkeys(known))


def exact(found: str, spans: tuple[str, ...]) -> float:
    """Return 1 where an answer is the only span of a reference."""
    return float((found,) == spans)


def overlap(found: str, spans: tuple[str, ...]) -> float:
    """Return F1 of the distinct words of an answer and those of the span that fits best, over the number of spans.

    It is 0 for a span with numbers of which the answer has none, and rounded to two digits as in the evaluator.

    >>> overlap("tom brady", ("tom brady",)), overlap("brady", ("tom brady", "moss"))
    (1.0, 0.33)
    """
    best = max(_f1(set(found.split()), set(span.split())) for span in spans)
    return round(100 * best / len(spans)) / 100


def normalised(text: str) -> str:
    """Return a text's words without case, punctuation and English articles, numbers as floats.

    >>> normalised("The 3,000-yard run, 12%")
    '3000.0 yard run 12.0'
    """
    words = (_normalised_word(word) for word in re.split(" |-", text))
    return " ".join(word for word in words if word)


def _answers(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    others = row.get("validated_answers") or ()
    if isinstance(others, Mapping):  # the hub's tables have a list for each key
        columns = [others.get(key) or () for key in _KEYS]
        if not all(isinstance(column, list | tuple) for column in columns):
            raise ValueError(f"'validated_answers' should hold a list for each key, found {short_repr(others)}")
        others = [dict(zip(_KEYS, values, strict=True)) for values in zip(*columns, strict=True)]
    if not isinstance(others, list | tuple):
        raise ValueError(f"'validated_answers' should hold answers, found {short_repr(others)}")
    for field, answer in (("answer", row.get("answer")), *(("validated_answers", each) for each in others)):
        if not isinstance(answer, Mapping) or not set(_KEYS) <= answer.keys():
            raise ValueError(f"the field {field!r} should hold number, date and spans, found {short_repr(answer)}")
        for key, kinds, wanted in _KINDS:
            if answer[key] not in (None, "") and not isinstance(answer[key], kinds):
                raise ValueError(f"the {key} of an answer should be {wanted}, found {short_repr(answer[key])}")
        if odd := [span for span in answer["spans"] or () if not isinstance(span, str)]:
            raise ValueError(f"the spans of an answer should be texts, found {short_repr(odd[0])}")
        yield answer


def _spans(answer: Mapping[str, Any]) -> tuple[str, ...]:
    if answer["number"] not in ("", None):
        return (str(answer["number"]),)
    if answer["spans"]:
        return tuple(answer["spans"])
    date = answer["date"] or {}
    return (" ".join(str(date.get(part) or "") for part in ("day", "month", "year")).strip(),)


def _normalised_word(word: str) -> str:
    word = word.lower()
    word = word if _is_number(word) else word.translate(_NO_PUNCTUATION)
    word = str(float(word)) if _is_number(word) else word
    return " ".join(_ARTICLES.sub(" ", word).split())


def _f1(found: set[str], span: set[str]) -> float:
    numbers = {word for word in span if _is_number(word)}
    if numbers and not numbers & found:
        return 0.0
    shared = len(found & span)
    precision = shared / len(found) if found else 1.0
    recall = shared / len(span) if span else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
