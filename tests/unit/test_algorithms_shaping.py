"""Reward and advantage shaping and masks by hand-computed numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from algorithm_samples import make_group

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.algorithms.shaping import RewardShaping, RunningMoments, shape_advantages, trained_on
from roll_like.config.algorithm import AdvantageShapingConfig, DifficultyConfig, MaskConfig, RewardShapingConfig
from roll_like.errors import ConfigError
from roll_like.types import Group, Scored, StopReason
from roll_like.values import reduce

LIMIT = 10


def shaped(groups: list[Group[Scored]], **config: Any) -> list[list[float]]:
    """Rewards of each group's samples after shaping."""
    groups, _ = RewardShaping(RewardShapingConfig(**config), max_response_tokens=LIMIT).apply(groups)
    return [[sample.reward for sample in group.samples] for group in groups]


def of_lengths(rewards: list[float], lengths: list[int], **more: Any) -> Group[Scored]:
    return make_group(rewards, [[1] * length for length in lengths], **more)


def test_without_settings_nothing_changes() -> None:
    groups = [make_group([1.0, 0.0], baseline=0.5)]
    after, metrics = RewardShaping(RewardShapingConfig(), max_response_tokens=LIMIT).apply(groups)
    assert (after, metrics) == (groups, {})


def test_overlong_responses_are_punished_softly() -> None:
    group = of_lengths([1.0, 1.0, 1.0, 1.0], [5, 6, 8, 10])
    assert shaped([group], overlong={"buffer_tokens": 4, "penalty": 0.5}) == [[1.0, 1.0, 0.75, 0.5]]
    after, metrics = RewardShaping(RewardShapingConfig(overlong={"buffer_tokens": 4}), max_response_tokens=LIMIT).apply(
        [group]
    )
    assert after[0].samples[3].rewards == {"toy": 1.0, "overlong": -1.0}
    assert after[0].samples[3].weights == {"toy": 1.0, "overlong": 1.0}
    assert reduce(metrics) == {"reward/shaped": pytest.approx(1 - 1.5 / 4), "reward/overlong": pytest.approx(-1.5 / 4)}


@pytest.mark.parametrize(
    ("truncated", "rewards"),
    [
        # as NeMo-RL's and OpenRLHF's stop_properly_penalty_coef of 0 and of 0.5; as of −1 in OpenRLHF, and as
        # open-instruct's non_stop_penalty_value
        ({"factor": 0.0}, [0.0, 0.0, 1.0]),
        ({"factor": 0.5}, [0.5, -0.25, 1.0]),
        ({"reward": -1.0}, [-1.0, -1.0, 1.0]),
    ],
)
def test_a_response_that_was_cut_is_worth_what_is_set(truncated: dict[str, float], rewards: list[float]) -> None:
    group = of_lengths([1.0, -0.5, 1.0], [10, 10, 10])
    ended = (StopReason.LENGTH, StopReason.LENGTH, StopReason.STOP)
    samples = [
        replace(sample, trajectory=replace(sample.trajectory, stop_reason=reason))
        for sample, reason in zip(group.samples, ended, strict=True)
    ]
    group = replace(group, samples=tuple(samples))
    after, metrics = RewardShaping(RewardShapingConfig(truncated=truncated), max_response_tokens=LIMIT).apply([group])
    assert [sample.reward for sample in after[0].samples] == rewards
    assert after[0].samples[0].rewards == {"toy": 1.0, "truncated": rewards[0] - 1}
    changes = np.array(rewards) - np.array([1.0, -0.5, 1.0])
    assert reduce(metrics) == {
        "reward/shaped": pytest.approx(np.mean(rewards)),
        "reward/truncated": pytest.approx(changes.mean()),
    }
    # the penalty for over-long responses comes on top
    assert shaped([group], truncated=truncated, overlong={"buffer_tokens": 5}) == [[each - 1 for each in rewards]]


