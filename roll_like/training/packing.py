"""Which samples share a row: less padding, same numbers.

Samples of a row are segments without a common prompt (`layout.py`): positions begin at 0 in each, and no token sees
another sample's. Which of them share one is decided by first-fit decreasing (Johnson 1973): the longest first, each
goes into the first row that has room. It never takes more than 11/9 of the fewest rows, plus one.

    lengths 5 3 4 2, at most 7 tokens a row  →  rows (5, 2) (3, 4)
"""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Return rows that hold every sequence once, by their indices, in the order of each row's first sequence.

    Args:
        lengths: Tokens of each sequence.
        budget: Tokens that a row has room for.

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
