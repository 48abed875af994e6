"""Rows to samples, many at a time: here, and of large data in further processes.

A process runs `main`. It reads pickled values from its standard input and
answers on its standard output: first what it works with, then batches of rows. It ends when its input does, also if the
process that started it is killed. It is no fork, which would copy threads' locks, and it does not import the user's
program.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from roll_like.data.bad_rows import BadRow, Problem, RowCounter, refuse_odd_text
from roll_like.data.chat import WITHOUT_UNKNOWN, Renderer
from roll_like.data.images import download_images, require_whole_images, shift_images
from roll_like.data.packed import PackedSamples, packed
from roll_like.data.reader import Reader
from roll_like.data.rows import Row
from roll_like.data.turns import Piece
from roll_like.errors import DataError, RollLikeError
from roll_like.types import IntArray, PlacedImage, TrainingSample

#: Rows that are tokenised in one call.
BATCH = 512
#: Rows that are tokenised in this process before others are started, which takes seconds.
_FIRST_ROWS = 16 * BATCH
_MOST_PROCESSES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    """What became of a batch of rows.

    Attributes:
        columns: The samples in columns; None where they hold images.
        with_images: The samples that do.
        counter: How many, and what became of the other rows.
    """

    columns: dict[str, npt.NDArray[Any]] | None
    with_images: list[Any]
    counter: RowCounter

    def samples_of(self, reader: Reader[Any]) -> Sequence[Any]:
        """Return the samples themselves."""
        return self.with_images if self.columns is None else list(PackedSamples(self.columns, reader))


@dataclass(frozen=True, slots=True)
class TokeniseJob:
    """What rows become samples by: picklable."""

    reader: Reader[Any]
    renderer: Renderer

    def run(self, rows: Sequence[Row]) -> Tokenised:
        """Return what becomes of rows.

        Raises:
            DataError: A row is wrong, and that is refused.
        """
        reader, counter = self.reader, self.reader.counter()
        samples: list[Any] = []
        for row, sequences in _tokenised(rows, reader, self.renderer, counter):
            counter.longest = max(counter.longest, *map(len, sequences))
            try:
                if counter.bad_rows == "skip":  # else --check decodes some of the images
                    require_whole_images(image.picture for each in sequences for image in each.images)
                made = reader.finish(row, sequences, counter)
            except BadRow as bad:
                counter.leave(row.origin, bad)
                continue
            counter.kept += bool(made)
            samples += made
        parts = [part for sample in samples for part in sample.sequences]
        counter.samples += len(samples)
        counter.tokens += sum(map(len, parts))
        counter.trained += sum(part.trained_tokens for part in parts)
        if any(part.images for part in parts):
            return Tokenised(columns=None, with_images=samples, counter=counter)
        columns = packed([(sample.sequences, reader.values(sample)) for sample in samples])
        return Tokenised(columns=columns, with_images=[], counter=counter)


def tokenised(rows: Iterable[Row], job: TokeniseJob) -> Iterator[Tokenised]:
    """Yield what becomes of rows, batch after batch in their order; of many rows, by several processes.

    Raises:
        DataError: A row is wrong, or a process was lost.
    """
    remaining = iter(rows)
    batches = iter(lambda: list(islice(remaining, BATCH)), [])
    for batch in islice(batches, _FIRST_ROWS // BATCH):
        yield job.run(batch)
    count = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    first = next(batches, None)
    if first is None:
        return
    text = _pickled(job) if count > 1 and job.renderer.images is None else None
    further = chain([first], batches)
    yield from map(job.run, further) if text is None else _by_processes(text, further, count)


def _pickled(job: TokeniseJob) -> bytes | None:
    """Return a job for other processes; None where a part of it cannot be sent, such as a reader made in a function."""
    if type(job.reader).__module__ == "__main__":  # the user's program, which others do not import
        return None
    try:
        return pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _by_processes(job: bytes, batches: Iterable[list[Row]], count: int) -> Iterator[Tokenised]:
    """Yield what becomes of batches, in their order; each process is driven by a thread, which waits for it."""
    paths = os.pathsep.join([path for path in sys.path if path] + [os.getcwd()])
    environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    idle: queue.Queue[tuple[subprocess.Popen[bytes], bytes]] = queue.Queue()

    def run(batch: list[Row]) -> Tokenised:
        process, begin = idle.get()
        answer = _answer(process, begin, batch)
        idle.put((process, b""))  # it has the job from now on
        if isinstance(answer, BaseException):
            raise answer
        return answer

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(count))
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C and a scheduler's signals are this process's to answer
            )
            stack.callback(_end, process)
            idle.put((process, job))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        waiting: deque[Future[Tokenised]] = deque()
        for batch in batches:
            waiting.append(pool.submit(run, batch))
            if len(waiting) >= 3 * count:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def _answer(process: subprocess.Popen[bytes], begin: bytes, batch: list[Row]) -> Tokenised | RollLikeError:
    """Return what became of a batch, or why it is refused; `begin` is what the process is sent before it.

    Raises:
        DataError: The process ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(begin)
        pickle.dump(batch, process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        answer: Tokenised | RollLikeError = pickle.load(process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            f"a process that tokenises rows ended with code {process.wait()} at {batch[0].origin}",
            fix="look above for its message; where there is none, it had too little memory (code -9): "
            "let fewer processes tokenise (`taskset -c 0,1 roll-like …`)",
        ) from error
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not sent goes nowhere
                pipe.close()


def main() -> None:
    """Answer batches of rows, which standard input has, until there are no more."""
    # what is printed meanwhile must not come between the answers
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # an input that ends amid a value is that of a process that was killed, and so is an output that nobody reads
    with suppress(EOFError, pickle.UnpicklingError, BrokenPipeError):
        job: TokeniseJob = pickle.load(requests)
        while True:
            batch = pickle.load(requests)
            try:
                answer: Tokenised | RollLikeError = job.run(batch)
            except RollLikeError as error:
                answer = error
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _tokenised(
    batch: Sequence[Row], reader: Reader[Any], renderer: Renderer, counter: RowCounter
) -> Iterator[tuple[Row, list[TrainingSample]]]:
    """Yield the rows that are not bad with their sequences; all are tokenised in one call."""
    if renderer.images is not None:
        download_images(batch)
    drafts: list[tuple[Row, list[list[Piece]]]] = []
    for row in batch:
        counter.rows += 1
        try:
            refuse_odd_text(row.fields)
            drafts.append((row, reader.draft(row, renderer)))
        except BadRow as bad:
            counter.leave(row.origin, bad)
    pieces = [(piece.text, place == 0) for _, draft in drafts for pieces in draft for place, piece in enumerate(pieces)]
    tokens = iter(renderer.encode_pieces(pieces))
    for row, draft in drafts:
        encoded = [list(islice(tokens, len(pieces))) for pieces in draft]
        try:
            made = [
                _joined(pieces, ids, renderer, row, at)
                for at, (pieces, ids) in enumerate(zip(draft, encoded, strict=True))
            ]
        except BadRow as bad:
            counter.leave(row.origin, bad)
            continue
        yield row, made


def _joined(
    pieces: Sequence[Piece], tokens: Sequence[IntArray], renderer: Renderer, row: Row, part: int
) -> TrainingSample:
    if (unknown := next(filter(None, map(renderer.unknown, tokens)), None)) is not None:
        raise BadRow(Problem.UNKNOWN, f"it has {unknown}", fix=WITHOUT_UNKNOWN)
    images: list[PlacedImage] = []
    if any(piece.pictures for piece in pieces):
        expanded: list[IntArray] = []
        length = 0
        for ids, piece in zip(tokens, pieces, strict=True):
            seen, found = (ids, ()) if piece.trained else renderer.expanded(ids, piece.pictures, row.origin)
            images += shift_images(found, length)
            expanded.append(seen)
            length += len(seen)
        tokens = expanded
    loss_mask = np.repeat([piece.trained for piece in pieces], [len(ids) for ids in tokens])
    if len(loss_mask):
        loss_mask[0] = False  # nothing predicts it
    return TrainingSample(
        token_ids=np.concatenate(tokens).astype(np.int32),
        loss_mask=loss_mask,
        origin=row.origin,
        part=part,
        images=tuple(images),
    )
