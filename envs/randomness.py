"""Randomness of environments that draw from Python's and NumPy's global generators.

Each episode has states of its own for both, put in place while its environment moves, so that episodes do not disturb
each other, nor the rest of the process.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

#: One episode of this process moves at a time: the generators are shared.
_MOVING = threading.Lock()


class OwnRandomness:
    """An episode's states of the global generators.

    >>> own = OwnRandomness()
    >>> with own.active(seed=7):
    ...     first = random.random()
    >>> with own.active():
    ...     second = random.random()
    >>> generator = random.Random(7)
    >>> [first, second] == [generator.random(), generator.random()]
    True
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def active(self, seed: int | None = None) -> Iterator[None]:
        """Put the episode's states in place; with a seed, seed both generators first.

        Args:
            seed: ≥ 0 and below 2³².
        """
        with _MOVING:
            outside = random.getstate(), np.random.get_state()
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            elif self._states is not None:
                _set(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set(outside)


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
