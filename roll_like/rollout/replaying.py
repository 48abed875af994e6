"""A source of groups whose right answers are replayed in later steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll_like.rollout.collection import Collected
from roll_like.rollout.experience import POOL, ExperiencePool
from roll_like.rollout.source import RolloutSource
from roll_like.values import Last


class ReplayingRollouts:
    """A `RolloutSource` whose right answers become a pool.

    Args:
        source: Where groups come from; they are joined by answers of the pool.
    """

    def __init__(self, source: RolloutSource, pool: ExperiencePool) -> None:
        self._source = source
        self._pool = pool
        self._steps: Mapping[str, Sequence[int]] | None = None

    def collect(self, step: int) -> Collected:
        """Return the groups that `step` trains on; their right answers are kept for later ones."""
        self._pool.begin_step(step)
        collected = self._source.collect(step)
        self._pool.add((*collected.groups, *collected.rejected), step)
        return replace(collected, metrics={**collected.metrics, "replay/kept": Last(float(len(self._pool)))})

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; plain JSON."""
        return {**self._source.state(), POOL: self._pool.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._source.load_state(state)
        self._steps = state.get(POOL)

    def save(self, directory: Path) -> None:
        """Write what of the last `state` is no JSON into a checkpoint."""
        self._source.save(directory)
        self._pool.save(directory)

    def load(self, directory: Path) -> None:
        """Read back what `save` wrote; a checkpoint of a run without replay has no answers."""
        self._source.load(directory)
        if self._steps is not None:
            self._pool.load(directory, self._steps)
