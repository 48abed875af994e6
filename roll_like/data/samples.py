"""What supervised and preference training is fed: samples of tokens, by source, with a report of what was left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from roll_like.config.data import RowLimits
from roll_like.data.bad_rows import SamplesReport
from roll_like.data.chat import Renderer
from roll_like.data.kept_samples import kept_samples, sample_stream
from roll_like.data.order import ItemSet, ItemSource, Order
from roll_like.data.packed import viewed
from roll_like.data.reader import Reader, SampleT
from roll_like.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampleSet(ItemSet[SampleT]):
    """All samples of a run, by source.

    Attributes:
        report: What became of each source's rows.
    """

    report: tuple[SamplesReport, ...]

    @property
    def samples(self) -> tuple[SampleT, ...]:
        """Every sample, source after source."""
        return tuple(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every sample: equal for equal data, wherever the files lie."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(f"{source.name}\0{len(source.items)}\0".encode())
            for sample in viewed(source.items):
                content = sample.content()
                digest.update(len(content).to_bytes(8, "little") + content)
            if source.stream is not None:
                digest.update(source.stream.settings.encode())
        return digest.hexdigest()[:16]

    def order(self, *, seed: int, shuffle: bool = True) -> Order[SampleT]:
        """Return the endless sequence in which they are trained on, which can be resumed."""
        return Order(self.sources, self.fingerprint, seed=seed, shuffle=shuffle, limit="max_tokens")


def load_samples(
    data: RowLimits, renderer: Renderer, reader: Callable[..., Reader[SampleT]], section: str = "data"
) -> SampleSet[SampleT]:
    """Read datasets: from the cache, where they were tokenised before.

    Args:
        data: The datasets, and what happens to rows that are too long or bad.
        reader: Makes what reads a source, given the fields of `Reader`.
        section: Where `data` stands in the configuration, for messages.

    Raises:
        DataError: A source cannot be read, a row is wrong (names file, line and key), nothing is left of a source, or
            two sources have one name.
    """
    sources: Any = getattr(data, "sources")  # noqa: B009 - those of each kind of data have a type of their own
    names = [source.label for source in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"two sources are called {twice[0]!r}", fix=f"give each of {section}.sources a `name` of its own"
        )
    loaded, reports = [], []
    for index, source in enumerate(sources):
        key = f"{section}.sources.{index}"
        reads = reader(source=source, key=key, limits=data, section=section)
        samples, report = kept_samples(reads, renderer)
        stream = sample_stream(reads, renderer) if source.streaming else None
        loaded.append(ItemSource(name=source.label, key=key, weight=source.weight, items=samples, stream=stream))
        reports.append(report)
    return SampleSet(sources=tuple(loaded), report=tuple(reports))
