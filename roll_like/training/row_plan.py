"""How samples with given answers are laid out: what they begin with in common once a row, and rows of a good length.

Chat templates begin every conversation alike, often for dozens of tokens. No loss applies there, so a row needs them
once, as a group's prompt (`rows.py`); log-probabilities and gradients are those of separate sequences.

Long rows have little padding and few copies of the common beginning, and attention within a row costs with the square
of its length, whatever its mask leaves out. A few lengths are tried out and the one that computes least is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from roll_like.training.attention import MAX_DENSE_TOKENS
from roll_like.training.rows import RowPlan, balance, split_by_budget
from roll_like.types import TrainingSample

#: Length of a row at which attention takes as long as the rest of the model: 135M parameters on CPU, from measurements.
ATTENTION_TOKENS = 1024
#: A micro-batch more, whatever its size, takes as long as this many tokens: the same model's gradients are added up.
MICRO_BATCH_TOKENS = 64


def planned(samples: Sequence[TrainingSample], *, max_tokens: int, ranks: int) -> RowPlan:
    """Return which groups of samples share a row, and what all begin with.

    Args:
        samples: Any of at least two tokens.
        max_tokens: Budget of one micro-batch, padding included. A row has `MAX_DENSE_TOKENS` at most, unless one group
            is longer.
        ranks: World size of the engine.
    """
    if not samples:
        return RowPlan(rows=(), prefix=0)
    prefix = common_prefix(samples)
    groups: dict[str, int] = {}
    numbers = [groups.setdefault(sample.group_id, len(groups)) for sample in samples]
    lengths = _lengths(samples, numbers, prefix)
    plans = [pack(lengths, room) for room in _rooms(lengths, max(min(MAX_DENSE_TOKENS, max_tokens) - prefix, 1))]
    best = min(
        plans, key=lambda plan: _cost([prefix + sum(lengths[at] for at in row) for row in plan], max_tokens, ranks)
    )
    row_of = {group: row for row, members in enumerate(best) for group in members}
    return RowPlan(rows=[row_of[number] for number in numbers], prefix=prefix)


def _lengths(samples: Sequence[TrainingSample], numbers: Sequence[int], prefix: int) -> list[int]:
    """Return how many tokens each group takes in a row after what all samples begin with."""
    lengths = [0] * (max(numbers) + 1)
    for sample, number in zip(samples, numbers, strict=True):
        shared = max(sample.prompt_length - prefix, 0)
        if lengths[number] == 0:
            lengths[number] = shared
        # the last token predicts nothing and is not computed
        lengths[number] += len(sample.token_ids) - 1 - prefix - shared
    return lengths


def common_prefix(samples: Sequence[TrainingSample]) -> int:
    """Return how many tokens all samples begin with alike, before the first that is trained and the last but one.

    [1 2 3 4 5], [1 2 3 9], nothing of them trained before their ends  →  2, which leaves two tokens of the second
    """
    limit = min(len(sample.token_ids) - 2 for sample in samples)
    limit = min([limit, *(int(sample.loss_mask.argmax()) for sample in samples if sample.loss_mask.any())])
    # placeholders are alike, whatever image they stand for
    limit = min([limit, *(sample.images[0].start for sample in samples if sample.images)])
    first = samples[0].token_ids
    for sample in samples:
        different = np.flatnonzero(sample.token_ids[:limit] != first[:limit])
        limit = int(different[0]) if len(different) else limit
    return max(limit, 0)


def _rooms(lengths: Sequence[int], most: int) -> list[int]:
    """Return how much room a row may have: all of it, and what cuts the groups into more rows of equal length."""
    total, longest = sum(lengths), max(lengths)
    most = max(most, longest)
    fewest = math.ceil(total / most)
    # first-fit leaves about half a group of room in each row
    rooms = [math.ceil(total / (fewest * more) + total / len(lengths) / 2) for more in (1, 1.5, 2, 3, 4, 6, 8, 12, 16)]
    return [most, *(room for room in rooms if longest <= room < most)]


def _cost(row_lengths: Sequence[int], max_tokens: int, ranks: int) -> float:
    """Return what the rank with the most to do computes, in tokens of short rows."""
    shares = balance([range(length) for length in row_lengths], ranks)
    return max(sum(map(_batch_cost, split_by_budget(share, max_tokens))) for share in shares)


def _batch_cost(batch: Sequence[range]) -> float:
    length = len(batch[0])  # the longest row, to which the others are padded
    return MICRO_BATCH_TOKENS + len(batch) * length * (1 + length / ATTENTION_TOKENS)


def pack(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Return rows that hold every sequence once, by their indices, in the order of each row's first sequence.

    First-fit decreasing (Johnson 1973): the longest first, each goes into the first row that has room. It never takes
    more than 11/9 of the fewest rows, plus one.

        lengths 5 3 4 2, at most 7 tokens a row  →  rows (5, 2) (3, 4)

    Args:
        lengths: Tokens of each sequence.

    Raises:
        ValueError: A sequence has no token or does not fit into a row.
    """
    for index, length in enumerate(lengths):
        if not 0 < length <= budget:
            raise ValueError(f"sequence {index} has {length} tokens, expected 1 to {budget}, which a row has room for")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda member: (-lengths[member], member)):
        place = next((at for at, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(budget)
        rows[place].append(index)
        room[place] -= lengths[index]
    return sorted(tuple(sorted(row)) for row in rows)
