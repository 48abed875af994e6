"""From samples to the tensors of a forward pass: rows, token budgets, balanced ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from roll_like.data.images import shift_images
from roll_like.data.kept import KeptOfSamples
from roll_like.data.routes import joined_routes
from roll_like.training.row_plan import planned
from roll_like.training.rows import PADDING, TokenRow, balance, build_rows, split_by_budget
from roll_like.types import FloatArray, IntArray, KeptTokens, PlacedImage, RouteArray, TrainingSample

#: Joined rows are at most this part of a micro-batch where groups as a whole fill it badly.
ROWS_A_BUDGET = 4
#: A micro-batch more takes a GPU as long as about this many tokens, an estimate: on an H100 one of 4,500 tokens took a
#: model of 0.4B parameters 155 ms, and its matrix products need about 20.
JOINED_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows padded to one length: what one forward pass of one rank takes, whatever the model.

    Attributes:
        token_ids_BL: Inputs.
        positions_BL: Rotary positions.
        segment_ids_BL: 0 for the prompt, 1… for what follows it (`rows.py`), −1 for padding.
        sources: Index into the flattened [B·L] outputs of the state before each target, shape [N].
        targets: Tokens to predict, shape [N].
        sample_ids: Which sample each target belongs to, as an index into the batch, shape [N].
        target_ids: Index of each target within its sample's own tokens, shape [N].
        weights: Weight of each target in the loss, shape [N].
        images: The images among the inputs, in order; each starts at an index into the flattened [B·L].
        routes_BLMK: Experts to compute the inputs with, in M layers; None where the model chooses them.
        kept: What each target's log-probability is normalised over; None for the whole vocabulary.
    """

    token_ids_BL: IntArray
    positions_BL: IntArray
    segment_ids_BL: IntArray
    sources: IntArray
    targets: IntArray
    sample_ids: IntArray
    target_ids: IntArray
    weights: FloatArray
    images: tuple[PlacedImage, ...] = ()
    routes_BLMK: RouteArray | None = None
    kept: KeptTokens | None = None

    @property
    def tokens(self) -> int:
        """Computed tokens, padding included."""
        return int(self.token_ids_BL.size)

    @property
    def padding(self) -> int:
        """Computed tokens that are padding."""
        return int((self.segment_ids_BL == PADDING).sum())

    def sequences(self) -> tuple[IntArray, npt.NDArray[np.intp], FloatArray]:
        """Return the ids of the R samples in the batch, sorted, shape [R]; which of them each target belongs to, [N];
        and 1 for those that count, 0 for those that only fill up the rank's work, [R].
        """
        ids_R, sequence_N = np.unique(self.sample_ids, return_inverse=True)
        counted_R = np.zeros(len(ids_R), np.float32)
        counted_R[sequence_N[self.weights != 0]] = 1
        return ids_R, sequence_N, counted_R

    @property
    def shared_fields(self) -> dict[str, Any]:
        """The fields that a batch of any kind has, for the constructor of another kind."""
        return {each.name: getattr(self, each.name) for each in fields(MicroBatch)}


class Layout(TypedDict):
    """How samples become micro-batches: the keyword arguments of `micro_batches`.

    Attributes:
        ranks: Ranks that have rows of their own.
        max_tokens: Budget of one micro-batch, padding included.
        share_prompts: Whether to compute a group's prompt once.
        packing: Whether several groups share a row, and what all of them begin with; default: no.
        joined: Whether the ranks join the rows of a micro-batch, without padding and masks (`joined.py`); default: no.
    """

    ranks: int
    max_tokens: int
    share_prompts: bool
    packing: NotRequired[bool]
    joined: NotRequired[bool]


BatchT = TypeVar("BatchT", bound=MicroBatch)


def micro_batches(
    samples: Sequence[TrainingSample], weights: Sequence[FloatArray] | None = None, **layout: Unpack[Layout]
) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches.

    All ranks get equally many, because ZeRO's collectives must pair up. A rank that has too few rows
    repeats one, with weight 0, which changes no gradient.

    Args:
        samples: The global batch.
        weights: Weight of each token in the loss, one array [T] a sample; None for a pass without a loss, where
            weights only tell targets from repeated ones.
        layout: Ranks, budget, and what shares a row.
    """
    if weights is None:
        weights = [np.ones(len(sample.token_ids), np.float32) for sample in samples]
    return spread(samples, weights, lambda batch: batch, **layout)


def per_sample(
    samples: Sequence[TrainingSample],
    shards: Sequence[Sequence[MicroBatch]],
    results: Sequence[Sequence[FloatArray]],
) -> list[FloatArray]:
    """Return what ranks computed for each target as one array [T] a sample, 0 where not sampled."""
    lengths = [len(sample.token_ids) for sample in samples]
    starts = np.cumsum([0, *lengths])
    flat = np.zeros(starts[-1], np.float32)
    for batches, figures in zip(shards, results, strict=True):
        for batch, figure in zip(batches, figures, strict=True):
            flat[starts[batch.sample_ids] + batch.target_ids] = figure
    return [flat[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def update_parts(samples: Sequence[TrainingSample], parts: int) -> list[list[int]]:
    """Cut a step's samples into at most `parts` optimizer batches, as indices, in order of their groups.

    No group is torn apart.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    ordered = list(groups.values())
    cuts = np.array_split(np.arange(len(ordered)), parts)
    return [[index for group in cut for index in ordered[group]] for cut in cuts if len(cut)]


