"""Several pools as one scorer: each is asked for its own, and their results are put together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from algorithm_samples import make_group

from roll_like.errors import ConfigError
from roll_like.rewards.base import RewardConfig
from roll_like.rollout.reward_pools import RewardPools, RewardShare, together
from roll_like.types import Failure, Group, Scored, Trajectory


def unscored(samples: int = 3, *failures: Failure) -> Group[Trajectory]:
    group = make_group([0.0] * samples)
    return Group(task=group.task, samples=tuple(one.trajectory for one in group.samples), failures=failures)


def failure(name: str) -> Failure:
    return Failure(stage="reward", name=name, error="broke", origin="toy.jsonl:1")


def results(group: Group[Trajectory], name: str, value: float, *, lost: tuple[int, ...] = ()) -> Group[Scored]:
    """What a pool with one reward says; it lost some samples."""
    samples = tuple(
        Scored(
            trajectory=one,
            reward=2 * value,
            rewards={name: value},
            details={f"{name}/seen": 1.0},
            weights={name: 2.0},
            answer=None if name == "a" else f"{name}{one.sample_index}",
        )
        for one in group.samples
        if one.sample_index not in lost
    )
    return Group(task=group.task, samples=samples, failures=(*group.failures, *(failure(name) for _ in lost)))


def test_verdicts_add_up() -> None:
    group = unscored()
    whole = together(group, [results(group, "a", 1.0), results(group, "b", 0.25)])
    assert [sample.reward for sample in whole.samples] == [2.5] * 3
    assert whole.samples[0].rewards == {"a": 1.0, "b": 0.25}
    assert whole.samples[0].weights == {"a": 2.0, "b": 2.0}
    assert whole.samples[0].details == {"a/seen": 1.0, "b/seen": 1.0}
    assert [sample.answer for sample in whole.samples] == ["b0", "b1", "b2"]
    assert [
        sample.answer for sample in together(group, [results(group, "c", 1.0), results(group, "b", 1.0)]).samples
    ] == [
        "c0",
        "c1",
        "c2",
    ]
    assert whole.failures == ()


def test_a_sample_that_one_pool_lost_is_lost_once() -> None:
    group = unscored(3, failure("earlier"))
    whole = together(group, [results(group, "a", 1.0, lost=(0, 1)), results(group, "b", 1.0, lost=(1,))])
    assert [sample.trajectory.sample_index for sample in whole.samples] == [2]
    assert [one.name for one in whole.failures] == ["earlier", "a", "a"]


class FakePool:
    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0
        self.ready = False

    def wait_until_ready(self) -> None:
        self.ready = True

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        self.asked += 1
        return results(group, self.name, 1.0)


def test_only_pools_whose_rewards_judge_the_task_are_asked() -> None:
    maths, style = FakePool("maths"), FakePool("style")
    shares = [RewardShare([RewardConfig(type="maths")], maths), RewardShare([RewardConfig(type="style")], style)]
    pools = RewardPools(shares, {"sums": ["maths"]})
    pools.wait_until_ready()
    assert maths.ready
    assert style.ready
    group = unscored()
    sums = replace(group, task=replace(group.task, domain="sums"))
    assert asyncio.run(pools.score(sums)).samples[0].rewards == {"maths": 1.0}
    assert (maths.asked, style.asked) == (1, 0)
    assert asyncio.run(pools.score(group)).samples[0].rewards == {"maths": 1.0, "style": 1.0}


def test_a_task_that_nobody_judges_is_an_error() -> None:
    pools = RewardPools([RewardShare([RewardConfig(type="maths", sources=("gsm",))], FakePool("maths"))], {})
    with pytest.raises(ConfigError, match="no reward scores the data source"):
        asyncio.run(pools.score(unscored()))
