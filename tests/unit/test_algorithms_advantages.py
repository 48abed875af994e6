from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from algorithm_samples import make_group, same_cases
from hypothesis import given
from hypothesis import strategies as st

from roll_like.algorithms.advantages import AdvantageEstimator, GroupEstimator, Rewards
from roll_like.algorithms.advantages.base import policy_samples, whiten
from roll_like.algorithms.advantages.groups import dr_grpo_advantages, grpo_advantages, rloo_advantages
from roll_like.algorithms.advantages.returns import discounted_returns
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.base import PluginConfig
from roll_like.errors import EngineError, PluginError, RewardError
from roll_like.registry import ADVANTAGES, Registry
from roll_like.types import PolicySample
from roll_like.values import has_signal

GROUP_FORMULAS = [grpo_advantages, dr_grpo_advantages, rloo_advantages]
rewards_of_any_group = st.lists(st.floats(-100, 100), min_size=1, max_size=9).map(np.array)


def estimator(name: str, **settings: object) -> AdvantageEstimator:
    plugin = ADVANTAGES.get(name)
    return plugin(plugin.Config(**settings))


def values_at_sampled(samples: list[PolicySample]) -> list[list[float]]:
    return [sample.advantages[sample.loss_mask].round(5).tolist() for sample in samples]


def test_hand_computed_groups():
    rewards = np.array([2.0, 0.0, 1.0, 0.0])
    # mean 0.75; squares 1.5625, 0.5625, 0.0625, 0.5625 sum to 2.75; unbiased variance 2.75/3
    std = (2.75 / 3) ** 0.5
    assert grpo_advantages(rewards) == pytest.approx(np.array([1.25, -0.75, 0.25, -0.75]) / (std + 1e-6), abs=1e-12)
    assert dr_grpo_advantages(rewards) == pytest.approx([1.25, -0.75, 0.25, -0.75], abs=1e-12)
    assert rloo_advantages(rewards) == pytest.approx([2 - 1 / 3, 0 - 1, 1 - 2 / 3, 0 - 1], abs=1e-12)


@pytest.mark.parametrize("formula", GROUP_FORMULAS)
@pytest.mark.parametrize("rewards", [[0.7], [1.0, 1.0, 1.0], [0.1 + 0.2, 0.3], [1e4 / 3, 1e4 * (1 / 3)], [0.0, 1e-17]])
def test_groups_of_one_or_of_equal_rewards_have_no_advantage(formula, rewards):
    assert formula(np.array(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([], False), ([3.0], False), ([0.1 + 0.2, 0.3], False), ([0.3, 0.301], True), ([-1e-5, 1e-5], True)],
)
def test_signal_is_told_from_float_noise(rewards, expected):
    assert has_signal(rewards) is expected


@pytest.mark.parametrize("formula", GROUP_FORMULAS)
@same_cases
@given(rewards=rewards_of_any_group)
def test_any_group_sums_to_zero_and_keeps_its_order(formula, rewards):
    advantages = formula(rewards)
    assert advantages.shape == rewards.shape
    assert np.isfinite(advantages).all()
    assert advantages.sum() == pytest.approx(0, abs=1e-6 * len(rewards) * max(1.0, np.abs(advantages).max()))
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= -1e-12).all()


def test_returns_are_discounted_by_action():
    returns = discounted_returns([np.array([1.0, 0.0, 4.0]), np.array([2.0]), np.zeros(0)], 0.5)
    assert [row.tolist() for row in returns] == [[2.0, 2.0, 4.0], [2.0], []]


def test_whitening_is_over_all_sequences():
    # values 3, 1, 2: mean 2, unbiased variance 1
    (first, second, third) = whiten([np.array([3.0, 1.0]), np.zeros(0), np.array([2.0])])
    assert first == pytest.approx([1, -1], abs=1e-7)
    assert second.tolist() == []
    assert third == pytest.approx([0], abs=1e-7)
    assert whiten([]) == []


@same_cases
@given(st.lists(st.lists(st.floats(-10, 10), max_size=6).map(np.array), max_size=5), st.floats(0, 1))
def test_whitened_returns_of_ragged_batches(rewards, gamma):
    advantages = whiten(discounted_returns(rewards, gamma))
    assert [len(row) for row in advantages] == [len(row) for row in rewards]
    together = np.concatenate([*advantages, np.zeros(0)])
    assert np.isfinite(together).all()
    if together.any():
        assert together.mean() == pytest.approx(0, abs=1e-6)
        assert together.var(ddof=1) <= 1 + 1e-9


def test_samples_carry_what_training_needs():
    groups = [make_group([1.0, 0.0], [[1, 1, 0, 1], [1]]), make_group([0.0, 1.0])]
    samples = estimator("dr_grpo").assign(groups)
    assert [sample.group_id for sample in samples] == ["toy/0#0", "toy/0#0", "toy/0#1", "toy/0#1"]
    first = samples[0]
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]
    assert first.advantages.dtype == np.float32
    assert (first.prompt_length, first.reward, first.policy_version) == (2, 1.0, 3)
    assert np.array_equal(first.behaviour_logprobs, groups[0].samples[0].trajectory.logprobs)
    assert np.array_equal(first.token_ids, groups[0].samples[0].trajectory.token_ids)
    assert samples[1].advantages.tolist() == [0, 0, -0.5]


def test_groups_that_failures_emptied_are_passed_over():
    samples = estimator("grpo").assign([make_group([]), make_group([1.0]), make_group([0.0, 1.0])])
    assert [sample.group_id for sample in samples] == ["toy/0#1", "toy/0#2", "toy/0#2"]
    assert values_at_sampled(samples)[0] == [0, 0]
    assert estimator("grpo").assign([]) == []
    assert estimator("reinforce_plus_plus").assign([]) == []


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_a_sample_without_sampled_tokens_gets_none(name):
    samples = estimator(name).assign([make_group([1.0, 0.0], [[0, 0], [1, 1]])])
    assert samples[0].advantages.tolist() == [0, 0, 0, 0]
    assert np.isfinite(samples[1].advantages).all()