def test_a_wrong_answer_that_was_cut_gains_nothing_by_being_short() -> None:
    group = of_lengths([1.0, 1.0], [2, 6])
    cut = replace(group.samples[0], trajectory=replace(group.samples[0].trajectory, stop_reason=StopReason.LENGTH))
    group = replace(group, samples=(cut, group.samples[1]))
    settings = {"truncated": {"factor": 0.0}, "length_penalty": {"type": "group", "coefficient": 1.0}}
    assert shaped([group], **settings) == [[0.0, 0.5]]


def test_linear_length_penalty() -> None:
    assert shaped([of_lengths([1.0, 1.0], [2, 10])], length_penalty={"coefficient": 0.5}) == [[0.9, 0.5]]


def test_length_penalty_by_the_place_in_the_group() -> None:
    group = of_lengths([1.0, 1.0, 0.0, 0.0], [2, 6, 2, 4])
    # places ½, −½, ½, 0; a wrong answer gains nothing by being short
    assert shaped([group], length_penalty={"type": "group", "coefficient": 1.0}) == [[1.5, 0.5, 0.0, 0.0]]
    assert shaped([of_lengths([1.0, 0.0], [3, 3])], length_penalty={"type": "group", "coefficient": 1.0}) == [[1, 0]]


STATISTICS = {
    "none": (0.0, 1.0),
    "group": (2.0, math.sqrt(2)),  # of 1 and 3
    "batch": (4.0, math.sqrt(12)),  # of 1, 3, 3 and 9
}


@pytest.mark.parametrize("std", STATISTICS)
@pytest.mark.parametrize("mean", STATISTICS)
def test_mean_and_std_may_come_from_different_samples(mean: str, std: str) -> None:
    groups = [make_group([1.0, 3.0]), make_group([3.0, 9.0], task_id="toy/1")]
    first = shaped(groups, normalise={"mean": mean, "std": std})[0]
    centre, scale = STATISTICS[mean][0], STATISTICS[std][1]
    assert first == pytest.approx([(1 - centre) / scale, (3 - centre) / scale], rel=1e-5)


def test_running_statistics_cover_all_steps_and_survive_a_checkpoint() -> None:
    config = RewardShapingConfig(normalise={"mean": "running", "std": "running"})
    shaping = RewardShaping(config, max_response_tokens=LIMIT)
    shaping.apply([make_group([1.0, 3.0])])
    resumed = RewardShaping(config, max_response_tokens=LIMIT)
    resumed.load_state(json.loads(json.dumps(shaping.state())))
    for one in (shaping, resumed):
        (group,), _ = one.apply([make_group([3.0, 9.0])])
        # of 1, 3, 3, 9
        assert [s.reward for s in group.samples] == pytest.approx([-1 / math.sqrt(12), 5 / math.sqrt(12)])


def test_running_moments_equal_those_of_everything_at_once() -> None:
    draw = np.random.default_rng(0)
    parts = [draw.normal(5, 2, size) for size in (1, 7, 0, 30)]
    moments = RunningMoments()
    for part in parts:
        moments.add(part)
    together = np.concatenate(parts)
    assert (moments.mean, moments.std) == (pytest.approx(together.mean()), pytest.approx(together.std(ddof=1)))
    assert RunningMoments().std == 0


def test_equal_rewards_do_not_become_amplified_noise() -> None:
    group = make_group([0.1 + 0.2, 0.3])
    assert np.abs(shaped([group], normalise={"mean": "group", "std": "group"})).max() < 1e-9


def test_rewards_are_clipped_last() -> None:
    assert shaped([make_group([5.0, -5.0, 0.1])], clip=1.0) == [[1.0, -1.0, 0.1]]
    assert shaped([make_group([5.0, 7.0])], normalise={"mean": "group"}, clip=0.5) == [[-0.5, 0.5]]


def test_a_baseline_is_shaped_like_its_samples_and_counts_in_no_statistic() -> None:
    groups = [make_group([1.0, 3.0], baseline=9.0)]
    (group,), _ = RewardShaping(
        RewardShapingConfig(normalise={"mean": "group"}, clip=5.0), max_response_tokens=LIMIT
    ).apply(groups)
    assert [sample.reward for sample in group.samples] == [-1.0, 1.0]
    assert [sample.reward for sample in group.baselines] == [5.0]


