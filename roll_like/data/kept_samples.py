"""The samples of a source: tokenised once, and then those of this process, or those that the disk has kept."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from roll_like.data.bad_rows import LeftOut, Problem, SamplesReport
from roll_like.data.chat import Renderer
from roll_like.data.packed import Columns, PackedSamples
from roll_like.data.reader import Reader, SampleT
from roll_like.data.rows import Row, content_hash, read_rows
from roll_like.data.streamed import FIRST_ROWS, Stream
from roll_like.data.token_cache import TokenCache, key_of
from roll_like.data.tokenise import BATCH, Tokenised, TokeniseJob, tokenised
from roll_like.errors import DataError

#: Samples, in columns unless they hold images, and what became of the rows.
Made: TypeAlias = tuple[Sequence[SampleT], SamplesReport]

#: The newest samples of this process, by what they were made of.
_REMEMBERED: dict[str, tuple[dict[str, Any], SamplesReport]] = {}
_MOST_REMEMBERED = 16
#: How often it is said how far a long tokenisation is. Seconds.
_SAY_EVERY = 5.0


def kept_samples(reader: Reader[SampleT], renderer: Renderer) -> Made[SampleT]:
    """Return the samples of a reader's source; errors are those of `load_samples`."""
    content = None
    if renderer.fingerprint is not None and not reader.source.streaming:
        content = content_hash(reader.source, reader.key)
    if content is None:
        return _made(reader, renderer)
    key = key_of(reader, renderer, content)
    if key not in _REMEMBERED:
        cache = TokenCache(reader.limits.cache_dir, reader.limits.cache_gib * 2**30)
        found = cache.find(key) if reader.limits.cache_gib else None
        if found is not None:
            columns, facts = found
            left = tuple(LeftOut(**{**each, "problem": Problem(each["problem"])}) for each in facts["left_out"])
            remembered = columns, SamplesReport(**{**facts, "left_out": left})
        else:
            samples, report = _made_and_kept(reader, renderer, cache, key, content)
            if not isinstance(samples, PackedSamples):
                return samples, report
            remembered = samples.columns, report
        while len(_REMEMBERED) >= _MOST_REMEMBERED:
            del _REMEMBERED[next(iter(_REMEMBERED))]
        _REMEMBERED[key] = remembered
    columns, report = _REMEMBERED[key]
    return PackedSamples(columns, reader), replace(report, name=reader.source.label)


def sample_stream(reader: Reader[SampleT], renderer: Renderer) -> Stream[SampleT]:
    """Return where samples come from that are read as steps need them."""
    source, job = reader.source, TokeniseJob(reader, renderer)

    def items(rows: Sequence[Row], _: int) -> list[SampleT]:
        batches = (rows[begin : begin + BATCH] for begin in range(0, len(rows), BATCH))
        return [sample for batch in batches for sample in job.run(batch).samples_of(reader)]

    limits = reader.limits.model_dump_json(exclude={"sources", "cache_dir", "cache_gib"})
    return Stream(
        label=source.label,
        block=source.stream_block,
        settings=f"{source.model_dump_json()} {limits} {renderer.fingerprint}",
        rows=partial(read_rows, source, reader.key),
        items=items,
        content=lambda sample: sample.content(),
    )


def _made_and_kept(
    reader: Reader[SampleT], renderer: Renderer, cache: TokenCache, key: str, content: str
) -> Made[SampleT]:
    """Return new samples, which the disk keeps under a key where it can and they are many."""
    part: Path | None = None
    try:
        part = cache.begin() if reader.limits.cache_gib else None
        samples, report = _made(reader, renderer, part)
        many = isinstance(samples, PackedSamples) and report.rows > BATCH
        # the content is another one where a file was written to meanwhile
        if part is not None and many and content_hash(reader.source, reader.key) == content:
            cache.keep(part, key, asdict(report))
            part = None
    except OSError as error:
        _say(
            f"{reader.key}: tokenised rows are not kept in {cache.folder}: {error}; set {reader.section}.cache_dir to "
            f"a folder that can be written, or {reader.section}.cache_gib: 0"
        )
        return _made(reader, renderer)
    else:
        return samples, report
    finally:
        if part is not None:  # its files stay mapped until they are not used any more
            shutil.rmtree(part, ignore_errors=True)


def _made(reader: Reader[SampleT], renderer: Renderer, folder: Path | None = None) -> Made[SampleT]:
    """Return new samples.

    Raises:
        OSError: The folder cannot be written.
        DataError: As `load_samples` says.
    """
    source, key = reader.source, reader.key
    counter, in_memory = reader.counter(), list[SampleT]()
    with closing(Columns(folder)) as columns:
        rows = islice(read_rows(source, key), FIRST_ROWS if source.streaming else None)
        for result in _said(tokenised(rows, TokeniseJob(reader.sent(), renderer)), key):
            counter.add(result.counter)
            if result.columns is not None and not in_memory:
                columns.append(result.columns)
            else:  # from the first images on
                in_memory += [] if in_memory else PackedSamples(columns.finish(), reader)
                in_memory += result.samples_of(reader)
        report = counter.report(source.label)
        if not report.rows:
            raise DataError(f"{source.place} holds no rows", fix=f"correct {key}.path or {key}.split")
        if not report.samples:
            reasons = "; ".join(f"{left.count} {left.problem}, first {left.first}" for left in report.left_out)
            raise DataError(
                f"{source.place}: none of {report.rows} rows can be trained on: {reasons}",
                fix=f"correct the rows, or {reader.section}.max_tokens (the longest sample has {report.longest} "
                "tokens)",
            )
        return tuple(in_memory) or PackedSamples(columns.finish(), reader), report


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
