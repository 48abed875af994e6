"""Rows of a dataset, each with the place it came from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from roll_like.config.data import DataSource, RowSource, is_dataset
from roll_like.data.content import files_hash, rows_hash
from roll_like.data.fields import as_named
from roll_like.data.files import ending, read_file
from roll_like.data.folders import find_parts, is_saved, says_other
from roll_like.data.hub import explained, hub_rows
from roll_like.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        fields: Its columns.
        origin: `file:line` of JSON lines and of CSV, `file:row` of Parquet and JSON, `dataset[split]:row` of the hub;
            1-based.
        images: What the column with images holds.
        typed: Whether it comes from a table with types (Parquet, the hub): these give every object the fields that any
            row has, as null.
    """

    fields: dict[str, Any]
    origin: str
    images: tuple[Any, ...] = ()
    typed: bool = False

    @property
    def folder(self) -> Path:
        """Folder of its file."""
        return Path(self.origin.rpartition(":")[0]).expanduser().parent


def read_rows(source: RowSource | DataSource, key: str) -> Iterator[Row]:
    """Yield the rows of a file, of a split of a directory (its files in the order of their names) or of a hub dataset.

    Fields are as the source names them, images apart.

    Args:
        key: Place of `source` in the configuration, for messages.

    Raises:
        DataError: It does not exist, cannot be read, or a line is not a JSON object.
    """
    for row in written_rows(source, key):
        yield as_read(row, source)


def as_read(row: Row, source: RowSource | DataSource) -> Row:
    """Return a row with its fields as the source names them, images apart."""
    row = replace(row, fields=as_named(row.fields, source))
    images = None if source.images_field is None else row.fields.get(source.images_field)
    if images is None:
        return row
    images = images if isinstance(images, list | tuple) else [images]
    fields = {name: value for name, value in row.fields.items() if name != source.images_field}
    return replace(row, fields=fields, images=tuple(images))


def content_hash(source: RowSource | DataSource, key: str) -> str | None:
    """Return a hash of everything that rows are read from; None where nothing can be read.

    Raises:
        DataError: A dataset of the hub cannot be had.
    """
    if source.rows is not None:
        rows: Any = source.rows
        if isinstance(rows, Mapping):
            rows = rows.get(source.split, ())
        return f"{key} {rows_hash(rows)}"  # their origins name the key
    path = Path(os.path.expanduser(source.path))
    try:
        if path.exists():
            return files_hash(path)
    except OSError:
        return None  # reading them says why
    if ending(path.name) or source.path.startswith(("/", ".", "~")):
        return None
    return rows_hash(hub_rows(source, key)[0])


def written_rows(source: RowSource | DataSource, key: str) -> Iterator[Row]:
    """Yield the rows as they stand in the files; arguments and errors as for `read_rows`."""
    if source.rows is not None:
        yield from _given_rows(source, key)
        return
    path = Path(os.path.expanduser(source.path))  # leaves a user's home that is not known
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise DataError(f"{source.path} cannot be read: {error.strerror}", fix=f"correct {key}.path") from error
    if is_file or is_folder:
        yield from _split_rows(source, path, key)
    elif ending(path.name) or source.path.startswith(("/", ".", "~")):
        fix = f"correct {key}.path"
        if any(mark in source.path for mark in "*?["):
            fix += "; patterns are not read: name a directory, whose files are read"
        absolute = os.path.abspath(path)
        here = "" if absolute == source.path else f" (here {absolute})"
        raise DataError(f"there is no file or directory {source.path}{here}", fix=fix)
    else:
        rows, label = hub_rows(source, key)
        with explained(source, key):
            yield from _numbered(rows, label)


def _given_rows(source: RowSource | DataSource, key: str) -> Iterator[Row]:
    """Yield the rows that the configuration itself has."""
    rows: Any = source.rows
    if isinstance(rows, Mapping):  # a DatasetDict
        if source.split not in rows:
            raise DataError(
                f"{key}.rows: there is no split {source.split!r}; it has {', '.join(map(repr, rows))}",
                fix=f"set {key}.split to one of them",
            )
        rows = rows[source.split]
    for number, fields in enumerate(rows):
        yield Row(dict(fields), f"{key}.rows[{number}]", typed=is_dataset(rows))


def _split_rows(source: RowSource | DataSource, path: Path, key: str) -> Iterator[Row]:
    """Yield the rows of a split of local files: of `train`, `train[:100]` or `train+test`, as `datasets` writes it."""
    asked = [each.strip() for each in source.split.split("+")]
    if len({each.partition("[")[0] for each in asked}) > 1 and path.is_file():
        raise DataError(
            f"{source.path} is a file, and {key}.split: {source.split} names several", fix=f"set {key}.split: train"
        )
    for each in asked:
        name, bracket, _ = each.partition("[")
        files = _files_of(source, path, name, key)
        rows: Iterator[Row] = (row for file, label in files for row in _rows_of(file, label, source, key, name))
        if bracket:
            count = sum(1 for file, label in files for _ in _rows_of(file, label, source, key, name))
            rows = islice(rows, *_slice(bracket + each.partition("[")[2], count, key))
        yield from rows


def _files_of(source: RowSource | DataSource, path: Path, split: str, key: str) -> list[tuple[Path, str]]:
    """Return the files that hold a split, each with what messages call it."""
    if path.is_dir():
        try:
            return [(part, str(part)) for part in find_parts(path, split, source.subset, key)]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}", fix=f"correct {key}.path") from error
    # the default says nothing: a file is named as it is
    if split != "train" and says_other(path.name, split):
        raise DataError(
            f"{source.path} is not of the split {split!r}, as its name says",
            fix=f"correct {key}.path or remove {key}.split",
        )
    return [(path, source.path)]


def _rows_of(path: Path, label: str, source: RowSource | DataSource, key: str, split: str) -> Iterator[Row]:
    if path.is_dir() and is_saved(path):
        import datasets

        with explained(source, key):
            yield from _numbered(datasets.load_from_disk(str(path)), label)
        return
    found = ending(path.name)
    typed = found is not None and found.kind in ("parquet", "arrow")
    for place, fields in read_file(path, label, key, split):
        yield Row(fields, f"{label}:{place}", typed=typed)


def _slice(text: str, count: int, key: str) -> tuple[int, int]:
    """Return the first row and the one after the last that `[:100]` or `[50%:]` means of so many."""
    import datasets

    try:
        (found,) = datasets.ReadInstruction.from_spec(f"rows{text}").to_absolute({"rows": count})
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{key}.split: {text} is no part of a split: {error}", fix="write train[:100] or train[:10%]"
        ) from error
    return found.from_ or 0, count if found.to is None else found.to


def _numbered(rows: Iterable[Mapping[str, Any]], label: str) -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        yield Row(dict(fields), f"{label}:{number}", typed=True)
