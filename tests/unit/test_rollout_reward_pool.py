"""A pool of reward workers: groups go where there is room, and workers that die or hang are replaced."""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests_support import all_follows, group, task
from virtual_time import in_virtual_time

from roll_like.cluster import WorkerDied, worker_restarts
from roll_like.cluster.spans import SPANS
from roll_like.config.rewards import RewardPoolConfig, RewardsConfig
from roll_like.errors import ConfigError
from roll_like.policy_gradient import reward_workers
from roll_like.policy_gradient.reward_workers import RewardWorkers
from roll_like.rewards.worker import RewardWorker
from roll_like.rollout import reward_pools
from roll_like.rollout.reward_pools import RewardPool
from roll_like.types import Failure, Group


class FakeCluster:
    """Workers whose answers a test decides: `answer(rank, group)` returns a group, an error or a coroutine's wait.

    A restart ends what the worker was asked, as Ray does.
    """

    name = "rewards"
    start_timeout_seconds = 30.0

    def __init__(self, answer: Any, workers: int = 1, healthy: Any = True) -> None:
        self.answer = answer
        self.workers = workers
        self.healthy = healthy
        self.asked: list[tuple[int, str]] = []
        self.restarted: list[int] = []
        self.busy: list[set[asyncio.Task[Any]]] = [set() for _ in range(workers)]
        self.most = [0] * workers

    def __len__(self) -> int:
        return self.workers

    async def ask(self, rank: int, method: Any, *args: Any) -> Any:
        if method is RewardWorker.healthy:
            if isinstance(self.healthy, BaseException):
                raise self.healthy
            if isinstance(self.healthy, float):
                await asyncio.sleep(self.healthy)
            return self.healthy
        self.asked.append((rank, args[0].task.task_id))
        work = asyncio.ensure_future(self._work(rank, args[0]))
        self.busy[rank].add(work)
        self.most[rank] = max(self.most[rank], len(self.busy[rank]))
        try:
            return await work
        except asyncio.CancelledError:
            if work.cancelled():
                raise WorkerDied("killed") from None
            raise
        finally:
            self.busy[rank].discard(work)

    async def _work(self, rank: int, group: Group) -> Any:
        answer = self.answer(rank, group)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, BaseException):
            if isinstance(answer, WorkerDied):
                self.end(rank, besides=asyncio.current_task())
            raise answer
        return answer

    def end(self, rank: int, besides: Any = None) -> None:
        for work in self.busy[rank]:
            if work is not besides:
                work.cancel()

    def close(self, method: Any) -> None:
        pass

    def restart(self, rank: int) -> None:
        self.restarted.append(rank)
        self.end(rank)


def pool_of(cluster: FakeCluster, *, limit: float = 5.0, room: int = 8) -> RewardPool:
    return RewardPool(cluster, limit_seconds=limit, groups_per_worker=room)  # type: ignore[arg-type]


def asked_group(name: str = "fake/0", samples: int = 1) -> Group:
    owner = replace(task(), task_id=name)
    return Group(task=owner, samples=group(owner, [1.0] * samples).samples, failures=())


def judged(asked: Group, *, failures: int = 0) -> Group:
    """What comes back; the same samples stand for judged ones."""
    lost = Failure(stage="reward", name="r", error="hung", origin="x")
    return Group(task=asked.task, samples=asked.samples, failures=(lost,) * failures)


def after(*answers: Any) -> Any:
    """An answer a call, in order; `judged` for what comes after."""
    left = list(answers)

    def answer(rank: int, asked: Group) -> Any:
        return left.pop(0) if left else judged(asked)

    return answer


def names(cluster: FakeCluster) -> list[str]:
    return [name for _, name in cluster.asked]


async def test_a_worker_that_dies_is_replaced_and_the_group_tried_again() -> None:
    cluster = FakeCluster(after(WorkerDied("gone")))
    pool = pool_of(cluster)
    assert (await pool.score(asked_group())).samples
    assert (cluster.restarted, sum(pool.worker_restarts.generations)) == ([0], 1)


