"""Which task comes next: endless, deterministic, weighted over sources, and resumable at any task."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from roll_like.data.tasks import TaskSet, TaskSource
from roll_like.errors import CheckpointError, ConfigError
from roll_like.types import Task


class TaskOrder:
    """An endless sequence of tasks.

    Sources take turns by smooth weighted round robin: with integer weights w of sum W, after every W
    tasks each source has given exactly its w, and none is ever a whole task ahead of its share. Each
    source runs through all its tasks before any comes again; every pass is shuffled anew.

    Worked example: weights 2 and 1 give a, b, a, a, b, a, …

    Args:
        taskset: The tasks.
        seed: Seed of the shuffles. The order depends on nothing else: not on library versions, not on the machine.
        shuffle: False keeps file order in every pass.

    Raises:
        ConfigError: There is nothing to draw from, or a weight is infinite.
    """

    def __init__(self, taskset: TaskSet, *, seed: int, shuffle: bool = True) -> None:
        if not taskset.sources or not all(source.tasks for source in taskset.sources):
            raise ConfigError("a data source without tasks cannot be drawn from", fix="correct data.sources")
        self._seed = seed
        self._shuffle = shuffle
        self._sources = taskset.sources
        self._shares = _integer_weights(taskset.sources)
        self._fingerprint = _fingerprint(taskset, self._shares, seed, shuffle)
        self._credits = [0] * len(self._sources)
        self._drawn = [0] * len(self._sources)
        self._passes = [self._permutation(index, 0) for index in range(len(self._sources))]

    def next(self) -> Task:
        """Return the next task."""
        for index, share in enumerate(self._shares):
            self._credits[index] += share
        chosen = max(range(len(self._shares)), key=lambda index: (self._credits[index], -index))
        self._credits[chosen] -= sum(self._shares)
        return self._draw(chosen)

    def state(self) -> dict[str, Any]:
        """Return where the sequence stands, as JSON takes it."""
        return {
            "fingerprint": self._fingerprint,
            "credits": list(self._credits),
            "drawn": {source.name: drawn for source, drawn in zip(self._sources, self._drawn, strict=True)},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the sequence from here is the one that it would have been.

        Raises:
            CheckpointError: The state is of other data, weights, seed or shuffling, or is damaged.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise CheckpointError(
                "the data changed since the checkpoint: rows, tokenizer, chat template, max_prompt_tokens, weights, "
                f"shuffle or seed (fingerprint {state.get('fingerprint')!r}, now {self._fingerprint!r})",
                fix="restore the `data` section, `seed` and the files as they were, or start a new run",
            )
        try:
            credit = [int(value) for value in state["credits"]]
            drawn = [int(state["drawn"][source.name]) for source in self._sources]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's data position is damaged: {error!r}") from error
        if len(credit) != len(self._sources) or sum(credit) != 0 or min(drawn) < 0:
            raise CheckpointError(f"the checkpoint's data position is damaged: credits {credit}, drawn {drawn}")
        self._credits, self._drawn = credit, drawn
        self._passes = [self._permutation(index, count // self._size(index)) for index, count in enumerate(drawn)]

    def _draw(self, index: int) -> Task:
        number, position = divmod(self._drawn[index], self._size(index))
        if position == 0:
            self._passes[index] = self._permutation(index, number)
        self._drawn[index] += 1
        return self._sources[index].tasks[self._passes[index][position]]

    def _size(self, index: int) -> int:
        return len(self._sources[index].tasks)

    def _permutation(self, index: int, number: int) -> Sequence[int]:
        """Return the order of pass `number`: positions sorted by a keyed hash of each."""
        if not self._shuffle:
            return range(self._size(index))
        key = hashlib.blake2b(f"{self._seed}/{number}/{self._sources[index].name}".encode(), digest_size=32).digest()

        def rank(position: int) -> bytes:
            return hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=16).digest()

        return sorted(range(self._size(index)), key=rank)


def _integer_weights(sources: Sequence[TaskSource]) -> list[int]:
    """Return the smallest integers in the ratio of the weights, taken as the decimals that were written."""
    for source in sources:
        if not math.isfinite(source.weight):
            raise ConfigError(f"{source.key}.weight is {source.weight}", fix="set it to a finite number above 0")
    exact = [Fraction(repr(source.weight)) for source in sources]
    common = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * common) for fraction in exact]
    divisor = math.gcd(*whole)
    return [number // divisor for number in whole]


def _fingerprint(taskset: TaskSet, shares: Sequence[int], seed: int, shuffle: bool) -> str:
    parts = [
        taskset.fingerprint,
        list(zip([source.name for source in taskset.sources], shares, strict=True)),
        seed,
        shuffle,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
