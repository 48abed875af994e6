"""Rows of a dataset, each with the place it came from.

JSON lines are read one by one, Parquet through Hugging Face `datasets` in streaming mode: nothing is converted or
cached, and no schema is forced on rows that differ. Cells of CSV stay texts: what guesses types makes 7 of `007`.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_like.config.sections import DataSource
from roll_like.config.training_data import RowSource
from roll_like.errors import DataError

_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_PARQUET = (".parquet",)
_JSON = (".json",)
#: What separates cells.
_TABLES = {".csv": ",", ".tsv": "\t"}
#: How names of files end that can be read.
ENDINGS = (*_LINES, *_PARQUET, *_JSON, *_TABLES)


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
    """Yield the rows of a file, a directory (its files in the order of their names) or a hub dataset.

    Args:
        source: The dataset.
        key: Its place in the configuration, for messages.

    Raises:
        DataError: It does not exist, cannot be read, or a line is not a JSON object.
    """
    path = Path(source.path).expanduser()
    if path.is_file():
        yield from _read_file(path, str(source.path), key)
    elif path.is_dir():
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            import datasets

            yield from _numbered(_load(lambda: datasets.load_from_disk(str(path)), str(path), key), str(path))
            return
        files = sorted(file for file in path.rglob("*") if file.name.endswith(ENDINGS))
        # beside other files, what ends in .json is about the dataset
        files = [file for file in files if file.suffix not in _JSON] or files
        if not files:
            raise DataError(
                f"the directory {source.path} holds no {', '.join(ENDINGS)} file", fix=f"correct {key}.path"
            )
        for file in files:
            yield from _read_file(file, str(file), key)
    elif path.name.endswith(ENDINGS) or source.path.startswith(("/", ".", "~")):
        raise DataError(f"there is no file or directory {named(source.path)}", fix=f"correct {key}.path")
    else:
        import datasets

        rows = _load(lambda: datasets.load_dataset(source.path, split=source.split), source.path, key)
        yield from _numbered(rows, f"{source.path}[{source.split}]")


def named(spelling: str) -> str:
    """Return a path as it is written, and where that is.

    >>> named("/data/rows.jsonl")
    '/data/rows.jsonl'
    """
    absolute = str(Path(spelling).expanduser().absolute())
    return spelling if absolute == spelling else f"{spelling} (here {absolute})"


def _numbered(rows: Iterable[Mapping[str, Any]], label: str) -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        yield Row(dict(fields), f"{label}:{number}")


def _read_file(path: Path, label: str, key: str) -> Iterator[Row]:
    if path.name.endswith(_LINES):
        return _read_lines(path, label, key)
    if path.name.endswith(_PARQUET):
        return _numbered(_stream("parquet", path, label, key), label)
    if path.suffix in _JSON:
        return _read_json(path, label, key)
    if path.suffix in _TABLES:
        return _read_table(path, _TABLES[path.suffix], label, key)
    raise DataError(
        f"{label}: expected a file that ends in {', '.join(ENDINGS)}",
        fix=f"convert it (one JSON object a line), or correct {key}.path",
    )


def _read_json(path: Path, label: str, key: str) -> Iterator[Row]:
    """Yield the objects of a JSON file: of a list, of the one list in an object, or one a line."""
    try:
        value = json.loads(_text(path, label, key))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:  # a second value: one a line
            yield from _read_lines(path, label, key)
            return
        raise DataError(f"{label}:{error.lineno}: not JSON: {error.msg}", fix="correct the file") from error
    if isinstance(value, dict):
        lists = [each for each in value.values() if isinstance(each, list)]
        value = lists[0] if len(lists) == 1 and all(isinstance(each, dict) for each in lists[0]) else [value]
    if not isinstance(value, list):
        raise DataError(
            f"{label}: expected a list of JSON objects, found {type(value).__name__}", fix=f"correct {key}.path"
        )
    for number, fields in enumerate(value, start=1):
        if not isinstance(fields, dict):
            raise DataError(
                f"{label}:{number}: expected a JSON object, found {type(fields).__name__}", fix="correct the file"
            )
        yield Row(fields, f"{label}:{number}")


def _read_table(path: Path, delimiter: str, label: str, key: str) -> Iterator[Row]:
    """Yield the rows of a table whose first line has the names of its columns; an empty cell is null."""
    csv.field_size_limit(sys.maxsize)
    text = io.StringIO(_text(path, label, key), newline="")  # line ends within quotation marks stay as they are
    table = csv.reader(text, delimiter=delimiter, strict=True)
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
        yield Row({name: cell or None for name, cell in zip(names, cells, strict=True)}, f"{label}:{line}")


def _text(path: Path, label: str, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{label} cannot be read: {error}", fix=f"save it as UTF-8, or correct {key}.path") from error


def _read_lines(path: Path, label: str, key: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(path, label, key), start=1):
        text = line.strip()
        if not text:
            continue
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise DataError(
                f"{label}:{number}: not JSON: {error}", fix=f"correct the line; {key}.path takes one JSON object a line"
            ) from error
        if not isinstance(fields, dict):
            raise DataError(
                f"{label}:{number}: expected a JSON object, found {type(fields).__name__}",
                fix=f"correct the line; {key}.path takes one JSON object a line",
            )
        yield Row(fields, f"{label}:{number}")


def _lines(path: Path, label: str, key: str) -> Iterator[str]:
    if path.name.endswith(".zst"):
        for row in _stream("text", path, label, key):
            yield row["text"]
        return
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise DataError(f"{label} cannot be read: {error}", fix=f"repair the file, or correct {key}.path") from error


def _stream(builder: str, path: Path, label: str, key: str) -> Iterator[dict[str, Any]]:
    import datasets
    import pyarrow

    try:
        # a file without a byte has no rows, which the builders take for damage
        if path.stat().st_size == 0:
            return
        yield from datasets.load_dataset(builder, data_files=str(path.resolve()), split="train", streaming=True)
    except (OSError, UnicodeDecodeError, EOFError, pyarrow.ArrowInvalid, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{label} cannot be read: {error}", fix=f"repair the file, or correct {key}.path") from error


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
