"""Rows, budgets and balance: every trained token is computed once, and sees just its own past."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_like.policy_gradient.critic import value_batches
from roll_like.policy_gradient.objective import policy_batches
from roll_like.training.draws import sample_seeds, uniform_draws
from roll_like.training.layout import micro_batches, per_sample, update_parts
from roll_like.training.rows import PADDING, build_rows
from roll_like.types import PolicySample


def make_sample(group: str, prompt: list[int], response: list[int], sampled: list[bool] | None = None) -> PolicySample:
    tokens = np.array(prompt + response, np.int32)
    mask = np.array([False] * len(prompt) + (sampled or [True] * len(response)))
    return PolicySample(
        group_id=group,
        token_ids=tokens,
        prompt_length=len(prompt),
        loss_mask=mask,
        turns=np.where(mask, tokens % 3, -1).astype(np.int32),
        behaviour_logprobs=np.where(mask, -tokens / 10, 0).astype(np.float32),
        advantages=np.where(mask, tokens, 0).astype(np.float32),
        reward=0.0,
        policy_version=0,
    )


def weights_of(samples: list[PolicySample]) -> list[np.ndarray]:
    return [sample.loss_mask.astype(np.float32) for sample in samples]


def test_shared_prompt_by_hand() -> None:
    """The layout that the module's docstring draws, with one token fewer per response: the last predicts nothing."""
    samples = [make_sample("g", [1, 2, 3], [4, 5, 6]), make_sample("g", [1, 2, 3], [7, 8])]
    (row,) = build_rows(samples, share_prompts=True, max_row_tokens=100)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 7]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert row.segment_ids.tolist() == [0, 0, 0, 1, 1, 2]
    assert row.sources.tolist() == [2, 3, 4, 2, 5]
    assert row.targets.tolist() == [4, 5, 6, 7, 8]
    assert row.sample_ids.tolist() == [0, 0, 0, 1, 1]
    assert row.target_ids.tolist() == [3, 4, 5, 3, 4]


def test_tokens_that_the_policy_did_not_sample_are_no_targets() -> None:
    (row,) = build_rows(
        [make_sample("g", [1, 2], [3, 4, 5, 6], [True, False, False, True])], share_prompts=True, max_row_tokens=100
    )
    assert row.targets.tolist() == [3, 6]
    assert row.sources.tolist() == [1, 4]


def test_a_row_never_exceeds_the_limit_unless_one_sample_does() -> None:
    samples = [make_sample("g", [1] * 10, [2] * 21) for _ in range(5)]
    rows = build_rows(samples, share_prompts=True, max_row_tokens=50)
    assert [len(row) for row in rows] == [50, 50, 30]
    assert len(build_rows(samples, share_prompts=True, max_row_tokens=5)) == 5


def test_equal_group_ids_with_other_prompts_do_not_share() -> None:
    samples = [make_sample("g", [1, 2], [3]), make_sample("g", [1, 9], [3])]
    assert len(build_rows(samples, share_prompts=True, max_row_tokens=100)) == 2


def test_samples_without_targets_cost_nothing() -> None:
    empty = make_sample("g", [1, 2], [3], [False])
    assert policy_batches([empty], weights_of([empty]), ranks=2, max_tokens=10, share_prompts=True) == [[], []]
    assert micro_batches([empty], ranks=2, max_tokens=10, share_prompts=True) == [[], []]


def test_a_rank_without_rows_repeats_one_with_weight_zero() -> None:
    samples = [make_sample("g", [1, 2], [3, 4])]
    first, second = policy_batches(samples, weights_of(samples), ranks=2, max_tokens=10, share_prompts=True)
    assert len(first) == len(second) == 1
    assert first[0].weights.tolist() == [1, 1]
    assert second[0].weights.tolist() == [0, 0]


@st.composite
def batches(draw: st.DrawFn) -> list[PolicySample]:
    samples = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(1, 99), min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 4))):
            response = draw(st.lists(st.integers(1, 99), min_size=1, max_size=7))
            sampled = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
            samples.append(make_sample(str(group), prompt, response, sampled))
    return samples


@settings(max_examples=3 * settings().max_examples)
@given(batches(), st.integers(1, 3), st.sampled_from([12, 20, 64]), st.booleans(), st.booleans())
def test_every_target_is_computed_exactly_once(
    samples: list[PolicySample], ranks: int, max_tokens: int, share: bool, joined: bool
) -> None:
    shards = policy_batches(
        samples, weights_of(samples), ranks=ranks, max_tokens=max_tokens, share_prompts=share, joined=joined
    )
    assert len({len(shard) for shard in shards}) == 1
    seen: dict[tuple[int, int], float] = {}
    for batch in (batch for shard in shards for batch in shard):
        assert batch.tokens - (batch.padding if joined else 0) <= max_tokens or len(batch.token_ids_BL) == 1
        for index in range(len(batch.targets)):
            if batch.weights[index] == 0:
                continue
            sample, at = int(batch.sample_ids[index]), int(batch.target_ids[index])
            assert (sample, at) not in seen
            seen[sample, at] = 1.0
            assert batch.targets[index] == samples[sample].token_ids[at]
            assert batch.advantages[index] == samples[sample].advantages[at]
            assert batch.turns[index] == samples[sample].turns[at]
            assert batch.behaviour_logprobs[index] == pytest.approx(samples[sample].behaviour_logprobs[at])
            assert visible_tokens(batch, int(batch.sources[index])) == samples[sample].token_ids[:at].tolist()
    assert set(seen) == {
        (index, int(at)) for index, sample in enumerate(samples) for at in np.flatnonzero(sample.loss_mask)
    }


