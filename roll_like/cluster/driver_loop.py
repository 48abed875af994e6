"""The driver's event loop, in a thread of its own; and how often its process looks for garbage.

`asyncio.Runner` refuses to run where a loop runs already, and in a notebook one always does.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

#: How long an interrupted coroutine may take to clean up before it is left behind. Seconds.
CLEAN_UP_SECONDS = 10.0
#: Python's are 700, 10, 10.
GC_THRESHOLDS = (10_000, 20, 20)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for cyclic garbage less often, in the whole process.

    What the driver makes for a group lives until the group ends. With Python's thresholds the collector visits
    thousands of open groups so often that this takes a third of the driver's time
    (`benchmarks/schedule_simulation.py`).
    """
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class DriverLoop:
    """Runs one coroutine after another, while the calling thread waits.

    A signal that raises in the calling thread (Ctrl-C, SIGTERM) cuts the wait short: the coroutine is
    cancelled, may clean up, and the exception goes on.

        >>> with DriverLoop() as loop:
        ...     loop.run(asyncio.sleep(0, "done"))
        'done'
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="driver-loop", daemon=True)
        self._closing = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing = True
        self.run(_cancel_what_is_left())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work beside all else, from any thread; none once the loop ends. `work` sees to its own errors."""
        if self._closing:
            work.close()
        else:
            asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon, from any thread."""
        self._loop.call_soon_threadsafe(function)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_what_is_left())  # another thread may have started something meanwhile

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or raise what it raises."""
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda ended: _hand_over(ended, outcome))

        def stop() -> None:
            tasks[0].cancel()  # `start` has run: callbacks run in order

        self._loop.call_soon_threadsafe(start)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():  # the exception is the calling thread's own
                self._loop.call_soon_threadsafe(stop)
                wait([outcome], timeout=CLEAN_UP_SECONDS)
            raise


def _hand_over(task: asyncio.Task[T], outcome: Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


async def _cancel_what_is_left() -> None:
    await asyncio.sleep(0)  # what is to be started has started then
    while left := asyncio.all_tasks() - {asyncio.current_task()}:  # one that ends may have started another
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0)
    await asyncio.get_running_loop().shutdown_asyncgens()
