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


class RoundRobin:
    """Smooth weighted round robin: whose turn it is.

    With integer weights w of sum W, after every W turns each has had exactly its w, and none is ever a whole
    turn ahead of its share.

    Worked example: weights 2 and 1 give 0, 1, 0, 0, 1, 0, …

    Args:
        weights: A finite number above 0 for each; taken as the decimals that were written.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = _integers(weights)
        self.credits = [0] * len(self.shares)

    def next(self) -> int:
        """Return who is next."""
        for index, share in enumerate(self.shares):
            self.credits[index] += share
        chosen = max(range(len(self.shares)), key=lambda index: (self.credits[index], -index))
        self.credits[chosen] -= sum(self.shares)
        return chosen

    def load(self, credits_: Sequence[int]) -> None:
        """Go on where `credits` were these.

        Raises:
            ValueError: They cannot have been.
        """
        if len(credits_) != len(self.shares) or sum(credits_) != 0:
            raise ValueError(f"credits {list(credits_)} for {len(self.shares)} that take turns")
        self.credits = list(credits_)


class TaskOrder:
    """An endless sequence of tasks.

    Sources take turns by `RoundRobin`. Each source runs through all its tasks before any comes again; every pass
    is shuffled anew.

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
        self._turns = RoundRobin(_weights(taskset.sources))
        self._fingerprint = _fingerprint(taskset, self._turns.shares, seed, shuffle)
        self._drawn = [0] * len(self._sources)
        self._passes = [self._permutation(index, 0) for index in range(len(self._sources))]

    def next(self) -> Task:
        """Return the next task."""
        return self._draw(self._turns.next())

    def find(self, task_id: str) -> Task:
        """Return a task by its id.

        Raises:
            CheckpointError: There is none.
        """
        for source in self._sources:
            for task in source.tasks:
                if task.task_id == task_id:
                    return task
        raise CheckpointError(f"the checkpoint names the task {task_id!r}, which the data no longer has")

    def state(self) -> dict[str, Any]:
        """Return where the sequence stands, as JSON takes it."""
        return {
            "fingerprint": self._fingerprint,
            "credits": list(self._turns.credits),
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
            drawn = [int(state["drawn"][source.name]) for source in self._sources]
            if min(drawn) < 0:
                raise ValueError(f"drawn {drawn}")
            self._turns.load([int(value) for value in state["credits"]])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's data position is damaged: {error!r}") from error
        self._drawn = drawn
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


def _weights(sources: Sequence[TaskSource]) -> list[float]:
    for source in sources:
        if not math.isfinite(source.weight):
            raise ConfigError(f"{source.key}.weight is {source.weight}", fix="set it to a finite number above 0")
    return [source.weight for source in sources]


def _integers(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the ratio of the weights, taken as the decimals that were written."""
    exact = [Fraction(repr(weight)) for weight in weights]
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
