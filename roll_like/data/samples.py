"""What supervised and preference training is fed: samples of tokens, by source, with a report of what was left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic

import numpy as np

from roll_like.config.data import RowLimits, RowSource
from roll_like.data.bad_rows import BadRow, Problem, RowCounter, RowsReport
from roll_like.data.chat import Renderer
from roll_like.data.kept_samples import kept_samples, sample_stream
from roll_like.data.order import Drawn, Order
from roll_like.data.packed import viewed
from roll_like.data.reader import ConversationSample, Reader, Sample, SampleT
from roll_like.data.streamed import Stream
from roll_like.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampleSource(Generic[SampleT]):
    """The samples of one source, in file order.

    Attributes:
        name: Name in metrics.
        key: Its place in the configuration (`data.sources.0`), for messages.
        weight: Its share, relative to the other sources.
        samples: What it holds.
        report: What was kept and what was left out.
        stream: Where its samples come from, if they are read as steps need them; `samples` are its first ones.
    """

    name: str
    key: str
    weight: float
    samples: Sequence[SampleT]
    report: RowsReport
    stream: Stream[SampleT] | None = None


@dataclass(frozen=True, kw_only=True)
class SampleSet(Generic[SampleT]):
    """All samples of a run, by source."""

    sources: tuple[SampleSource[SampleT], ...]

    @property
    def samples(self) -> tuple[SampleT, ...]:
        """Every sample, source after source."""
        return tuple(self)

    @property
    def report(self) -> tuple[RowsReport, ...]:
        """What became of each source's rows."""
        return tuple(source.report for source in self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every sample: equal for equal data, wherever the files lie."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(f"{source.name}\0{len(source.samples)}\0".encode())
            for sample in viewed(source.samples):
                content = sample.content()
                digest.update(len(content).to_bytes(8, "little") + content)
            if source.stream is not None:
                digest.update(source.stream.settings.encode())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return sum(len(source.samples) for source in self.sources)

    def __iter__(self) -> Iterator[SampleT]:
        for source in self.sources:
            yield from source.samples

    def order(self, *, seed: int, shuffle: bool = True) -> Order[SampleT]:
        """Return the endless sequence in which they are trained on, which can be resumed."""
        sources = [
            Drawn(name=source.name, key=source.key, weight=source.weight, items=source.samples, stream=source.stream)
            for source in self.sources
        ]
        return Order(sources, self.fingerprint, seed=seed, shuffle=shuffle, limit="max_tokens")


def load_source(
    source: RowSource, reader: Reader[SampleT], renderer: Renderer, limits: RowLimits, *, key: str, section: str
) -> SampleSource[SampleT]:
    """Read one dataset: from the cache, where it was tokenised before.

    Args:
        source: The dataset.
        reader: How its rows become samples.
        renderer: Tokenizer and chat template.
        limits: What happens to rows that are too long, or bad.
        key: The source's place in the configuration, for messages.
        section: The limits' place in the configuration, for messages.

    Raises:
        DataError: It cannot be read, a row is wrong (names file and line), or nothing is left of it.
    """
    samples, facts = kept_samples(source, reader, renderer, limits, key=key, section=section)
    report = RowsReport(name=source.label, **facts)
    stream = sample_stream(source, reader, renderer, limits, key=key, section=section) if source.streaming else None
    return SampleSource(name=source.label, key=key, weight=source.weight, samples=samples, report=report, stream=stream)


def load_sources(
    sources: Sequence[RowSource], load: Callable[[Any, str], SampleSource[SampleT]], section: str
) -> SampleSet[SampleT]:
    """Read datasets; `load` takes one and its place in the configuration.

    Raises:
        DataError: As `load_source` says, or two sources have one name.
    """
    names = [source.label for source in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"two sources are called {twice[0]!r}", fix=f"give each of {section}.sources a `name` of its own"
        )
    return SampleSet(sources=tuple(load(source, f"{section}.sources.{index}") for index, source in enumerate(sources)))


def fit(sample: ConversationSample, limits: RowLimits, counter: RowCounter, section: str) -> ConversationSample:
    """Return a sample that is no longer than the limit: itself, or its beginning.

    Raises:
        DataError: It is longer, and that is refused.
        BadRow: It is longer, and that is left out; or nothing that is trained would be left of it.
    """
    if len(sample) <= limits.max_tokens:
        return sample
    found = f"{len(sample)} tokens, the limit is {limits.max_tokens}"
    if limits.too_long == "refuse":
        raise DataError(
            f"{sample.origin}: {found}", fix=f"raise {section}.max_tokens, or set {section}.too_long: skip or cut"
        )
    loss_mask = sample.loss_mask[: limits.max_tokens]
    if limits.too_long == "skip" or not loss_mask.any():
        raise BadRow(Problem.TOO_LONG, found)
    counter.shorten(sample.origin, len(sample))
    end = int(np.flatnonzero(loss_mask)[-1]) + 1
    # an image ends before the last trained token, or begins after it
    images = tuple(image for image in sample.images if image.start < end)
    return replace(sample, token_ids=sample.token_ids[:end], loss_mask=loss_mask[:end], images=images)


__all__ = [
    "ConversationSample",
    "Reader",
    "Sample",
    "SampleSet",
    "SampleSource",
    "SampleT",
    "fit",
    "load_source",
    "load_sources",
]
