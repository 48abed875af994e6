"""SIGTERM ends a run at the next moment when nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequested(KeyboardInterrupt):
    """SIGTERM arrived. A KeyboardInterrupt, because event loops let only that through."""


class StopSignal:
    """Turns SIGTERM into a flag, and into `StopRequested` where that is safe.

    While generating, nothing of the step has changed the policy: the wait is cut short. While training,
    the step is finished first.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interruptible = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def claim(self) -> None:
        """Take the signal back from a library that replaced the handler (`ray.init` does)."""
        signal.signal(signal.SIGTERM, self._on_signal)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let SIGTERM cut this block short with `StopRequested`."""
        self._interruptible = True
        try:
            if self.requested:
                raise StopRequested
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.requested = True
        if self._interruptible:
            raise StopRequested
