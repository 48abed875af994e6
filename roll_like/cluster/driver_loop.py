"""The driver's event loop, in a thread of its own; and how often its process looks for garbage.

`asyncio.Runner` refuses to run where a loop runs already, and in a notebook one always does.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
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
        self._stop_waiting: Callable[[Exception], None] | None = None
        self._interruption: Exception | None = None
        self._interrupting = threading.Lock()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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

    def interrupt(self, error: Exception) -> None:
        """Raise an error where `wait_for` waits, and at its next calls until `go_on`; from any thread.

        What is waited for does not come before the waiting thread has seen to the cause.
        """
        with self._interrupting:
            self._interruption = error
            if self._stop_waiting is not None:
                self._stop_waiting(error)

    def go_on(self) -> None:
        """Note that the cause of an interruption is gone."""
        with self._interrupting:
            self._interruption = None

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Do as `run`, for one thread's work that `interrupt` may end."""
        return self.run(self._interruptible(work))

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        task, cause = asyncio.current_task(), list[Exception]()
        assert task is not None

        def stop(error: Exception) -> None:
            cause.append(error)
            self._loop.call_soon_threadsafe(task.cancel)

        with self._interrupting:
            if self._interruption is not None:
                work.close()
                raise self._interruption
            self._stop_waiting = stop
        try:
            return await work
        except asyncio.CancelledError:
            raise (cause[0] if cause else asyncio.CancelledError) from None
        finally:
            with self._interrupting:
                self._stop_waiting = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or raise what it raises."""
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda ended: _hand_over(ended, outcome))

        def stop() -> None:
            if tasks:  # `start` has run if it was to: callbacks run in order
                tasks[0].cancel()
            else:
                work.close()
                outcome.set_exception(asyncio.CancelledError())

        try:
            # a signal may raise in here, too, when the loop has already begun
            self._loop.call_soon_threadsafe(start)
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
    until = time.monotonic() + CLEAN_UP_SECONDS
    # one that ends may have started another
    while (left := asyncio.all_tasks() - {asyncio.current_task()}) and time.monotonic() < until:
        for task in left:
            task.cancel()
        ended, _ = await asyncio.wait(left, timeout=CLEAN_UP_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # read, or asyncio prints it
        await asyncio.sleep(0)
    await asyncio.get_running_loop().shutdown_asyncgens()