async def test_groups_are_spans_of_rewards_whatever_a_pool_is_called() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(asked: Group) -> Group:
        begun.set()
        await go_on.wait()
        return judged(asked)

    for name, track in (("rewards", "rewards 0"), ("engine", "rewards engine 0")):
        begun.clear()
        go_on.clear()
        cluster = FakeCluster(lambda _, asked: slow(asked))
        cluster.name = name
        pool = pool_of(cluster)
        SPANS.begin()
        scoring = asyncio.create_task(pool.score(asked_group()))
        await begun.wait()
        (under_way,) = pool.under_way()
        go_on.set()
        await scoring
        (scored,) = SPANS.end()
        assert [span.track for span in (under_way, scored)] == [track, track]
        assert abs(under_way.began - scored.began) < 1
        assert pool.under_way() == []


def test_a_profile_asks_pools_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Any] = []
    monkeypatch.setattr(SPANS, "watch", watched.append)
    monkeypatch.setattr(reward_workers, "Cluster", lambda *_, **__: FakeCluster(after()))
    config: Any = SimpleNamespace(rewards=RewardsConfig.model_construct(use=()), import_=(), domain_rewards={})
    config.resources = SimpleNamespace(device="cpu")
    resources: Any = SimpleNamespace(beside=lambda workers: [], report=worker_restarts.to_stderr)
    with ExitStack() as stack:
        workers: Any = RewardWorkers(config, resources, stack)
        pool = workers._start_pool("rewards", RewardPoolConfig(rewards=("a",)), (), {})
    assert watched == [pool]


async def test_a_replacement_is_reported_when_the_new_worker_answers() -> None:
    said: list[tuple[str, str, bool]] = []

    def report(role: str, text: str, *, seconds: float | None) -> None:
        said.append((role, text, seconds is not None))

    cluster = FakeCluster(after(WorkerDied("rewards worker 0 in score: its process is gone (a long story)")))
    pool = RewardPool(cluster, limit_seconds=5.0, report=report)  # type: ignore[arg-type]
    await pool.score(asked_group())
    await asyncio.sleep(0)
    text = (
        "rewards worker 0 in score: its process is gone; rewards 0 was replaced in 0 s, and its groups are scored again"
    )
    assert [(role, re.sub(r"in \d+ s", "in 0 s", what), timed) for role, what, timed in said] == [
        ("rewards", text, True)
    ]


async def lose_together(pool: RewardPool) -> None:
    """Have two groups scored that end the worker which they share, and then each one that it has to itself."""
    lost = await asyncio.gather(*(pool.score(asked_group(f"kills {index}")) for index in range(2)))
    assert [len(one.failures) for one in lost] == [1, 1]


async def kills(rank: int, asked: Group) -> Any:
    await asyncio.sleep(0.01)
    return WorkerDied("memory") if asked.task.task_id.startswith("kills") else judged(asked)


async def test_a_worker_that_is_lost_again_and_again_without_work_in_between_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_restarts, "PAUSES", (0.0, 0.01, 0.01, 0.01, 0.01))
    said: list[str] = []
    pool = RewardPool(
        FakeCluster(kills),  # type: ignore[arg-type]
        limit_seconds=5.0,
        report=lambda role, text, *, seconds: said.append(text),
    )
    for _ in range(8):
        await lose_together(pool)
        assert (await pool.score(asked_group("good"))).samples
    for _ in range(5):
        await lose_together(pool)
    with pytest.raises(WorkerDied, match="memory; rewards 0 was lost too often") as caught:
        await lose_together(pool)
    assert caught.value.worker == ("rewards", 0)
    assert said[-1] == "memory; rewards 0 was lost too often and is not replaced again"


async def test_groups_wait_for_a_worker_that_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_restarts, "PAUSES", (0.05,))
    cluster = FakeCluster(kills)
    pool = pool_of(cluster, room=2)
    lost = asyncio.gather(*(pool.score(asked_group(name)) for name in ("kills 0", "good 0")))
    while not sum(pool.worker_restarts.generations):
        await asyncio.sleep(0.001)
    assert cluster.restarted == []
    later = await asyncio.gather(*(pool.score(asked_group(f"good {index}")) for index in range(1, 9)))
    assert all(one.samples for one in later)
    assert [len(one.samples) for one in await lost] == [0, 1]
    assert cluster.most == [2]


async def test_only_the_pause_is_waited_for_and_not_the_new_workers_first_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_restarts, "PAUSES", (0.01,))
    cluster = FakeCluster(kills, healthy=30.0)  # it does not say for long that it has started
    pool = pool_of(cluster, room=2)
    lost = asyncio.gather(*(pool.score(asked_group(name)) for name in ("kills 0", "good 0")))
    while not sum(pool.worker_restarts.generations):
        await asyncio.sleep(0.001)
    assert (await asyncio.wait_for(pool.score(asked_group("good 1")), timeout=20)).samples
    await lost


