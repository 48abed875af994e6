"""Asynchronous rollouts as the pipeline calls them, with a fake collector: order, progress, SIGTERM, checkpoints."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests_support import all_follows, group, task

from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.rollout import AsyncSchedule, RolloutConfig
from roll_like.errors import GenerationError
from roll_like.inference.interface import Guesses, derived_seed
from roll_like.rollout.asynchronous import AsyncRollouts
from roll_like.rollout.collection import SampleCounter, SampleProgress, no_progress
from roll_like.rollout.source import GroupFilter, GroupSource, SynchronousRollouts
from roll_like.run.signals import StopRequested, StopSignal
from roll_like.types import Failure, Group, Scored, Task


class FakeCollector:
    """A collector, its engines and its runner in one: groups end when a test says so."""

    def __init__(self, loop: DriverLoop) -> None:
        self.loop = loop
        self.replicas = 2
        self.busy = 0.0
        self.begun: list[str] = []
        self.running: dict[str, asyncio.Future[Group[Scored]]] = {}
        self.counter = SampleCounter(2, no_progress)

    def busy_seconds(self) -> float:
        return self.busy

    def take_guesses(self) -> Guesses:
        return Guesses()

    def make(self, seed: int | None, progress: SampleProgress) -> FakeCollector:
        self.counter = SampleCounter(2, progress)
        return self

    async def run(self, serial: int, owner: Task) -> Group[Scored]:
        self.begun.append(owner.task_id)
        self.running[owner.task_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[owner.task_id]
        finally:
            del self.running[owner.task_id]

    async def stop(self, groups: Collection[int]) -> None:
        raise AssertionError("a stream cancels its tasks")

    def prioritize(self, groups: Collection[int]) -> None:
        pass

    def describe(self, group: int) -> str:
        return "sampling"

    def finish(self, *numbers: int, rewards: Sequence[float] = (0.0, 1.0)) -> None:
        """Let groups end, one after the other."""
        for number in numbers:
            self.loop.run(self._finish(task(number), list(rewards)))

    async def _finish(self, owner: Task, rewards: list[float]) -> None:
        failures = tuple(
            Failure(stage="reward", name="judge", error="broke", origin=owner.origin) for _ in range(2 - len(rewards))
        )
        scored = group(owner, rewards)
        for sample in scored.samples:
            self.counter.sampled(sample.trajectory.response_length)
        self.running[owner.task_id].set_result(Group(task=owner, samples=scored.samples, failures=failures))
        await all_follows()

    def fail(self, number: int, error: Exception) -> None:
        """Let a group raise."""

        async def raising() -> None:
            self.running[f"fake/{number}"].set_exception(error)
            await all_follows()

        self.loop.run(raising())


@pytest.fixture
def loop() -> Iterator[DriverLoop]:
    with DriverLoop() as started:
        yield started


class InOrder:
    """Tasks by their numbers."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> Task:
        self.drawn += 1
        return task(self.drawn - 1)

    def find(self, task_id: str) -> Task:
        return task(int(task_id.removeprefix("fake/")))

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state(self, state: Mapping[str, Any], /) -> None:
        self.drawn = state["drawn"]


def source(collector: FakeCollector, config: RolloutConfig) -> GroupSource:
    return GroupSource(make_runner=collector.make, engines=collector, order=InOrder(), accept=GroupFilter(config))


def rollouts(
    collector: FakeCollector,
    *,
    steps: int = 100,
    staleness: int = 1,
    ahead: float = 1.0,
    shown: list[tuple[int, int]] | None = None,
    **changes: Any,
) -> AsyncRollouts:
    config = RolloutConfig(prompts_per_step=3, samples_per_prompt=2, **changes)
    return AsyncRollouts(
        source(collector, config),
        config,
        AsyncSchedule(type="async", max_staleness=staleness, ahead=ahead),
        steps=steps,
        seed=7,
        runner=collector.loop,
        progress=lambda done, total: None if shown is None else shown.append((done, total)),
    )


def names(groups: Sequence[Group[Scored]]) -> list[str]:
    return [one.task.task_id for one in groups]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_order_of_a_batch_depends_on_the_step_and_not_on_what_was_ready_first(step: int, loop: DriverLoop) -> None:
    found = set()
    for finished in itertools.permutations(range(3)):
        collector = FakeCollector(loop)
        flow = rollouts(collector, steps=step + 1)  # the last step: exactly its own groups are admitted
        flow.published(step + 1)
        collector.finish(*finished)
        found.add(tuple(names(flow.collect(step).groups)))
        flow.close()
    order = np.random.default_rng(derived_seed(7, step)).permutation(3)
    assert found == {tuple(f"fake/{index}" for index in order)}


def test_progress_is_shown_while_a_step_waits_only(loop: DriverLoop) -> None:
    collector, shown = FakeCollector(loop), []
    flow = rollouts(collector, shown=shown)
    flow.published(1)
    collector.finish(0, 1)
    assert shown == []
    waiting = Waiting(flow, 0)
    collector.finish(2)
    assert len(waiting.result().groups) == 3
    assert shown == [(4, 6), (4, 6)]  # the third group is ready after its last sample
    collector.finish(3)
    assert len(shown) == 2
    flow.close()


