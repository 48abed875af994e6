"""Where a step's time and memory go.

>>> timer = StepTimer()
>>> with timer("generate"):
...     pass
>>> sorted(timer.metrics())
['time/generate', 'time/idle', 'time/step']
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

from roll_like.cluster.spans import SPANS
from roll_like.values import Metric, Sum

GIB = 2**30
Interval = tuple[float, float]


class StepTimer:
    """Times the named parts of a step. Timers may overlap, nest and come from tasks or threads.

    `time/NAME` is the time in which at least one timer of that name was running, so a hundred
    concurrent `reward` timers of one second count as one second. `time/idle` is the part of
    the step that no timer covers; overlapping timers are therefore not subtracted twice.

    Args:
        on_enter: Called with a timer's name when it starts, for a display of the current phase.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, *, on_enter: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_enter = on_enter
        self._clock = clock
        self._lock = threading.Lock()
        self._finished: dict[str, list[Interval]] = {}
        self._running: dict[int, tuple[str, float]] = {}
        self._next_id = 0
        self._start = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a part of the step."""
        with self._lock:
            timer_id, self._next_id = self._next_id, self._next_id + 1
            began = self._clock()
            self._running[timer_id] = (name, began)
        if self._on_enter is not None:
            self._on_enter(name)
        try:
            yield
        finally:
            with self._lock:
                _, start = self._running.pop(timer_id)
                end = self._clock()
                self._finished.setdefault(name, []).append((start, end))
            if SPANS.on:
                SPANS.past("driver", name, end - began)

    def restart(self) -> None:
        """Begin a step now: what was timed before belongs to none."""
        self.metrics()

    def metrics(self) -> dict[str, Metric]:
        """Close the step and begin the next one.

        A timer that is still running is split: its time so far belongs to this step, the rest to the next.

        Returns:
            `time/NAME` for every timer, `time/step` and `time/idle`, in seconds.
        """
        with self._lock:
            end = self._clock()
            timers = {name: list(intervals) for name, intervals in self._finished.items()}
            for timer_id, (name, start) in self._running.items():
                timers.setdefault(name, []).append((start, end))
                self._running[timer_id] = (name, end)
            self._finished = {}
            start, self._start = self._start, end
        covered = length(union(interval for intervals in timers.values() for interval in intervals))
        seconds = {f"time/{name}": length(union(intervals)) for name, intervals in timers.items()}
        seconds["time/step"] = end - start
        seconds["time/idle"] = max(0.0, end - start - covered)
        return {name: Sum(value) for name, value in seconds.items()}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time that intervals cover, as intervals apart from each other.

    >>> union([(1, 3), (0, 2), (5, 6), (7, 7)])
    [(0, 3), (5, 6)]
    """
    found: list[Interval] = []
    for began, ended in sorted(each for each in intervals if each[1] > each[0]):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the time that intervals take together."""
    return sum((ended - began for began, ended in intervals), 0.0)


def process_tree_rss_gib() -> float:
    """Return the resident memory of this process and all its descendants, in GiB.

    Pages that processes share (weights in shared memory, libraries) count in each of them.
    """
    this, total = psutil.Process(), 0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, and its memory with it
            total += process.memory_info().rss
    return total / GIB
