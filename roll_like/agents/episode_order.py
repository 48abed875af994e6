"""Which environment is played next, and from which seed: endless, weighted, and resumable at any group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_like.agents.env_manager import episode_task
from roll_like.agents.episode import EpisodeSpec
from roll_like.data.order import RoundRobin
from roll_like.errors import CheckpointError
from roll_like.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRange:
    """The seeds of one environment.

    Attributes:
        first: The first one.
        count: How many there are, after which they begin anew; None: no end.
    """

    first: int
    count: int | None

    def at(self, place: int) -> int:
        """Return the seed of the group `place`, counted from 0."""
        return self.first + (place if self.count is None else place % self.count)


class EpisodeOrder:
    """An endless sequence of what groups begin from.

    Environments take turns by `RoundRobin`; each counts up its own seeds.
    """

    def __init__(self, environments: Sequence[tuple[EpisodeSpec, float, SeedRange]]) -> None:
        self._specs = {spec.name: spec for spec, _, _ in environments}
        self._seeds = {spec.name: seeds for spec, _, seeds in environments}
        self._names = list(self._specs)
        self._turns = RoundRobin([weight for _, weight, _ in environments])
        self._begun = dict.fromkeys(self._names, 0)
        self._written = [(repr(spec), weight, repr(seeds)) for spec, weight, seeds in environments]

    def next(self) -> Task:
        """Return what the next group begins from."""
        name = self._names[self._turns.next()]
        seed = self._seeds[name].at(self._begun[name])
        self._begun[name] += 1
        return episode_task(self._specs[name], seed)

    def find(self, task_id: str) -> Task:
        """Return what a group began from, by its id.

        Raises:
            CheckpointError: There is no such environment.
        """
        name, _, seed = task_id.rpartition(":")
        if name not in self._specs:
            raise CheckpointError(f"the checkpoint names {task_id!r}, and `environments` has no {name!r}")
        return episode_task(self._specs[name], int(seed))

    def state(self) -> dict[str, Any]:
        """Return where the sequence stands, as JSON takes it."""
        return {
            "environments": [list(written) for written in self._written],
            "credits": list(self._turns.credits),
            "begun": dict(self._begun),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: The state is of other environments, or is damaged.
        """
        if state.get("environments") != [list(written) for written in self._written]:
            raise CheckpointError(
                "the environments changed since the checkpoint",
                fix="restore the `environments` section as it was, or start a new run",
            )
        try:
            self._begun = {name: int(state["begun"][name]) for name in self._names}
            self._turns.load([int(value) for value in state["credits"]])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's position among episodes is damaged: {error!r}") from error
