"""Destinations of figures that may fail without failing the run, or the service."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

Payload = dict[str, Any]

#: After a failure that took t seconds, the next attempt waits 19 t, so that a server that is away
#: and times out costs the run at most a twentieth of its time.
PATIENCE = 19.0


class Sink:
    """Delivers payloads in order and keeps what could not be delivered for the next attempt.

    The first failure is reported with its reason; all are counted. A payload counts as delivered
    when `deliver` returns.

    Args:
        name: For messages.
        deliver: Takes a step and a payload; may raise anything.
        warn: Takes the message of the first failure.
        keep: Undelivered payloads to hold; the oldest are dropped beyond it, and counted as lost.
        clock: Seconds, monotonic.
        whose: What goes on without it, for messages.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[int, Payload], None],
        warn: Callable[[str], None],
        *,
        keep: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
        whose: str = "the run",
    ) -> None:
        self.name = name
        self.failures = 0
        self.lost = 0
        self.last_error = ""
        self._deliver = deliver
        self._warn = warn
        self._keep = keep
        self._clock = clock
        self._whose = whose
        self._pending: deque[tuple[int, Payload]] = deque()
        self._not_before = float("-inf")

    @property
    def pending(self) -> list[tuple[int, Payload]]:
        """What is still to be delivered, oldest first."""
        return list(self._pending)

    def send(self, step: int, payload: Payload) -> None:
        """Deliver a payload, after those that are still pending."""
        self.hold([(step, payload)])
        if self._clock() >= self._not_before:
            self.flush()

    def hold(self, items: Iterable[tuple[int, Payload]]) -> None:
        """Queue payloads for the next attempt."""
        self._pending.extend(items)
        while len(self._pending) > self._keep:
            self._pending.popleft()
            self.lost += 1

    def flush(self) -> None:
        """Try to deliver everything now; stop at the first failure."""
        while self._pending:
            start = self._clock()
            if not self.attempt(lambda: self._deliver(*self._pending[0]), "written"):
                end = self._clock()
                self._not_before = end + PATIENCE * (end - start)
                return
            self._pending.popleft()

    def attempt(self, action: Callable[[], object], what: str) -> bool:
        """Run an action of this destination and return whether it succeeded."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on; counted and reported
            self.failures += 1
            self.last_error = f"{type(error).__name__}: {error}".splitlines()[0]
            if self.failures == 1:
                self._warn(
                    f"{self.name} could not be {what} ({self.last_error}); {self._whose} goes on and tries "
                    "again, and says at the end what is missing"
                )
            return False
        return True

    def report(self) -> dict[str, Any]:
        """Return what went wrong, for the summary."""
        return {"failures": self.failures, "undelivered": len(self._pending) + self.lost, "last_error": self.last_error}
