"""Many short sequences to a row: fewer rows, less padding, and no sequence sees another.

A row says where each of its sequences begins; positions restart there, and attention stays within a sequence
(`roll_like.training.packed` lays rows out so). Which sequences share a row is decided by first-fit decreasing within a
window (Johnson 1973): of the next few hundred, the longest first, each goes into the first row that has room. It never
takes more than 11/9 of the fewest rows, plus one. The window keeps the order of the data: nothing moves further than
that.

    lengths 5 3 4 2, at most 7 tokens a row  →  rows (5, 2) (3, 4)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic

from roll_like.data.order import Order
from roll_like.data.samples import SampleT
from roll_like.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The sequences of one row.

    Attributes:
        members: Indices of the sequences, ascending.
        lengths: Tokens that each takes.
    """

    members: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where in the row each sequence begins."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """How full rows are.

    Attributes:
        rows: Rows so far.
        sequences: Sequences in them.
        tokens: Tokens of the sequences.
        budget: Tokens that a row has room for.
    """

    rows: int
    sequences: int
    tokens: int
    budget: int

    @property
    def fill(self) -> float:
        """Share of the rows' room that is taken; 1 where there are no rows."""
        return self.tokens / (self.rows * self.budget) if self.rows else 1.0

    @property
    def padding(self) -> float:
        """Share of the rows' room that is not."""
        return 1.0 - self.fill

    def __str__(self) -> str:
        return f"{self.sequences} sequences in {self.rows} rows of {self.budget} tokens, {self.fill:.1%} full"


def computed_tokens(sample: SampleT) -> int:
    """Return how many tokens of a row a sample takes: all but the last of each sequence, which predicts nothing."""
    return sum(len(sequence) - 1 for sequence in sample.sequences)


def pack(lengths: Sequence[int], budget: int, *, window: int = 512) -> list[Packed]:
    """Return rows that hold every sequence once, ordered by their first sequence within each window.

    Args:
        lengths: Tokens of each sequence.
        budget: Tokens that a row has room for.
        window: How many consecutive sequences are packed at a time.

    Raises:
        ValueError: A sequence has no token or does not fit into a row, or the window is empty.
    """
    if window < 1:
        raise ValueError(f"a window of {window} sequences packs nothing; expected 1 or more")
    for index, length in enumerate(lengths):
        if not 0 < length <= budget:
            raise ValueError(f"sequence {index} has {length} tokens, expected 1 to {budget}, which a row has room for")
    rows: list[Packed] = []
    for start in range(0, len(lengths), window):
        rows += _first_fit(range(start, min(start + window, len(lengths))), lengths, budget)
    return rows


def report(rows: Sequence[Packed], budget: int) -> PackingReport:
    """Return how full rows are."""
    return PackingReport(
        rows=len(rows),
        sequences=sum(len(row.members) for row in rows),
        tokens=sum(row.tokens for row in rows),
        budget=budget,
    )


class PackedOrder(Generic[SampleT]):
    """An endless sequence of rows, made of an endless sequence of samples; resumable at any row.

    Args:
        order: Which sample comes next. Nobody else draws from it.
        budget: Tokens that a row has room for; every sample fits.
        window: How many samples are packed at a time.
    """

    def __init__(self, order: Order[SampleT], budget: int, *, window: int = 512) -> None:
        self._order = order
        self._budget = budget
        self._window = window
        self._begun = order.state()
        self._samples: list[SampleT] = []
        self._rows: list[Packed] = []
        self._given = 0
        self._totals = PackingReport(rows=0, sequences=0, tokens=0, budget=budget)

    @property
    def report(self) -> PackingReport:
        """How full the rows given so far are, since this object was made."""
        return self._totals

    def next(self) -> list[SampleT]:
        """Return the samples of the next row.

        Raises:
            ValueError: A sample does not fit into a row.
        """
        if self._given == len(self._rows):
            self._begun, self._given = self._order.state(), 0
            self._fill()
        row = self._rows[self._given]
        self._given += 1
        self._totals = PackingReport(
            rows=self._totals.rows + 1,
            sequences=self._totals.sequences + len(row.members),
            tokens=self._totals.tokens + row.tokens,
            budget=self._budget,
        )
        return [self._samples[index] for index in row.members]

    def state(self) -> dict[str, Any]:
        """Return where the sequence stands, as JSON takes it."""
        return {"order": self._begun, "given": self._given, "budget": self._budget, "window": self._window}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the rows from here are those that would have come.

        Raises:
            CheckpointError: The state is of other data, another order, budget or window, or is damaged.
        """
        for name, value in (("budget", self._budget), ("window", self._window)):
            if state.get(name) != value:
                raise CheckpointError(
                    f"rows were packed with a {name} of {state.get(name)!r}, now of {value}",
                    fix="restore the packing's settings as they were, or start a new run",
                )
        begun, given = state.get("order"), state.get("given")
        if not isinstance(begun, Mapping) or not isinstance(given, int):
            raise CheckpointError(f"the checkpoint's packing position is damaged: {dict(state)!r}")
        self._order.load_state(begun)
        self._begun, self._given = dict(begun), given
        self._samples, self._rows = [], []
        if given:
            self._fill()
        if not 0 <= given <= len(self._rows):
            raise CheckpointError(f"the checkpoint's packing position is damaged: row {given} of {len(self._rows)}")

    def _fill(self) -> None:
        self._samples = [self._order.next() for _ in range(self._window)]
        self._rows = pack([computed_tokens(sample) for sample in self._samples], self._budget, window=self._window)


def _first_fit(members: Sequence[int], lengths: Sequence[int], budget: int) -> list[Packed]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(members, key=lambda member: (-lengths[member], member)):
        place = next((at for at, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(budget)
        bins[place].append(index)
        room[place] -= lengths[index]
    rows = sorted(sorted(row) for row in bins)
    return [Packed(members=tuple(row), lengths=tuple(lengths[index] for index in row)) for row in rows]
