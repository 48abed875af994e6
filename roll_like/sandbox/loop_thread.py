"""An event loop of its own in a thread, so that callers with and without a loop share one evaluator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from roll_like.errors import SandboxError

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs coroutines; started by the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; the future may be waited for in any other thread.

        Raises:
            SandboxError: The thread was closed, or asks itself, which would never end.
        """
        with self._lock:
            if self._closed or threading.current_thread() is self._thread:
                coroutine.close()
                why = "is closed" if self._closed else "was called from its own thread"
                raise SandboxError(f"the evaluator {why}")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, run `last`, and end the thread; a second call does nothing."""
        with self._lock:
            if self._closed or self._loop is None or self._thread is None:
                self._closed = True
                last.close()
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._finish(last), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await last
