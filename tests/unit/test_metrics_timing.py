"""A step's time split adds up, whatever overlaps; memory counts every process of the tree."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from roll_like.metrics.timing import StepTimer, process_tree_rss_gib
from roll_like.values import Sum, reduce


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_is_what_no_span_covers() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    clock.now += 1
    with timer("generate"):
        clock.now += 2
    with timer("train"):
        clock.now += 4
    with timer("generate"):
        clock.now += 0.5
    clock.now += 3
    assert reduce(timer.metrics()) == {"time/generate": 2.5, "time/train": 4, "time/step": 10.5, "time/idle": 4}


def test_overlapping_timers_are_not_counted_twice() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer("generate"):
        clock.now += 2
        with timer("reward"):
            clock.now += 1
    clock.now += 5
    values = reduce(timer.metrics())
    assert values == {"time/generate": 3, "time/reward": 1, "time/step": 8, "time/idle": 5}


async def test_concurrent_timers_of_one_name_count_once() -> None:
    timer = StepTimer()

    async def score() -> None:
        with timer("reward"):
            await asyncio.sleep(0.05)

    await asyncio.gather(*(score() for _ in range(50)))
    values = reduce(timer.metrics())
    assert 0.05 <= values["time/reward"] <= values["time/step"] + 1e-9  # and not 50 times as much


def test_an_open_span_is_divided_between_steps() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer("generate"):
        clock.now += 2
        first = reduce(timer.metrics())
        clock.now += 3
    second = reduce(timer.metrics())
    assert first == {"time/generate": 2, "time/step": 2, "time/idle": 0}
    assert second == {"time/generate": 3, "time/step": 3, "time/idle": 0}


def test_restart_forgets_what_came_before() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer("generate"):
        clock.now += 30
    timer.restart()
    clock.now += 1
    assert reduce(timer.metrics()) == {"time/step": 1, "time/idle": 1}


def test_a_span_that_raises_is_counted_and_phases_are_announced() -> None:
    clock, phases = Clock(), []
    timer = StepTimer(clock=clock, on_enter=phases.append)

    def fail() -> None:
        with timer("train"):
            clock.now += 1
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert timer.metrics()["time/train"] == Sum(1.0)
    assert phases == ["train"]


def test_memory_counts_a_child_process() -> None:
    before = process_tree_rss_gib()
    code = "data = bytearray(b'x') * (200 << 20); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = process_tree_rss_gib()
        child.communicate(b"\n")
    assert 0.19 < during - before < 0.4
    assert process_tree_rss_gib() < during - 0.15
