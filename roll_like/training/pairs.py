"""Pairs of sequences on their way to a rank: both of a pair are in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll_like.errors import EngineError
from roll_like.training.layout import MicroBatch, spread
from roll_like.training.rows import MAX_SHARED_ROW_TOKENS
from roll_like.types import FloatArray, IntArray, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPair:
    """Two sequences that begin alike and share their `group_id`, the first of which is preferred."""

    chosen: TrainingSample
    rejected: TrainingSample


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


def sequences_of(pairs: Sequence[TrainingPair]) -> list[TrainingSample]:
    """Return the sequences of pairs: each chosen one and, after it, the rejected one."""
    return [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)]


def pair_batches(pairs: Sequence[TrainingPair], *, ranks: int, max_tokens: int) -> list[list[PairBatch]]:
    """Return each rank's micro-batches of one optimizer step over pairs.

    Args:
        pairs: The global batch.
        ranks: World size of the engine.
        max_tokens: Budget of one micro-batch, padding included.

    Raises:
        EngineError: A pair is longer than a row may be.
    """
    longest = min(max_tokens, MAX_SHARED_ROW_TOKENS)
    for pair in pairs:
        length = len(pair.chosen.token_ids) + len(pair.rejected.token_ids) - pair.chosen.prompt_length - 2
        if length > longest:
            raise EngineError(
                f"a pair takes {length} tokens, and a row {longest} at most",
                fix="raise training.max_tokens_per_micro_batch, or lower data.max_tokens",
            )
    sequences = sequences_of(pairs)
    ones = [np.ones(len(sequence.token_ids), np.float32) for sequence in sequences]
    return spread(sequences, ones, _of_rows, ranks=ranks, max_tokens=max_tokens, share_prompts=True, packing=True)


def _of_rows(batch: MicroBatch) -> PairBatch:
    ids_R, _, counted_R = batch.sequences()
    # `sequences_of` numbers the sequences of pair i 2·i and 2·i + 1
    chosen = np.flatnonzero(ids_R % 2 == 0).astype(np.int32)
    return PairBatch(
        **batch.shared_fields,
        pair_ids=ids_R[chosen] // 2,
        chosen=chosen,
        rejected=chosen + 1,
        counted=counted_R[chosen],
    )
