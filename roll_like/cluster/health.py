"""How often workers may be replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

#: Replacements of a role's workers within `WINDOW_SECONDS`; one more, and the cause does not pass by itself.
MOST_RESTARTS = 5
WINDOW_SECONDS = 3600.0
#: Pauses before the first replacement within a window, the second, …, in which a machine may recover. Seconds.
PAUSES = (0.0, 2.0, 8.0, 30.0, 120.0)


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