async def test_two_deaths_make_the_group_a_failure_and_no_reward() -> None:
    cluster = FakeCluster(after(WorkerDied("first"), WorkerDied("second")))
    scored = await pool_of(cluster).score(asked_group(samples=3))
    assert scored.samples == ()
    assert [(failure.stage, failure.error) for failure in scored.failures] == [("reward", "second")] * 3
    assert cluster.restarted == [0, 0]


async def test_a_worker_that_does_not_answer_in_time_is_replaced() -> None:
    cluster = FakeCluster(after(asyncio.sleep(30)))
    assert (await pool_of(cluster, limit=0.05).score(asked_group())).samples
    assert cluster.restarted == [0]


async def test_an_error_of_the_configuration_is_not_tried_again() -> None:
    cluster = FakeCluster(after(ConfigError("no reward judges it")))
    with pytest.raises(ConfigError, match="no reward judges it"):
        await pool_of(cluster).score(asked_group())
    assert (len(cluster.asked), cluster.restarted) == (1, [])


async def test_what_a_reward_could_not_judge_is_not_asked_again_here() -> None:
    cluster = FakeCluster(lambda rank, asked: judged(asked, failures=1))
    assert len((await pool_of(cluster).score(asked_group())).failures) == 1
    assert (len(cluster.asked), cluster.restarted) == (1, [])


@pytest.mark.parametrize("healthy", [False, WorkerDied("gone"), 1.0])
async def test_a_worker_with_a_hanging_reward_is_replaced_after_its_result(
    healthy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_pools, "HEALTH_SECONDS", 0.05)
    cluster = FakeCluster(lambda rank, asked: judged(asked, failures=1), healthy=healthy)
    assert len((await pool_of(cluster).score(asked_group())).failures) == 1
    assert cluster.restarted == [0]


async def test_failures_of_generation_say_nothing_about_a_worker() -> None:
    cluster = FakeCluster(lambda rank, asked: asked, healthy=False)
    asked = judged(asked_group(), failures=2)
    assert (await pool_of(cluster).score(asked)) == asked
    assert cluster.restarted == []


async def test_groups_go_to_the_worker_with_the_fewest_and_wait_for_room() -> None:
    gate = asyncio.Event()

    async def wait(asked: Group) -> Group:
        await gate.wait()
        return judged(asked)

    cluster = FakeCluster(lambda rank, asked: wait(asked), workers=2)
    pool = pool_of(cluster, room=3)
    scoring = [asyncio.create_task(pool.score(asked_group(str(index)))) for index in range(20)]
    await all_follows()
    assert sorted(rank for rank, _ in cluster.asked) == [0, 0, 0, 1, 1, 1]  # fourteen wait on the driver
    gate.set()
    scored = await asyncio.gather(*scoring)
    assert [one.task.task_id for one in scored] == [str(index) for index in range(20)]
    assert cluster.most == [3, 3]


async def test_a_dead_workers_groups_are_all_tried_again_and_only_the_guilty_one_is_lost() -> None:
    async def judge(asked: Group) -> Any:
        guilty = asked.task.task_id == "guilty"
        await asyncio.sleep(0.01 if guilty else 0.03)
        return WorkerDied("memory") if guilty else judged(asked)

    cluster = FakeCluster(lambda rank, asked: judge(asked))
    pool = pool_of(cluster)
    asked = [asked_group(name) for name in ("a", "guilty", "b", "c")]
    scored = await asyncio.gather(*(pool.score(one) for one in asked))
    assert [len(one.samples) for one in scored] == [1, 0, 1, 1]
    assert sum(pool.worker_restarts.generations) == 3  # once in company, twice alone
    again = names(cluster)[4:]
    assert sorted(again) == ["a", "b", "c", "guilty", "guilty"]


