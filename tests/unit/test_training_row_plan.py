"""Rows of given answers: what samples begin with in common is computed once, and rows have a length that is cheap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from roll_like.training.layout import MicroBatch, micro_batches, per_sample
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.training.row_plan import common_prefix
from roll_like.types import TrainingSample

GROUPS = count()


def sample(tokens: Sequence[int], trained_from: int | None = None) -> TrainingSample:
    ids = np.array(tokens, np.int32)
    start = len(ids) - 1 if trained_from is None else trained_from
    group = str(next(GROUPS))
    return TrainingSample(group_id=group, token_ids=ids, prompt_length=0, loss_mask=np.arange(len(ids)) >= start)


def laid_out(samples: list[TrainingSample], *, max_tokens: int, ranks: int = 1) -> list[MicroBatch]:
    shards = micro_batches(samples, ranks=ranks, max_tokens=max_tokens, share_prompts=False, packing=True)
    return [batch for shard in shards for batch in shard]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([sample([1, 2, 3, 4, 5]), sample([1, 2, 3, 9])], 2),  # two tokens of each remain
        ([sample([1, 2, 3, 4, 5]), sample([1, 2, 9, 9, 9])], 2),
        ([sample([1, 2, 3, 4, 5]), sample([1, 2, 3, 4, 6], trained_from=1)], 1),
        ([sample([1, 2, 3]), sample([4, 2, 3])], 0),
        ([sample([1, 2])], 0),
        ([sample([1, 2, 3, 4], trained_from=9), sample([1, 2, 3, 4])], 2),  # one without anything to learn
    ],
)
def test_what_samples_begin_with_in_common(samples: list[TrainingSample], expected: int) -> None:
    assert common_prefix(samples) == expected


def test_a_common_beginning_is_computed_once_a_row() -> None:
    head = list(range(100, 120))
    samples = [sample([*head, index, index + 1, index + 2], trained_from=21) for index in range(0, 40, 4)]
    (batch,) = laid_out(samples, max_tokens=1024)
    assert batch.token_ids_BL.shape == (1, 20 + 10 * 2)
    assert batch.padding == 0
    assert laid_out([], max_tokens=64) == []


def test_rows_are_short_where_attention_would_cost_more_than_padding() -> None:
    samples = [sample(np.random.default_rng(index).integers(1, 1000, 64)) for index in range(16)]
    (batch,) = laid_out(samples, max_tokens=1024)
    assert batch.token_ids_BL.shape[0] >= 8
    assert batch.padding <= 64


def test_every_rank_has_as_much_to_do() -> None:
    samples = [sample(np.random.default_rng(index).integers(1, 1000, 33)) for index in range(12)]
    first, second = laid_out(samples, max_tokens=1024, ranks=2)
    assert first.tokens == second.tokens == 6 * 32
    assert first.weights.all()
    assert second.weights.all()


@given(st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(0, 12), st.sampled_from([40, 64, 200]))
def test_every_target_is_there_once_and_no_row_is_too_long(lengths: list[int], head: int, budget: int) -> None:
    start = max(head, 1)  # nothing predicts a first token
    samples = [sample([*range(head), *(1000 * index + np.arange(1, n + 1))], start) for index, n in enumerate(lengths)]
    batches = laid_out(samples, max_tokens=budget)
    assert all(batch.token_ids_BL.shape[1] <= max(budget, head + max(lengths)) for batch in batches)
    found = sorted(target for batch in batches for target in batch.targets.tolist())
    assert found == sorted(int(token) for each in samples for token in each.token_ids[start:])


def test_log_probabilities_are_those_of_separate_sequences(tiny_model: Path) -> None:
    random = np.random.default_rng(0)
    head = random.integers(5, 400, 9)
    samples = [
        sample(np.concatenate([head, random.integers(5, 400, random.integers(2, 30))]), trained_from=10)
        for _ in range(12)
    ]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    module = PolicyModule(model, chunk_tokens=64, chunk_vocab=512)
    (shard,) = micro_batches(samples, ranks=1, max_tokens=128, share_prompts=False, packing=True)
    assert sum(batch.tokens for batch in shard) < 0.8 * sum(len(each.token_ids) - 1 for each in samples)
    with torch.no_grad():
        results = [module(*tensors_of(batch, torch.device("cpu")), 1.0)[0].numpy() for batch in shard]
        found = per_sample(samples, [shard], [results])
        for each, logprobs in zip(samples, found, strict=True):
            ids = torch.from_numpy(each.token_ids).long()
            expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
            assert np.abs(logprobs[10:] - expected[9:]).max() < 1e-4
