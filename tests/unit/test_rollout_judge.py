"""Servers of the run's own judge that end: they are replaced, and what failed meanwhile is scored again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests_support import group, task

from roll_like.cluster import WorkerDied
from roll_like.errors import EngineError, RollLikeError
from roll_like.inference.interface import JudgeServer
from roll_like.rollout import judge as judge_module
from roll_like.rollout.judge import JudgeKeeper
from roll_like.rollout.reward_pools import RewardPools
from roll_like.types import Failure, Group

LIMIT = 60.0


class FakeServers:
    """Servers that end when a test says so."""

    start_timeout_seconds = 7.0

    def __init__(self, count: int = 1) -> None:
        self.ends = [threading.Event() for _ in range(count)]
        self.errors: list[RollLikeError | None] = [None] * count
        self.starts: list[RollLikeError | None] = []
        self.did: list[str] = []

    def __len__(self) -> int:
        return len(self.ends)

    def only(self, ranks: list[int], *, within: float | None = None) -> Any:
        (rank,) = ranks

        class Handle:
            def everywhere(_, method: Callable[..., Any]) -> None:
                assert within == (self.start_timeout_seconds if method is JudgeServer.start else None)
                if method is JudgeServer.start:
                    self.did.append(f"start {rank}")
                    if self.starts and (error := self.starts.pop(0)) is not None:
                        raise error
                else:
                    assert self.ends[rank].wait(LIMIT)
                    self.ends[rank].clear()
                    if (error := self.errors[rank]) is not None:
                        raise error

        return Handle()

    def fence(self, rank: int) -> None:
        self.did.append(f"fence {rank}")

    def restart(self, rank: int) -> None:
        self.did.append(f"restart {rank}")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.cluster.worker_restarts.PAUSES", (0.0,) * 5)
    monkeypatch.setattr(judge_module, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(judge_module, "NOTICE_SECONDS", LIMIT)


def keeper_of(servers: FakeServers) -> tuple[JudgeKeeper, list[str]]:
    told: list[str] = []
    fake: Any = servers
    keeper = JudgeKeeper(fake, lambda role, text, *, seconds: told.append(f"{role}: {text}"))
    keeper.start()
    return keeper, told


async def test_a_server_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FakeServers(2)
    keeper, told = keeper_of(servers)
    with monkeypatch.context() as short:
        short.setattr(judge_module, "NOTICE_SECONDS", 0.2)
        assert not await keeper.died_since(0)
    servers.ends[1].set()
    assert await keeper.died_since(0)
    assert await keeper.ready() == 1
    assert servers.did == ["fence 1", "restart 1", "start 1"]
    assert told == [
        "judge: the server of judge 1 ended; judge 1 was replaced in 0 s, and what it was asked is asked again"
    ]
    servers.errors[0] = WorkerDied("judge worker 0 in ended: its process is gone (killed)")
    servers.ends[0].set()
    assert await keeper.died_since(1)
    assert await keeper.ready() == 2
    assert told[1].startswith("judge: judge worker 0 in ended: its process is gone; judge 0 was replaced in 0 s")
    keeper.close()
    for end in servers.ends:
        end.set()


async def test_a_start_that_fails_is_tried_again_and_then_given_up() -> None:
    servers = FakeServers()
    servers.starts = [EngineError("no memory"), None, *[EngineError("no memory")] * 9]
    keeper, told = keeper_of(servers)
    servers.ends[0].set()
    assert await keeper.died_since(0)
    assert await keeper.ready() == 1
    assert servers.did.count("restart 0") == 2
    servers.ends[0].set()
    while len(told) < 2:
        await asyncio.sleep(0.005)
    assert await keeper.ready() == 2
    assert not await keeper.died_since(1)
    assert told[1] == "judge: no memory; judge 0 was lost too often and is not replaced again"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_nobody_waits_for_a_server_that_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FakeServers()

    def broken(rank: int) -> None:
        raise OSError("Ray is gone")

    monkeypatch.setattr(servers, "restart", broken)
    before = set(threading.enumerate())
    keeper, _ = keeper_of(servers)
    (thread,) = set(threading.enumerate()) - before
    servers.ends[0].set()
    thread.join(LIMIT)  # its error belongs to this test
    assert not await keeper.died_since(0)
    assert await asyncio.wait_for(keeper.ready(), LIMIT) == 1


async def test_servers_end_with_the_run() -> None:
    servers = FakeServers()
    keeper, told = keeper_of(servers)
    keeper.close()
    servers.ends[0].set()
    await asyncio.sleep(0.05)
    assert (servers.did, told) == ([], [])


class FakePool:
    """Loses a group's samples as long as the judge is away."""

    def __init__(self, lost: list[bool]) -> None:
        self.lost = lost

    async def score(self, asked: Group[Any]) -> Group[Any]:
        if self.lost.pop(0):
            failure = Failure(stage="reward", name="llm_judge", error="cannot be reached", origin="x")
            return Group(task=asked.task, samples=(), failures=asked.failures + (failure,) * len(asked.samples))
        return asked


class FakeJudge:
    def __init__(self, *died: bool) -> None:
        self.died = list(died)

    async def ready(self) -> int:
        return 3

    async def died_since(self, deaths: int) -> bool:
        assert deaths == 3
        return self.died.pop(0)


@pytest.mark.parametrize(
    ("lost", "died", "failures"),
    [([False], [], 0), ([True, False], [True], 0), ([True], [False], 2), ([True, True, False], [True, True], 0)],
)
async def test_what_a_dead_judge_lost_is_scored_again(
    lost: list[bool], died: list[bool], failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    share: Any = type("Share", (), {"pool": FakePool(lost), "rewards": ["any"]})()
    monkeypatch.setattr("roll_like.rollout.reward_pools.scores_task", lambda *arguments: True)
    monkeypatch.setattr("roll_like.rollout.reward_pools.together", lambda group, parts: parts[0])
    pools = RewardPools([share], {}, FakeJudge(*died))  # type: ignore[arg-type]
    owner = task(0)
    asked: Any = Group(task=owner, samples=group(owner, [1.0, 0.0]).samples, failures=())
    assert len((await pools.score(asked)).failures) == failures
    assert lost == []
