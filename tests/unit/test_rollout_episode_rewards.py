"""Rewards of episodes beside their environments': what is added, what is lost, what a reward sees of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
from episodes import episode, rows
from test_rollout_env_manager import RENDERER, SPEC, Pool, Speaker, Walk, collect, tasks

from roll_like.agents.env_manager import EnvManager, EpisodePlan
from roll_like.agents.episode import EpisodeLimits
from roll_like.agents.episode_rewards import EpisodeRewards, with_rewards
from roll_like.algorithms.advantages.base import policy_samples
from roll_like.errors import RewardError
from roll_like.inference.interface import Sampling
from roll_like.registry import REWARDS
from roll_like.rewards.base import Completion, Outcome, RewardConfig, RewardResult, register_reward
from roll_like.rewards.scorer import Scorer, scores_task, to_completion
from roll_like.rollout.reward_pools import RewardPools, RewardShare
from roll_like.types import Group, Scored, Task, Trajectory


class Local:
    """A pool of reward workers, without workers."""

    def __init__(self, *configs: RewardConfig) -> None:
        self.scorer = Scorer(configs, timeout_seconds=5.0, retries=0)
        self.groups: list[Group[Trajectory]] = []

    def wait_until_ready(self) -> None:
        pass

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        self.groups.append(group)
        return await self.scorer.score_group(group)


MakeRewards: TypeAlias = "Callable[..., tuple[EpisodeRewards, Local]]"


def played(words: list[str], sample: int = 0) -> Scored:
    """An episode as its environment scored it: its last turn earned 1."""
    return replace(episode(words, sample=sample), rewards={"return": 1.0}, weights={"return": 1.0})


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> MakeRewards:
    """Make the rewards of a run out of functions."""
    REWARDS.names()
    monkeypatch.setattr(REWARDS, "_plugins", dict(REWARDS._plugins))

    def make(
        environment_weight: float = 1.0,
        sources: tuple[str, ...] | None = None,
        **functions: tuple[float, Callable[[Completion], Outcome]],
    ) -> tuple[EpisodeRewards, Local]:
        configs = []
        for name, (weight, function) in functions.items():
            register_reward(name)(function)
            configs.append(RewardConfig(type=name, weight=weight, sources=sources))
        local = Local(*configs)
        pools = RewardPools([RewardShare(configs, local)], {})
        return EpisodeRewards(pools, environment_weight=environment_weight), local

    return make


def group_of(*samples: Scored) -> Group[Scored]:
    return Group(task=samples[0].trajectory.task, samples=samples, failures=())


def test_the_sum_is_weighted_and_the_last_turn_earns_what_is_added(
    rewards: MakeRewards,
) -> None:
    def words(completion: Completion) -> RewardResult:
        return RewardResult(float(len(completion.text.split())), {"seen": 1.0}, completion.text)

    both, _ = rewards(0.5, words=(0.1, words), turns=(2.0, lambda completion: float(len(completion.turns))))
    steps = episode(["left", "right now"])
    steps = replace(steps, reward=1.25, rewards={"return": 1.25}, turn_rewards=(0.25, 1.0))
    (sample,) = asyncio.run(both.add(group_of(steps))).samples
    assert sample.rewards == {"return": 1.25, "words": 2.0, "turns": 2.0}
    assert sample.weights == {"return": 0.5, "words": 0.1, "turns": 2.0}
    assert sample.reward == pytest.approx(0.5 * 1.25 + 0.1 * 2 + 2.0 * 2)
    assert sample.turn_rewards == pytest.approx((0.125, 0.5 + 4.2))
    assert sum(sample.turn_rewards) == pytest.approx(sample.reward)
    assert sample.reward == pytest.approx(sum(sample.weights[name] * value for name, value in sample.rewards.items()))
    assert sample.details == {**steps.details, "words/seen": 1.0}
    assert sample.answer == "right now"
    assert sample.trajectory is steps.trajectory
    (row,) = rows([sample])
    assert (row["return"], row["turns"][1]["reward"]) == (1.0, 1.0)  # the environment's, unweighted


def test_an_episode_that_a_reward_cannot_score_is_lost(rewards: MakeRewards) -> None:
    def fragile(completion: Completion) -> Outcome:
        return RewardError("broke") if completion.text == "b" else 1.0

    added, _ = rewards(fragile=(1.0, fragile))
    scored = asyncio.run(added.add(group_of(*(played([word], sample=at) for at, word in enumerate("abc")))))
    assert [sample.trajectory.sample_index for sample in scored.samples] == [0, 2]
    assert [sample.reward for sample in scored.samples] == [2.0, 2.0]
    ((failure),) = scored.failures
    assert (failure.stage, failure.name, failure.error) == ("reward", "fragile", "broke")


def test_environments_that_no_reward_scores_keep_their_own(
    rewards: MakeRewards,
) -> None:
    added, local = rewards(0.5, ("other",), one=(1.0, lambda completion: 1.0))
    (sample,) = asyncio.run(added.add(group_of(played(["left", "right"])))).samples
    assert (sample.reward, sample.turn_rewards, sample.rewards) == (0.5, (0.0, 0.5), {"return": 1.0})
    assert (sample.weights, local.groups) == ({"return": 0.5}, [])


def test_an_episode_without_a_turn_has_a_reward_and_no_turn_rewards() -> None:
    empty = replace(episode(["left"]), turn_rewards=(), reward=0.0, rewards={"return": 0.0})
    sample = with_rewards(empty, replace(empty, reward=0.5, rewards={"one": 0.5}, weights={"one": 1.0}), 1.0)
    assert (sample.reward, sample.turn_rewards) == (0.5, ())


def test_what_a_reward_sees_of_an_episode() -> None:
    completion = to_completion(episode(["left", "right"], index=7).trajectory)
    assert completion.text == "right"
    assert [(turn.text, turn.reward) for turn in completion.turns] == [("left", 0.0), ("right", 1.0)]
    assert [message["role"] for message in completion.conversation] == [
        *("system", "user", "assistant"),
        *("user", "assistant", "user"),
    ]
    assert [message["content"] for message in completion.conversation][2::2] == ["left", "right"]
    assert completion.conversation[-1]["content"] == "It is over."
    single = replace(completion, turns=(), text="yes", messages=({"role": "user", "content": "Well?"},))
    assert single.conversation == ({"role": "user", "content": "Well?"}, {"role": "assistant", "content": "yes"})


def test_groups_are_scored_when_they_are_complete_and_others_are_played_meanwhile(
    rewards: MakeRewards,
) -> None:
    order: list[str] = []
    release = asyncio.Event()

    class Slow:
        def scores(self, task: Task) -> bool:
            return scores_task(RewardConfig(type="any"), task, {})

        async def score(self, group: Group[Trajectory]) -> Group[Scored]:
            order.append(f"scoring {group.task.task_id} of {len(group.samples)}")
            assert group.task.metadata == {"environment": "walk", "seed": int(group.task.task_id.partition(":")[2])}
            if group.task.task_id == "walk:0":
                await release.wait()
            else:
                release.set()  # the second group ends while the first is scored
            return await real.scorer.score_group(group)

    _, real = rewards(ended=(2.0, lambda completion: float(completion.messages[0]["content"] == "Walk.")))
    slow = EpisodeRewards(Slow(), environment_weight=1.0)
    pool = Pool(lambda number: Walk(2 if number < 2 else 6))
    collected = collect(pool, groups=2, rewards=slow)
    assert order == ["scoring walk:0 of 2", "scoring walk:1 of 2"]
    assert [sample.reward for group in collected.groups for sample in group.samples] == pytest.approx(
        [3.1, 3.1, 3.5, 3.5]
    )
    assert len({id(sample.trajectory.task) for sample in collected.groups[0].samples}) == 1
    assert len(policy_samples(collected.groups)) == 4


def test_a_group_that_is_stopped_is_not_scored(rewards: MakeRewards) -> None:
    added, local = rewards(one=(1.0, lambda completion: 1.0))
    pool = Pool(lambda number: Walk(1) if number == 0 else Walk(9, delay=5.0))
    manager = EnvManager(Speaker(), pool, [SPEC], RENDERER, retries=0, rewards=added)
    limits, sampling = EpisodeLimits(turns=10, tokens=1000), Sampling(max_tokens=16)
    plan = EpisodePlan(episodes_per_group=2, sampling=sampling, limits=limits)

    async def stop_when_one_has_ended() -> Group[Scored]:
        ended = asyncio.Event()
        runner = manager.runner(plan, 0, lambda done, total: ended.set())
        playing = asyncio.create_task(runner.run(0, next(tasks())))
        await ended.wait()
        await runner.stop([0])
        return await playing

    group = asyncio.run(stop_when_one_has_ended())
    assert (len(group.samples), local.groups) == (1, [])