def test_joined_rows_fill_micro_batches() -> None:
    """Eight groups of 530 tokens at 1,000 a micro-batch: one group each left half of it empty."""
    samples = [make_sample(str(group), [1] * 50, [2] * 60) for group in range(8) for _ in range(8)]
    layout = {"ranks": 1, "max_tokens": 1000, "share_prompts": True}
    (padded,) = policy_batches(samples, weights_of(samples), **layout)
    (joined,) = policy_batches(samples, weights_of(samples), **layout, joined=True)
    assert len(padded) == 8
    assert len(joined) == 6
    assert sum(batch.tokens - batch.padding for batch in joined) == 8 * 8 * 59 + 24 * 50  # three rows a group
    # where whole groups fill a micro-batch, no prompt is computed twice
    (whole,) = policy_batches(samples, weights_of(samples), ranks=1, max_tokens=1050, share_prompts=True, joined=True)
    assert sum(batch.tokens - batch.padding for batch in whole) == 8 * 8 * 59 + 8 * 50


def visible_tokens(batch, source: int) -> list[int]:  # type: ignore[no-untyped-def]
    """What the prediction at a flat index may attend to, by the definition of segments."""
    length = batch.token_ids_BL.shape[1]
    row, column = divmod(source, length)
    mine = batch.segment_ids_BL[row, column]
    assert mine != PADDING
    keys = [key for key in range(column + 1) if batch.segment_ids_BL[row, key] in (0, mine)]
    assert batch.positions_BL[row, keys].tolist() == list(range(len(keys)))
    return batch.token_ids_BL[row, keys].tolist()


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3), st.sampled_from([12, 20, 64]), st.booleans(), st.randoms(use_true_random=False))
def test_draws_belong_to_the_token_however_it_is_computed(
    samples: list[PolicySample], ranks: int, max_tokens: int, share: bool, random: Random
) -> None:
    order = random.sample(range(len(samples)), len(samples))
    mixed = [samples[index] for index in order]
    plain = draws_of(samples, ranks=1, max_tokens=1000, share_prompts=False)
    found = draws_of(mixed, ranks=ranks, max_tokens=max_tokens, share_prompts=share)
    assert {(order[sample], at): draw for (sample, at), draw in found.items()} == plain


def draws_of(samples: list[PolicySample], **layout: Any) -> dict[tuple[int, int], float]:
    shards = policy_batches(samples, weights_of(samples), **layout)
    return {
        (int(sample), int(at)): float(draw)
        for shard in shards
        for batch in shard
        for sample, at, draw in zip(batch.sample_ids, batch.target_ids, batch.draws, strict=True)
    }


def test_draws_are_uniform_and_differ_between_samples_and_places() -> None:
    tokens = [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)]
    seeds = sample_seeds([*tokens, tokens[0].copy()])
    assert seeds[0] == seeds[2] != seeds[1]
    places = np.arange(20_000, dtype=np.int32)
    first, second = (uniform_draws(np.full(len(places), seed), places) for seed in seeds[:2])
    assert first.dtype == np.float32
    for draws in (first, second):
        assert 0 <= draws.min() < draws.max() < 1
        assert np.abs(np.histogram(draws, 10, (0, 1))[0] - 2000).max() < 250
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03


def test_figures_of_a_critic_are_at_their_tokens() -> None:
    samples = [make_sample("g", [1, 2], [3, 4, 5], [True, False, True]), make_sample("h", [9], [8, 7])]
    values = [np.arange(5, dtype=np.float32), np.arange(10, 13, dtype=np.float32)]
    returns = [-array for array in values]
    shards = value_batches(samples, weights_of(samples), values, returns, ranks=2, max_tokens=10, share_prompts=True)
    for batch in (batch for shard in shards for batch in shard):
        expected = [values[sample][at] for sample, at in zip(batch.sample_ids, batch.target_ids, strict=True)]
        assert batch.old_values.tolist() == expected
        assert batch.returns.tolist() == [-value for value in expected]
        assert batch.weights.tolist() == [1.0] * len(expected)
    restored = per_sample(samples, shards, [[batch.old_values for batch in shard] for shard in shards])
    assert [array.tolist() for array in restored] == [[0, 0, 2, 0, 4], [0, 11, 12]]


def test_updates_never_tear_groups_apart() -> None:
    samples = [make_sample(group, [1], [2]) for group in "abbacbd"]
    assert update_parts(samples, 2) == [[0, 3, 1, 2, 5], [4, 6]]
    assert update_parts(samples[:2], 3) == [[0], [1]]
    assert update_parts([], 2) == []
