"""Pools of reward workers, and several of them as one scorer: each group goes to every pool whose rewards score it.

Rewards that hold a model or take long have workers and devices of their own, so that quick rewards and
slow ones do not wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from roll_like.cluster import Cluster, WorkerDied
from roll_like.cluster.spans import SPANS, Span
from roll_like.cluster.worker_restarts import PoolRestarts, RestartCallback, to_stderr
from roll_like.config.rewards import DEFAULT_POOL
from roll_like.rewards.base import RewardConfig
from roll_like.rewards.scorer import scores_task, unscored
from roll_like.rewards.worker import RewardWorker
from roll_like.rollout.judge import JudgeKeeper
from roll_like.types import Failure, Group, Scored, Task, Trajectory

#: How long a worker may take to report whether a reward hangs in it. Seconds.
HEALTH_SECONDS = 10.0
#: Workers that a group may lose while it has them to itself.
_LOSSES_ALONE = 2


@dataclass(frozen=True, slots=True)
class _Lost:
    """A group that came back without results: its worker died, or did not answer.

    Attributes:
        error: What happened.
        why: `retired`: the worker was replaced because of another group. `company`: this group or one beside it is the
            reason. `alone`: there was no other.
    """

    error: str
    why: Literal["retired", "company", "alone"]


class RewardPool:
    """Gives each group to the reward worker with the fewest groups; replaces workers that died or hang.

    Waits for: a worker with room (at most `groups_per_worker` groups are at a worker; further ones wait here,
    where they cost nothing and can go to any worker), and for results.

    Args:
        cluster: The reward workers.
        limit_seconds: Longest that one group may take once a worker has it. A reward that holds
            Python's interpreter lock stops its worker's own time-outs too; this one replaces the worker.
        groups_per_worker: Groups that one worker scores side by side.
        report: Told about workers that were replaced.
    """

    def __init__(
        self,
        cluster: Cluster[RewardWorker],
        *,
        limit_seconds: float,
        groups_per_worker: int = 8,
        report: RestartCallback = to_stderr,
    ) -> None:
        self._cluster = cluster
        self.worker_restarts = PoolRestarts(cluster, RewardWorker.healthy, "its groups are scored again", report)
        self._limit = limit_seconds
        self._room = groups_per_worker
        self._load = [0] * len(cluster)
        self._arrivals = [0] * len(cluster)
        self._scoring: dict[object, tuple[int, float]] = {}  # worker of each call, and since when
        self._reserved: int | None = None  # the worker that a suspect has to itself
        self._one_suspect = asyncio.Lock()
        self._retired: set[tuple[int, int]] = set()  # (rank, generation) of workers replaced although they answered
        self._changed = asyncio.Event()

    def wait_until_ready(self) -> None:
        """Wait until every worker has built its rewards.

        Raises:
            RollLikeError: A reward cannot be built or started.
        """
        self._cluster.everywhere(RewardWorker.healthy)

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with rewards; samples that could not be scored are in its failures.

        A group whose worker dies or hangs may be the reason, or only have been there. It is tried again with a
        worker to itself, where it can take no other group along. When two workers went that had no other group, its
        samples are failures.

        Raises:
            WorkerDied: A worker was lost too often without having scored anything.
        """
        outcome = await self._anywhere(group)
        while isinstance(outcome, _Lost) and outcome.why == "retired":
            outcome = await self._anywhere(group)
        for _ in range(_LOSSES_ALONE - (isinstance(outcome, _Lost) and outcome.why == "alone")):
            if isinstance(outcome, _Lost):
                async with self._one_suspect:
                    outcome = await self._alone(group)
        if isinstance(outcome, Group):
            return outcome
        failure = Failure(stage="reward", name="worker", error=outcome.error, origin=group.task.origin)
        return Group(task=group.task, samples=(), failures=group.failures + (failure,) * len(group.samples))

    async def _anywhere(self, group: Group[Trajectory]) -> Group[Scored] | _Lost:
        """Let the worker with the fewest groups score, once one has room."""
        while True:
            ranks = [rank for rank, load in enumerate(self._load) if load < self._room and rank != self._reserved]
            if ranks:
                # one that is to start after a pause is waited for where there is no other
                return await self._score_on(min(ranks, key=self._burden), group)
            await self._change()

    async def _alone(self, group: Group[Trajectory]) -> Group[Scored] | _Lost:
        """Let a worker score that has no other group, nor gets one meanwhile."""
        rank = self._reserved = min(range(len(self._load)), key=self._burden)
        try:
            while self._load[rank]:
                await self._change()
            return await self._score_on(rank, group)
        finally:
            self._reserved = None
            self._changed.set()

    def _burden(self, rank: int) -> tuple[bool, int]:
        return self.worker_restarts.pausing(rank), self._load[rank]

    async def _score_on(self, rank: int, group: Group[Trajectory]) -> Group[Scored] | _Lost:
        self._load[rank] += 1
        self._arrivals[rank] += 1
        arrivals, first = self._arrivals[rank], self._load[rank] == 1
        try:
            await self.worker_restarts.started(rank)
        except asyncio.CancelledError:
            self._leave(rank)
            raise
        generation = self.worker_restarts.generations[rank]
        # waiting for other groups counts: a worker takes them side by side
        limit = self._limit * self._load[rank]
        began = time.monotonic()
        call = asyncio.ensure_future(self._cluster.ask(rank, RewardWorker.score, group))
        self._scoring[call] = rank, began
        call.add_done_callback(lambda ended: self._release(rank, ended))
        # not cancelled with this coroutine: the worker goes on, and has no room until it is done
        done, _ = await asyncio.wait({call}, timeout=limit)
        try:
            if not done:
                raise TimeoutError(f"reward worker {rank} did not answer within {limit:g} s")
            scored = call.result()
        except (TimeoutError, WorkerDied) as error:
            alone = first and self._arrivals[rank] == arrivals
            self.worker_restarts.replace(rank, generation, str(error), counted=not alone)
            if done and (rank, generation) in self._retired:
                return _Lost(str(error), "retired")
            return _Lost(str(error), "alone" if alone else "company")
        if SPANS.on:
            SPANS.past(self._track(rank), "score", time.monotonic() - began)
        self.worker_restarts.worked(rank)
        if len(scored.failures) > len(group.failures):
            await self._retire_if_hung(rank, generation)
        return scored

    async def _retire_if_hung(self, rank: int, generation: int) -> None:
        """Replace a worker in which a reward hangs; its other groups are tried again as if nothing had been."""
        try:
            healthy = await asyncio.wait_for(self._cluster.ask(rank, RewardWorker.healthy), HEALTH_SECONDS)
        except (WorkerDied, TimeoutError):
            healthy = False
        if not healthy and self.worker_restarts.generations[rank] == generation:
            self._retired.add((rank, generation))
            why = f"a reward hangs in {self._cluster.name} worker {rank}"
            self.worker_restarts.replace(rank, generation, why, counted=False)

    def under_way(self) -> list[Span]:
        """Return when workers got the groups that they score."""
        now, clock = time.time(), time.monotonic()
        return [
            Span(self._track(rank), "score", now - (clock - began), now) for rank, began in list(self._scoring.values())
        ]

    def _track(self, rank: int) -> str:
        """Return the track of a worker's spans; a pool may be called anything."""
        name = self._cluster.name
        return f"rewards {rank}" if name == DEFAULT_POOL else f"rewards {name} {rank}"

    def _release(self, rank: int, ended: asyncio.Future[Group[Scored]]) -> None:
        del self._scoring[ended]
        if not ended.cancelled():
            ended.exception()  # read here too, if no caller waits any more
        self._leave(rank)

    def _leave(self, rank: int) -> None:
        self._load[rank] -= 1
        self._changed.set()

    async def _change(self) -> None:
        """Wait until a worker has one group less."""
        self._changed.clear()
        await self._changed.wait()


