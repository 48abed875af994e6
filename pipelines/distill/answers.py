"""What teachers say of the targets of samples, and how it finds its way into a student's micro-batches.

A teacher answers for all N targets of some samples, numbered in the samples' order. Which of them a micro-batch holds
depends on ranks and budgets, and differs between a teacher and its student.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

import numpy as np

from roll_like.training.layout import MicroBatch
from roll_like.types import FloatArray, IntArray, TopKAnswers, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTopKAnswers(TopKAnswers):
    """A teacher's most likely tokens, and what it says of the targets themselves.

    Attributes:
        own_N: Log-probability of each target, in nats.
    """

    own_N: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswers:
    """A teacher's answers in the student's tokens: the arrays of `TeacherTexts`."""

    ids_NK: IntArray
    logprobs_NK: FloatArray
    spans_N: IntArray
    entropy_N: FloatArray
    best_N: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenAnswers:
    """What a teacher's logits come from, where its student has the output projection: the whole distribution.

    Attributes:
        hidden_NE: Last hidden states before each target, after the final norm.
    """

    hidden_NE: FloatArray


Answers: TypeAlias = TopKAnswers | HiddenAnswers | TextAnswers
AnswersT = TypeVar("AnswersT", bound=Answers)


class Targets:
    """The targets of some samples, numbered from 0 in their order."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self._starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
        loss_mask = np.concatenate([np.zeros(0, np.bool_), *(sample.loss_mask for sample in samples)])
        self._number = np.cumsum(loss_mask) - 1
        self.count = int(loss_mask.sum())

    def of(self, batch: MicroBatch) -> IntArray:
        """Return the number of each target of a micro-batch of these samples, shape [N]."""
        numbers: IntArray = self._number[self._starts[batch.sample_ids] + batch.target_ids]
        return numbers


def joined_answers(parts: Sequence[AnswersT]) -> AnswersT:
    """Return one after the other as one; all are alike."""
    arrays = {each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(parts[0])}
    return type(parts[0])(**arrays)


def chosen(answers: AnswersT, numbers: IntArray | slice) -> AnswersT:
    """Return the answers for some targets."""
    arrays: dict[str, Any] = {each.name: getattr(answers, each.name)[numbers] for each in fields(answers)}
    return type(answers)(**arrays)


def assembled(count: int, parts: Sequence[tuple[IntArray, Answers]]) -> Answers:
    """Return the answers for all of `count` targets, from those of micro-batches with the numbers of their targets."""
    kind = type(parts[0][1])
    arrays: dict[str, Any] = {}
    for each in fields(kind):
        like = getattr(parts[0][1], each.name)
        whole = np.zeros((count, *like.shape[1:]), like.dtype)
        for numbers, answers in parts:
            whole[numbers] = getattr(answers, each.name)
        arrays[each.name] = whole
    return kind(**arrays)
