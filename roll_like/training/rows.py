"""Rows: what forward passes read, with every common beginning computed once.

The samples of a group share their prompt. A row holds it once, followed by every response:

    tokens     p0 p1 p2 | a3 a4 | b3 b4 b5
    positions   0  1  2 |  3  4 |  3  4  5
    segments    0  0  0 |  1  1 |  2  2  2

A token attends to the prompt and to earlier tokens of its own segment, so log-probabilities and
gradients equal those of separate sequences, at a fraction of the tokens. The last token of a
response predicts nothing and is not computed.

Several groups may share a row (`row_plan.py`). Its prompt is then what all of them begin with, and the rest of a
group's own prompt is a prefix: segment s, which the group's segments see too. Those are numbered b + s · S, where S is
`PREFIX_STRIDE`.

    tokens     p0 | s1 s2 | a3 a4 | b3    | t1 | c2
    positions   0 |  1  2 |  3  4 |  3    |  1 |  2
    segments    0 |  1  1 | 2 + S | 3 + S |  4 | 5 + 4 · S
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from roll_like.data.routes import joined_routes
from roll_like.types import IntArray, PlacedImage, RouteArray, TrainingSample

#: Longest row of several samples that has a dense attention mask; beyond, the mask would cost more than sharing saves.
MAX_SHARED_ROW_TOKENS = 8192
PADDING = -1
#: More than the segments of any row: segment b after prefix s has the number b + s · PREFIX_STRIDE.
PREFIX_STRIDE = 1 << 14

#: A row, or what stands for one of that length.
RowT = TypeVar("RowT", bound=Sized)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One prompt and one or more sequences that begin with it; an empty prompt is shared by any.

    Attributes:
        token_ids: Inputs, shape [L].
        positions: Rotary positions, shape [L].
        segment_ids: 0 for the prompt, 1… for what follows it, as the module says, shape [L].
        sources: Index into the row of the token whose output predicts each target, shape [N].
        targets: Tokens to predict, shape [N].
        sample_ids: Which sample each target belongs to, as an index into the batch, shape [N].
        target_ids: Index of each target within its sample's own tokens, shape [N].
        images: The images among the inputs; one of a shared prompt is there once.
        routes: Experts to compute the inputs with; None where the model chooses them. Those of a shared prompt are what
            the engine chose for its first sample.
    """

    token_ids: IntArray
    positions: IntArray
    segment_ids: IntArray
    sources: IntArray
    targets: IntArray
    sample_ids: IntArray
    target_ids: IntArray
    images: tuple[PlacedImage, ...] = ()
    routes: RouteArray | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Which samples share a row.

    Attributes:
        rows: The row of each sample of the batch; samples of one group are in one row.
        prefix: How many tokens all of them begin with alike: the prompt of every row.
    """

    rows: Sequence[int]
    prefix: int


@dataclass(slots=True)
class _Prefix:
    """Samples of one group in a row, and what they share after the row's prompt."""

    tokens: IntArray
    pictures: tuple[bytes, ...]
    members: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """A row being built."""

    prompt: IntArray
    pictures: tuple[bytes, ...]
    length: int
    members: int = 0
    prefixes: list[_Prefix] = field(default_factory=list)
    latest: dict[str, _Prefix] = field(default_factory=dict)

    def growth(self, sample: TrainingSample) -> int:
        """Return how many tokens longer a sample would make the row; its last predicts nothing and is not computed."""
        return self._growth_after(sample, self._prefix(sample))

    def add(self, index: int, sample: TrainingSample) -> None:
        """Append a sample."""
        prefix = self._prefix(sample)
        self.length += self._growth_after(sample, prefix)
        self.members += 1
        if prefix is None:
            rest = self._rest_of_prompt(sample)
            prefix = _Prefix(rest, _pictures(sample, len(self.prompt), sample.prompt_length))
            self.prefixes.append(prefix)
            self.latest[sample.group_id] = prefix
        prefix.members.append(index)

    def _growth_after(self, sample: TrainingSample, prefix: _Prefix | None) -> int:
        shared = len(self.prompt) + (0 if prefix is None else len(prefix.tokens))
        return max(len(sample.token_ids) - 1 - shared, 0)

    def _prefix(self, sample: TrainingSample) -> _Prefix | None:
        """Return the prefix that a sample goes on from; None where there is none yet, or nothing to share."""
        prefix = self.latest.get(sample.group_id)
        if prefix is None or not len(prefix.tokens):
            return None
        if not np.array_equal(prefix.tokens, self._rest_of_prompt(sample)):
            return None
        return prefix if prefix.pictures == _pictures(sample, len(self.prompt), sample.prompt_length) else None

    def _rest_of_prompt(self, sample: TrainingSample) -> IntArray:
        return sample.token_ids[len(self.prompt) : sample.prompt_length]


def _pictures(sample: TrainingSample, begin: int, end: int) -> tuple[bytes, ...]:
    """Return which images are among the tokens `[begin, end)`: their placeholders are alike."""
    return tuple(image.picture.digest for image in sample.images if begin <= image.start < end)


