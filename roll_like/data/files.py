"""Rows of one file: JSON, JSON lines and tables, plain or compressed, Parquet and Arrow.

Nothing is converted or cached, and no schema is forced on rows that differ. Cells of CSV stay texts: what guesses types
makes 7 of `007`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from roll_like.content.pointers import PULL, is_pointer
from roll_like.errors import DataError

#: How names of files end that can be read, and what each holds.
_KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "table",
    ".tsv": "table",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
#: What a file of text may be compressed with, by the end of its name.
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
#: Endings that can be read, for messages.
READABLE = f"{', '.join(_KINDS)} (those of text also with {', '.join(_COMPRESSED)})"
#: Rows of Parquet that are in memory as Python's values, and bytes. Arrow refuses more than 2 GiB of a nested column,
#: such as `datasets`' images, in one batch.
_AT_A_TIME, _BYTES_AT_A_TIME = 1024, 2**28
_UNFINISHED = object()
_BLANK = re.compile(r"[\s\ufeff]*")


class Ending(NamedTuple):
    """What a file's name says of its content.

    Attributes:
        stem: The name without its endings.
        kind: `lines`, `json`, `table`, `parquet` or `arrow`.
        suffix: The ending that says so, in lower case: `.csv`.
        compression: The ending of a compressed file: `.gz`; empty for others.
    """

    stem: str
    kind: str
    suffix: str
    compression: str


class Record(NamedTuple):
    """A row of a file: its line or, where rows have no lines, its number, 1-based; and its columns."""

    place: int
    fields: dict[str, Any]


def ending(name: str) -> Ending | None:
    """Return what a file's name says of its content; None if no such file can be read.

    >>> ending("Train.JSONL.gz")
    Ending(stem='Train', kind='lines', suffix='.jsonl', compression='.gz')
    """
    lower = name.lower()
    compression = next((each for each in _COMPRESSED if lower.endswith(each)), "")
    lower = lower.removesuffix(compression)
    suffix = next((each for each in _KINDS if lower.endswith(each)), None)
    if suffix is None or (compression and _KINDS[suffix] in ("parquet", "arrow")):
        return None
    return Ending(name[: len(lower) - len(suffix)], _KINDS[suffix], suffix, compression)


def read_file(path: Path, label: str, key: str, split: str = "train") -> Iterator[Record]:
    """Yield the rows of a file.

    Args:
        key: Place of its source in the configuration, for messages.
        split: Which rows, where one JSON object holds lists of rows of several splits.

    Raises:
        DataError: It cannot be read, or holds something else than rows; names the line where there is one.
    """
    found = ending(path.name)
    if found is None:
        raise DataError(
            f"{label}: expected a file that ends in {READABLE}",
            fix=f"convert it (one JSON object a line), unpack it if it is an archive, or correct {key}.path",
        )
    with _explained(label, f"{key}.path"):
        if path.is_file() and is_pointer(path):
            raise DataError(f"{label} is a pointer of Git LFS, and not the file", fix=PULL)
        if found.kind in ("parquet", "arrow"):
            yield from _columns(path, found.kind)
            return
        with _text(path, found) as text:
            lines = _lines(text, label)
            if found.kind == "table":
                yield from _table(lines, "\t" if found.suffix == ".tsv" else ",", label)
            elif found.kind == "json":
                yield from _values("".join(lines), label, 1, key, split)
            else:
                yield from _objects(lines, label, key, split)


def read_json_lines(path: Path, key: str) -> Iterator[Record]:
    """Yield the objects of a file of JSON lines, whatever its name; arguments and errors are those of `read_file`."""
    with _explained(str(path), key), _text(path, Ending(path.name, "lines", ".jsonl", "")) as text:
        yield from _objects(_lines(text, str(path)), str(path), key, "train")


@contextmanager
def _explained(label: str, key: str) -> Iterator[None]:
    """Raise what goes wrong with a file as a DataError that names it."""
    import pyarrow

    try:
        yield
    except (OSError, UnicodeError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException) as error:
        raise DataError(f"{label} cannot be read: {error}", fix=f"repair the file, or correct {key}") from error


def _columns(path: Path, kind: str) -> Iterator[Record]:
    """Yield the rows of Parquet and Arrow, some at a time; Arrow's stream format is what `datasets` writes."""
    import pyarrow
    import pyarrow.parquet

    if path.stat().st_size == 0:  # it has no rows, which readers take for damage
        return
    with pyarrow.OSFile(str(path)) as source:
        in_file = source.read(6) == b"ARROW1"
        source.seek(0)
        table: Any
        if kind == "parquet":
            table = pyarrow.parquet.ParquetFile(source)
            schema, batches = table.schema_arrow, _batches(table)
        elif in_file:
            table = pyarrow.ipc.open_file(source)
            schema, batches = table.schema, map(table.get_batch, range(table.num_record_batches))
        else:
            table = pyarrow.ipc.open_stream(source)
            schema, batches = table.schema, iter(table)
        decoded = None
        # `datasets` writes values of many types as JSON, and says so
        if b'"Json"' in (schema.metadata or {}).get(b"huggingface", b""):
            import datasets

            decoded = datasets.Features.from_arrow_schema(schema).decode_example
        rows = (fields for batch in batches for fields in batch.to_pylist())
        for place, fields in enumerate(rows, start=1):
            yield Record(place, fields if decoded is None else dict(decoded(fields)))