@dataclass(frozen=True, slots=True)
class RewardShare:
    """One pool and the rewards that its workers hold."""

    rewards: Sequence[RewardConfig]
    pool: RewardPool


class RewardPools:
    """Has a group scored by several pools at a time and combines their results.

    Args:
        shares: The pools; every reward is in one of them.
        domains: Names of the rewards of each domain that names its own.
        judge: The run's own judge, if rewards ask one. What fails because a server of it ended is scored again.
        later: Rewards that trainers add; a group that no other reward scores has reward 0 until then.
    """

    def __init__(
        self,
        shares: Sequence[RewardShare],
        domains: Mapping[str, Sequence[str]],
        judge: JudgeKeeper | None = None,
        later: Sequence[RewardConfig] = (),
    ) -> None:
        self._later = later
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
        pools = [
            share.pool
            for share in self._shares
            if any(scores_task(reward, group.task, self._domains) for reward in share.rewards)
        ]
        added = any(scores_task(reward, group.task, self._domains) for reward in self._later)
        if not self._shares or (added and not pools):
            samples = [Scored(trajectory=one, reward=0.0, rewards={}, details={}, weights={}) for one in group.samples]
            return Group(task=group.task, samples=tuple(samples), failures=group.failures)
        if not pools:
            raise unscored(group.task)
        while True:
            deaths = 0 if self._judge is None else await self._judge.ready()
            scored = together(group, await asyncio.gather(*(pool.score(group) for pool in pools)))
            failed = len(scored.failures) > len(group.failures)
            if not failed or self._judge is None or not await self._judge.died_since(deaths):
                return scored


def together(group: Group[Trajectory], parts: Sequence[Group[Scored]]) -> Group[Scored]:
    """Combine what several scorers returned for one group: rewards add up, a sample that one lost is lost.

    Args:
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
        summed([results[one.sample_index] for results in kept]) for one in group.samples if one.sample_index not in lost
    )
    failures = (*group.failures, *(lost[one.sample_index] for one in group.samples if one.sample_index in lost))
    return Group(task=group.task, samples=samples, failures=failures)


def summed(results: Sequence[Scored]) -> Scored:
    """Return a sample with the rewards that several scorers gave it; everything else is as the first has it."""
    first, *others = results
    for other in others:
        first = replace(
            first,
            reward=first.reward + other.reward,
            rewards={**first.rewards, **other.rewards},
            details={**first.details, **other.details},
            weights={**first.weights, **other.weights},
            answer=other.answer if first.answer is None else first.answer,
            step_scores={**first.step_scores, **other.step_scores},
        )
    return first