async def test_a_death_in_company_proves_nothing_about_a_group() -> None:
    left = {"guilty": 9, "unlucky": 1}

    async def judge(asked: Group) -> Any:
        name = asked.task.task_id
        await asyncio.sleep(0.01 if name == "guilty" else 0.03)
        left[name] -= 1
        return WorkerDied("memory") if left[name] >= 0 else judged(asked)

    pool = pool_of(FakeCluster(lambda rank, asked: judge(asked)))
    scored = await asyncio.gather(*(pool.score(asked_group(name)) for name in left))
    assert [len(one.samples) for one in scored] == [0, 1]
    assert (left["guilty"], sum(pool.worker_restarts.generations)) == (6, 4)


async def test_a_suspect_has_its_worker_to_itself() -> None:
    running: list[set[str]] = [set(), set()]
    beside: list[set[str]] = []

    async def judge(rank: int, asked: Group) -> Any:
        name = asked.task.task_id
        running[rank].add(name)
        try:
            for _ in range(3):
                await asyncio.sleep(0.01)
                if name == "guilty":
                    beside.append(set(running[rank]))
        finally:
            running[rank].discard(name)
        return WorkerDied("memory") if name == "guilty" else judged(asked)

    cluster = FakeCluster(judge, workers=2)
    pool = pool_of(cluster, room=2)
    asked = [asked_group(name) for name in ("guilty", *map(str, range(12)))]
    scored = await asyncio.gather(*(pool.score(one) for one in asked))
    assert [len(one.samples) for one in scored] == [0, *[1] * 12]
    assert any(len(names) > 1 for names in beside[:3])
    assert beside[3:] == [{"guilty"}] * 6


async def test_groups_that_come_while_a_suspect_is_judged_wait_for_it() -> None:
    late: list[asyncio.Task[Group]] = []

    async def judge(asked: Group) -> Any:
        if asked.task.task_id == "guilty":
            late.append(asyncio.create_task(pool.score(asked_group(f"late {len(late)}"))))
        await asyncio.sleep(0.02)
        return WorkerDied("memory") if asked.task.task_id == "guilty" else judged(asked)

    cluster = FakeCluster(lambda rank, asked: judge(asked))
    pool = pool_of(cluster)
    assert (await pool.score(asked_group("guilty"))).samples == ()
    assert all(one.samples for one in await asyncio.gather(*late))
    # the first one came beside it, and went down with its worker; it and the others were judged after it
    assert names(cluster)[:3] == ["guilty", "late 0", "guilty"]
    assert sorted(names(cluster)[3:]) == ["guilty", "late 0", "late 1", "late 2"]
    assert sum(pool.worker_restarts.generations) == 3


async def test_a_replacement_because_of_a_hang_costs_the_other_groups_no_attempt() -> None:
    async def judge(asked: Group) -> Any:
        if asked.task.task_id == "hangs":
            await beside.wait()
            beside.clear()
            return judged(asked, failures=1)
        beside.set()
        await released.wait()
        return judged(asked)

    beside, released = asyncio.Event(), asyncio.Event()
    cluster = FakeCluster(lambda rank, asked: judge(asked), healthy=False)
    pool = pool_of(cluster)
    first = asyncio.create_task(pool.score(asked_group("other")))
    for _ in range(3):  # each replaces the worker under the other group
        await pool.score(asked_group("hangs"))
    released.set()
    assert (await first).samples
    assert cluster.restarted == [0, 0, 0]
    assert names(cluster).count("other") == 4


async def test_a_group_that_nobody_waits_for_any_more_keeps_its_place_until_it_is_done() -> None:
    gate = asyncio.Event()

    async def wait(asked: Group) -> Group:
        await gate.wait()
        return judged(asked)

    cluster = FakeCluster(lambda rank, asked: wait(asked))
    pool = pool_of(cluster, room=1)
    left = asyncio.create_task(pool.score(asked_group("left")))
    await all_follows()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    further = asyncio.create_task(pool.score(asked_group("further")))
    await all_follows()
    assert names(cluster) == ["left"]
    gate.set()
    assert (await further).samples
    assert cluster.most == [1]


@in_virtual_time
async def test_the_limit_grows_with_what_a_worker_has_already() -> None:
    lock = asyncio.Lock()

    async def one_at_a_time(asked: Group) -> Group:
        async with lock:
            await asyncio.sleep(0.1)
        return judged(asked)

    cluster = FakeCluster(lambda rank, asked: one_at_a_time(asked))
    pool = pool_of(cluster, limit=0.5)
    scored = await asyncio.gather(*(pool.score(asked_group(str(index))) for index in range(8)))
    assert all(one.samples for one in scored)
    assert cluster.restarted == []
