"""Which samples share a row: less padding, same numbers.

Samples of a row are branches without a common prompt (`layout.py`): positions begin at 0 in each, and no token sees
another sample's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roll_like.data.packing import pack
from roll_like.types import TrainingSample


def packed(samples: Sequence[TrainingSample], row_tokens: int) -> list[TrainingSample]:
    """Return the samples, in their order, with the same `group_id` for those that share a row.

    Args:
        samples: Any of at least two tokens; what they share already is forgotten.
        row_tokens: Largest row; one sample that is longer makes all rows as long.
    """
    # the last token of a sample predicts nothing and takes no room
    lengths = [len(sample.token_ids) - 1 for sample in samples]
    rows = pack(lengths, max([row_tokens, *lengths]), window=max(len(samples), 1))
    row_of = {index: row for row, members in enumerate(rows) for index in members.members}
    return [replace(sample, group_id=f"row {row_of[index]}", prompt_length=0) for index, sample in enumerate(samples)]
