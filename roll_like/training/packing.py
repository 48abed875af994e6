"""Several samples in one row: less padding, same numbers.

Samples of a row are branches without a common prompt (`layout.py`): positions begin at 0 in each, and no token sees
another sample's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roll_like.types import TrainingSample


def packed(samples: Sequence[TrainingSample], row_tokens: int) -> list[TrainingSample]:
    """Return the samples, in their order, with the same `group_id` for those that share a row.

    Longest first, each into the first row that has room (first-fit decreasing, at most 11/9 of the fewest rows
    possible; Johnson 1973).

    Args:
        samples: Any; what they share already is forgotten.
        row_tokens: Largest row. A longer sample has a row of its own.
    """
    # the last token of a sample predicts nothing and takes no room
    sizes = [max(len(sample.token_ids) - 1, 0) for sample in samples]
    room: list[int] = []
    row_of = [0] * len(samples)
    for index in sorted(range(len(samples)), key=lambda index: (-sizes[index], index)):
        row = next((row for row, left in enumerate(room) if left >= sizes[index]), len(room))
        if row == len(room):
            room.append(row_tokens)
        room[row] -= sizes[index]
        row_of[index] = row
    return [
        replace(sample, group_id=f"row {row}", prompt_length=0) for sample, row in zip(samples, row_of, strict=True)
    ]
