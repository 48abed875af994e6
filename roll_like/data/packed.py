"""Samples as a few long arrays, in files or in memory: a million of them cost no more than their tokens.

A file holds one column of all samples, one after the other: tokens, where they are trained, where each sequence ends,
and so on. A sample is made out of its columns when it is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
OtherT = TypeVar("OtherT")

#: The columns and their types. `sequence_ends` counts tokens, `origin_ends` bytes of `origins`; both of all before.
COLUMNS: dict[str, npt.DTypeLike] = {
    "token_ids": np.int32,
    "trained": np.bool_,
    "sequence_ends": np.int64,
    "parts": np.int32,
    "values": np.float64,
    "origins": np.uint8,
    "origin_ends": np.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some samples in columns; ends count from the batch's beginning.

    Attributes:
        columns: The arrays of `COLUMNS`.
        width: Sequences of each sample.
    """

    columns: dict[str, npt.NDArray[Any]]
    width: int

    @classmethod
    def of(cls, sequences: Sequence[Sequence[Any]], values: Sequence[float], width: int) -> Batch:
        """Return samples in columns.

        Args:
            sequences: The `ConversationSample`s of each sample.
            values: What each has beside them, as a number.
            width: How many sequences each has.
        """
        flat = [each for parts in sequences for each in parts]
        origins = [parts[0].origin.encode("utf-8", "surrogatepass") for parts in sequences]
        columns: dict[str, Any] = {
            "token_ids": np.concatenate([each.token_ids for each in flat]) if flat else [],
            "trained": np.concatenate([each.loss_mask for each in flat]) if flat else [],
            "sequence_ends": np.cumsum([len(each.token_ids) for each in flat], dtype=np.int64),
            "parts": [each.part for each in flat],
            "values": values,
            "origins": np.frombuffer(b"".join(origins), np.uint8),
            "origin_ends": np.cumsum([len(each) for each in origins], dtype=np.int64),
        }
        return cls(columns={name: np.asarray(columns[name], dtype) for name, dtype in COLUMNS.items()}, width=width)


class Columns:
    """Samples that are being written, in files of a folder or in memory.

    Args:
        folder: Is there, and empty; None keeps them in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.width = 1
        self._files: dict[str, IO[bytes]] = {
            name: io.BytesIO() if folder is None else (folder / name).open("wb") for name in COLUMNS
        }
        self._tokens = self._bytes = 0

    def append(self, batch: Batch) -> None:
        """Write further samples.

        Raises:
            OSError: They cannot be written.
        """
        columns = batch.columns
        self.width = batch.width
        moved = {
            "sequence_ends": columns["sequence_ends"] + self._tokens,
            "origin_ends": columns["origin_ends"] + self._bytes,
        }
        for name, file in self._files.items():
            file.write(moved.get(name, columns[name]).tobytes())
        self._tokens += len(columns["token_ids"])
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


class PackedSamples(Sequence[T], Generic[T]):
    """Samples in columns.

    Args:
        columns: All samples, as `COLUMNS` says.
        width: Sequences of each sample.
        make: Makes a sample of its sequences, given as (tokens, loss_mask, origin, part), and of its number.
    """

    def __init__(
        self, columns: dict[str, npt.NDArray[Any]], width: int, make: Callable[[list[tuple[Any, ...]], float], T]
    ) -> None:
        self.columns, self.width, self._make = columns, width, make

    def __len__(self) -> int:
        return len(self.columns["values"])

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self._at(each) for each in range(*index.indices(len(self))))
        return self._at(range(len(self))[index])

    def __iter__(self) -> Iterator[T]:
        return map(self._at, range(len(self)))

    def views(self) -> Iterator[T]:
        """Yield every sample for as long as it takes to look at it: without its origin, and not to be written to."""
        # slices of plain arrays take a third of the time of those of maps
        columns = {name: np.asarray(column) for name, column in self.columns.items()}
        ends, tokens, loss_mask = columns["sequence_ends"].tolist(), columns["token_ids"], columns["trained"]
        begins, width, parts = [0, *ends], self.width, columns["parts"].tolist()
        for index, value in enumerate(columns["values"].tolist()):
            found = []
            for each in range(index * width, (index + 1) * width):
                here = slice(begins[each], ends[each])
                found.append((tokens[here], loss_mask[here], "", parts[each]))
            yield self._make(found, value)

    def _at(self, index: int) -> T:
        columns = self.columns
        begin, end = _bounds(columns["origin_ends"], index)
        origin = columns["origins"][begin:end].tobytes().decode("utf-8", "surrogatepass")
        parts = []
        for each in range(index * self.width, (index + 1) * self.width):
            begin, end = _bounds(columns["sequence_ends"], each)
            # copies: what is mapped cannot be written to, which torch warns of
            tokens, loss_mask = np.array(columns["token_ids"][begin:end]), np.array(columns["trained"][begin:end])
            parts.append((tokens, loss_mask, origin, int(columns["parts"][each])))
        return self._make(parts, float(columns["values"][index]))


def _bounds(ends: npt.NDArray[Any], index: int) -> tuple[int, int]:
    return (int(ends[index - 1]) if index else 0), int(ends[index])


class MappedSequence(Sequence[OtherT], Generic[T, OtherT]):
    """A sequence whose items are made of another's when they are asked for."""

    def __init__(self, items: Sequence[T], make: Callable[[T], OtherT]) -> None:
        self._items, self._make = items, make

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> OtherT: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[OtherT, ...]: ...

    def __getitem__(self, index: int | slice) -> OtherT | tuple[OtherT, ...]:
        if isinstance(index, slice):
            return tuple(map(self._make, self._items[index]))
        return self._make(self._items[index])

    def __iter__(self) -> Iterator[OtherT]:
        return map(self._make, self._items)

    def views(self) -> Iterator[OtherT]:
        """Yield every item for as long as it takes to look at it."""
        return map(self._make, viewed(self._items))


def viewed(items: Sequence[T]) -> Iterator[T]:
    """Yield every item for as long as it takes to look at it: of samples in columns their views, which are quicker."""
    return items.views() if isinstance(items, PackedSamples | MappedSequence) else iter(items)