def _batches(table: Any) -> Iterator[Any]:
    """Yield the rows of Parquet, as many at a time as Arrow takes.

    A file says how large its rows are, and counts a value once that many rows share.
    """
    import pyarrow

    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        size = int(_BYTES_AT_A_TIME * group.num_rows / max(group.total_byte_size, 1))
        size, read = max(1, min(_AT_A_TIME, size)), 0
        while read < group.num_rows:
            seen = 0
            try:
                for batch in table.iter_batches(size, row_groups=[number]):
                    seen += len(batch)
                    if seen > read:
                        yield batch.slice(len(batch) - (seen - read))
                        read = seen
            except pyarrow.ArrowNotImplementedError:
                if size == 1:
                    raise
                size //= 2


@contextmanager
def _text(path: Path, found: Ending) -> Iterator[TextIO]:
    """Open a file of text: UTF-8, or UTF-16 and UTF-32 as their first bytes say.

    Bytes that are no UTF-8 become lone surrogates, for messages with a line.
    """
    with io.BufferedReader(_opened(path, found.compression)) as binary:
        encoding = json.detect_encoding(binary.peek(4)[:4])
        yield io.TextIOWrapper(
            binary,
            encoding=encoding,
            errors="surrogateescape" if encoding.startswith("utf-8") else "strict",
        )


def _opened(path: Path, compression: str) -> Any:
    import pyarrow

    openers: dict[str, Callable[[Path], Any]] = {
        "": partial(open, mode="rb", buffering=0),
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".xz": lzma.open,
        ".zst": lambda file: pyarrow.input_stream(str(file), compression="zstd"),
    }
    return openers[compression](path)


def _lines(text: TextIO, label: str) -> Iterator[str]:
    """Yield lines; where files were joined, a byte order mark may begin any of them.

    Raises:
        DataError: A line is not UTF-8.
    """
    for number, line in enumerate(text, start=1):
        if line.isascii():
            yield line
            continue
        try:
            line.encode()
        except UnicodeEncodeError as error:
            byte = ord(line[error.start]) - 0xDC00
            raise DataError(f"{label}:{number}: the byte 0x{byte:02x} is not UTF-8", fix="save it as UTF-8") from error
        yield line.removeprefix("\ufeff")


def _objects(lines: Iterator[str], label: str, key: str, split: str) -> Iterator[Record]:
    """Yield one object a line, or those of a file that begins with a list or with an object over several lines."""
    begun = False
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if not begun and (isinstance(found := _decoded(text), list) or found is _UNFINISHED):
            rest = list(lines)
            following = next(filter(None, map(str.strip, rest)), "")
            # an object that ends before its end, and then another or none, is a broken line
            if text.startswith("[") or (following and not isinstance(_decoded(following), dict)):
                yield from _values(line + "".join(rest), label, number, key, split)
                return
        begun = True
        value, end = _value(text, 0, label, number)
        if end < len(text):
            extra = text[end : end + 20]
            raise DataError(f"{label}:{number}: not JSON: {extra!r} after the object", fix="write one object a line")
        yield Record(number, _object(value, label, number))


def _decoded(text: str) -> Any:
    """Return the value that a text is; `_UNFINISHED` where it may go on after its end, None where it is nothing."""
    try:
        return _JSON.decode(text)
    except json.JSONDecodeError as error:
        return _UNFINISHED if error.pos >= len(text) else None
    except (ValueError, RecursionError):  # told where the line is read
        return None


#: Keys by which an object holds splits, and is no row.
_SPLITS = frozenset({"train", "training", "validation", "valid", "val", "dev", "test", "eval"})


