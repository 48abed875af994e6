from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from roll_like.cluster.driver_loop import DriverLoop
from roll_like.run.signals import StopRequested, StopSignal


@pytest.fixture
def loop() -> Iterator[DriverLoop]:
    with DriverLoop() as started:
        yield started


async def test_it_runs_inside_a_running_loop() -> None:
    # what a notebook cell is: synchronous code below a loop
    with DriverLoop() as loop:
        assert loop.run(asyncio.sleep(0, "done")) == "done"


def test_state_lives_from_one_call_to_the_next(loop: DriverLoop) -> None:
    async def make() -> asyncio.Event:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, event.set)
        return event

    event = loop.run(make())
    assert loop.run(asyncio.wait_for(event.wait(), 60))


def test_errors_arrive_as_themselves(loop: DriverLoop) -> None:
    async def fail() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        loop.run(fail())


def test_a_signal_cuts_the_wait_short_and_lets_the_coroutine_clean_up(loop: DriverLoop) -> None:
    cleaned: list[str] = []

    async def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            cleaned.append(threading.current_thread().name)

    with StopSignal() as stop, pytest.raises(StopRequested), stop.interruptible():
        loop.run(wait())
    assert cleaned == ["driver-loop"]
    assert loop.run(asyncio.sleep(0, "usable afterwards")) == "usable afterwards"


@pytest.mark.parametrize("begun", [True, False])
def test_a_signal_while_work_is_handed_over_ends_the_work(
    loop: DriverLoop, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """The loop may have begun before the thread that asks is back from the call that hands the work over."""
    ended = threading.Event()
    hand_over = loop._loop.call_soon_threadsafe

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def interrupted(callback: Any, *arguments: Any) -> None:
        monkeypatch.setattr(loop._loop, "call_soon_threadsafe", hand_over)
        if begun:
            hand_over(callback, *arguments)
            loop.run(asyncio.sleep(0.01))
        raise StopRequested("SIGTERM")

    work = wait()
    monkeypatch.setattr(loop._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(StopRequested):
        loop.run(work)
    assert ended.is_set() == begun
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


def test_another_thread_ends_a_wait_until_its_cause_is_gone(loop: DriverLoop) -> None:
    cleaned: list[bool] = []

    async def wait() -> None:
        try:
            threading.Thread(target=loop.interrupt, args=[LookupError("the other one")]).start()
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    with pytest.raises(LookupError, match="the other one"):
        loop.wait_for(wait())
    assert cleaned == [True]
    with pytest.raises(LookupError, match="the other one"):  # nobody has seen to it
        loop.wait_for(wait())
    assert cleaned == [True]
    assert loop.run(asyncio.sleep(0, "other work")) == "other work"
    loop.go_on()
    assert loop.wait_for(asyncio.sleep(0, "it came")) == "it came"


def test_what_is_cancelled_from_within_is_no_interruption(loop: DriverLoop) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        loop.wait_for(cancelled())


def test_leaving_ends_what_still_runs() -> None:
    ended: list[bool] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def begin(tasks: list[asyncio.Task[None]]) -> None:
        tasks.append(asyncio.create_task(linger()))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    with DriverLoop() as loop:
        loop.run(begin(tasks))
    assert ended == [True]
    assert not any(thread.name == "driver-loop" for thread in threading.enumerate())