def build_rows(
    samples: Sequence[TrainingSample],
    *,
    share_prompts: bool,
    max_row_tokens: int,
    plan: RowPlan | None = None,
    joined: bool = False,
) -> list[TokenRow]:
    """Lay samples out as rows; responses of one group share a row while it has room.

    Args:
        samples: The batch; each sample's `group_id` says whose prompt it shares.
        share_prompts: Whether to compute a group's prompt once.
        max_row_tokens: Largest row, in tokens. A single longer sample makes a row of its own.
        plan: Which groups share a row too; none by default.
        joined: Whether rows have no masks (`Layout`).
    """
    limit = max_row_tokens if joined else min(max_row_tokens, MAX_SHARED_ROW_TOKENS)
    rows: list[_Open] = []
    open_rows: dict[str | int, _Open] = {}
    for index, sample in enumerate(samples):
        if not sample.loss_mask.any():
            continue
        key = sample.group_id if plan is None else plan.rows[index]
        prompt = sample.token_ids[: sample.prompt_length if plan is None else plan.prefix]
        row = open_rows.get(key) if share_prompts else None
        if (
            row is None
            or row.length + row.growth(sample) > limit
            or 2 * row.members + 2 >= PREFIX_STRIDE
            or not np.array_equal(row.prompt, prompt)
            or row.pictures != _pictures(sample, 0, len(prompt))
        ):
            row = _Open(prompt=prompt, pictures=_pictures(sample, 0, len(prompt)), length=len(prompt))
            rows.append(row)
            open_rows[key] = row
        row.add(index, sample)
    return [_lay_out(row, samples) for row in rows]


def balance(rows: Sequence[RowT], ranks: int) -> list[list[RowT]]:
    """Give every rank about as many tokens: longest row first, to the rank with the least."""
    shares: list[list[RowT]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=len, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += len(row)
    return shares


def split_by_budget(rows: Sequence[RowT], max_tokens: int, *, joined: bool = False) -> list[list[RowT]]:
    """Cut rows, sorted by length, into micro-batches of at most `max_tokens` tokens.

    Args:
        max_tokens: The budget; a longer row makes a batch of its own.
        joined: Whether padding is not computed and does not count.
    """
    batches: list[list[RowT]] = []
    for row in sorted(rows, key=len, reverse=True):
        # a batch's first row is its longest and sets the padded length; without padding any batch may have room
        room = [
            batch
            for batch in (batches if joined else batches[-1:])
            if (sum(map(len, batch)) + len(row) if joined else (len(batch) + 1) * len(batch[0])) <= max_tokens
        ]
        if room:
            room[0].append(row)
        else:
            batches.append([row])
    return batches


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive tokens of a row, of one sample: the prompt, a prefix, or what the sample has of its own."""

    sample: TrainingSample
    position: int
    end: int
    segment: int

    @property
    def tokens(self) -> IntArray:
        return self.sample.token_ids[self.position : self.end]

    @property
    def routes(self) -> tuple[RouteArray | None, int]:
        routes = self.sample.routes
        return (None if routes is None else routes[self.position : self.end]), self.end - self.position


def _lay_out(row: _Open, samples: Sequence[TrainingSample]) -> TokenRow:
    prompt_length = len(row.prompt)
    first = row.prefixes[0].members[0]
    pieces = [_Piece(samples[first], 0, prompt_length, 0)]
    sources, targets, sample_ids, target_ids = [], [], [], []
    start, segment = prompt_length, 0
    images: list[PlacedImage] = []

    def show(index: int, begin: int, end: int, place: int) -> None:
        """Add the images of a sample's tokens `[begin, end)`, which are in the row from `place` on."""
        images.extend(
            replace(image, start=image.start - begin + place)
            for image in samples[index].images
            if begin <= image.start < end
        )

    show(first, 0, prompt_length, 0)
    for prefix in row.prefixes:
        prefix_start, own_begin, number = start, prompt_length + len(prefix.tokens), 0
        if len(prefix.tokens):
            segment += 1
            number = segment
            pieces.append(_Piece(samples[prefix.members[0]], prompt_length, own_begin, number))
            show(prefix.members[0], prompt_length, own_begin, start)
            start += len(prefix.tokens)
        for index in prefix.members:
            segment, sample = segment + 1, samples[index]
            own = _Piece(sample, own_begin, max(len(sample.token_ids) - 1, own_begin), segment + PREFIX_STRIDE * number)
            pieces.append(own)
            show(index, own_begin, len(sample.token_ids), start)
            at = np.flatnonzero(sample.loss_mask)
            # token t is predicted by t-1, which is in the prompt or the prefix for the first token of a response
            previous = at - 1
            sources.append(
                np.select(
                    [previous < prompt_length, previous < own_begin],
                    [previous, previous - prompt_length + prefix_start],
                    previous - own_begin + start,
                )
            )
            targets.append(sample.token_ids[at])
            sample_ids.append(np.full(len(at), index))
            target_ids.append(at)
            start += len(own.tokens)

    def joined(parts: Iterator[np.typing.NDArray[np.generic]]) -> IntArray:
        whole: IntArray = np.concatenate(list(parts)).astype(np.int32)
        return whole

    return TokenRow(
        token_ids=joined(piece.tokens for piece in pieces),
        positions=joined(piece.position + np.arange(len(piece.tokens)) for piece in pieces),
        segment_ids=joined(np.full(len(piece.tokens), piece.segment) for piece in pieces),
        sources=joined(iter(sources)),
        targets=joined(iter(targets)),
        sample_ids=joined(iter(sample_ids)),
        target_ids=joined(iter(target_ids)),
        images=tuple(images),
        routes=joined_routes([piece.routes for piece in pieces]),
    )