def test_returns_pass_through_tool_turns():
    # sampled tokens 0, 1 and 4 of the response; the tool's tokens 2 and 3 neither break nor discount a return
    group = make_group([1.0, 0.0], [[1, 1, 0, 0, 1], [1]])
    with_tool = estimator("reinforce_plus_plus", gamma=0.5).assign([group])
    without = estimator("reinforce_plus_plus", gamma=0.5).assign([make_group([1.0, 0.0], [[1, 1, 1], [1]])])
    assert values_at_sampled(with_tool) == values_at_sampled(without)
    # returns 0.25, 0.5, 1 and 0: mean 0.4375
    raw = np.array([0.25, 0.5, 1.0, 0.0])
    expected = (raw - 0.4375) / np.sqrt(raw.var(ddof=1) + 1e-8)
    assert with_tool[0].advantages == pytest.approx([0, 0, expected[0], expected[1], 0, 0, expected[2]], abs=1e-6)


def test_gamma_changes_the_advantages():
    group = make_group([1.0, 0.0], [[1, 1, 1], [1]])
    half = estimator("reinforce_plus_plus", gamma=0.5).assign([group])
    assert values_at_sampled(half) != values_at_sampled(estimator("reinforce_plus_plus").assign([group]))


def test_penalties_lower_the_reward_of_group_estimators_by_their_sum():
    group = make_group([1.0, 0.0])
    # the prompt's entries are not sampled and do not count
    penalties = [np.array([9, 9, 0.25, 0.5], np.float32), np.array([9, 9, 0.0, -0.25], np.float32)]
    samples = estimator("dr_grpo").assign([group], penalties)
    # rewards 0.25 and 0.25
    assert values_at_sampled(samples) == [[0, 0], [0, 0]]
    assert [sample.reward for sample in samples] == [1.0, 0.0]


def test_penalties_of_reinforce_plus_plus_stay_at_their_tokens():
    group = make_group([1.0, 0.0])
    penalties = [np.array([9, 9, 0.5, 0.25], np.float32), np.zeros(4, np.float32)]
    samples = estimator("reinforce_plus_plus").assign([group], penalties)
    # returns 1 − 0.75, 1 − 0.25, 0, 0
    raw = np.array([0.25, 0.75, 0, 0])
    expected = (raw - 0.25) / np.sqrt(raw.var(ddof=1) + 1e-8)
    assert np.concatenate([sample.advantages[2:] for sample in samples]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_rewards_that_are_no_numbers_are_refused(reward):
    with pytest.raises(RewardError, match=r"sample 1 of task 'toy/7' \(toy.jsonl:1\) is (nan|inf)"):
        estimator("grpo").assign([make_group([0.0, reward], task_id="toy/7")])


def test_penalties_that_do_not_fit_are_refused():
    group = make_group([0.0, 1.0])
    with pytest.raises(EngineError, match="1 arrays of token penalties came for 2 samples"):
        estimator("grpo").assign([group], [np.zeros(4, np.float32)])
    with pytest.raises(EngineError, match=r"sample 1 .* have shape \(3,\); \(4,\) was expected"):
        estimator("grpo").assign([group], [np.zeros(4, np.float32), np.zeros(3, np.float32)])
    with pytest.raises(EngineError, match=r"sample 0 .* hold infinities or NaN"):
        estimator("grpo").assign([group], [np.full(4, np.nan, np.float32), np.zeros(4, np.float32)])


def test_samples_before_advantages_are_known():
    (sample, _) = policy_samples([make_group([0.0, 1.0])])
    assert sample.advantages.tolist() == [0, 0, 0, 0]


class BestOfGroup(GroupEstimator):
    class Config(PluginConfig):
        type: Literal["best_of_group"] = "best_of_group"
        bonus: float = 1.0

    def of_group(self, rewards: Rewards) -> Rewards:
        return np.where(rewards == rewards.max(), self.config.bonus, 0.0)


class Ragged(BestOfGroup):
    def of_group(self, rewards: Rewards) -> Rewards:
        return np.zeros(len(rewards) + 1)


def test_a_users_own_estimator(monkeypatch):
    monkeypatch.setattr(ADVANTAGES, "_plugins", dict(ADVANTAGES._plugins))
    ADVANTAGES.register("best_of_group")(BestOfGroup)
    config = AlgorithmConfig.model_validate({"advantage": {"type": "best_of_group", "bonus": 3.0}}).advantage
    samples = ADVANTAGES.get(config.type)(config).assign([make_group([0.0, 1.0])])
    assert values_at_sampled(samples) == [[0, 0], [3, 3]]
    with pytest.raises(EngineError, match=r"Ragged.of_group returned shape \(3,\) for a group of 2"):
        Ragged(config).assign([make_group([0.0, 1.0])])


def test_registered_estimators_say_how_many_samples_they_need():
    registry: Registry[type[AdvantageEstimator]] = ADVANTAGES
    needed = {name: registry.get(name).minimum_samples_per_prompt for name in registry.names()}
    single = {"gae", "reinforce", "reinforce_plus_plus", "remax", "rae", "turn_returns"}
    assert {name for name, least in needed.items() if least == 1} == single
    assert {name for name, least in needed.items() if least == 2} == set(needed) - single
    with pytest.raises(PluginError, match="did you mean 'grpo'"):
        registry.get("grpoo")
