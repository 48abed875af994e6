"""Items of data that does not fit: read block after block as steps need them, endless, and resumable.

A block is so many rows in the order of the files. Its items are shuffled with each other, and all are drawn before the
next block is read; after the last row the first comes again. Where a stream stands is the number of its pass, the row
at which its block begins, and how many of the block's items are drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from roll_like.data.rows import Row
from roll_like.errors import CheckpointError, DataError

ItemT = TypeVar("ItemT")

#: Rows of a stream that are read before a run, to find what is wrong with them.
FIRST_ROWS = 1024
#: Rows that are read at most to find so many that `where` keeps.
MOST_ROWS = 64 * FIRST_ROWS


@dataclass(frozen=True, kw_only=True)
class Stream(Generic[ItemT]):
    """Where the items of a source come from.

    Attributes:
        label: Name of the source.
        block: Rows that are read at once.
        settings: All that decides which items rows become, as text.
        rows: Begins to read the rows.
        items: Makes items of rows, given with the number of the first one, from 1.
        content: Returns what training sees of an item.
    """

    label: str
    block: int
    settings: str
    rows: Callable[[], Iterable[Row]]
    items: Callable[[Sequence[Row], int], Sequence[ItemT]]
    content: Callable[[ItemT], bytes]

    def at(self, number: int) -> ItemT | None:
        """Return the item of a row, counted from 1; None where it has none."""
        row = next(islice(self.rows(), number - 1, None), None)
        found = () if row is None else self.items([row], number)
        return found[0] if found else None


class StreamPosition(Generic[ItemT]):
    """A place in a stream.

    Args:
        permutation: Returns the order of so many items: given their number and a name that is another for each block.
    """

    def __init__(self, stream: Stream[ItemT], permutation: Callable[[int, str], Sequence[int]]) -> None:
        self._stream = stream
        self._permutation = permutation
        self._pass = self._row = self._taken = 0
        self._read = 0
        self._items: Sequence[ItemT] = ()
        self._order: Sequence[int] = ()
        self._rows: Iterator[Row] | None = None
        self._content: str | None = None

    def next(self) -> ItemT:
        """Return the next item.

        Raises:
            DataError: A row is wrong, or no row of a whole pass has an item.
        """
        began = self._pass
        while self._taken >= len(self._items):
            self._row, self._taken = self._row + self._read, 0
            if not self._block():
                if self._pass > began:  # a whole pass
                    raise DataError(
                        f"no row of {self._stream.label} can be trained on", fix="correct the rows, or raise the limit"
                    )
                self._pass, self._row, self._rows = self._pass + 1, 0, None
        self._taken += 1
        return self._items[self._order[self._taken - 1]]

    def state(self) -> dict[str, Any]:
        """Return the place, as JSON takes it."""
        if self._content is None:
            self._content = self._hash()
        return {"pass": self._pass, "row": self._row, "taken": self._taken, "content": self._content}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: The rows there are others now, or the state is damaged.
        """
        try:
            self._pass, self._row, self._taken = (int(state[name]) for name in ("pass", "row", "taken"))
            content = state["content"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's data position is damaged: {error!r}") from error
        self._rows, self._items, self._order, self._read = None, (), (), 0
        if content is None:  # nothing was read
            return
        self._block()
        if self._hash() != content:
            raise CheckpointError(
                f"the rows of {self._stream.label!r} changed since the checkpoint: those from row {self._row + 1} on",
                fix="restore the files as they were (`revision` keeps those of the hub), or start a new run",
            )

    def _block(self) -> bool:
        """Read the block that begins at the row where the stream stands; return whether there is one."""
        if self._rows is None:
            self._rows = islice(self._stream.rows(), self._row, None)
        rows = list(islice(self._rows, self._stream.block))
        self._read, self._content = len(rows), None
        self._items = self._stream.items(rows, self._row + 1) if rows else ()
        self._order = self._permutation(len(self._items), f"{self._pass}/{self._row}")
        return bool(rows)

    def _hash(self) -> str | None:
        """Return a hash of the block's items; None where none was read yet."""
        if not self._read:
            return None
        digest = hashlib.blake2b(digest_size=8)
        for item in self._items:
            content = self._stream.content(item)
            digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()