def _values(text: str, label: str, line: int, key: str, split: str) -> Iterator[Record]:
    """Yield the objects in a JSON text that begins with a line: of a list, of the one in an object, or one by one."""
    start = _blank_end(text, 0)
    if start == len(text):
        return
    value, end = _value(text, start, label, line)
    if end == len(text):
        yield from _members(value, label, key, split)
        return
    first, counted = line, 0
    while True:
        line, counted = line + text.count("\n", counted, start), start
        yield Record(line, _object(value, label, line))
        if end == len(text):
            return
        start = end
        value, end = _value(text, start, label, first)


def _members(value: Any, label: str, key: str, split: str) -> Iterator[Record]:
    """Yield the objects of a list, of the one list or the split's list in an object, or the object itself."""
    if isinstance(value, dict):
        lists = {name: each for name, each in value.items() if isinstance(each, list)}
        of_rows = all(_is_row(each) for one in lists.values() for each in one)
        if of_rows and len(lists) > 1 and not _SPLITS.isdisjoint(lists) and split not in lists:
            raise DataError(
                f"{label}: there is no split {split!r}; it has {', '.join(map(repr, lists))}",
                fix=f"set {key}.split to one of them",
            )
        if of_rows and (split in lists or len(lists) == 1):
            value = lists[split] if split in lists else next(iter(lists.values()))
        else:
            value = [value]
    if not isinstance(value, list):
        raise DataError(
            f"{label}: expected a list of JSON objects, found {type(value).__name__}", fix="correct the file"
        )
    for number, fields in enumerate(value, start=1):
        yield Record(number, _object(fields, label, number))


def _is_row(member: Any) -> bool:
    """Return whether a member of a list in an object is a row, and no message: then the object is the row."""
    return isinstance(member, dict) and not any(isinstance(member.get(key), str) for key in ("role", "from"))


def _value(text: str, start: int, label: str, line: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start` or after blanks, and where what follows it begins."""
    start = _blank_end(text, start)
    try:
        value, end = _JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        at, problem = line + error.lineno - 1, f"not JSON: {error.msg}"
    except RecursionError:
        at, problem = line + _lines_before(text, start), "the value is nested too deeply to be read"
    except ValueError as error:
        at, problem = line + _lines_before(text, start), str(error)
    else:
        return value, _blank_end(text, end)
    raise DataError(f"{label}:{at}: {problem}", fix="correct the line; a file of rows has one JSON object a line")


def _lines_before(text: str, start: int) -> int:
    """Return how many lines end before what cannot be read: the value that begins at `start`, or a member of it."""
    try:
        while text[start] in "[,":
            start = _blank_end(text, start + 1)
            start = _blank_end(text, _JSON.raw_decode(text, start)[1])
    except (ValueError, RecursionError):
        pass
    return text.count("\n", 0, start)


def _blank_end(text: str, start: int) -> int:
    found = _BLANK.match(text, start)
    return found.end() if found else start


def _object(value: Any, label: str, place: int) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise DataError(
        f"{label}:{place}: expected a JSON object, found {type(value).__name__}",
        fix="correct the file; it holds one JSON object a line, or a list of them",
    )


def _constant(name: str) -> None:
    """Read NaN, which Python writes for what is missing, as null; JSON has no infinity, and no row means one."""
    if name != "NaN":
        raise ValueError(f"{name} is no number of JSON; write it as a text")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a number; write it as a text")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


_JSON = json.JSONDecoder(parse_constant=_constant, parse_float=_finite, object_pairs_hook=_unique)


def _table(lines: Iterator[str], delimiter: str, label: str) -> Iterator[Record]:
    """Yield the rows of a table whose first line has the names of its columns; an empty cell is null."""
    csv.field_size_limit(sys.maxsize)
    table = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        line = table.line_num + 1
        try:
            cells = next(table, None)
        except csv.Error as error:
            raise DataError(f"{label}:{line}: not a table: {error}", fix="correct the line") from error
        if cells is None:
            return
        if not cells:
            continue
        if not names:
            names = [name.strip() for name in cells]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise DataError(
                    f"{label}:{line}: two columns are called {twice!r}", fix="the first line has a name for each column"
                )
            continue
        if len(cells) != len(names):
            raise DataError(
                f"{label}:{line}: expected {len(names)} cells, as in the first line, found {len(cells)}",
                fix=f"correct the line; a cell that holds {delimiter!r} or a line end stands in quotation marks",
            )
        yield Record(line, {name: cell or None for name, cell in zip(names, cells, strict=True)})
