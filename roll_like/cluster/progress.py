"""What a worker process is doing: a small page of shared memory that the watchdog of its node reads.

Work moves the page on: it counts micro-batches, gathered tensors, engine steps. No thread does, because a thread would
go on while the work hangs. Where there is no watchdog the page is memory that nobody reads.
"""

from __future__ import annotations

import faulthandler
import functools
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from io import TextIOWrapper
from pathlib import Path
from typing import ParamSpec, TypeVar

from roll_like.cluster.spans import SPANS

P = ParamSpec("P")
R = TypeVar("R")

#: Environment variable of a watched worker: where its page goes, without the `.PID` at the end. Children inherit it.
VARIABLE = "ROLL_LIKE_PROGRESS"
#: Ends the name of the file beside a page that Python's stacks are written to.
STACKS = ".stacks"
#: Start time of the process, events, ticks, bytes of GPU memory, kind of work, phase; 64 bytes.
_LAYOUT = struct.Struct("=QQQQB31s")
_COUNTS = struct.Struct("=QQ")
_COUNTS_AT = 8


class Work(IntEnum):
    """What a standstill says of a process."""

    #: It was asked for nothing: it may stand still for ever.
    NONE = 0
    #: It hangs.
    OWN = 1
    #: It or another rank of its role hangs: all of them wait for the last one.
    SHARED = 2
    #: It waits for processes of another role, which are watched themselves.
    ELSEWHERE = 3


@dataclass(frozen=True, slots=True)
class Page:
    """What a page says.

    Attributes:
        started: Start time of the process, in the kernel's clock ticks since boot; tells it from a later one of its id.
        events: Phases that began or ended, and ticks, since the start. It changes whenever anything happens.
        ticks: Units of work that are done since the phase began.
        gpu_bytes: The most that the process had allocated of a GPU when that was last noted, since it started.
        work: The kind of work.
        phase: What the process was asked to do; empty if nothing.
    """

    started: int
    events: int
    ticks: int
    gpu_bytes: int
    work: Work
    phase: str

    @classmethod
    def read(cls, content: bytes) -> Page | None:
        """Return what a page's bytes say; None of one that is just being made."""
        if len(content) != _LAYOUT.size:
            return None
        started, events, ticks, gpu_bytes, work, phase = _LAYOUT.unpack(content)
        if not started:
            return None
        return cls(started, events, ticks, gpu_bytes, Work(work), phase.rstrip(b"\0").decode(errors="replace"))


class ProgressPage:
    """The page of this process."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _LAYOUT.size)
        self._pid = os.getpid()
        self._started = 0
        self._events = 0
        self._ticks = 0
        self._gpu_bytes = 0
        self._active: list[tuple[Work, str]] = []
        self._stacks: TextIOWrapper | None = None  # open as long as the process: a signal handler writes to it

    def open(self) -> None:
        """Show the page to the node's watchdog, if there is one, and write Python's stacks to a file on SIGUSR2."""
        prefix, pid = os.environ.get(VARIABLE), os.getpid()
        if self._pid != pid:  # a child: what its parent was doing is not its work
            self._pid, self._started, self._gpu_bytes, self._active = pid, 0, 0, []
        if prefix is None or self._started:
            return
        path = f"{prefix}.{pid}"
        try:
            stacks = open(path + STACKS, "w")  # noqa: SIM115 - see above
            with open(path, "w+b") as file:
                file.truncate(_LAYOUT.size)
                self._page = mmap.mmap(file.fileno(), _LAYOUT.size)
        except OSError as error:
            print(f"this process is not watched: {error}", file=sys.stderr)
            return
        faulthandler.register(signal.SIGUSR2, file=stacks)
        self._stacks = stacks
        self._started = started_at(Path("/proc/self/stat").read_text())
        self._show()

    def tick(self) -> None:
        """Count a unit of work that is done."""
        self._events += 1
        self._ticks += 1
        _COUNTS.pack_into(self._page, _COUNTS_AT, self._events, self._ticks)

    @contextmanager
    def phase(self, name: str, work: Work = Work.OWN) -> Iterator[None]:
        """Be busy with something; the last one that began and has not ended is shown."""
        activity = (work, name)
        self._enter(activity)
        began = time.monotonic()
        try:
            yield
        finally:
            self._leave(activity)
            if SPANS.on:
                SPANS.past("", name, time.monotonic() - began)

    def hold(self, name: str, busy: bool) -> None:
        """Be busy with something, or no longer, where no block of code lasts as long; to repeat it changes nothing."""
        activity = (Work.OWN, name)
        if busy and activity not in self._active:
            self._enter(activity)
        elif not busy and activity in self._active:
            self._leave(activity)

    def _enter(self, activity: tuple[Work, str]) -> None:
        if not self._active:  # ranks are compared by what they have done since all of them were asked
            self._ticks = 0
        self._active.append(activity)
        self._show()

    def _leave(self, activity: tuple[Work, str]) -> None:
        self._active.remove(activity)
        self.note_memory()

    def note_memory(self) -> None:
        """Show the peak of GPU memory also where no phase ends: in processes of an engine that others call."""
        self._gpu_bytes = max(self._gpu_bytes, _peak_gpu_bytes())
        self._show()

    def _show(self) -> None:
        self._events += 1
        work, phase = self._active[-1] if self._active else (Work.NONE, "")
        content = (self._started, self._events, self._ticks, self._gpu_bytes, work, phase.encode())
        _LAYOUT.pack_into(self._page, 0, *content)


#: The page of this process.
PROGRESS = ProgressPage()


def shared_phase(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method a phase of its own name, in which ranks wait for each other."""

    @functools.wraps(method)
    def working(*args: P.args, **kwargs: P.kwargs) -> R:
        with PROGRESS.phase(method.__name__, Work.SHARED):
            return method(*args, **kwargs)

    return working


def _peak_gpu_bytes() -> int:
    """Return the most that this process has allocated of its GPU; 0 where it uses none."""
    torch = sys.modules.get("torch")  # a process without it has no such memory, and need not load it for this
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated())


def started_at(stat: str) -> int:
    """Return a process's start time out of its `/proc/PID/stat`, in clock ticks since boot."""
    return int(stat.rpartition(")")[2].split()[19])
