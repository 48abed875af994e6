"""Handles turn what actors raise into what the scheduler understands, and replace reward workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests_support import group, task

from roll_like.cluster import WorkerDied
from roll_like.inference.base import EngineDied
from roll_like.rollout.handles import ActorReplica, RewardPool
from roll_like.rollout.router import ReplicaLost
from roll_like.types import Failure, Group


class FakeCluster:
    """Answers `ask` with what a test gives it: a value, an error, or a wait."""

    def __init__(self, *answers: Any, workers: int = 1) -> None:
        self.answers = list(answers)
        self.workers = workers
        self.restarted: list[int] = []

    def __len__(self) -> int:
        return self.workers

    async def ask(self, rank: int, method: Any, *args: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        return answer

    def on(self, rank: int, method: Any) -> bool:
        return False  # "not healthy"

    def restart(self, rank: int) -> None:
        self.restarted.append(rank)


@pytest.mark.parametrize("death", [WorkerDied("process gone"), EngineDied("engine gone")])
async def test_a_dead_actor_and_a_dead_engine_are_a_lost_replica(death: Exception) -> None:
    replica = ActorReplica(FakeCluster(death, death, death), 0)  # type: ignore[arg-type]
    with pytest.raises(ReplicaLost, match="gone"):
        await replica.submit([])
    with pytest.raises(ReplicaLost, match="gone"):
        await replica.poll(1.0)
    with pytest.raises(ReplicaLost, match="gone"):
        await replica.abort([])


def judged(*, failures: int = 0) -> Group:
    lost = Failure(stage="reward", name="r", error="hung", origin="x")
    return Group(task=task(), samples=group(task(), [1.0]).samples, failures=(lost,) * failures)


async def test_a_worker_that_dies_is_replaced_and_the_group_tried_again() -> None:
    cluster = FakeCluster(WorkerDied("gone"), judged())
    pool = RewardPool(cluster, limit_seconds=5)  # type: ignore[arg-type]
    assert (await pool.score(judged())).samples  # type: ignore[arg-type]
    assert cluster.restarted == [0]


async def test_two_deaths_make_the_group_a_failure_and_no_reward() -> None:
    cluster = FakeCluster(WorkerDied("first"), WorkerDied("second"))
    pool = RewardPool(cluster, limit_seconds=5)  # type: ignore[arg-type]
    scored = await pool.score(judged())  # type: ignore[arg-type]
    assert scored.samples == ()
    assert [(failure.stage, failure.error) for failure in scored.failures] == [("reward", "second")]


async def test_a_worker_that_does_not_answer_in_time_is_replaced() -> None:
    cluster = FakeCluster(30.0, judged())
    pool = RewardPool(cluster, limit_seconds=0.05)  # type: ignore[arg-type]
    assert (await pool.score(judged())).samples  # type: ignore[arg-type]
    assert cluster.restarted == [0]


async def test_a_worker_with_a_hanging_reward_is_replaced_after_its_verdict() -> None:
    cluster = FakeCluster(judged(failures=1))
    pool = RewardPool(cluster, limit_seconds=5)  # type: ignore[arg-type]
    assert len((await pool.score(judged())).failures) == 1  # type: ignore[arg-type]
    assert cluster.restarted == [0]