def test_truncated_samples_are_masked() -> None:
    groups = [make_group([1.0, 0.0], stops=[StopReason.STOP, StopReason.LENGTH])]
    chosen, metrics = trained_on(groups, MaskConfig(truncated=True))
    assert chosen == [True, False]
    assert reduce(metrics) == {"mask/truncated": 0.5}
    assert trained_on(groups, MaskConfig()) == ([True, True], {})


def test_samples_beyond_a_number_are_masked() -> None:
    groups = [make_group([1.0, 0.0, 1.0]), make_group([1.0], task_id="toy/1")]
    chosen, metrics = trained_on(groups, MaskConfig(samples_per_group=2))
    assert chosen == [True, True, False, True]
    assert reduce(metrics) == {"mask/samples_per_group": 0.25}


@pytest.mark.parametrize(
    ("band", "expected"),
    [
        ({"of": "mean", "low": 0.2, "high": 0.8}, [False, True, False]),
        ({"of": "mean", "low": 0.0, "high": 0.5}, [True, True, False]),
        ({"of": "std", "low": 0.1, "high": 1.0}, [False, True, False]),
        ({"of": "std", "low": 0.0, "high": 0.1}, [True, False, True]),
    ],
)
def test_groups_outside_of_the_difficulty_band_are_masked(band: dict[str, Any], expected: list[bool]) -> None:
    groups = [make_group(rewards) for rewards in ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])]
    chosen, metrics = trained_on(groups, MaskConfig(difficulty=band))
    assert chosen[::2] == expected
    assert metrics["mask/difficulty"].value == pytest.approx(expected.count(False) / 3)


def test_a_domain_may_have_a_band_of_its_own() -> None:
    groups = [make_group([1.0, 1.0]), make_group([1.0, 1.0], task_id="toy/1")]
    groups[1] = replace(groups[1], task=replace(groups[1].task, domain="other"))
    own = {"other": DifficultyConfig(of="mean", low=0.0, high=0.5)}
    assert trained_on(groups, MaskConfig(), own)[0] == [True, True, False, False]
    everywhere = MaskConfig(difficulty={"of": "mean", "low": 2.0, "high": 3.0})
    assert trained_on(groups, everywhere, {"other": DifficultyConfig(of="mean", low=0, high=1)})[0][1:3] == [
        False,
        True,
    ]


def test_a_mean_at_the_end_of_a_band_lies_in_it() -> None:
    """Three weighted parts, all right, add up to 0.9999999999999999."""
    groups = [make_group([0.7 + 0.2 + 0.1] * 2), make_group([0.9999] * 2), make_group([1.0001] * 2)]
    chosen, _ = trained_on(groups, MaskConfig(difficulty={"of": "mean", "low": 1.0, "high": 1.0}))
    assert chosen == [True] * 2 + [False] * 4


def test_an_empty_band_is_refused() -> None:
    with pytest.raises(ConfigError, match="set low below high"):
        MaskConfig(difficulty={"of": "mean", "low": 0.8, "high": 0.2})


def test_advantages_are_whitened_then_clipped() -> None:
    groups = [make_group([0.0, 0.0], [[1, 0], [1, 1]])]
    advantages = [np.array([0, 0, 3, 9], np.float32), np.array([0, 0, 1, 2], np.float32)]
    samples = policy_samples(groups, advantages)
    after, metrics = shape_advantages(samples, AdvantageShapingConfig(whiten=True))
    # of 3, 1, 2: the token that was not sampled has no part
    assert after[0].advantages.tolist() == pytest.approx([0, 0, 1, 0], abs=1e-6)
    assert after[1].advantages.tolist() == pytest.approx([0, 0, -1, 0], abs=1e-6)
    assert reduce(metrics)["advantage/std"] == pytest.approx(math.sqrt(2 / 3))
    after, metrics = shape_advantages(samples, AdvantageShapingConfig(clip=1.5))
    assert after[0].advantages.tolist() == [0, 0, 1.5, 0]
    assert after[1].advantages.tolist() == [0, 0, 1, 1.5]
    assert reduce(metrics)["advantage/max"] == 1.5
    assert shape_advantages([], AdvantageShapingConfig(whiten=True)) == ([], {})
