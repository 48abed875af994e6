"""What makes samples of the rows of a source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

import numpy as np

from roll_like.config.data import RowLimits, RowSource
from roll_like.data.bad_rows import BadRow, Problem, RowCounter
from roll_like.data.chat import Renderer
from roll_like.data.rows import Row
from roll_like.data.turns import Piece
from roll_like.errors import DataError
from roll_like.types import Pair, TrainingSample

SampleT = TypeVar("SampleT", bound=TrainingSample | Pair)


@dataclass(frozen=True, kw_only=True)
class Reader(ABC, Generic[SampleT]):
    """How the rows of one source become samples: other processes get a copy of it.

    Attributes:
        source: The dataset.
        key: Its place in the configuration (`data.sources.0`), for messages.
        limits: What happens to rows that are too long, or bad.
        section: Their place in the configuration, for messages.
        width: How many sequences each sample has.
    """

    source: RowSource
    key: str
    limits: RowLimits
    section: str

    width: ClassVar[int] = 1

    @abstractmethod
    def draft(self, row: Row, renderer: Renderer) -> list[list[Piece]]:
        """Return the sequences of a row, as texts.

        Raises:
            BadRow: There is nothing to train on.
            DataError: The row is not what the source's settings say.
        """

    @abstractmethod
    def finish(self, row: Row, parts: list[TrainingSample], counter: RowCounter) -> list[SampleT]:
        """Return the samples of a row from its sequences, as tokens; errors are those of `draft`."""

    @abstractmethod
    def join(self, parts: Sequence[TrainingSample], values: Sequence[float]) -> SampleT:
        """Return a sample that was kept as its sequences and its numbers."""

    def values(self, sample: SampleT) -> Sequence[float]:  # noqa: ARG002
        """Return the numbers that are kept of a sample beside its sequences."""
        return ()

    def sent(self) -> Self:
        """Return what other processes get: the same without rows."""
        source = self.source if self.source.rows is None else self.source.model_copy(update={"rows": ()})
        return replace(self, source=source, limits=self.limits.reading(()))

    def counter(self) -> RowCounter:
        """Return what counts the source's rows."""
        return RowCounter(self.limits.bad_rows, self.section)

    def fit(self, sample: TrainingSample, counter: RowCounter) -> TrainingSample:
        """Return a sample that is no longer than the limit: itself, or its beginning.

        Raises:
            DataError: It is longer, and that is refused.
            BadRow: It is longer, and that is left out; or nothing that is trained would be left of it.
        """
        most = self.limits.max_tokens
        if len(sample) <= most:
            return sample
        found = f"{len(sample)} tokens, the limit is {most}"
        if self.limits.too_long == "refuse":
            raise DataError(
                f"{sample.origin}: {found}",
                fix=f"raise {self.section}.max_tokens, or set {self.section}.too_long: skip or cut",
            )
        loss_mask = sample.loss_mask[:most]
        if self.limits.too_long == "skip" or not loss_mask.any():
            raise BadRow(Problem.TOO_LONG, found)
        counter.shorten(sample.origin, len(sample))
        end = int(np.flatnonzero(loss_mask)[-1]) + 1
        # an image ends before the last trained token, or begins after it
        images = tuple(image for image in sample.images if image.start < end)
        return replace(sample, token_ids=sample.token_ids[:end], loss_mask=loss_mask[:end], images=images)
