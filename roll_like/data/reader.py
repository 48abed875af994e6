"""Samples of tokens, and what makes them of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from roll_like.data.bad_rows import RowCounter
from roll_like.data.chat import Renderer
from roll_like.data.rows import Row
from roll_like.data.turns import Piece
from roll_like.types import BoolArray, IntArray, PlacedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSample:
    """A sequence of tokens with the assistant's among them.

    Attributes:
        token_ids: The sequence, shape [T]; ends with a trained token.
        loss_mask: True where the loss applies, shape [T]; never at the first token, which nothing predicts.
        origin: `file:line` of its row.
        part: Its place among the parts of a conversation that was cut; 0 for one that was not.
        images: The images among its tokens, in order.
    """

    token_ids: IntArray
    loss_mask: BoolArray
    origin: str
    part: int = 0
    images: tuple[PlacedImage, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(self.loss_mask.argmax())

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss applies to."""
        return int(self.loss_mask.sum())

    @property
    def sequences(self) -> tuple[ConversationSample, ...]:
        """Its sequences: itself."""
        return (self,)

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        images = b"".join(image.picture.digest for image in self.images)
        return self.token_ids.tobytes() + self.loss_mask.tobytes() + images


class Sample(Protocol):
    """What a source holds."""

    @property
    def sequences(self) -> tuple[ConversationSample, ...]:
        """Its sequences of tokens."""

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""


SampleT = TypeVar("SampleT", bound=Sample)


class Reader(ABC, Generic[SampleT]):
    """How the rows of one source become samples: a dataclass, which other processes get a copy of.

    Attributes:
        width: How many sequences each sample has.
    """

    width: ClassVar[int] = 1

    def sent(self) -> Self:
        """Return what other processes get: the same without what only this one needs, such as rows."""
        return self

    @abstractmethod
    def draft(self, row: Row, renderer: Renderer) -> list[list[Piece]]:
        """Return the sequences of a row, as texts.

        Raises:
            BadRow: There is nothing to train on.
            DataError: The row is not what the source's settings say.
        """

    @abstractmethod
    def finish(self, row: Row, parts: list[ConversationSample], counter: RowCounter) -> list[SampleT]:
        """Return the samples of a row from its sequences, as tokens; errors are those of `draft`."""

    @abstractmethod
    def join(self, parts: Sequence[ConversationSample], value: float) -> SampleT:
        """Return a sample that was kept as its sequences and a number."""

    def value(self, sample: SampleT) -> float:  # noqa: ARG002
        """Return the number that is kept of a sample beside its sequences."""
        return 0.0

    def make(self, parts: list[tuple[Any, ...]], value: float) -> SampleT:
        """Return a sample of columns, as `roll_like.data.packed.PackedSamples` gives them."""
        return self.join(
            [
                ConversationSample(token_ids=tokens, loss_mask=loss_mask, origin=origin, part=part)
                for tokens, loss_mask, origin, part in parts
            ],
            value,
        )
