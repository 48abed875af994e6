"""Which task or sample comes next: endless, deterministic, weighted over sources, and resumable anywhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Generic, TypeVar

from roll_like.data.streamed import Stream, StreamPosition
from roll_like.errors import CheckpointError, ConfigError

ItemT = TypeVar("ItemT")


class RoundRobin:
    """Smooth weighted round robin over sources.

    With integer weights w of sum W, after every W turns each has had exactly its w, and none is ever a whole
    turn ahead of its share.

    Worked example: weights 2 and 1 give 0, 1, 0, 0, 1, 0, …

    Args:
        weights: A finite number above 0 for each; taken as the decimals that were written.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        self.shares = _integers(weights)
        self.credits = [0] * len(self.shares)

    def next(self) -> int:
        """Return the index of the next source."""
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


@dataclass(frozen=True, kw_only=True)
class ItemSource(Generic[ItemT]):
    """The tasks or samples of one source, in file order.

    Attributes:
        name: Name in metrics, unique.
        key: Its place in the configuration (`data.sources.0`), for messages.
        weight: Its share, relative to the other sources; a float is taken as the decimal that was written.
        items: What it holds.
        stream: Where its items come from, if they are read as steps need them; `items` are its first ones.
    """

    name: str
    key: str
    weight: float | Fraction
    items: Sequence[ItemT]
    stream: Stream[ItemT] | None = None


@dataclass(frozen=True, kw_only=True)
class ItemSet(Generic[ItemT]):
    """All tasks or samples of a run, by source."""

    sources: tuple[ItemSource[ItemT], ...]

    def __len__(self) -> int:
        return sum(len(source.items) for source in self.sources)

    def __iter__(self) -> Iterator[ItemT]:
        for source in self.sources:
            yield from source.items


class Order(Generic[ItemT]):
    """An endless sequence of items.

    Sources take turns by `RoundRobin`. Each source runs through all its items before any comes again; every pass
    is shuffled anew.

    Args:
        seed: Seed of the shuffles. The order depends on nothing else: not on library versions, not on the machine.
        shuffle: False keeps file order in every pass.
        limit: Configuration key of the token limit that decides which rows are items, for messages.

    Raises:
        ConfigError: There is nothing to draw from, or a weight is infinite.
    """

    def __init__(
        self, sources: Sequence[ItemSource[ItemT]], fingerprint: str, *, seed: int, shuffle: bool = True, limit: str
    ) -> None:
        if not sources or not all(source.items for source in sources):
            raise ConfigError("a data source without tasks cannot be drawn from", fix="correct data.sources")
        for source in sources:
            if not math.isfinite(source.weight):
                raise ConfigError(f"{source.key}.weight is {source.weight}", fix="set it to a finite number above 0")
        self._seed = seed
        self._shuffle = shuffle
        self._limit = limit
        self._sources = sources
        self._turns = RoundRobin([source.weight for source in sources])
        shares = zip([source.name for source in sources], self._turns.shares, strict=True)
        decisive = repr([fingerprint, list(shares), seed, shuffle])
        self._fingerprint = hashlib.sha256(decisive.encode()).hexdigest()[:16]
        self._drawn = [0] * len(self._sources)
        self._streams = [
            None if source.stream is None else StreamPosition(source.stream, partial(self._permuted, source.name))
            for source in sources
        ]
        self._passes = [self._permutation(index, 0) for index in range(len(self._sources))]

    @property
    def drawn(self) -> int:
        """Items drawn so far, from all sources."""
        return sum(self._drawn)

    def next(self) -> ItemT:
        """Return the next item."""
        index = self._turns.next()
        stream = self._streams[index]
        if stream is not None:
            item = stream.next()
            self._drawn[index] += 1
            return item
        items = self._sources[index].items
        number, position = divmod(self._drawn[index], len(items))
        if position == 0:
            self._passes[index] = self._permutation(index, number)
        self._drawn[index] += 1
        return items[self._passes[index][position]]

    def take(self, count: int) -> list[ItemT]:
        """Return the next items."""
        return [self.next() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Return where the sequence stands, as JSON takes it."""
        pairs = zip(self._sources, self._streams, strict=True)
        streams = {source.name: stream.state() for source, stream in pairs if stream is not None}
        return {
            "fingerprint": self._fingerprint,
            "credits": list(self._turns.credits),
            "drawn": {source.name: drawn for source, drawn in zip(self._sources, self._drawn, strict=True)},
            **({"streams": streams} if streams else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the sequence from here is the one that it would have been.

        Raises:
            CheckpointError: The state is of other data, weights, seed or shuffling, or is damaged.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise CheckpointError(
                f"the data changed since the checkpoint: rows, tokenizer, chat template, {self._limit}, weights, "
                f"shuffle or seed (fingerprint {state.get('fingerprint')!r}, now {self._fingerprint!r})",
                fix="restore the `data` section, `seed` and the files as they were, or start a new run",
            )
        try:
            drawn = [int(state["drawn"][source.name]) for source in self._sources]
            if min(drawn) < 0:
                raise ValueError(f"drawn {drawn}")
            self._turns.load([int(value) for value in state["credits"]])
            for source, stream in zip(self._sources, self._streams, strict=True):
                if stream is not None:
                    stream.load_state(state["streams"][source.name])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's data position is damaged: {error!r}") from error
        self._drawn = drawn
        passes = [count // len(source.items) for count, source in zip(drawn, self._sources, strict=True)]
        self._passes = [self._permutation(index, number) for index, number in enumerate(passes)]

    def _permutation(self, index: int, number: int) -> Sequence[int]:
        """Return the order of pass `number`: positions sorted by a keyed hash of each."""
        if self._streams[index] is not None:
            return ()
        return self._permuted(self._sources[index].name, len(self._sources[index].items), str(number))

    def _permuted(self, name: str, size: int, number: str) -> Sequence[int]:
        if not self._shuffle:
            return range(size)
        key = hashlib.blake2b(f"{self._seed}/{number}/{name}".encode(), digest_size=32).digest()

        def rank(position: int) -> bytes:
            return hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=16).digest()

        return sorted(range(size), key=rank)


def exact_weight(weight: float | Fraction) -> Fraction:
    """Return a weight as the decimal that was written."""
    return weight if isinstance(weight, Fraction) else Fraction(repr(weight))


def _integers(weights: Sequence[float | Fraction]) -> list[int]:
    """Return the smallest integers in the ratio of the weights."""
    exact = [exact_weight(weight) for weight in weights]
    common = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * common) for fraction in exact]
    divisor = math.gcd(*whole)
    return [number // divisor for number in whole]
