"""Episodes of several agents: each agent's samples are compared with its own in the group's other episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from algorithm_samples import make_group

from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.rollout import RolloutConfig
from roll_like.policy_gradient.advantages import Advantages
from roll_like.registry import ADVANTAGES
from roll_like.rollout.collection import Collected
from roll_like.rollout.metrics import evaluation_metrics, rollout_metrics, rollout_rows
from roll_like.rollout.source import GroupFilter
from roll_like.types import Failure, Group, Scored, by_agent
from roll_like.values import Metric, reduce

LOST = Failure(stage="environment", name="duel", error="it fell", origin="duel")


def played(first: list[float], second: list[float]) -> Group[Scored]:
    """Episodes of two players, in the order in which a group holds them."""
    group = make_group([*first, *second])
    names = ["first"] * len(first) + ["second"] * len(second)
    samples = tuple(replace(one, agent=name) for one, name in zip(group.samples, names, strict=True))
    return replace(group, samples=samples, failures=(LOST,))


def advantages_by(advantage: Any, **algorithm: Any) -> Advantages:
    config = AlgorithmConfig.model_validate({"advantage": advantage, **algorithm})
    estimator = ADVANTAGES.get(config.advantage.type)(config.advantage)
    return Advantages(estimator, config, KLController(config.kl), None, max_response_tokens=8)


def test_a_group_has_a_baseline_for_each_agent() -> None:
    advantages = advantages_by("dr_grpo")
    assigned = advantages.assign([played([1, 1, -1], [-1, -1, 1]), make_group([1, 0])])
    # of the first player 1/3 is the mean, of the second -1/3: together it would be 0 for both
    expected = [2 / 3, 2 / 3, -4 / 3, -2 / 3, -2 / 3, 4 / 3, 0.5, -0.5]
    np.testing.assert_allclose([sample.advantages[-1] for sample in assigned.samples], expected, rtol=1e-6)
    # players see other prompts, so their samples do not share one
    assert [sample.group_id for sample in assigned.samples[:6:3]] == ["toy/0#0", "toy/0#1"]


def last(advantages: Advantages, *groups: Group[Scored]) -> list[float]:
    return [float(sample.advantages[-1]) for sample in advantages.assign(groups).samples]


def game(group: Group[Scored], name: str) -> Group[Scored]:
    task = replace(group.task, source=name)
    samples = [replace(one, trajectory=replace(one.trajectory, task=task)) for one in group.samples]
    return replace(group, task=task, samples=tuple(samples))


def test_each_role_of_each_game_has_a_running_mean() -> None:
    advantages = advantages_by({"type": "rae", "decay": 0.5})
    # first: b = 0.5, 0.75, then 0.5 + 0.5 · (−1) → −0.125; second: b = −0.5, −0.75, 0.125
    assert last(advantages, played([1, 1, -1], [-1, -1, 1])) == [0.5, 0.25, -0.875, -0.5, -0.25, 0.875]
    # another game begins at 0, and so does the only agent of a third; the first goes on
    groups = [game(played([1], [1]), "other"), game(make_group([2]), "third"), played([1], [0])]
    assert last(advantages, *groups) == [0.5, 0.5, 1.0, 1 - (0.5 * -0.125 + 0.5), -0.5 * 0.125]
    figures = reduce(advantages.assign([]).metrics)
    assert figures == {
        "advantage/baseline/toy/first": 0.4375,
        "advantage/baseline/toy/second": 0.0625,
        "advantage/baseline/other/first": 0.5,
        "advantage/baseline/other/second": 0.5,
        "advantage/baseline/third": 1.0,
    }


def test_the_mean_before_a_reward_differs_by_a_constant_factor() -> None:
    rewards, decay = [0.3, -1.0, 2.0, 0.7], 0.95
    before, expected = 0.0, []
    for reward in rewards:
        expected.append(decay * (reward - before))
        before = decay * before + (1 - decay) * reward
    np.testing.assert_allclose(last(advantages_by("rae"), make_group(rewards)), expected, rtol=1e-6)


def test_penalties_count_for_the_running_mean() -> None:
    shaped = advantages_by({"type": "rae", "decay": 0.5}, reward_shaping={"clip": 0.5})
    assert last(shaped, make_group([4.0, -1.0])) == [0.25, -0.5 - (0.125 - 0.25)]


@pytest.mark.parametrize("advantage", ["rae", "dr_grpo"])
def test_a_resumed_run_goes_on_with_the_same_means(advantage: str) -> None:
    steps = [[played([1, 0.3], [-1, -0.3])], [played([0.7, -0.1], [0.2, 0.9]), make_group([1.0, 0.1])]]
    whole = advantages_by(advantage)
    expected = [last(whole, *groups) for groups in steps]
    begun, resumed = advantages_by(advantage), advantages_by(advantage)
    assert last(begun, *steps[0]) == expected[0]
    saved = json.loads(json.dumps(begun.state()))
    resumed.load_state(saved)
    assert last(resumed, *steps[1]) == expected[1]
    assert resumed.state() == whole.state()
    # of earlier versions, or with another estimator
    for other in ({key: value for key, value in saved.items() if key != "estimator"}, advantages_by("grpo").state()):
        fresh = advantages_by(advantage)
        fresh.load_state(other)
        assert last(fresh, *steps[0]) == expected[0]


def test_a_group_in_which_a_side_always_wins_has_no_signal() -> None:
    dropping = GroupFilter(
        RolloutConfig(prompts_per_step=1, samples_per_prompt=2, drop_zero_variance_groups=True, max_oversampling=2.0)
    )
    assert not dropping(played([1, 1], [-1, -1]))
    assert dropping(played([1, 1], [-1, 1]))
    assert not dropping(make_group([1, 1]))
    assert not dropping(replace(make_group([]), failures=(LOST,)))


def test_groups_of_one_agent_stay_as_they_are() -> None:
    group, other = make_group([1, 0]), played([1, 0], [0, 1])
    assert by_agent([group])[0] is group
    first, second = by_agent([other])
    assert (*first.samples, *second.samples) == other.samples
    assert (first.failures, second.failures) == ((LOST,), ())  # counted once


def value(metrics: dict[str, Metric], name: str) -> float:
    return reduce({name: metrics[name]})[name]


def test_figures_are_those_of_each_agent() -> None:
    collected = Collected(
        groups=(played([1, 1], [0, -1]),),
        rejected=(),
        unfinished=(),
        failures=(),
        started=1,
        wait_reward_seconds=0.0,
        tokens=8,
    )
    rollout, evaluation = rollout_metrics(collected, 3), evaluation_metrics(collected, 2)
    assert value(rollout, "rollout/agent/first/reward") == 1
    assert value(evaluation, "eval/agent/second/avg") == -0.5
    assert value(evaluation, "eval/pass@2") == 0.5  # one of the two agents solved it
    assert value(rollout, "rollout/groups/accepted") == 1
    assert [row["agent"] for row in rollout_rows(collected.groups)] == ["first", "first", "second", "second"]
    assert "agent" not in rollout_rows([make_group([1])])[0]


@pytest.mark.parametrize("k", [1, 2])
def test_an_evaluation_of_one_agent_has_no_figures_of_agents(k: int) -> None:
    collected = Collected(
        groups=(make_group([1, 0]),),
        rejected=(),
        unfinished=(),
        failures=(),
        started=1,
        wait_reward_seconds=0.0,
        tokens=4,
    )
    assert not [name for name in evaluation_metrics(collected, k) if "agent" in name]
