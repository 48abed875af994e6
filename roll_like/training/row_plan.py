"""How samples with given answers are laid out: what they begin with in common once a row, and rows of a good length.

Chat templates begin every conversation alike, often for dozens of tokens. No loss applies there, so a row needs them
once, as a group's prompt (`layout.py`); log-probabilities and gradients are those of separate sequences.

Long rows have little padding and few copies of the common beginning, and attention within a row costs with the square
of its length, whatever its mask leaves out. A few lengths are tried out and the one that computes least is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll_like.training.attention import MAX_DENSE_TOKENS
from roll_like.training.layout import balance, split_by_budget
from roll_like.training.packing import packed
from roll_like.types import TrainingSample

#: Length of a row at which attention takes as long as the rest of the model: 135M parameters on CPU, from measurements.
ATTENTION_TOKENS = 1024
#: A micro-batch more, whatever its size, takes as long as this many tokens: the same model's gradients are added up.
MICRO_BATCH_TOKENS = 64


def planned(samples: Sequence[TrainingSample], *, row_tokens: int, max_tokens: int, ranks: int) -> list[TrainingSample]:
    """Return the samples, in their order, with the same `group_id` and prompt for those that share a row.

    Args:
        samples: Any of at least two tokens; what they share already is forgotten.
        row_tokens: Largest row; one sample that is longer makes a row as long.
        max_tokens: Budget of one micro-batch, padding included.
        ranks: World size of the engine.
    """
    if not samples:
        return []
    prefix = common_prefix(samples)
    rests = [replace(sample, token_ids=sample.token_ids[prefix:]) for sample in samples]
    lengths = [len(rest.token_ids) - 1 for rest in rests]  # the last token predicts nothing and is not computed
    plans = [packed(rests, room) for room in _rooms(lengths, max(row_tokens - prefix, 1))]
    best = min(plans, key=lambda plan: _cost(_row_lengths(plan, prefix), max_tokens, ranks))
    return [
        replace(sample, group_id=rest.group_id, prompt_length=prefix)
        for sample, rest in zip(samples, best, strict=True)
    ]


def rows_of(samples: Sequence[TrainingSample], *, packing: bool, max_tokens: int, ranks: int) -> list[TrainingSample]:
    """Return the samples as rows hold them: several in one, with what they begin with alike, or each by itself.

    Args:
        samples: In the order that figures come back in.
        packing: Whether several samples share a row.
        max_tokens: Budget of one micro-batch, padding included.
        ranks: World size of the engine.
    """
    if not packing:
        return list(samples)
    return planned(samples, row_tokens=min(max_tokens, MAX_DENSE_TOKENS), max_tokens=max_tokens, ranks=ranks)


def common_prefix(samples: Sequence[TrainingSample]) -> int:
    """Return how many tokens all samples begin with alike, before the first that is trained and the last but one.

    [1 2 3 4 5], [1 2 3 9], nothing of them trained before their ends  →  2, which leaves two tokens of the second
    """
    limit = min(len(sample.token_ids) - 2 for sample in samples)
    limit = min([limit, *(int(sample.sampled.argmax()) for sample in samples if sample.sampled.any())])
    first = samples[0].token_ids
    for sample in samples:
        different = np.flatnonzero(sample.token_ids[:limit] != first[:limit])
        limit = int(different[0]) if len(different) else limit
    return max(limit, 0)


def _rooms(lengths: Sequence[int], most: int) -> list[int]:
    """Return how much room a row may have: all of it, and what cuts the samples into more rows of equal length."""
    total, longest = sum(lengths), max(lengths)
    fewest = math.ceil(total / most)
    # first-fit leaves about half a sample of room in each row
    rooms = [math.ceil(total / (fewest * more) + total / len(lengths) / 2) for more in (1, 1.5, 2, 3, 4, 6, 8, 12, 16)]
    return [most, *(room for room in rooms if longest <= room < most)]


def _row_lengths(plan: Sequence[TrainingSample], prefix: int) -> list[int]:
    lengths: dict[str, int] = {}
    for rest in plan:
        lengths[rest.group_id] = lengths.get(rest.group_id, prefix) + len(rest.token_ids) - 1
    return list(lengths.values())


def _cost(row_lengths: Sequence[int], max_tokens: int, ranks: int) -> float:
    """Return what the rank with the most to do computes, in tokens of short rows."""
    shares = balance([range(length) for length in row_lengths], ranks)
    return max(sum(map(_batch_cost, split_by_budget(share, max_tokens))) for share in shares)


def _batch_cost(batch: Sequence[range]) -> float:
    length = len(batch[0])  # the longest row, to which the others are padded
    return MICRO_BATCH_TOKENS + len(batch) * length * (1 + length / ATTENTION_TOKENS)
