"""Packed rows: full, deterministic, and no token of a sample sees another's."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_like.training.layout import build_rows, micro_batches
from roll_like.training.packing import packed
from roll_like.training.policy import branch_mask
from roll_like.types import TrainingSample


def sample(length: int, index: int = 0) -> TrainingSample:
    return TrainingSample(
        group_id=str(index),
        token_ids=np.arange(length, dtype=np.int32) + 100 * index,
        prompt_length=0,
        sampled=np.arange(length) > 0,
    )


def test_the_longest_come_first_and_each_goes_where_there_is_room() -> None:
    lengths = [5, 9, 3, 7, 2]  # one token less is computed: 4, 8, 2, 6, 1
    made = packed([sample(length) for length in lengths], 10)
    shared = {}
    for length, each in zip(lengths, made, strict=True):
        shared.setdefault(each.group_id, []).append(length)
    assert sorted(shared.values()) == [[2], [5, 7], [9, 3]]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(20, 60))
def test_rows_hold_every_sample_once_and_are_not_too_long(lengths: list[int], limit: int) -> None:
    samples = [sample(length, index) for index, length in enumerate(lengths)]
    made = packed(samples, limit)
    assert [each.token_ids.tolist() for each in made] == [each.token_ids.tolist() for each in samples]
    rows = build_rows(made, share_prompts=True, max_row_tokens=limit)
    assert sum(map(len, rows)) == sum(length - 1 for length in lengths)
    assert all(len(row) <= max(limit, max(lengths) - 1) for row in rows)
    targets = sorted(target for row in rows for target in row.targets.tolist())
    assert targets == sorted(token for each in samples for token in each.token_ids[1:].tolist())
    sizes = sum(length - 1 for length in lengths)
    if max(lengths) - 1 <= limit:  # first-fit leaves at most one row that is less than half full
        assert len(rows) <= 2 * -(-sizes // limit)


def test_no_token_sees_another_sample_and_positions_begin_anew() -> None:
    lengths = [4, 6, 3]
    made = packed([sample(length, index) for index, length in enumerate(lengths)], 100)
    ((batch,),) = micro_batches(made, ranks=1, max_tokens=100, share_prompts=True)
    mask = branch_mask(torch.from_numpy(batch.branches_BL).long())[0, 0]
    owner = batch.token_ids_BL[0] // 100
    for at in range(batch.token_ids_BL.shape[1]):
        seen = owner[mask[at].numpy()]
        assert set(seen.tolist()) == {owner[at]}
        own = np.flatnonzero(owner == owner[at])
        assert batch.positions_BL[0, at] == np.flatnonzero(own == at)[0]
