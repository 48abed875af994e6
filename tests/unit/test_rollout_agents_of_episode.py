"""Episodes of several agents: each agent's samples are compared with its own in the group's other episodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from algorithm_samples import make_group

from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.policy_gradient.advantages import Advantages
from roll_like.registry import ADVANTAGES
from roll_like.rollout.collection import Collected
from roll_like.rollout.metrics import evaluation_metrics, rollout_metrics, rollout_rows
from roll_like.types import Failure, Group, Scored, by_agent
from roll_like.values import Metric, reduce

LOST = Failure(stage="environment", name="duel", error="it fell", origin="duel")


def played(first: list[float], second: list[float]) -> Group[Scored]:
    """Episodes of two players, in the order in which a group holds them."""
    group = make_group([*first, *second])
    names = ["first"] * len(first) + ["second"] * len(second)
    samples = tuple(replace(one, agent=name) for one, name in zip(group.samples, names, strict=True))
    return replace(group, samples=samples, failures=(LOST,))


def test_a_group_has_a_baseline_for_each_agent() -> None:
    algorithm = AlgorithmConfig.model_validate({"advantage": "dr_grpo"})
    advantages = Advantages(
        ADVANTAGES.get("dr_grpo")(algorithm.advantage),
        algorithm,
        KLController(algorithm.kl),
        None,
        max_response_tokens=8,
    )
    assigned = advantages.assign([played([1, 1, -1], [-1, -1, 1]), make_group([1, 0])])
    # of the first player 1/3 is the mean, of the second -1/3: together it would be 0 for both
    expected = [2 / 3, 2 / 3, -4 / 3, -2 / 3, -2 / 3, 4 / 3, 0.5, -0.5]
    np.testing.assert_allclose([sample.advantages[-1] for sample in assigned.samples], expected, rtol=1e-6)
    # players see other prompts, so their samples do not share one
    assert [sample.group_id for sample in assigned.samples[:6:3]] == ["toy/0#0", "toy/0#1"]


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
