"""The scheduler's ends of actors: inference replicas and the pool of reward workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll_like.cluster import Cluster, WorkerDied
from roll_like.inference.base import FailedGeneration, GenerateRequest, Generation
from roll_like.inference.worker import InferenceWorker
from roll_like.rewards.worker import RewardWorker
from roll_like.rollout.scheduler import ReplicaLost
from roll_like.types import Group, Scored, Trajectory


class ActorReplica:
    """One rank of the inference cluster, as the scheduler sees it."""

    def __init__(self, cluster: Cluster[InferenceWorker], rank: int) -> None:
        self._cluster = cluster
        self._rank = rank

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start generating."""
        try:
            await self._cluster.ask(self._rank, InferenceWorker.submit, requests)
        except WorkerDied as error:
            raise ReplicaLost(str(error)) from error

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        """Return what finished since the last call."""
        try:
            return await self._cluster.ask(self._rank, InferenceWorker.poll, timeout)
        except WorkerDied as error:
            raise ReplicaLost(str(error)) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll` with their tokens so far."""
        try:
            await self._cluster.ask(self._rank, InferenceWorker.abort, request_ids)
        except WorkerDied as error:
            raise ReplicaLost(str(error)) from error


class RewardPool:
    """Gives each group to the reward worker with the fewest groups; replaces workers that died or hang."""

    def __init__(self, cluster: Cluster[RewardWorker]) -> None:
        self._cluster = cluster
        self._load = [0] * len(cluster)
        self._restarting = asyncio.Lock()
        self.restarts = 0

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with rewards; what could not be judged is in its failures.

        Raises:
            WorkerDied: Two workers died over the same group.
        """
        rank = min(range(len(self._load)), key=lambda index: self._load[index])
        self._load[rank] += 1
        try:
            scored = await self._cluster.ask(rank, RewardWorker.score, group)
        except WorkerDied:
            await self._replace(rank)
            scored = await self._cluster.ask(rank, RewardWorker.score, group)
        finally:
            self._load[rank] -= 1
        if scored.failures and not await self._cluster.ask(rank, RewardWorker.healthy):
            await self._replace(rank)
        return scored

    async def _replace(self, rank: int) -> None:
        async with self._restarting:
            self._cluster.restart(rank)
            self.restarts += 1
