"""Packed rows: every sequence once, no sequence sees another, and the rows go on after a restart."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_like.data.order import Drawn, Order
from roll_like.data.packing import PackedOrder, computed_tokens, pack, report
from roll_like.data.pairs import PairSample
from roll_like.data.samples import ConversationSample
from roll_like.errors import CheckpointError
from roll_like.training.attention import use_dense_attention
from roll_like.training.layout import Row
from roll_like.training.packed import packed_rows, pair_rows
from roll_like.training.policy import PolicyModule


def make_sample(prompt: Sequence[int], response: Sequence[int], origin: str = "") -> ConversationSample:
    trained = np.array([False] * len(prompt) + [True] * len(response))
    return ConversationSample(token_ids=np.array([*prompt, *response], np.int32), trained=trained, origin=origin)


def test_first_fit_decreasing_by_hand() -> None:
    rows = pack([5, 3, 4, 2], 7)
    assert [row.members for row in rows] == [(0, 3), (1, 2)]
    assert [row.lengths for row in rows] == [(5, 2), (3, 4)]
    assert [row.starts for row in rows] == [(0, 5), (0, 3)]
    assert str(report(rows, 7)) == "4 sequences in 2 rows of 7 tokens, 100.0% full"


lengths_and_budget = st.integers(1, 40).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=60), st.just(budget))
)


@given(lengths_and_budget, st.integers(1, 30))
def test_every_sequence_is_in_one_row_that_has_room(case: tuple[list[int], int], window: int) -> None:
    lengths, budget = case
    rows = pack(lengths, budget, window=window)
    assert sorted(index for row in rows for index in row.members) == list(range(len(lengths)))
    for row in rows:
        assert row.lengths == tuple(lengths[index] for index in row.members)
        assert row.tokens <= budget
        assert list(row.members) == sorted(row.members)
        assert len({index // window for index in row.members}) == 1, "nothing leaves its window"
    assert [row.members[0] // window for row in rows] == sorted(row.members[0] // window for row in rows)
    assert rows == pack(lengths, budget, window=window)
    for start in range(0, len(lengths), window):
        part = lengths[start : start + window]
        used = sum(row.members[0] // window == start // window for row in rows)
        # no two rows of a window are half empty together
        assert used <= max(1, math.ceil(2 * sum(part) / budget))
    assert report(rows, budget).tokens == sum(lengths)


def test_a_report_of_padding() -> None:
    found = report(pack([3, 3], 4), 4)
    assert (found.rows, found.fill, found.padding) == (2, 0.75, 0.25)
    assert report([], 4).fill == 1.0


@pytest.mark.parametrize("lengths", [[3, 5], [0]])
def test_a_sequence_that_does_not_fit(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"sequence {len(lengths) - 1} has {lengths[-1]} tokens, expected 1 to 4"):
        pack(lengths, 4)
    with pytest.raises(ValueError, match="a window of 0 sequences"):
        pack([1], 4, window=0)


def make_order(seed: int = 0, count: int = 23) -> Order[ConversationSample]:
    samples = [make_sample([1], range(2 + at % 7), str(at)) for at in range(count)]
    source = Drawn(name="a", key="data.sources[0]", weight=1.0, items=samples)
    return Order([source], f"{count} samples", seed=seed, limit="max_tokens")


def origins(rows: PackedOrder[ConversationSample], count: int) -> list[list[str]]:
    return [[sample.origin for sample in rows.next()] for _ in range(count)]


def test_rows_hold_what_the_order_gives() -> None:
    rows = PackedOrder(make_order(), 10, window=8)
    drawn = make_order()
    for _ in range(5):
        window = sorted(drawn.next().origin for _ in range(8))
        given: list[str] = []
        while len(given) < 8:
            row = rows.next()
            assert sum(map(computed_tokens, row)) <= 10
            given += [sample.origin for sample in row]
        assert sorted(given) == window
    assert rows.report.sequences == 40
    assert 0.5 < rows.report.fill <= 1.0


@pytest.mark.parametrize("before", [0, 1, 4, 9, 17])
def test_rows_go_on_where_they_stood(before: int) -> None:
    rows = PackedOrder(make_order(), 10, window=8)
    origins(rows, before)
    state = json.loads(json.dumps(rows.state()))
    expected = origins(rows, 12)
    resumed = PackedOrder(make_order(), 10, window=8)
    origins(resumed, 3)
    resumed.load_state(state)
    assert resumed.state() == state
    assert origins(resumed, 12) == expected


def test_a_position_of_another_packing_is_refused() -> None:
    rows = PackedOrder(make_order(), 10, window=8)
    rows.next()
    state = rows.state()
    with pytest.raises(CheckpointError, match="packed with a budget of 10, now of 12"):
        PackedOrder(make_order(), 12, window=8).load_state(state)
    with pytest.raises(CheckpointError, match="packed with a window of 8, now of 4"):
        PackedOrder(make_order(), 10, window=4).load_state(state)
    with pytest.raises(CheckpointError, match="max_tokens, weights"):
        PackedOrder(make_order(seed=1), 10, window=8).load_state(state)
    for damage in ({"given": 99}, {"given": -1}, {"given": None}, {"order": None}):
        with pytest.raises(CheckpointError, match="packing position is damaged"):
            PackedOrder(make_order(), 10, window=8).load_state({**state, **damage})


SAMPLES = (
    make_sample([5, 6, 7], [8, 9, 10]),
    make_sample([11, 12], [13]),
    make_sample([5, 6], [14, 15, 16, 17]),
)


def test_packed_rows_by_hand() -> None:
    (row,) = packed_rows(SAMPLES, pack([computed_tokens(sample) for sample in SAMPLES], 12))
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 11, 12, 5, 6, 14, 15, 16]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]
    assert row.branches.tolist() == [1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert row.targets.tolist() == [8, 9, 10, 13, 14, 15, 16, 17]
    assert row.sources.tolist() == [2, 3, 4, 6, 8, 9, 10, 11]
    assert row.sample_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert row.target_ids.tolist() == [3, 4, 5, 2, 2, 3, 4, 5]


def test_pair_rows_by_hand() -> None:
    chosen, rejected = make_sample([5, 6], [7, 8]), make_sample([5, 6], [9, 10, 11])
    pair = PairSample(chosen=chosen, rejected=rejected, prompt_length=2, origin="")
    first, second = pair_rows([pair, pair])
    assert first.token_ids.tolist() == [5, 6, 7, 9, 10]
    assert first.positions.tolist() == [0, 1, 2, 2, 3]
    assert first.branches.tolist() == [0, 0, 1, 2, 2]
    assert first.targets.tolist() == [7, 8, 9, 10, 11]
    assert first.sources.tolist() == [1, 2, 1, 3, 4]
    assert (set(first.sample_ids), set(second.sample_ids)) == ({0, 1}, {2, 3})


@pytest.fixture(scope="module", params=["sdpa", "dense"])
def policy(request: pytest.FixtureRequest, tiny_model: Path) -> PolicyModule:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa")
    if request.param == "dense":
        use_dense_attention(model)
    return PolicyModule(model, chunk_tokens=64, chunk_vocab=512)


def losses(policy: PolicyModule, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a row's targets and the gradient of their sum in the first layer's queries."""
    inputs = (row.token_ids, row.positions, row.branches)
    tensors: list[Any] = [torch.from_numpy(array).long()[None] for array in inputs]
    tensors += [torch.from_numpy(array).long() for array in (row.sources, row.targets)]
    logprobs, _ = policy(*tensors, 1.0)
    weight = policy.causal_lm.base_model.layers[0].self_attn.q_proj.weight
    return logprobs.detach(), torch.autograd.grad(logprobs.sum(), weight)[0]


@pytest.mark.parametrize("form", ["packed", "pair"])
def test_sequences_in_one_row_are_computed_as_if_each_were_alone(policy: PolicyModule, form: str) -> None:
    generator = np.random.default_rng(0)
    if form == "packed":
        lengths = [(9, 4), (1, 7), (5, 1), (3, 3)]
        samples = [make_sample(generator.integers(3, 512, n), generator.integers(3, 512, m)) for n, m in lengths]
        (together,) = packed_rows(samples, pack([computed_tokens(sample) for sample in samples], 64))
    else:
        prompt = generator.integers(3, 512, 6)
        samples = [make_sample(prompt, generator.integers(3, 512, length)) for length in (5, 8)]
        pair = PairSample(chosen=samples[0], rejected=samples[1], prompt_length=6, origin="")
        (together,) = pair_rows([pair])
    alone = [packed_rows([sample], pack([computed_tokens(sample)], 64))[0] for sample in samples]
    logprobs, gradient = losses(policy, together)
    separate = [losses(policy, row) for row in alone]
    torch.testing.assert_close(logprobs, torch.cat([each for each, _ in separate]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, sum(each for _, each in separate), atol=1e-5, rtol=1e-4)