class PerToken:
    """One array [T] a sample, laid end to end, so that a micro-batch's figures are one look-up."""

    def __init__(self, arrays: Sequence[FloatArray] | Sequence[IntArray]) -> None:
        self._starts = np.cumsum([0, *map(len, arrays)])
        self._flat = np.concatenate([np.zeros(0, np.float32), *arrays]).astype(np.float32, copy=False)

    def of(self, batch: MicroBatch) -> FloatArray:
        """Return the figures of the batch's targets, shape [N]."""
        return self.at(batch.sample_ids, batch.target_ids)

    def at(self, sample_ids: IntArray, target_ids: IntArray) -> FloatArray:
        """Return the figures of some tokens, shape [N]."""
        figures: FloatArray = self._flat[self._starts[sample_ids] + target_ids]
        return figures


def spread(
    samples: Sequence[TrainingSample],
    weights: Sequence[FloatArray],
    make: Callable[[MicroBatch], BatchT],
    **layout: Unpack[Layout],
) -> list[list[BatchT]]:
    """Return each rank's micro-batches, as `micro_batches` does, with what `make` adds for an objective."""
    ranks, max_tokens = layout["ranks"], layout["max_tokens"]
    packing, joined = layout.get("packing", False), layout.get("joined", False)
    packed = planned(samples, max_tokens=max_tokens, ranks=ranks) if packing else None
    share = layout["share_prompts"] or packing

    def laid_out(longest: int) -> tuple[list[TokenRow], list[list[list[TokenRow]]]]:
        rows = build_rows(samples, share_prompts=share, max_row_tokens=longest, plan=packed, joined=joined)
        return rows, [split_by_budget(own, max_tokens, joined=joined) for own in balance(rows, ranks)]

    rows, plans = laid_out(max_tokens)
    if not rows:
        return [[] for _ in range(ranks)]
    if joined and packed is None:
        # rows of whole groups may leave half of each budget empty; cut up, they fill it and repeat some prompts
        rows, plans = min((rows, plans), laid_out(max_tokens // ROWS_A_BUDGET), key=lambda one: _cost(one[1]))
    weight_of = PerToken(weights)
    truncated = any(sample.kept is not None for sample in samples)
    kept = KeptOfSamples([(sample.kept, len(sample)) for sample in samples]) if truncated else None

    def made(rows: Sequence[TokenRow], weight_of: PerToken) -> BatchT:
        batch = padded(rows, weight_of)
        return make(batch if kept is None else replace(batch, kept=kept.at(batch.sample_ids, batch.target_ids)))

    count = even_out(plans)
    filled = []
    for plan in plans:
        batches = [made(batch, weight_of) for batch in plan]
        if len(batches) < count:
            filler = made([min(rows, key=len)], PerToken([np.zeros_like(weight) for weight in weights]))
            batches += [filler] * (count - len(batches))
        filled.append(batches)
    return filled


def _cost(plans: Sequence[Sequence[Sequence[TokenRow]]]) -> int:
    """Return what the rank with the most to do computes, in tokens; joined rows have no padding."""
    count = max(len(plan) for plan in plans)
    return count * JOINED_BATCH_TOKENS + max(sum(len(row) for batch in plan for row in batch) for plan in plans)


def even_out(plans: Sequence[list[list[TokenRow]]]) -> int:
    """Cut up micro-batches of ranks that have fewer than another, in place; return how many that one has."""
    count = max(len(plan) for plan in plans)
    for plan in plans:
        while len(plan) < count and any(len(batch) > 1 for batch in plan):
            largest = max(plan, key=len)
            plan.remove(largest)
            plan += [largest[::2], largest[1::2]]
    return count


def padded(rows: Sequence[TokenRow], weight_of: PerToken) -> MicroBatch:
    """Return a micro-batch of some rows, with the weights of their targets."""
    length = max(len(row) for row in rows)
    shape = (len(rows), length)
    token_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segment_ids = np.full(shape, PADDING, np.int32)
    for index, row in enumerate(rows):
        token_ids[index, : len(row)] = row.token_ids
        positions[index, : len(row)] = row.positions
        segment_ids[index, : len(row)] = row.segment_ids
    sample_ids = np.concatenate([row.sample_ids for row in rows])
    target_ids = np.concatenate([row.target_ids for row in rows])
    return MicroBatch(
        token_ids_BL=token_ids,
        positions_BL=positions,
        segment_ids_BL=segment_ids,
        sources=np.concatenate([row.sources + index * length for index, row in enumerate(rows)]).astype(np.int32),
        targets=np.concatenate([row.targets for row in rows]),
        sample_ids=sample_ids,
        target_ids=target_ids,
        weights=weight_of.at(sample_ids, target_ids),
        images=tuple(image for index, row in enumerate(rows) for image in shift_images(row.images, index * length)),
        routes_BLMK=_routes(rows, length),
    )


def _routes(rows: Sequence[TokenRow], length: int) -> RouteArray | None:
    """Return the routes of rows that are padded to a length."""
    padded = [piece for row in rows for piece in ((row.routes, len(row)), (None, length - len(row)))]
    routes = joined_routes(padded)
    return None if routes is None else routes.reshape(len(rows), length, *routes.shape[1:])
