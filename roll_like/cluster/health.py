"""How often workers may be replaced, and who is told."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from roll_like.errors import RollLikeError

#: Replacements of a role's workers within `WINDOW_SECONDS`; one more, and the cause does not pass by itself.
MOST_RESTARTS = 5
WINDOW_SECONDS = 3600.0
#: Pauses before the first replacement within a window, the second, …, in which a machine may recover. Seconds.
PAUSES = (0.0, 2.0, 8.0, 30.0, 120.0)


class RestartCallback(Protocol):
    """Told about workers that were replaced, and about those that are not going to be."""

    def __call__(self, role: str, text: str, *, seconds: float | None) -> None:
        """Take a plain sentence, and the seconds from the death to the replacement; None if there is none."""


def to_stderr(role: str, text: str, *, seconds: float | None) -> None:
    """Report where there is no run: print the sentence."""
    del role, seconds
    print(text, file=sys.stderr)


def brief(error: RollLikeError) -> str:
    """Return the first line of an error's message, without what Ray has to say of a death."""
    return error.message.partition("\n")[0].partition(" (")[0].rstrip(": ")[:200]


class RestartBudget:
    """Grants replacements of a role's workers: at most `MOST_RESTARTS` an hour, after pauses that grow.

        >>> now = 0.0
        >>> budget = RestartBudget(clock=lambda: now)
        >>> [budget.take() for _ in range(6)]
        [0.0, 2.0, 8.0, 30.0, 120.0, None]
        >>> now = 3601.0
        >>> budget.take()
        0.0

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._granted: deque[float] = deque()

    def take(self) -> float | None:
        """Return how long to pause before the next replacement, in seconds; None if there are to be no more."""
        now = self._clock()
        while self._granted and now - self._granted[0] >= WINDOW_SECONDS:
            self._granted.popleft()
        if len(self._granted) == MOST_RESTARTS:
            return None
        self._granted.append(now)
        return PAUSES[len(self._granted) - 1]
