"""Rows of a dataset, each with the place it came from.

Files are read through Hugging Face `datasets` in streaming mode: nothing is converted or cached, and
no schema is forced on rows that differ.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_like.config.sections import DataSource
from roll_like.config.training_data import RowSource
from roll_like.errors import DataError

_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_PARQUET = (".parquet",)


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        fields: Its columns.
        origin: `file:line` of JSON lines, `file:row` of Parquet, `dataset[split]:row` of the hub; 1-based.
    """

    fields: dict[str, Any]
    origin: str


def read_rows(source: RowSource | DataSource, key: str) -> Iterator[Row]:
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
        files = sorted(file for file in path.rglob("*") if file.name.endswith(_LINES + _PARQUET))
        if not files:
            raise DataError(
                f"the directory {source.path} holds no {', '.join(_LINES + _PARQUET)} file", fix=f"correct {key}.path"
            )
        for file in files:
            yield from _read_file(file, str(file), key)
    elif path.suffix in (".json", *_LINES, *_PARQUET) or source.path.startswith(("/", ".", "~")):
        raise DataError(f"there is no file or directory {source.path}", fix=f"correct {key}.path")
    else:
        import datasets

        rows = _load(lambda: datasets.load_dataset(source.path, split=source.split), source.path, key)
        yield from _numbered(rows, f"{source.path}[{source.split}]")


def _numbered(rows: Iterable[Mapping[str, Any]], label: str) -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        yield Row(dict(fields), f"{label}:{number}")


def _read_file(path: Path, label: str, key: str) -> Iterator[Row]:
    if path.name.endswith(_LINES):
        return _read_lines(path, label, key)
    if path.name.endswith(_PARQUET):
        return _numbered(_stream("parquet", path, label, key), label)
    raise DataError(
        f"{label}: expected a file that ends in {', '.join(_LINES + _PARQUET)}",
        fix=f"convert it (one JSON object a line), or correct {key}.path",
    )


def _read_lines(path: Path, label: str, key: str) -> Iterator[Row]:
    lines = _stream("text", path, label, key)
    for number, row in enumerate(lines, start=1):
        text = row["text"].strip()
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
