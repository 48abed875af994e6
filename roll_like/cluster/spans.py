"""What happens in this process while a step is profiled: named stretches of time.

Timers of the driver, phases of workers (`progress.py`), requests and scored groups end here. While nothing is profiled
each costs one comparison.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time. Unix seconds.

    Attributes:
        track: What it happened in: `driver`, `engine 0`, `rewards 1`, `environments`; empty: in the process itself.
        name: What happened.
        began: When it began.
        ended: When it ended.
    """

    track: str
    name: str
    began: float
    ended: float


class Works(Protocol):
    """Something whose spans are added when they end."""

    def under_way(self) -> Iterable[Span]:
        """Return those that have not ended, up to now. Called from any thread."""


class SpanRecorder:
    """Keeps spans between `begin` and `end`; any thread may add some."""

    def __init__(self) -> None:
        #: Whether spans are kept. Asked before one is made.
        self.on = False
        self._spans: list[Span] = []
        self._watched: WeakSet[Works] = WeakSet()

    def watch(self, works: Works) -> None:
        """Ask `works` at the end for what is still under way, for as long as something else holds it."""
        self._watched.add(works)

    def begin(self) -> None:
        """Keep what ends from now on."""
        self._spans = []
        self.on = True

    def add(self, track: str, name: str, began: float, ended: float) -> None:
        """Keep a span."""
        self._spans.append(Span(track, name, began, ended))

    def past(self, track: str, name: str, seconds: float) -> None:
        """Keep a span that ends now."""
        now = time.time()
        self.add(track, name, now - seconds, now)

    def end(self) -> list[Span]:
        """Keep nothing any more; return what was kept, and what is under way."""
        if self.on:
            self._spans += [span for works in list(self._watched) for span in works.under_way()]
        self.on = False
        spans, self._spans = self._spans, []
        return spans


#: The spans of this process.
SPANS = SpanRecorder()
