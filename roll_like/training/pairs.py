"""Pairs of sequences on their way to a rank: both of a pair are in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import numpy as np

from roll_like.errors import EngineError
from roll_like.training.layout import Layout, MicroBatch, spread
from roll_like.training.rows import MAX_SHARED_ROW_TOKENS
from roll_like.types import BoolArray, FloatArray, IntArray, Pair, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch(MicroBatch):
    """Rows of whole pairs, P in all.

    Attributes:
        pair_ids: Which pair of the step each is, shape [P].
        chosen: Which of the batch's sequences (`MicroBatch.sequences`) is the preferred one of each pair, shape [P].
        rejected: Which is the other, shape [P].
        counted: 1, or 0 for pairs that only fill up the rank's work, shape [P].
    """

    pair_ids: IntArray
    chosen: IntArray
    rejected: IntArray
    counted: FloatArray


def sequences_of(pairs: Sequence[Pair]) -> list[TrainingSample]:
    """Return the sequences of pairs: each chosen one and, after it, the rejected one."""
    return [sequence for pair in pairs for sequence in pair.sequences]


def pair_batches(pairs: Sequence[Pair], **layout: Unpack[Layout]) -> list[list[PairBatch]]:
    """Return each rank's micro-batches of one optimizer step over pairs.

    Args:
        pairs: The global batch; both of a pair have its `group_id` and the `prompt_length` that they share.
        layout: Ranks and budget; both of a pair always share their prompt, and rows with other pairs.

    Raises:
        EngineError: A pair is longer than a row may be.
    """
    longest = layout["max_tokens"]
    if not layout.get("joined", False):
        longest = min(longest, MAX_SHARED_ROW_TOKENS)
    for pair in pairs:
        length = len(pair.chosen) + len(pair.rejected) - pair.chosen.prompt_length - 2
        if length > longest:
            raise EngineError(
                f"a pair takes {length} tokens, and a row {longest} at most",
                fix="raise training.max_tokens_per_micro_batch, or lower data.max_tokens",
            )
    sequences = sequences_of(pairs)
    ones = [np.ones(len(sequence.token_ids), np.float32) for sequence in sequences]
    of_rows = partial(
        _of_rows,
        pair_S=np.repeat(np.arange(len(pairs), dtype=np.int32), 2),
        chosen_S=np.tile([True, False], len(pairs)),
    )
    shared: Layout = {**layout, "share_prompts": True, "packing": True}
    return spread(sequences, ones, of_rows, **shared)


def _of_rows(batch: MicroBatch, *, pair_S: IntArray, chosen_S: BoolArray) -> PairBatch:
    """Return rows with their pairs.

    Args:
        batch: Rows of whole pairs.
        pair_S: Which pair of the step each of its sequences belongs to.
        chosen_S: Whether each of them is the chosen one.
    """
    ids_R, _, counted_R = batch.sequences()
    chosen = np.flatnonzero(chosen_S[ids_R]).astype(np.int32)
    rejected = np.flatnonzero(~chosen_S[ids_R]).astype(np.int32)
    pair_ids = pair_S[ids_R]
    assert np.array_equal(pair_ids[chosen], pair_ids[rejected]), "both sequences of a pair are in one row"
    return PairBatch(
        **batch.shared_fields,
        pair_ids=pair_ids[chosen],
        chosen=chosen,
        rejected=rejected,
        counted=counted_R[chosen],
    )
