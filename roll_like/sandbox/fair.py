"""Time limits on a machine that is busy: what counts is the time in which a program was not kept waiting.

The kernel counts for each thread how long it could run and had no processor (`/proc/…/schedstat`). A program whose
limit is over, and which was kept waiting for most of it, gets more time; where that does not help, the sandbox has
failed, and nothing is said about the program.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

from roll_like.errors import SandboxError

T = TypeVar("T")

#: Share of its time limit that a program has to have had.
FAIR_SHARE = 0.5
#: Most times its limit that it is waited for.
PATIENCE = 4.0
_TICKS = os.sysconf("SC_CLK_TCK")


@runtime_checkable
class Measured(Protocol):
    """A session of which the time can be measured; elsewhere, as on a server, it cannot."""

    def own_seconds(self) -> float:
        """Return the seconds since its start in which nothing but itself kept it from its end."""
        ...


class CpuShare:
    """Measures from now on what processes had of the time. For the thread in which it is made.

    Args:
        processes: Returns the ids of processes of the program, none before it runs.
        servers: Ids of the processes that start it and wait for it.
    """

    def __init__(self, processes: Callable[[], Iterable[int]], servers: Iterable[int] = ()) -> None:
        self._processes = processes
        self._servers = {pid: waited(pid) for pid in servers}
        self._own_thread = threading.get_native_id()
        self._began, self._waited = time.monotonic(), _of_thread(os.getpid(), self._own_thread)

    def own_seconds(self) -> float:
        """Return the seconds in which nothing but the program itself kept it from its end.

        A program that makes itself wait, with more threads than there are processors, uses CPU time meanwhile.
        """
        pids = list(self._processes())
        here = _of_thread(os.getpid(), self._own_thread) - self._waited
        inside = [waited(pid) - self._servers.get(pid, 0.0) for pid in (*self._servers, *pids)]
        lost = here + max(inside, default=0.0)
        return max(time.monotonic() - self._began - lost, sum(map(_used, pids)))


async def within(work: Coroutine[Any, Any, T], seconds: float, own_seconds: Callable[[], float] | None) -> T:
    """Return what `work` does within some seconds of a program's own time.

    Args:
        work: Is cancelled where it takes longer.
        own_seconds: The program's own time; None where it cannot be measured, and the clock counts.

    Raises:
        TimeoutError: It had its time.
        SandboxError: It had not even half of it for a long time.
    """
    task = asyncio.ensure_future(work)
    began, start = own_seconds() if own_seconds else 0.0, time.monotonic()
    pause = seconds
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=pause)
            if done:
                return task.result()
            if own_seconds is None or own_seconds() - began >= FAIR_SHARE * seconds:
                raise TimeoutError
            if time.monotonic() - start >= PATIENCE * seconds:
                raise SandboxError(too_busy(time.monotonic() - start, own_seconds() - began))
            pause = seconds / 4
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def too_busy(seconds: float, own: float) -> str:
    """Return what is wrong with a machine on which a program waits."""
    return f"this machine is too busy: in {seconds:.3g} s a program had {own:.2g} s of processors; lower `executions`"


def waited(pid: int) -> float:
    """Return the seconds that a process's thread has waited for a processor: the most of any thread, 0 if unknown."""
    try:
        return max((_of_thread(pid, int(task)) for task in os.listdir(f"/proc/{pid}/task")), default=0.0)
    except OSError:  # it has ended
        return 0.0


def _of_thread(pid: int, thread: int) -> float:
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):  # it has ended, or the kernel does not count
        return 0.0


def _used(pid: int) -> float:
    """Return a process's CPU seconds, those of its children that ended included."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return sum(map(int, file.read().rpartition(b")")[2].split()[11:15])) / _TICKS
    except OSError:  # it has ended
        return 0.0
