"""Samples as a few long arrays, in files or in memory: a million of them cost no more than their tokens.

A file holds one column of all samples, one after the other: tokens, where they are trained, where each sequence ends,
and so on. A sample is made out of its columns when it is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Generic, overload

import numpy as np
import numpy.typing as npt

from roll_like.data.reader import Reader, SampleT
from roll_like.types import TrainingSample

#: The columns and their types. `sequence_ends` counts tokens, `value_ends` numbers of `values`, `origin_ends` bytes of
#: `origins`; each of all before.
COLUMNS: dict[str, npt.DTypeLike] = {
    "token_ids": np.int32,
    "trained": np.bool_,
    "sequence_ends": np.int64,
    "parts": np.int32,
    "values": np.float64,
    "value_ends": np.int64,
    "origins": np.uint8,
    "origin_ends": np.int64,
}


def packed(samples: Sequence[tuple[Sequence[TrainingSample], Sequence[float]]]) -> dict[str, npt.NDArray[Any]]:
    """Return samples, given as their sequences and their numbers, in columns.

    Ends count from the first one's beginning.
    """
    flat = [each for sequences, _ in samples for each in sequences]
    origins = [sequences[0].origin.encode("utf-8", "surrogatepass") for sequences, _ in samples]
    columns: dict[str, Any] = {
        "token_ids": np.concatenate([each.token_ids for each in flat]) if flat else [],
        "trained": np.concatenate([each.loss_mask for each in flat]) if flat else [],
        "sequence_ends": np.cumsum([len(each) for each in flat], dtype=np.int64),
        "parts": [each.part for each in flat],
        "values": [value for _, values in samples for value in values],
        "value_ends": np.cumsum([len(values) for _, values in samples], dtype=np.int64),
        "origins": np.frombuffer(b"".join(origins), np.uint8),
        "origin_ends": np.cumsum([len(each) for each in origins], dtype=np.int64),
    }
    return {name: np.asarray(columns[name], dtype) for name, dtype in COLUMNS.items()}


class Columns:
    """Samples that are being written, in files of a folder or in memory.

    Args:
        folder: Is there, and empty; None keeps them in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._files: dict[str, IO[bytes]] = {
            name: io.BytesIO() if folder is None else (folder / name).open("wb") for name in COLUMNS
        }
        self._tokens = self._values = self._bytes = 0

    def append(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Write further samples, whose ends count from their own beginning.

        Raises:
            OSError: They cannot be written.
        """
        moved = {
            "sequence_ends": columns["sequence_ends"] + self._tokens,
            "value_ends": columns["value_ends"] + self._values,
            "origin_ends": columns["origin_ends"] + self._bytes,
        }
        for name, file in self._files.items():
            file.write(moved.get(name, columns[name]).tobytes())
        self._tokens += len(columns["token_ids"])
        self._values += len(columns["values"])
        self._bytes += len(columns["origins"])

    def finish(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns.

        Raises:
            OSError: They cannot be written.
        """
        if self.folder is not None:
            for file in self._files.values():
                file.flush()
            return mapped(self.folder)
        return {
            name: np.frombuffer(file.getvalue(), COLUMNS[name])
            for name, file in self._files.items()
            if isinstance(file, io.BytesIO)
        }

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def mapped(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the columns in a folder's files, which stay there until they are used.

    Raises:
        OSError: A file is not there.
        ValueError: A file has been cut.
    """
    # numpy maps no file without a byte
    return {
        name: np.memmap(folder / name, dtype, mode="r") if (folder / name).stat().st_size else np.zeros(0, dtype)
        for name, dtype in COLUMNS.items()
    }


class PackedSamples(Sequence[SampleT], Generic[SampleT]):
    """Samples in columns.

    Args:
        columns: All samples, as `COLUMNS` says.
        reader: Makes a sample of its sequences and its numbers.
    """

    def __init__(self, columns: dict[str, npt.NDArray[Any]], reader: Reader[SampleT]) -> None:
        self.columns, self._reader = columns, reader

    def __len__(self) -> int:
        return len(self.columns["value_ends"])

    @overload
    def __getitem__(self, index: int) -> SampleT: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[SampleT, ...]: ...

    def __getitem__(self, index: int | slice) -> SampleT | tuple[SampleT, ...]:
        if isinstance(index, slice):
            return tuple(self._at(each) for each in range(*index.indices(len(self))))
        return self._at(range(len(self))[index])

    def __iter__(self) -> Iterator[SampleT]:
        return map(self._at, range(len(self)))

    def views(self) -> Iterator[SampleT]:
        """Yield every sample for as long as it takes to look at it: without its origin, and not to be written to."""
        # slices of plain arrays take a third of the time of those of maps
        columns = {name: np.asarray(column) for name, column in self.columns.items()}
        ends, tokens, loss_mask = columns["sequence_ends"].tolist(), columns["token_ids"], columns["trained"]
        width, join = self._reader.width, self._reader.join
        sequences = (
            TrainingSample(token_ids=tokens[begin:end], loss_mask=loss_mask[begin:end], part=part)
            for begin, end, part in zip([0, *ends], ends, columns["parts"].tolist(), strict=False)
        )
        values, value_ends = columns["values"].tolist(), columns["value_ends"].tolist()
        for begin, end in zip([0, *value_ends], value_ends, strict=False):
            yield join(list(islice(sequences, width)), values[begin:end])

    def _at(self, index: int) -> SampleT:
        columns, width = self.columns, self._reader.width
        begin, end = _bounds(columns["origin_ends"], index)
        origin = columns["origins"][begin:end].tobytes().decode("utf-8", "surrogatepass")
        sequences = []
        for each in range(index * width, (index + 1) * width):
            begin, end = _bounds(columns["sequence_ends"], each)
            # copies: what is mapped cannot be written to, which torch warns of
            tokens, loss_mask = np.array(columns["token_ids"][begin:end]), np.array(columns["trained"][begin:end])
            part = int(columns["parts"][each])
            sequences.append(TrainingSample(token_ids=tokens, loss_mask=loss_mask, origin=origin, part=part))
        begin, end = _bounds(columns["value_ends"], index)
        return self._reader.join(sequences, columns["values"][begin:end].tolist())


def _bounds(ends: npt.NDArray[Any], index: int) -> tuple[int, int]:
    return (int(ends[index - 1]) if index else 0), int(ends[index])


def viewed(items: Sequence[SampleT]) -> Iterator[SampleT]:
    """Yield every item for as long as it takes to look at it: of samples in columns their views, which are quicker."""
    return items.views() if isinstance(items, PackedSamples) else iter(items)
