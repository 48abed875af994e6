"""One definition of equal rewards: what the filter keeps has an advantage and a pair, what it drops has neither."""

from __future__ import annotations

import numpy as np
import pytest
from algorithm_samples import make_group

from roll_like.algorithms.advantages.groups import (
    best_of_k_advantages,
    dr_grpo_advantages,
    gpg_scale,
    grpo_advantages,
    opo_advantages,
    rloo_advantages,
)
from roll_like.algorithms.shaping import RewardShaping
from roll_like.builtin.pipelines.online_dpo.config import PairsConfig
from roll_like.builtin.pipelines.online_dpo.pairs import _eligible
from roll_like.config.algorithm import RewardShapingConfig
from roll_like.config.rollout import RolloutConfig
from roll_like.rollout.metrics import _share_zero_variance
from roll_like.rollout.source import GroupFilter
from roll_like.values import has_signal

FORMULAS = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "opo": lambda rewards: opo_advantages(rewards, np.arange(1, len(rewards) + 1)),
}
EQUAL = {
    "one sample": [0.7],
    "the same": [1.0, 1.0, 1.0],
    "order of a sum": [0.1 + 0.2, 0.3],
    "many": [0.1] * 63 + [0.1 + 1e-17],
    "nearly zero": [0.1 + 0.2 - 0.3, 0.0],
    "single precision": [float(np.float32(0.1)), 0.1],
    "single precision, large": [float(np.float32(1234567.8)), 1234567.8],
    "large": [3e5, 3e5 * (1 + 1e-10)],
    "huge": [1e15 / 3, 1e15 * (1 / 3)],
    "negative": [-2e4, -2e4 * (1 + 1e-8)],
    "just below the threshold": [0.0, 0.9e-9],
    "just below the relative threshold": [100.0, 100.0 + 0.9e-4],
}
DIFFERENT = {
    "right and wrong": [0.0, 1.0],
    "one of many": [0.0] * 63 + [1.0],
    "tiny": [0.0, 5e-9],  # equal to a filter of 1e-8
    "tiny, one of many": [0.0] * 63 + [5e-9],
    "tiny around zero": [-3e-9, 3e-9],
    "small on top": [1.0, 1.0 + 3e-6],
    "large": [1e6, 1e6 + 20.0],
    "huge": [1e15, 1.1e15],
    "large and small": [1e9, 0.0, 1e-9],
    "negative": [-5.0, -5.0001],
}


ROLLOUT = RolloutConfig(prompts_per_step=1, samples_per_prompt=2, drop_zero_variance_groups=True, max_oversampling=2.0)


def kept(rewards: list[float]) -> bool:
    return GroupFilter(ROLLOUT)(make_group(rewards))


def zero_variance(rewards: list[float]) -> float:
    return _share_zero_variance([make_group(rewards)])


def pairs(rewards: list[float]) -> list[tuple[float, float]]:
    group = make_group(rewards, [[1] * (index + 1) for index in range(len(rewards))])
    rule = PairsConfig(pairs_per_step=1, select="all", min_margin=0.0, truncated="keep")
    return [(better.reward, worse.reward) for better, worse in _eligible(group.samples, rule)]


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("rewards", EQUAL.values(), ids=EQUAL)
def test_equal_rewards_teach_nothing_anywhere(formula, rewards: list[float]) -> None:
    assert not has_signal(rewards)
    assert not kept(rewards)
    assert zero_variance(rewards) == 1.0
    assert pairs(rewards) == []
    assert formula(np.array(rewards)).tolist() == [0.0] * len(rewards)
    assert gpg_scale([np.array(rewards), np.array([0.0, 1.0])]) == (len(rewards) + 2) / 2


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("rewards", DIFFERENT.values(), ids=DIFFERENT)
def test_different_rewards_teach_something_everywhere(formula, rewards: list[float]) -> None:
    assert has_signal(rewards)
    assert kept(rewards)
    assert zero_variance(rewards) == 0.0
    assert (max(rewards), min(rewards)) in pairs(rewards)
    advantages = formula(np.array(rewards)).astype(np.float32)  # as they are trained on
    assert advantages[int(np.argmax(rewards))] > 0 > advantages[int(np.argmin(rewards))]


@pytest.mark.parametrize("mean", ["group", "batch", "none"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", EQUAL.values(), ids=EQUAL)
def test_shaping_makes_no_difference_of_noise(rewards: list[float], mean: str, std: str) -> None:
    shaping = RewardShaping(RewardShapingConfig(normalise={"mean": mean, "std": std}), max_response_tokens=10)
    (after, _), _ = shaping.apply([make_group(rewards, baseline=rewards[-1]), make_group([0.0, 1.0], baseline=0.5)])
    shaped = np.array([sample.reward for sample in after.samples])
    assert grpo_advantages(shaped).tolist() == [0.0] * len(rewards)
    # not divided by a deviation of 0
    assert np.abs(shaped).max() <= 3 * max(1.0, np.abs(rewards).max())
    if std == "none" or mean == "group":
        assert after.baselines[0].reward == pytest.approx(shaped[0], abs=1e-6 * max(1.0, np.abs(shaped).max()))


def test_a_greedy_answer_that_differs_is_a_signal_for_an_estimator_that_compares_with_it() -> None:
    compares, plain = GroupFilter(ROLLOUT, needs_baseline=True), GroupFilter(ROLLOUT)
    assert compares(make_group([1.0, 1.0], baseline=0.0))
    assert not compares(make_group([1.0, 1.0], baseline=1.0 + 1e-12))
    assert not plain(make_group([1.0, 1.0], baseline=0.0))


def test_the_best_of_a_group_has_to_be_better_by_more_than_noise() -> None:
    assert best_of_k_advantages(np.array([0.3, 0.1 + 0.2, 0.0]), divide_by_std=True).tolist() == [0.0, 0.0, 0.0]
    assert best_of_k_advantages(np.array([0.3, 0.4, 0.0]), divide_by_std=False) == pytest.approx([0.0, 0.1, 0.0])


@pytest.mark.parametrize(
    ("rewards", "margin", "paired"),
    [
        ([0.3, 0.2], 0.1, True),  # 0.3 − 0.2 is 0.09999999999999998
        ([0.6, 0.300001], 0.3, False),
        ([8e7, 3e7], 5e7 + 1.0, True),  # 1 is noise there
        ([8e7, 3e7], 5.1e7, False),
    ],
)
def test_a_margin_is_reached_but_for_noise(rewards: list[float], margin: float, paired: bool) -> None:
    rule = PairsConfig(pairs_per_step=1, select="all", min_margin=margin, truncated="keep")
    group = make_group(rewards, [[1], [1, 1]])
    assert bool(_eligible(group.samples, rule)) is paired
