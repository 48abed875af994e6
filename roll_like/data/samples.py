"""What supervised and preference training is fed: samples of tokens, by source, with a report of what was left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from roll_like.config.training_data import RowLimits, RowSource
from roll_like.data.bad_rows import BadRow, Problem, RowsReport, SampleCounter
from roll_like.data.chat import WITHOUT_UNKNOWN, Renderer
from roll_like.data.images import download_images, moved
from roll_like.data.order import Drawn, Order
from roll_like.data.rows import Row, read_rows
from roll_like.data.turns import Piece
from roll_like.errors import DataError
from roll_like.types import BoolArray, IntArray, PlacedImage

_BATCH = 512  # rows tokenised in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSample:
    """A sequence of tokens with the assistant's among them.

    Attributes:
        token_ids: The sequence, shape [T]; ends with a trained token.
        trained: True where the loss applies, shape [T]; never at the first token, which nothing predicts.
        origin: `file:line` of its row.
        part: Its place among the parts of a conversation that was cut; 0 for one that was not.
        images: The images among its tokens, in order.
    """

    token_ids: IntArray
    trained: BoolArray
    origin: str
    part: int = 0
    images: tuple[PlacedImage, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(self.trained.argmax())

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss applies to."""
        return int(self.trained.sum())

    @property
    def sequences(self) -> tuple[ConversationSample, ...]:
        """Its sequences: itself."""
        return (self,)

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        images = b"".join(image.picture.digest for image in self.images)
        return self.token_ids.tobytes() + self.trained.tobytes() + images


class Sample(Protocol):
    """What a source holds."""

    @property
    def sequences(self) -> tuple[ConversationSample, ...]:
        """Its sequences of tokens."""

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""


SampleT = TypeVar("SampleT", bound=Sample)


@dataclass(frozen=True, kw_only=True)
class SampleSource(Generic[SampleT]):
    """The samples of one source, in file order.

    Attributes:
        name: Name in metrics.
        key: Its place in the configuration (`data.sources.0`), for messages.
        weight: Its share, relative to the other sources.
        samples: What it holds.
        report: What was kept and what was left out.
    """

    name: str
    key: str
    weight: float
    samples: tuple[SampleT, ...]
    report: RowsReport


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
            for sample in source.samples:
                content = sample.content()
                digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return sum(len(source.samples) for source in self.sources)

    def __iter__(self) -> Iterator[SampleT]:
        for source in self.sources:
            yield from source.samples

    def order(self, *, seed: int, shuffle: bool = True) -> Order[SampleT]:
        """Return the endless sequence in which they are trained on, which can be resumed."""
        sources = [
            Drawn(name=source.name, key=source.key, weight=source.weight, items=source.samples)
            for source in self.sources
        ]
        return Order(sources, self.fingerprint, seed=seed, shuffle=shuffle, limit="max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader(Generic[SampleT]):
    """How the rows of one source become samples.

    Attributes:
        draft: Returns the sequences of a row, as texts.
        finish: Returns the samples of a row from its sequences, as tokens.
    """

    draft: Callable[[Row], list[list[Piece]]]
    finish: Callable[[Row, list[ConversationSample], SampleCounter], list[SampleT]]


def load_source(
    source: RowSource, reader: Reader[SampleT], renderer: Renderer, limits: RowLimits, *, key: str, section: str
) -> SampleSource[SampleT]:
    """Read one dataset.

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
    counter = SampleCounter(limits.bad_rows, section)
    samples: list[SampleT] = []
    kept = 0
    for row, sequences in _tokenised(read_rows(source, key), reader, renderer, counter):
        counter.longest = max(counter.longest, *map(len, sequences))
        try:
            made = reader.finish(row, sequences, counter)
        except BadRow as bad:
            counter.leave(row.origin, bad)
            continue
        kept += bool(made)
        samples += made
    if not counter.rows:
        raise DataError(f"{source.path} holds no rows", fix=f"correct {key}.path or {key}.split")
    if not samples:
        reasons = "; ".join(f"{left.count} {left.problem}, first {left.first}" for left in counter.left_out)
        raise DataError(
            f"{source.path}: none of {counter.rows} rows can be trained on: {reasons}",
            fix=f"correct the rows, or {section}.max_tokens (the longest sample has {counter.longest} tokens)",
        )
    parts = [part for sample in samples for part in sample.sequences]
    report = RowsReport(
        name=source.label,
        rows=counter.rows,
        kept=kept,
        samples=len(samples),
        tokens=sum(map(len, parts)),
        trained=sum(part.trained_tokens for part in parts),
        shortened=counter.shortened,
        first_shortened=counter.first_shortened,
        longest=counter.longest,
        left_out=counter.left_out,
    )
    return SampleSource(name=source.label, key=key, weight=source.weight, samples=tuple(samples), report=report)


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


def fit(sample: ConversationSample, limits: RowLimits, counter: SampleCounter, section: str) -> ConversationSample:
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
    trained = sample.trained[: limits.max_tokens]
    if limits.too_long == "skip" or not trained.any():
        raise BadRow(Problem.TOO_LONG, found)
    counter.shorten(sample.origin, len(sample))
    end = int(np.flatnonzero(trained)[-1]) + 1
    # an image ends before the last trained token, or begins after it
    images = tuple(image for image in sample.images if image.start < end)
    return replace(sample, token_ids=sample.token_ids[:end], trained=trained[:end], images=images)


def _tokenised(
    rows: Iterable[Row], reader: Reader[Any], renderer: Renderer, counter: SampleCounter
) -> Iterator[tuple[Row, list[ConversationSample]]]:
    """Yield the rows that are not bad with their sequences; many are tokenised in one call."""
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH)):
        if renderer.images is not None:
            download_images(batch)
        drafts: list[tuple[Row, list[list[Piece]]]] = []
        for row in batch:
            counter.rows += 1
            try:
                drafts.append((row, reader.draft(row)))
            except BadRow as bad:
                counter.leave(row.origin, bad)
        pieces = [
            (piece.text, place == 0) for _, draft in drafts for pieces in draft for place, piece in enumerate(pieces)
        ]
        tokens = iter(renderer.encode_pieces(pieces))
        for row, draft in drafts:
            found = [list(islice(tokens, len(pieces))) for pieces in draft]
            unknown = next((said for part in found for ids in part if (said := renderer.unknown(ids))), None)
            if unknown is not None:
                counter.leave(row.origin, BadRow(Problem.UNKNOWN, f"it has {unknown}", fix=WITHOUT_UNKNOWN))
                continue
            yield row, [_joined(pieces, found[at], renderer, row, at) for at, pieces in enumerate(draft)]


def _joined(
    pieces: Sequence[Piece], tokens: Sequence[IntArray], renderer: Renderer, row: Row, part: int
) -> ConversationSample:
    images: list[PlacedImage] = []
    if any(piece.pictures for piece in pieces):
        expanded: list[IntArray] = []
        length = 0
        for ids, piece in zip(tokens, pieces, strict=True):
            seen, found = (ids, ()) if piece.trained else renderer.expanded(ids, piece.pictures, row.origin)
            images += moved(found, length)
            expanded.append(seen)
            length += len(seen)
        tokens = expanded
    trained = np.concatenate([np.full(len(ids), piece.trained) for ids, piece in zip(tokens, pieces, strict=True)])
    if len(trained):
        trained[0] = False  # nothing predicts it
    return ConversationSample(
        token_ids=np.concatenate(tokens).astype(np.int32),
        trained=trained,
        origin=row.origin,
        part=part,
        images=tuple(images),
    )
