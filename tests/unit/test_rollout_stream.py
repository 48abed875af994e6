"""Groups that run while others are trained, in virtual time: nothing locks up, and nothing is lost at any moment."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_support import group, task
from virtual_time import in_virtual_time, run_virtually

from roll_like.errors import GenerationError
from roll_like.rollout.collection import GroupStream, SampleCounter, no_progress
from roll_like.rollout.staleness import StalenessManager
from roll_like.types import Failure, Group, Scored, Task


class FakeRunner:
    """Runs each group for `seconds(serial)`; remembers what it was asked for."""

    def __init__(self, seconds: Callable[[int], float], result: Callable[[Task], Group[Scored]] | None = None) -> None:
        self.seconds = seconds
        self.result = result or (lambda owner: group(owner, [0.0, 1.0]))
        self.begun: list[int] = []
        self.running: set[int] = set()
        self.prioritized: list[int] = []
        self.counter = SampleCounter(1, no_progress)

    async def run(self, serial: int, owner: Task) -> Group[Scored]:
        self.begun.append(serial)
        self.running.add(serial)
        try:
            await asyncio.sleep(self.seconds(serial))
            return self.result(owner)
        finally:
            self.running.discard(serial)

    async def stop(self, groups: Collection[int]) -> None:
        raise AssertionError("a stream cancels its tasks")

    def prioritize(self, groups: Collection[int]) -> None:
        self.prioritized += groups

    def describe(self, group: int) -> str:
        return "sampling"


class CountedTasks:
    """Tasks without end, and which of them were drawn."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def __iter__(self) -> Iterator[Task]:
        for index in itertools.count(len(self.drawn)):
            self.drawn.append(f"fake/{index}")
            yield task(index)


def find(task_id: str) -> Task:
    return task(int(task_id.removeprefix("fake/")))


def stream(
    runner: FakeRunner,
    tasks: CountedTasks | None = None,
    *,
    groups: int = 2,
    staleness: int = 1,
    ahead: float = 1.0,
    batches: int = 1000,
    filtered: int = 0,
    stall_seconds: float = 1000.0,
    accept: Callable[[Group[Scored]], bool] = lambda group: bool(group.samples),
) -> GroupStream:
    manager = StalenessManager(
        groups=groups, max_staleness=staleness, ahead=ahead, batches=batches, max_filtered=filtered
    )
    clock = asyncio.get_running_loop().time
    return GroupStream(runner, iter(tasks or CountedTasks()), manager, accept, clock=clock, stall_seconds=stall_seconds)


@in_virtual_time
async def test_groups_run_while_the_policy_is_trained() -> None:
    runner = FakeRunner(lambda serial: 10.0)
    flow = stream(runner)
    now = asyncio.get_running_loop().time
    flow.published(1)
    assert [entry.serial for entry in await flow.batch()] == [0, 1]
    assert now() == 10
    await asyncio.sleep(30)  # training
    flow.published(2)
    assert [entry.serial for entry in await flow.batch()] == [2, 3]
    assert now() == 40  # they were ready: no wait
    assert flow.running == 2
    await flow.close()
    assert not runner.running


@in_virtual_time
async def test_the_trainer_waits_for_a_straggler_at_its_deadline_only_and_prioritizes_it() -> None:
    runner = FakeRunner(lambda serial: 100.0 if serial == 0 else 1.0)
    flow = stream(runner, staleness=2)
    now = asyncio.get_running_loop().time
    trained = []
    for version in (1, 2, 3):
        flow.published(version)
        trained.append([entry.serial for entry in await flow.batch()])
    assert trained[0] == [1, 2]
    assert trained[2][0] == 0
    assert now() == 100
    assert 0 in runner.prioritized
    await flow.close()


