"""Actors as the scheduler calls them: inference replicas and the pool of reward workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from roll_like.cluster import Cluster, ClusterHandle, WorkerDied
from roll_like.cluster.health import RestartCallback, to_stderr
from roll_like.cluster.worker_restarts import WorkerRestarts
from roll_like.errors import RollLikeError
from roll_like.inference.interface import EngineDied, FailedGeneration, GenerateRequest, Generation, InferenceEngine
from roll_like.rewards.worker import RewardWorker
from roll_like.rollout.router import ReplicaLost
from roll_like.types import Failure, Group, Scored, Trajectory

#: How long a worker may take to report whether a reward hangs in it. Seconds.
HEALTH_SECONDS = 10.0
#: Workers that a group may lose while it has them to itself.
_LOSSES_ALONE = 2
ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


class ActorReplica:
    """An inference engine, as the scheduler sees it.

    Args:
        engine: The engine alone; not one that is started in its place later.
        lost: Told when its process is gone.
    """

    def __init__(
        self, engine: ClusterHandle[InferenceEngine], lost: Callable[[RollLikeError], None] = lambda error: None
    ) -> None:
        self._engine = engine
        self._lost = lost

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start generating."""
        await self._ask(InferenceEngine.submit, requests)

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        """Return what finished since the last call."""
        return await self._ask(InferenceEngine.poll, timeout)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll` with their tokens so far."""
        await self._ask(InferenceEngine.abort, request_ids)

    async def _ask(
        self, method: Callable[[InferenceEngine, ArgumentT], Coroutine[Any, Any, ResultT]], argument: ArgumentT
    ) -> ResultT:
        try:
            return await self._engine.ask(0, method, argument)
        except (WorkerDied, EngineDied) as error:
            self._lost(error)
            raise ReplicaLost(str(error)) from error


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
        self._worker_restarts = WorkerRestarts(cluster, RewardWorker.healthy, "its groups are scored again", report)
        self._limit = limit_seconds
        self._room = groups_per_worker
        self._load = [0] * len(cluster)
        self._arrivals = [0] * len(cluster)
        self._generation = [0] * len(cluster)
        self._reserved: int | None = None  # the worker that a suspect has to itself
        self._one_suspect = asyncio.Lock()
        self._retired: set[tuple[int, int]] = set()  # (rank, generation) of workers replaced although they answered
        self._changed = asyncio.Event()
        self.restarts = 0

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
        return self._worker_restarts.pausing(rank), self._load[rank]

    async def _score_on(self, rank: int, group: Group[Trajectory]) -> Group[Scored] | _Lost:
        self._load[rank] += 1
        self._arrivals[rank] += 1
        arrivals, first = self._arrivals[rank], self._load[rank] == 1
        try:
            await self._worker_restarts.started(rank)
        except asyncio.CancelledError:
            self._leave(rank)
            raise
        generation = self._generation[rank]
        # waiting for other groups counts: a worker takes them side by side
        limit = self._limit * self._load[rank]
        call = asyncio.ensure_future(self._cluster.ask(rank, RewardWorker.score, group))
        call.add_done_callback(lambda ended: self._release(rank, ended))
        # not cancelled with this coroutine: the worker goes on, and has no room until it is done
        done, _ = await asyncio.wait({call}, timeout=limit)
        try:
            if not done:
                raise TimeoutError(f"reward worker {rank} did not answer within {limit:g} s")
            scored = call.result()
        except (TimeoutError, WorkerDied) as error:
            alone = first and self._arrivals[rank] == arrivals
            self._replace(rank, generation, str(error), counted=not alone)
            if done and (rank, generation) in self._retired:
                return _Lost(str(error), "retired")
            return _Lost(str(error), "alone" if alone else "company")
        self._worker_restarts.worked(rank)
        if len(scored.failures) > len(group.failures):
            await self._retire_if_hung(rank, generation)
        return scored

    async def _retire_if_hung(self, rank: int, generation: int) -> None:
        """Replace a worker in which a reward hangs; its other groups are tried again as if nothing had been."""
        try:
            healthy = await asyncio.wait_for(self._cluster.ask(rank, RewardWorker.healthy), HEALTH_SECONDS)
        except (WorkerDied, TimeoutError):
            healthy = False
        if not healthy and self._generation[rank] == generation:
            self._retired.add((rank, generation))
            self._replace(rank, generation, f"a reward hangs in {self._cluster.name} worker {rank}", counted=False)

    def _replace(self, rank: int, generation: int, why: str, *, counted: bool) -> None:
        """Restart a worker, unless another group that lost it has done so already."""
        if self._generation[rank] == generation:
            self._generation[rank] += 1
            self.restarts += 1
            self._worker_restarts.replace(rank, why, counted=counted)

    def _release(self, rank: int, ended: asyncio.Future[Group[Scored]]) -> None:
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
