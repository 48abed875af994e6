"""Datasets of answers with a score each to whole conversations, as a reward model reads them.

    {"prompt": "6 × 7?", "completion": "42", "score": 1}

Rows are those of `roll_like.data.conversations` with a score; conversations are written and tokenised as those of pairs
(`scored_pairs.py`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roll_like.builtin.pipelines.reward_model.config import ScoredAnswerData, ScoredAnswerSource
from roll_like.builtin.pipelines.reward_model.scored_pairs import number_in_field, read_at_its_end, whole_conversation
from roll_like.data.bad_rows import RowCounter
from roll_like.data.chat import Renderer
from roll_like.data.conversations import read_conversation
from roll_like.data.loss_flags import left_out, yes_or_no
from roll_like.data.messages import require_fields, short
from roll_like.data.reader import Reader
from roll_like.data.rows import Row
from roll_like.data.samples import SampleSet, load_samples
from roll_like.data.turns import Piece
from roll_like.errors import DataError
from roll_like.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer(TrainingSample):
    """A conversation that ends with an answer that has a score.

    Attributes:
        score: What the model is to learn.
    """

    score: float

    def content(self) -> bytes:
        return TrainingSample.content(self) + struct.pack("<d", self.score)


def load_scored_answers(
    data: ScoredAnswerData, renderer: Renderer, *, loss: str, section: str = "data"
) -> SampleSet[ScoredAnswer]:
    """Read answers with a score each; further arguments and errors are those of `load_samples`.

    Args:
        loss: `bce` takes scores from 0 to 1, `mse` all.
    """
    return load_samples(data, renderer, ShareReader if loss == "bce" else ScoredAnswerReader, section)


@dataclass(frozen=True, kw_only=True)
class ScoredAnswerReader(Reader[ScoredAnswer]):
    """How rows become conversations with a score each; the last token of each is trained."""

    source: ScoredAnswerSource

    #: Least and largest score, and what else to do with others.
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    def draft(self, row: Row, renderer: Renderer) -> list[list[Piece]]:
        """Return the text of a conversation."""
        self.score(row)
        found = read_conversation(row, self.source, self.key)
        if found.untrained.intersection(found.assistant_turns()[-1:]):
            raise left_out("the scored answer")
        return [whole_conversation(renderer, found)]

    def finish(self, row: Row, parts: list[TrainingSample], counter: RowCounter) -> list[ScoredAnswer]:
        """Return the conversation with its score."""
        return [self.join([read_at_its_end(self.fit(parts[0], counter))], [self.score(row)])]

    def values(self, sample: ScoredAnswer) -> Sequence[float]:
        """Return the score, which is kept beside the conversation."""
        return (sample.score,)

    def join(self, parts: Sequence[TrainingSample], values: Sequence[float]) -> ScoredAnswer:
        """Return a conversation with its score."""
        return ScoredAnswer(**parts[0].shared_fields, score=values[0])

    def score(self, row: Row) -> float:
        """Return the score of a row.

        Raises:
            DataError: The field is missing, or holds something else.
        """
        field = self.source.score_field
        require_fields(row, {field: f"{self.key}.score_field"})
        found = row.fields[field]
        score = score_in(found)
        least, most = self.bounds
        if score is not None and least <= score <= most:
            return score
        if math.isinf(most):
            expected, instead = "a number, or true or false,", ""
        else:
            expected = f"a number from {least:g} to {most:g}, or true or false,"
            instead = ", divide ratings by their highest, or set algorithm.loss: mse" if score is not None else ""
        raise DataError(
            f"{row.origin}: expected {expected} in {field!r}, found {short(found)}",
            fix=f"correct the row, or {self.key}.score_field{instead}",
        )


def score_in(value: Any) -> float | None:
    """Return the number that a value is, true and false as 1 and 0; None where it is something else."""
    word = yes_or_no(value)
    return number_in_field(value) if word is None else float(word)


@dataclass(frozen=True, kw_only=True)
class ShareReader(ScoredAnswerReader):
    """The same of scores from 0 to 1."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