@in_virtual_time
async def test_a_cancelled_batch_loses_nothing() -> None:
    runner = FakeRunner(lambda serial: 10.0 + serial)
    flow = stream(runner)
    flow.published(1)
    waiting = asyncio.create_task(flow.batch())
    await asyncio.sleep(10.5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert flow.ready == 1
    assert [entry.serial for entry in await flow.batch()] == [0, 1]
    await flow.close()


@in_virtual_time
async def test_what_a_group_raises_comes_out_of_the_next_batch() -> None:
    def fails(owner: Task) -> Group[Scored]:
        raise ZeroDivisionError(owner.task_id)

    runner = FakeRunner(lambda serial: 1.0, fails)
    flow = stream(runner)
    flow.published(1)
    await asyncio.sleep(5)
    with pytest.raises(ZeroDivisionError, match="fake/0"):
        await flow.batch()
    await flow.close()


@in_virtual_time
async def test_what_drawing_a_task_raises_comes_out_of_the_next_batch() -> None:
    class Torn(CountedTasks):
        def __iter__(self) -> Iterator[Task]:
            yield from itertools.islice(super().__iter__(), 4)
            raise ZeroDivisionError("a row that cannot be read")

    flow = stream(FakeRunner(lambda serial: 1.0), Torn(), filtered=9, accept=lambda group: False)
    flow.published(1)
    await asyncio.sleep(5)  # nobody waits for a batch when another task is drawn
    with pytest.raises(ZeroDivisionError, match="cannot be read"):
        await flow.batch()
    await flow.close()


@in_virtual_time
async def test_a_stalled_stream_names_what_hangs() -> None:
    runner = FakeRunner(lambda serial: 1e9 if serial == 1 else 3.0)
    flow = stream(runner, stall_seconds=60.0)
    flow.published(1)
    await flow.batch()  # 0 and 2
    flow.published(2)
    with pytest.raises(GenerationError, match=r"no group has ended for 60 s") as caught:
        await flow.batch()
    assert "fake.jsonl:2: running for 66 s, 1 versions old, sampling" in str(caught.value)
    assert "rollout.schedule.stall_seconds" in str(caught.value)
    await flow.close()


@in_virtual_time
async def test_filtered_and_failed_groups_are_reported_and_replaced() -> None:
    def result(owner: Task) -> Group[Scored]:
        number = int(owner.task_id.removeprefix("fake/"))
        if number == 0:
            lost = Failure(stage="reward", name="judge", error="broke", origin=owner.origin)
            return Group(task=owner, samples=(), failures=(lost,))
        return group(owner, [1.0, 1.0] if number == 1 else [0.0, 1.0])

    flow = stream(
        FakeRunner(lambda serial: 1.0, result),
        filtered=4,
        accept=lambda one: len(one.samples) > 0 and one.samples[0].reward == 0,
    )
    flow.published(1)
    batch = await flow.batch()
    assert [entry.serial for entry in batch] == [2, 3]
    report = flow.collected([])
    assert [one.task.task_id for one in report.rejected] == ["fake/0", "fake/1"]
    assert [one.name for one in report.failures] == ["judge"]
    assert report.started == 6
    assert flow.collected([]).rejected == ()
    await flow.close()


@in_virtual_time
async def test_time_in_which_nothing_may_run_is_counted() -> None:
    flow = stream(FakeRunner(lambda serial: 10.0))
    flow.published(1)
    await flow.batch()
    await asyncio.sleep(25)  # training: what runs ahead ends at 10 with the others, then nothing may start
    flow.published(2)
    await flow.batch()
    assert flow.blocked_seconds() == 25
    await flow.close()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 5),
    staleness=st.integers(1, 3),
    share=st.floats(0.1, 1.0),
    kills=st.lists(st.floats(0.0, 40.0), max_size=4),
)
def test_killed_at_any_moment_no_task_is_lost_or_trained_twice(
    seed: int, groups: int, staleness: int, share: float, kills: list[float]
) -> None:
    run_virtually(_killed_and_resumed(seed, groups, staleness, share, kills))


async def _killed_and_resumed(seed: int, groups: int, staleness: int, share: float, kills: list[float]) -> None:
    """Train 12 batches; at each of `kills` go back to the state after the last step, as a resumed run does."""
    chance = random.Random(seed)
    batches, tasks = 12, CountedTasks()
    options: dict[str, Any] = {"groups": groups, "staleness": staleness, "ahead": staleness * share, "batches": batches}
    options |= {"filtered": groups, "stall_seconds": 1e12, "accept": lambda one: one.samples[0].reward == 0}

    def result(owner: Task) -> Group[Scored]:
        return group(owner, [0.0 if chance.random() < 0.8 else 1.0])

    def runner() -> FakeRunner:
        return FakeRunner(lambda serial: chance.paretovariate(1.2), result)

    flow, step, trained, filtered = stream(runner(), tasks, **options), 0, [], []
    boundary = (flow.snapshot(), len(tasks.drawn), len(trained), len(filtered), 0)
    ages = []
    for killed_after in [*kills, 1e9]:
        try:
            async with asyncio.timeout(killed_after):
                while step < batches:
                    flow.published(step + 1)
                    batch = await flow.batch()
                    await asyncio.sleep(chance.uniform(0, 3))
                    trained += [entry.task.task_id for entry in batch]
                    ages += [step + 1 - entry.start for entry in batch]
                    filtered += [one.task.task_id for one in flow.collected([]).rejected]
                    step += 1
                    boundary = (flow.snapshot(), len(tasks.drawn), len(trained), len(filtered), step)
        except TimeoutError:
            await flow.close()
            (state, ready), drawn, done, dropped, step = boundary
            del tasks.drawn[drawn:], trained[done:], filtered[dropped:]
            flow = stream(runner(), tasks, **options)
            flow.restore(state, ready, find)
    assert max(ages) <= staleness
    state, ready = flow.snapshot()
    left = [task_id for _, task_id in state["open"]] + [one.task.task_id for one in ready]
    since = [one.task.task_id for one in flow.collected([]).rejected]
    assert sorted([*trained, *filtered, *left, *since]) == sorted(tasks.drawn)
    await flow.close()
