"""The scheduler's ends of actors: inference replicas and the pool of reward workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll_like.cluster import Cluster, WorkerDied
from roll_like.inference.base import EngineDied, FailedGeneration, GenerateRequest, Generation
from roll_like.inference.worker import InferenceWorker
from roll_like.rewards.worker import RewardWorker
from roll_like.rollout.router import ReplicaLost
from roll_like.types import Failure, Group, Scored, Trajectory


class ActorReplica:
    """One rank of the inference cluster, as the scheduler sees it."""

    def __init__(self, cluster: Cluster[InferenceWorker], rank: int) -> None:
        self._cluster = cluster
        self._rank = rank

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start generating."""
        try:
            await self._cluster.ask(self._rank, InferenceWorker.submit, requests)
        except (WorkerDied, EngineDied) as error:
            raise ReplicaLost(str(error)) from error

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        """Return what finished since the last call."""
        try:
            return await self._cluster.ask(self._rank, InferenceWorker.poll, timeout)
        except (WorkerDied, EngineDied) as error:
            raise ReplicaLost(str(error)) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll` with their tokens so far."""
        try:
            await self._cluster.ask(self._rank, InferenceWorker.abort, request_ids)
        except (WorkerDied, EngineDied) as error:
            raise ReplicaLost(str(error)) from error


class RewardPool:
    """Gives each group to the reward worker with the fewest groups; replaces workers that died or hang.

    Args:
        cluster: The reward workers.
        limit_seconds: Longest that one group may take once a worker has it. A reward that holds
            Python's interpreter lock stops its worker's own time-outs too; this one replaces the worker.
    """

    def __init__(self, cluster: Cluster[RewardWorker], *, limit_seconds: float) -> None:
        self._cluster = cluster
        self._limit = limit_seconds
        self._load = [0] * len(cluster)
        self._generation = [0] * len(cluster)
        self.restarts = 0

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with rewards; what could not be judged is in its failures.

        A worker that dies or hangs over a group is replaced and the group tried once more; then its
        samples are failures.
        """
        error = ""
        for _ in range(2):
            rank = min(range(len(self._load)), key=lambda index: self._load[index])
            generation = self._generation[rank]
            self._load[rank] += 1
            try:
                # waiting for other groups counts: a worker takes them side by side
                limit = self._limit * self._load[rank]
                scored = await asyncio.wait_for(self._cluster.ask(rank, RewardWorker.score, group), limit)
            except WorkerDied as died:
                error = str(died)
                self._replace(rank, generation)
                continue
            except TimeoutError:
                error = f"reward worker {rank} did not answer within {limit:g} s"
                self._replace(rank, generation)
                continue
            finally:
                self._load[rank] -= 1
            if scored.failures and not self._cluster.on(rank, RewardWorker.healthy):
                self._replace(rank, generation)
            return scored
        return Group(
            task=group.task,
            samples=(),
            failures=group.failures
            + tuple(
                Failure(stage="reward", name="worker", error=error, origin=group.task.origin) for _ in group.samples
            ),
        )

    def _replace(self, rank: int, generation: int) -> None:
        """Restart a worker, unless another group that lost it has done so already."""
        if self._generation[rank] == generation:
            self._generation[rank] += 1
            self.restarts += 1
            self._cluster.restart(rank)
