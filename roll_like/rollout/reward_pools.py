"""Several pools of reward workers as one scorer: each group goes to every pool whose rewards score it.

Rewards that hold a model or take long have workers and devices of their own, so that quick rewards and
slow ones do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from roll_like.errors import ConfigError
from roll_like.rewards.base import RewardConfig
from roll_like.rewards.scorer import scores_task
from roll_like.rollout.scheduler import GroupScorer
from roll_like.types import Failure, Group, Scored, Task, Trajectory


class ReadyScorer(GroupScorer, Protocol):
    """A scorer whose workers take a while to start."""

    def wait_until_ready(self) -> None:
        """Return when all workers can score."""


@dataclass(frozen=True, slots=True)
class RewardShare:
    """One pool and the rewards that its workers hold."""

    rewards: Sequence[RewardConfig]
    pool: ReadyScorer


class Judge(Protocol):
    """The run's own judge, whose servers may end and be replaced."""

    async def ready(self) -> int:
        """Wait until all servers answer; return how many have ended so far."""

    async def died_since(self, deaths: int) -> bool:
        """Return whether more than `deaths` have ended, and are being replaced or have been."""


class RewardPools:
    """Has a group scored by several pools at a time and combines their results.

    Args:
        shares: The pools; every reward is in one of them.
        domains: Names of the rewards of each domain that names its own.
        judge: The run's own judge, if rewards ask one. What fails because a server of it ended is scored again.
    """

    def __init__(
        self, shares: Sequence[RewardShare], domains: Mapping[str, Sequence[str]], judge: Judge | None = None
    ) -> None:
        self._shares = shares
        self._domains = domains
        self._judge = judge

    def wait_until_ready(self) -> None:
        """Wait until every worker has built its rewards, so that one that cannot ends the run before it begins.

        Raises:
            RollLikeError: A reward cannot be built or started.
        """
        for share in self._shares:
            share.pool.wait_until_ready()

    def scores(self, task: Task) -> bool:
        """Return whether any reward scores a task."""
        return any(scores_task(reward, task, self._domains) for share in self._shares for reward in share.rewards)

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with the results of all its rewards; a sample that one of them lost is a failure.

        Without any pool, in a run that trains on something other than rewards, every reward is 0.

        Raises:
            ConfigError: No reward scores this group's task.
        """
        if not self._shares:
            samples = [Scored(trajectory=one, reward=0.0, rewards={}, details={}, weights={}) for one in group.samples]
            return Group(task=group.task, samples=tuple(samples), failures=group.failures)
        pools = [
            share.pool
            for share in self._shares
            if any(scores_task(reward, group.task, self._domains) for reward in share.rewards)
        ]
        if not pools:
            raise ConfigError(
                f"no reward scores the data source {group.task.source!r}", fix="add it to one in rewards.use"
            )
        while True:
            deaths = 0 if self._judge is None else await self._judge.ready()
            scored = together(group, await asyncio.gather(*(pool.score(group) for pool in pools)))
            failed = len(scored.failures) > len(group.failures)
            if not failed or self._judge is None or not await self._judge.died_since(deaths):
                return scored


def together(group: Group[Trajectory], parts: Sequence[Group[Scored]]) -> Group[Scored]:
    """Combine what several scorers returned for one group: rewards add up, a sample that one lost is lost.

    Args:
        group: What all of them scored.
        parts: What each returned; its failures are those of the group, then its own in the samples' order.
    """
    kept: list[dict[int, Scored]] = []
    lost: dict[int, Failure] = {}
    for part in parts:
        results = {sample.trajectory.sample_index: sample for sample in part.samples}
        missing = [one.sample_index for one in group.samples if one.sample_index not in results]
        for index, failure in zip(missing, part.failures[len(group.failures) :], strict=True):
            lost.setdefault(index, failure)
        kept.append(results)
    samples = tuple(
        _sum([results[one.sample_index] for results in kept]) for one in group.samples if one.sample_index not in lost
    )
    failures = (*group.failures, *(lost[one.sample_index] for one in group.samples if one.sample_index in lost))
    return Group(task=group.task, samples=samples, failures=failures)


def _sum(results: Sequence[Scored]) -> Scored:
    first, *others = results
    for other in others:
        first = replace(
            first,
            reward=first.reward + other.reward,
            rewards={**first.rewards, **other.rewards},
            details={**first.details, **other.details},
            weights={**first.weights, **other.weights},
            answer=other.answer if first.answer is None else first.answer,
        )
    return first
