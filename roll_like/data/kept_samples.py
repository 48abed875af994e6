"""The samples of a source: tokenised once, and then those of this process, or those that the disk has kept."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic

from roll_like.config.data import RowLimits, RowSource
from roll_like.data.bad_rows import LeftOut, Problem, RowCounter
from roll_like.data.chat import Renderer
from roll_like.data.packed import Columns, PackedSamples
from roll_like.data.reader import Reader, SampleT
from roll_like.data.rows import Row, content_hash, read_rows
from roll_like.data.streamed import FIRST_ROWS, Stream
from roll_like.data.token_cache import TokenCache, key_of
from roll_like.data.tokenise import BATCH, Tokenised, TokeniseJob, tokenised
from roll_like.errors import DataError

#: The newest samples of this process, by what they were made of, with the facts of their report.
_REMEMBERED: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {}
_MOST_REMEMBERED = 16
#: How often it is said how far a long tokenisation is. Seconds.
_SAY_EVERY = 5.0


def kept_samples(
    source: RowSource, reader: Reader[SampleT], renderer: Renderer, limits: RowLimits, *, key: str, section: str
) -> tuple[Sequence[SampleT], dict[str, Any]]:
    """Return the samples of a source and the facts of its report; arguments and errors are those of `load_source`."""
    cache = TokenCache(limits.cache_dir, limits.cache_gib * 2**30)
    content = None if renderer.fingerprint is None or source.streaming else content_hash(source, key)
    if content is None:
        return _made(source, reader, renderer, limits, key=key, section=section)
    name = key_of(reader, renderer, source, limits, content)
    if name not in _REMEMBERED:
        found = cache.find(name) if limits.cache_gib else None
        made: tuple[Sequence[SampleT], dict[str, Any]]
        if found is not None:
            columns, facts = found
            left = tuple(LeftOut(**{**each, "problem": Problem(each["problem"])}) for each in facts["left_out"])
            made = PackedSamples(columns, reader.width, reader.make), {**facts, "left_out": left}
        else:
            made = _made_and_kept(source, reader, renderer, limits, cache, name, content, key=key, section=section)
        while len(_REMEMBERED) >= _MOST_REMEMBERED:
            del _REMEMBERED[next(iter(_REMEMBERED))]
        _REMEMBERED[name] = made
    return _REMEMBERED[name]


def sample_stream(
    source: RowSource, reader: Reader[SampleT], renderer: Renderer, limits: RowLimits, *, key: str, section: str
) -> Stream[SampleT]:
    """Return where samples come from that are read as steps need them; arguments are those of `load_source`."""
    job = TokeniseJob(reader, renderer, RowCounter(limits.bad_rows, section))

    def items(rows: Sequence[Row], _: int) -> list[SampleT]:
        batches = (rows[begin : begin + BATCH] for begin in range(0, len(rows), BATCH))
        return [sample for batch in batches for sample in job.run(batch).samples_of(reader)]

    settings = limits.model_dump_json(exclude={"sources", "cache_dir", "cache_gib"})
    return Stream(
        label=source.label,
        block=source.stream_block,
        settings=f"{source.model_dump_json()} {settings} {renderer.fingerprint}",
        rows=partial(read_rows, source, key),
        items=items,
        content=lambda sample: sample.content(),
    )


def _made_and_kept(
    source: RowSource,
    reader: Reader[SampleT],
    renderer: Renderer,
    limits: RowLimits,
    cache: TokenCache,
    name: str,
    content: str,
    *,
    key: str,
    section: str,
) -> tuple[Sequence[SampleT], dict[str, Any]]:
    """Return new samples, which the disk keeps where it can and they are many."""
    part: Path | None = None
    try:
        part = cache.begin() if limits.cache_gib else None
        samples, facts = _made(source, reader, renderer, limits, key=key, section=section, folder=part)
        many = isinstance(samples, PackedSamples) and facts["rows"] > BATCH
        # the content is another one where a file was written to meanwhile
        if part is not None and many and content_hash(source, key) == content:
            left = [asdict(each) for each in facts["left_out"]]
            cache.keep(part, name, {**facts, "left_out": left})
            part = None
    except OSError as error:
        _say(
            f"{key}: tokenised rows are not kept in {cache.folder}: {error}; set {section}.cache_dir to a folder that "
            f"can be written, or {section}.cache_gib: 0"
        )
        return _made(source, reader, renderer, limits, key=key, section=section)
    else:
        return samples, facts
    finally:
        if part is not None:  # its files stay mapped until they are not used any more
            shutil.rmtree(part, ignore_errors=True)


def _made(
    source: RowSource,
    reader: Reader[SampleT],
    renderer: Renderer,
    limits: RowLimits,
    *,
    key: str,
    section: str,
    folder: Path | None = None,
) -> tuple[Sequence[SampleT], dict[str, Any]]:
    """Return new samples, in columns unless they hold images, and the facts of their report.

    Raises:
        OSError: The folder cannot be written.
        DataError: As `load_source` says.
    """
    collected = _Collected(reader, RowCounter(limits.bad_rows, section))
    with closing(Columns(folder)) as columns:
        job = TokeniseJob(reader.sent(), renderer, collected.counter.empty())
        rows = islice(read_rows(source, key), FIRST_ROWS if source.streaming else None)
        for result in _said(tokenised(rows, job), key):
            collected.add(result, columns)
        collected.refuse_nothing(source, key, section)
        return collected.samples(columns), collected.facts()


@dataclass(slots=True)
class _Collected(Generic[SampleT]):
    """Counts what becomes of rows, and puts samples into columns until the first ones come that hold images."""

    reader: Reader[SampleT]
    counter: RowCounter
    kept: int = 0
    count: int = 0
    tokens: int = 0
    trained: int = 0
    in_memory: list[SampleT] = field(default_factory=list)

    def add(self, result: Tokenised, columns: Columns) -> None:
        """Take a batch."""
        self.counter.add(result.counter)
        self.kept += result.kept
        if result.batch is not None and not self.in_memory:
            columns.append(result.batch)
            found = result.batch.columns
            self.count += len(found["values"])
            self.tokens += len(found["token_ids"])
            self.trained += int(found["trained"].sum())
            return
        if not self.in_memory and self.count:
            self.in_memory += PackedSamples(columns.finish(), self.reader.width, self.reader.make)
        further = result.samples_of(self.reader)
        self.in_memory += further
        self.count += len(further)
        parts = [part for sample in further for part in sample.sequences]
        self.tokens += sum(map(len, parts))
        self.trained += sum(part.trained_tokens for part in parts)

    def refuse_nothing(self, source: RowSource, key: str, section: str) -> None:
        """Raise where no sample came of any row."""
        if not self.counter.rows:
            raise DataError(f"{source.place} holds no rows", fix=f"correct {key}.path or {key}.split")
        if not self.count:
            reasons = "; ".join(f"{left.count} {left.problem}, first {left.first}" for left in self.counter.left_out)
            raise DataError(
                f"{source.place}: none of {self.counter.rows} rows can be trained on: {reasons}",
                fix=f"correct the rows, or {section}.max_tokens (the longest sample has {self.counter.longest} tokens)",
            )

    def samples(self, columns: Columns) -> Sequence[SampleT]:
        """Return all samples."""
        if self.in_memory:
            return tuple(self.in_memory)
        return PackedSamples(columns.finish(), self.reader.width, self.reader.make)

    def facts(self) -> dict[str, Any]:
        """Return what the report says."""
        return {
            "rows": self.counter.rows,
            "kept": self.kept,
            "samples": self.count,
            "tokens": self.tokens,
            "trained": self.trained,
            "shortened": self.counter.shortened,
            "first_shortened": self.counter.first_shortened,
            "longest": self.counter.longest,
            "left_out": self.counter.left_out,
        }


def _said(results: Iterator[Tokenised], key: str) -> Iterator[Tokenised]:
    """Yield results, and say from time to time how far they are."""
    began = said = time.monotonic()
    rows = 0
    for result in results:
        rows += result.counter.rows
        now = time.monotonic()
        if now - said >= _SAY_EVERY:
            said = now
            _say(f"{key}: {rows:,} rows read and tokenised, {rows / (now - began):,.0f} a second")
        yield result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