class Waiting:
    """A `collect` that waits, in a thread of its own."""

    def __init__(self, flow: AsyncRollouts, step: int) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._outcome = self._pool.submit(flow.collect, step)
        while not flow._stream.waiting:
            time.sleep(0.001)

    def result(self) -> Any:
        with self._pool:
            return self._outcome.result(timeout=60)


def test_sigterm_while_a_step_waits_loses_nothing(loop: DriverLoop) -> None:
    collector = FakeCollector(loop)
    flow = rollouts(collector)
    flow.published(1)
    collector.finish(0, 1)

    async def stop_when_it_waits() -> None:
        while not flow._stream.waiting:
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.run(spawn(stop_when_it_waits()))
    with StopSignal() as stop, pytest.raises(StopRequested), stop.interruptible():
        flow.collect(0)
    assert sorted(collector.running) == ["fake/2", "fake/3", "fake/4", "fake/5"]  # they go on
    collector.finish(2)
    assert sorted(names(flow.collect(0).groups)) == ["fake/0", "fake/1", "fake/2"]
    flow.close()
    assert not collector.running


async def spawn(work: Any) -> None:
    """Start something that goes on while others run."""
    _spawned.append(asyncio.get_running_loop().create_task(work))


_spawned: list[asyncio.Task[None]] = []


def test_an_error_of_a_group_is_raised_in_the_next_step(loop: DriverLoop) -> None:
    collector = FakeCollector(loop)
    flow = rollouts(collector)
    flow.published(1)
    collector.finish(0, 1, 2)
    flow.collect(0)
    collector.fail(3, ZeroDivisionError("a bug in the middle of a group"))  # while the policy is trained
    flow.published(2)
    with pytest.raises(ZeroDivisionError, match="a bug in the middle of a group"):
        flow.collect(1)
    flow.close()
    assert not collector.running


def test_too_many_failures_end_the_run(loop: DriverLoop) -> None:
    collector = FakeCollector(loop)
    flow = rollouts(collector, max_failure_fraction=0.2)
    flow.published(1)
    collector.finish(0, rewards=())
    collector.finish(1, 2, 3)
    with pytest.raises(GenerationError, match="2 of 8 samples of step 1 were lost to failures"):
        flow.collect(0)
    flow.close()


def after_a_step(loop: DriverLoop) -> tuple[FakeCollector, AsyncRollouts]:
    """Rollouts at the end of their first step: 4 is ready, and 3 and those after 4 run."""
    collector = FakeCollector(loop)
    flow = rollouts(collector)
    flow.published(1)
    collector.finish(0, 1, 2, 4)
    flow.collect(0)
    flow.published(2)
    return collector, flow


def saved(flow: AsyncRollouts, directory: Path) -> dict[str, Any]:
    state = flow.state()
    flow.save(directory)
    return state


def test_a_resumed_run_trains_what_was_ready_and_starts_again_what_ran(loop: DriverLoop, tmp_path: Path) -> None:
    collector, flow = after_a_step(loop)
    state = flow.state()
    collector.finish(3)  # after the boundary: the checkpoint is that of the boundary
    flow.save(tmp_path)
    flow.close()
    assert state["returned"] == [f"fake/{index}" for index in range(3, 9)]

    again = FakeCollector(loop)
    resumed = rollouts(again)
    resumed.load_state(state)
    resumed.load(tmp_path)
    resumed.published(2)
    assert again.begun == ["fake/3", "fake/5", "fake/6", "fake/7", "fake/8"]
    again.finish(6, 3)
    assert sorted(names(resumed.collect(1).groups)) == ["fake/3", "fake/4", "fake/6"]
    resumed.close()


def test_a_synchronous_run_goes_on_where_an_asynchronous_one_stopped_and_back(loop: DriverLoop, tmp_path: Path) -> None:
    _, flow = after_a_step(loop)
    state = saved(flow, tmp_path)
    flow.close()

    config = RolloutConfig(prompts_per_step=3, samples_per_prompt=2)
    synchronous = SynchronousRollouts(source(FakeCollector(loop), config), config, seed=7, runner=loop)
    synchronous.load_state(state)
    synchronous.load(tmp_path)
    (tmp_path / "rollouts.npz").unlink()
    (tmp_path / "rollouts.json").unlink()

    again = FakeCollector(loop)
    resumed = rollouts(again)
    resumed.load_state(synchronous.state())
    resumed.load(tmp_path)
    resumed.published(2)
    assert again.begun == [f"fake/{index}" for index in range(3, 9)]
    resumed.close()


def test_engine_time_is_that_since_the_last_step_whatever_replicas_are_left(loop: DriverLoop) -> None:
    collector = FakeCollector(loop)
    flow = rollouts(collector)
    flow.published(1)
    collector.busy = 8.0  # two replicas, 4 s each
    collector.finish(0, 1, 2)
    assert flow.collect(0).metrics["time/engines"].value == 4.0
    flow.published(2)
    collector.busy, collector.replicas = 10.0, 1
    collector.finish(3, 4, 5)
    assert flow.collect(1).metrics["time/engines"].value == 1.0
    flow.close()
