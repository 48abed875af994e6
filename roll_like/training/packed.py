"""Rows of supervised and preference samples, as the forward pass takes them.

Packed sequences share a row and nothing else:

    tokens     a0 a1 a2 | b0 b1
    positions   0  1  2 |  0  1
    branches    1  1  1 |  2  2

The two responses of a pair share their prompt, which is computed once, as the samples of a group do
(`roll_like.training.layout`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll_like.data.packing import Packed
from roll_like.data.pairs import PairSample
from roll_like.data.samples import ConversationSample
from roll_like.training.layout import Row, lay_out


def packed_rows(samples: Sequence[ConversationSample], rows: Sequence[Packed]) -> list[Row]:
    """Return rows of sequences that do not see each other.

    Args:
        samples: The batch. `Row.sample_ids` are indices into it.
        rows: Which of them share a row.
    """
    nothing = np.zeros(0, np.int32)
    return [
        lay_out(nothing, [(index, samples[index].token_ids, samples[index].trained) for index in row.members])
        for row in rows
    ]


def pair_rows(pairs: Sequence[PairSample]) -> list[Row]:
    """Return a row for each pair, its prompt computed once.

    Args:
        pairs: The batch. In `Row.sample_ids`, pair i is 2·i for the chosen response and 2·i + 1 for the rejected one.
    """
    return [
        lay_out(
            pair.chosen.token_ids[: pair.prompt_length],
            [(2 * index + at, each.token_ids, each.trained) for at, each in enumerate(pair.sequences)],
        )
        for index, pair in enumerate(pairs)
    ]
