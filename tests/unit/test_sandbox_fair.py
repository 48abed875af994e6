"""Time limits on a busy machine: a program is blamed for its own time only."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest

from roll_like.errors import SandboxError
from roll_like.sandbox.fair import PATIENCE, CpuShare, waited, within


def run(work: float, seconds: float, own: Callable[[], float] | None) -> tuple[str, bool]:
    """Wait for work of so many seconds; return how it ended, and whether it was cancelled."""
    cancelled = False

    async def working() -> str:
        nonlocal cancelled
        try:
            await asyncio.sleep(work)
        except asyncio.CancelledError:
            cancelled = True
            raise
        return "done"

    async def limited() -> str:
        try:
            return await within(working(), seconds, own)
        except (TimeoutError, SandboxError) as error:
            return type(error).__name__

    return asyncio.run(limited()), cancelled


def test_in_time() -> None:
    assert run(0.0, 5.0, None) == ("done", False)
    assert run(0.0, 5.0, lambda: 0.0) == ("done", False)


def test_a_program_that_had_its_time_is_too_slow() -> None:
    began = time.monotonic()
    assert run(60.0, 0.1, None) == ("TimeoutError", True)
    assert run(60.0, 0.1, lambda: time.monotonic() - began) == ("TimeoutError", True)


def test_a_program_that_was_kept_waiting_gets_more_time() -> None:
    assert run(0.25, 0.1, lambda: 0.0) == ("done", False)  # after two and a half times its limit
    assert PATIENCE > 2.5


def test_a_program_that_is_kept_waiting_for_long_is_not_blamed() -> None:
    assert run(60.0, 0.05, lambda: 0.0) == ("SandboxError", True)


def test_errors_of_the_work_come_through() -> None:
    async def failing() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(within(failing(), 5.0, None))


def test_only_what_was_waited_since_the_start_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    of_process = {1: 5.0, 2: 7.0}
    monkeypatch.setattr("roll_like.sandbox.fair.waited", lambda pid: of_process[pid])
    monkeypatch.setattr("roll_like.sandbox.fair._of_thread", lambda pid, thread: 0.0)
    monkeypatch.setattr("roll_like.sandbox.fair._used", lambda pid: 0.5)
    clock = [100.0]
    monkeypatch.setattr("roll_like.sandbox.fair.time.monotonic", lambda: clock[0])
    programs: list[int] = []
    share = CpuShare(lambda: programs, [1])
    clock[0] = 110.0
    assert share.own_seconds() == 10.0  # nothing waited, whether or not the program is in sight
    of_process[1] = 9.0  # its server waited four seconds
    assert share.own_seconds() == 6.0
    programs.append(2)
    assert share.own_seconds() == 3.0
    of_process[2] = 9.9
    assert share.own_seconds() == 0.5  # what it used


def test_cpu_time_is_own_time_however_long_threads_wait() -> None:
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    assert CpuShare(lambda: (os.getpid(),)).own_seconds() >= 0.3


def test_what_a_thread_waited_is_read_from_the_kernel() -> None:
    with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", encoding="ascii") as file:
        at_least = int(file.read().split()[1]) / 1e9
    assert waited(os.getpid()) >= at_least
    assert waited(2**22 + 1) == 0.0  # no such process
