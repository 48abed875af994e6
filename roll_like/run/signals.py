"""SIGTERM, SIGUSR1 and SIGHUP end a run at the next moment when nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from roll_like.errors import STOPPING


class StopRequested(KeyboardInterrupt):
    """A signal to stop arrived; its argument is the signal's name.

    A KeyboardInterrupt, because event loops let only that through.
    """


def heeded() -> list[signal.Signals]:
    """Return the signals that ask a run to end, without those that are ignored: `nohup` ignores SIGHUP."""
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


class StopSignal:
    """Turns the signals of `STOPPING` into a flag, and into `StopRequested` where that is safe.

    While the run starts, nothing is lost; while generating, nothing of the step has changed the policy: the wait is cut
    short. While training, the step is finished first.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interruptible = False
        self._previous: dict[int, Any] = {}
        #: Name of the signal that arrived.
        self.name = ""

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in heeded()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let a library handle SIGTERM by an exit, as `ray.init` does, and take the signal back after the block."""
        try:
            yield
        except SystemExit:
            self.name, self.requested = signal.SIGTERM.name, True
            raise StopRequested(self.name) from None
        finally:
            for number in self._previous:
                signal.signal(number, self._on_signal)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the signals cut this block short with `StopRequested`."""
        self._interruptible = True
        try:
            if self.requested:
                raise StopRequested(self.name)
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.name = signal.Signals(number).name
        self.requested = True
        if self._interruptible:
            raise StopRequested(self.name)
