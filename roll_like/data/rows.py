"""Rows of a dataset, each with the place it came from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from roll_like.config.sections import DataSource
from roll_like.config.training_data import RowSource
from roll_like.data.files import ending, read_file
from roll_like.data.folders import find_parts, is_saved, says_other
from roll_like.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        fields: Its columns.
        origin: `file:line` of JSON lines and of CSV, `file:row` of Parquet and JSON, `dataset[split]:row` of the hub;
            1-based.
        images: What the column with images holds.
    """

    fields: dict[str, Any]
    origin: str
    images: tuple[Any, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder of its file."""
        return Path(self.origin.rpartition(":")[0]).expanduser().parent


def read_rows(source: RowSource | DataSource, key: str) -> Iterator[Row]:
    """Yield the rows of a dataset, as `_read_rows` does, with their images apart."""
    for row in _read_rows(source, key):
        images = None if source.images_field is None else row.fields.get(source.images_field)
        if images is None:
            yield row
            continue
        images = images if isinstance(images, list | tuple) else [images]
        fields = {name: value for name, value in row.fields.items() if name != source.images_field}
        yield replace(row, fields=fields, images=tuple(images))


def _read_rows(source: RowSource | DataSource, key: str) -> Iterator[Row]:
    """Yield the rows of a file, of a split of a directory (its files in the order of their names) or of a hub dataset.

    Args:
        source: The dataset.
        key: Its place in the configuration, for messages.

    Raises:
        DataError: It does not exist, cannot be read, or a line is not a JSON object.
    """
    path = Path(source.path).expanduser()
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise DataError(f"{source.path} cannot be read: {error.strerror}", fix=f"correct {key}.path") from error
    if is_file or is_folder:
        yield from _split_rows(source, path, key)
    elif ending(path.name) or source.path.startswith(("/", ".", "~")):
        raise DataError(f"there is no file or directory {source.path}", fix=f"correct {key}.path")
    else:
        import datasets

        rows = _load(lambda: datasets.load_dataset(source.path, split=source.split), source.path, key)
        yield from _numbered(rows, f"{source.path}[{source.split}]")


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
        rows = (row for file, label in files for row in _rows_of(file, label, key))
        if bracket:
            count = sum(1 for file, label in files for _ in _rows_of(file, label, key))
            rows = islice(rows, *_slice(bracket + each.partition("[")[2], count, key))
        yield from rows


def _files_of(source: RowSource | DataSource, path: Path, split: str, key: str) -> list[tuple[Path, str]]:
    """Return the files that hold a split, each with what messages call it."""
    if path.is_dir():
        try:
            return [(part, str(part)) for part in find_parts(path, split, getattr(source, "subset", None), key)]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}", fix=f"correct {key}.path") from error
    # the default says nothing: a file is named as it is
    if split != "train" and says_other(path.name, split):
        raise DataError(
            f"{source.path} is not of the split {split!r}, as its name says",
            fix=f"correct {key}.path or remove {key}.split",
        )
    return [(path, source.path)]


def _rows_of(path: Path, label: str, key: str) -> Iterator[Row]:
    if path.is_dir() and is_saved(path):
        import datasets

        yield from _numbered(_load(lambda: datasets.load_from_disk(str(path)), label, key), label)
        return
    for place, fields in read_file(path, label, key):
        yield Row(fields, f"{label}:{place}")


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
        yield Row(dict(fields), f"{label}:{number}")


def _load(load: Callable[[], Any], label: str, key: str) -> Any:
    """Call `load` without progress bars, and name the remedy when it fails."""
    import datasets
    import pyarrow

    with _no_progress_bars():
        try:
            return load()
        except (OSError, datasets.exceptions.DatasetsError) as error:
            raise DataError(
                f"{label} is neither a local file or directory nor a dataset that can be had now: {error}",
                fix=f"correct {key}.path; without network, download the dataset where there is one "
                f"(`hf download {label} --repo-type dataset --local-dir DIR`) and set {key}.path to that directory",
            ) from error
        except (ValueError, pyarrow.ArrowInvalid) as error:
            raise DataError(f"{label}: {error}", fix=f"correct {key}.path or {key}.split") from error


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    was_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            datasets.enable_progress_bars()
