"""Packed rows: full, deterministic, and no token of a sample sees another's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests_support import pairs_of  # type: ignore[import-not-found]

from roll_like.errors import EngineError
from roll_like.training.attention import use_dense_attention
from roll_like.training.joined import use_joined_attention
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.training.pairs import pair_batches
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.training.row_plan import pack
from roll_like.training.rows import PREFIX_STRIDE, RowPlan, build_rows, split_by_budget
from roll_like.training.segments import segment_mask
from roll_like.training.sequences import Sequences
from roll_like.types import TrainingSample


def sample(length: int, index: int = 0) -> TrainingSample:
    return TrainingSample(
        group_id=str(index),
        token_ids=np.arange(length, dtype=np.int32) + 100 * index,
        prompt_length=0,
        loss_mask=np.arange(length) > 0,
    )


def test_first_fit_decreasing_by_hand() -> None:
    assert pack([5, 3, 4, 2], 7) == [(0, 3), (1, 2)]
    assert pack([], 7) == []


lengths_and_budget = st.integers(1, 40).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=60), st.just(budget))
)


@given(lengths_and_budget)
def test_every_sequence_is_in_one_row_that_has_room(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    rows = pack(lengths, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert rows == sorted(tuple(sorted(row)) for row in rows) == pack(lengths, budget)
    assert all(sum(lengths[index] for index in row) <= budget for row in rows)
    # no two rows are half empty together
    assert len(rows) <= max(1, math.ceil(2 * sum(lengths) / budget))


@pytest.mark.parametrize("lengths", [[3, 5], [0]])
def test_a_sequence_that_does_not_fit(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"sequence {len(lengths) - 1} has {lengths[-1]} tokens, expected 1 to 4"):
        pack(lengths, 4)


def test_the_longest_come_first_and_each_goes_where_there_is_room() -> None:
    assert pack([4, 8, 2, 6, 1], 10) == [(0, 3), (1, 2), (4,)]


def test_no_token_sees_another_sample_and_positions_begin_anew() -> None:
    lengths = [4, 6, 3]
    made = [sample(length, index) for index, length in enumerate(lengths)]
    (row,) = build_rows(made, share_prompts=True, max_row_tokens=100, plan=RowPlan(rows=[0, 0, 0], prefix=0))
    mask = segment_mask(torch.from_numpy(row.segment_ids[None]).long())[0, 0]
    owner = row.token_ids // 100
    for at in range(len(row)):
        seen = owner[mask[at].numpy()]
        assert set(seen.tolist()) == {owner[at]}
        own = np.flatnonzero(owner == owner[at])
        assert row.positions[at] == np.flatnonzero(own == at)[0]


def of_two(prompt: Sequence[int], response: Sequence[int], index: int, *, shared: bool) -> TrainingSample:
    """A prompt and its response; what is shared is computed once for all that have it."""
    tokens = np.array([*prompt, *response], np.int32)
    return TrainingSample(
        group_id="shared" if shared else str(index),
        token_ids=tokens,
        prompt_length=len(prompt) if shared else 0,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
    )


def test_packed_rows_by_hand() -> None:
    parts = [([5, 6, 7], [8, 9, 10]), ([11, 12], [13]), ([5, 6], [14, 15, 16, 17])]
    samples = [of_two(*each, index, shared=False) for index, each in enumerate(parts)]
    plan = RowPlan(rows=[0, 0, 0], prefix=0)
    (row,) = build_rows(samples, share_prompts=True, max_row_tokens=12, plan=plan)
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 11, 12, 5, 6, 14, 15, 16]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]
    assert row.segment_ids.tolist() == [1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert row.targets.tolist() == [8, 9, 10, 13, 14, 15, 16, 17]
    assert row.sources.tolist() == [2, 3, 4, 6, 8, 9, 10, 11]
    assert row.sample_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert row.target_ids.tolist() == [3, 4, 5, 2, 2, 3, 4, 5]


def test_pairs_by_hand() -> None:
    samples = [of_two([5, 6], response, 0, shared=True) for response in ([7, 8], [9, 10, 11])]
    ((batch,),) = pair_batches(pairs_of(samples), ranks=1, max_tokens=12)
    assert batch.token_ids_BL.tolist() == [[5, 6, 7, 9, 10]]
    assert batch.positions_BL.tolist() == [[0, 1, 2, 2, 3]]
    assert batch.segment_ids_BL.tolist() == [[0, 0, 1, 2, 2]]
    assert batch.targets.tolist() == [7, 8, 9, 10, 11]
    assert batch.sources.tolist() == [1, 2, 1, 3, 4]
    assert batch.sample_ids.tolist() == [0, 0, 1, 1, 1]


def test_groups_in_one_row_by_hand() -> None:
    """Two pairs after one beginning: what the docstring of `rows` draws, with one token fewer per response."""
    parts = [([5, 6, 7], [8, 9, 10]), ([5, 6, 7], [11, 12]), ([5, 13], [14, 15]), ([5, 13], [16])]
    samples = [replace(of_two(*each, 0, shared=True), group_id=str(index // 2)) for index, each in enumerate(parts)]
    (row,) = build_rows(samples, share_prompts=True, max_row_tokens=99, plan=RowPlan(rows=[0] * 4, prefix=1))
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 11, 13, 14]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3, 1, 2]
    assert row.segment_ids.tolist() == [
        0,
        1,
        1,
        2 + PREFIX_STRIDE,
        2 + PREFIX_STRIDE,
        3 + PREFIX_STRIDE,
        4,
        5 + 4 * PREFIX_STRIDE,
    ]
    assert row.targets.tolist() == [8, 9, 10, 11, 12, 14, 15, 16]
    assert row.sources.tolist() == [2, 3, 4, 2, 5, 6, 7, 6]
    assert row.sample_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert row.target_ids.tolist() == [3, 4, 5, 3, 4, 2, 3, 2]
    mask = segment_mask(torch.from_numpy(row.segment_ids[None]).long())[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_sequences_of_rows_by_hand() -> None:
    """A branch right after its prompt goes on in the same sequence; others gather their keys."""
    stride = PREFIX_STRIDE
    rows = torch.tensor(
        [
            [0, 0, 0, 1, 1, 2, 2, 2, -1, -1],
            [0, 1, 1, 2 + stride, 3 + stride, 4, 5 + 4 * stride, -1, -1, -1],
            [1, 1, 2, 3, 3, -1, -1, -1, -1, -1],
        ]
    )
    found = Sequences.of(rows)
    assert found.kept_T.tolist() == [*range(8), *range(10, 17), *range(20, 25)]
    assert found.place_BL[found.kept_T].tolist() == list(range(20))
    assert found.keys_K is not None
    keys = found.keys_K.tolist()
    assert [(list(range(20))[queries], keys[seen]) for queries, seen in found] == [
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ([5, 6, 7], [0, 1, 2, 5, 6, 7]),
        ([8, 9, 10, 11], [8, 9, 10, 11]),
        ([12], [8, 9, 10, 12]),
        ([13, 14], [8, 13, 14]),
        ([15, 16], [15, 16]),
        ([17], [17]),
        ([18, 19], [18, 19]),
    ]
    assert found.longest == (5, 6)
    assert Sequences.of(rows[:1, :5]).keys_K is None


def test_joined_rows_have_no_limit_of_their_own_and_no_padding() -> None:
    samples = [of_two([5] * 5000, [6] * length, 0, shared=True) for length in (3000, 3000)]
    assert [len(row) for row in build_rows(samples, share_prompts=True, max_row_tokens=20000)] == [7999, 7999]
    (row,) = build_rows(samples, share_prompts=True, max_row_tokens=20000, joined=True)
    assert len(row) == 10998
    with pytest.raises(EngineError, match="a pair takes 10998 tokens, and a row 8192 at most"):
        pair_batches(pairs_of(samples), ranks=1, max_tokens=20000)
    ((batch,),) = pair_batches(pairs_of(samples), ranks=1, max_tokens=20000, joined=True)
    assert batch.tokens == 10998
    rows = [range(5), range(2), range(2), range(1)]
    assert [list(map(len, each)) for each in split_by_budget(rows, 10)] == [[5, 2], [2, 1]]
    assert [list(map(len, each)) for each in split_by_budget(rows, 10, joined=True)] == [[5, 2, 2, 1]]


def test_a_group_with_two_prompts_has_two_shared_prefixes() -> None:
    parts = [([5, 6], [8, 9]), ([5, 7], [8, 9]), ([5, 7], [3, 4])]
    samples = [of_two(*each, 0, shared=True) for each in parts]
    (row,) = build_rows(samples, share_prompts=True, max_row_tokens=99, plan=RowPlan(rows=[0] * 3, prefix=1))
    assert row.token_ids.tolist() == [5, 6, 8, 7, 8, 3]
    assert row.sources.tolist() == [1, 2, 3, 4, 3, 5]


@pytest.fixture(scope="module", params=["sdpa", "dense", "varlen"])
def policy(request: pytest.FixtureRequest, tiny_model: Path) -> PolicyModule:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa")
    if request.param == "dense":
        use_dense_attention(model)
    elif request.param == "varlen":
        use_joined_attention(model, "varlen")
    return PolicyModule(model, chunk_tokens=64, chunk_vocab=512)


def computed(policy: PolicyModule, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a batch's targets and the gradient of their sum in the first layer's queries."""
    logprobs, _ = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
    weight = policy.causal_lm.base_model.layers[0].self_attn.q_proj.weight
    return logprobs.detach(), torch.autograd.grad(logprobs.sum(), weight)[0]


@pytest.mark.parametrize("form", ["packed", "pair", "pairs"])
def test_sequences_in_one_row_are_computed_as_if_each_were_alone(policy: PolicyModule, form: str) -> None:
    random = np.random.default_rng(0)
    if form == "packed":
        lengths = [(9, 4), (1, 7), (5, 1), (3, 3)]
        parts = [(random.integers(3, 512, prompt), random.integers(3, 512, length)) for prompt, length in lengths]
        samples = [of_two(*each, index, shared=False) for index, each in enumerate(parts)]
        ((together,),) = micro_batches(samples, ranks=1, max_tokens=64, share_prompts=False, packing=True)
    elif form == "pairs":
        head = random.integers(3, 512, 4)
        prompts = [np.concatenate([head, random.integers(3, 512, length)]) for length in (3, 6, 0)]
        samples = [
            replace(of_two(prompt, random.integers(3, 512, length), 0, shared=True), group_id=str(index))
            for index, (prompt, lengths) in enumerate(zip(prompts, [(5, 8), (1, 2), (4, 4)], strict=True))
            for length in lengths
        ]
        ((together,),) = pair_batches(pairs_of(samples), ranks=1, max_tokens=64)
        # the third prompt is the common beginning, of which at least one token stays with each group
        assert together.tokens <= 4 + (3 + 4 + 7) + (6 + 0 + 1) + (1 + 3 + 3)
    else:
        prompt = random.integers(3, 512, 6)
        samples = [of_two(prompt, random.integers(3, 512, length), 0, shared=True) for length in (5, 8)]
        ((together,),) = pair_batches(pairs_of(samples), ranks=1, max_tokens=64)
    assert len(together.token_ids_BL) == 1
    alone = [micro_batches([sample], ranks=1, max_tokens=64, share_prompts=False)[0][0] for sample in samples]
    logprobs, gradient = computed(policy, together)
    separate = [computed(policy, batch) for batch in alone]
    torch.testing.assert_close(logprobs, torch.cat([each for each, _ in separate]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, sum(each for _, each in separate), atol=1e-5, rtol=1e-4)
