"""Rows that a Python program gave to a run, as files in its folder: what a resumed run and a reader find there."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from roll_like.config.data import SourceConfig
from roll_like.data.downloads import SCHEMES
from roll_like.data.images import is_image
from roll_like.errors import DataError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def with_stored_rows(config: ConfigT, folder: Path) -> ConfigT:
    """Return a configuration that names files in place of rows, which are written into a folder.

    Args:
        folder: Is made where it is needed. Files that are there already are replaced.

    Raises:
        DataError: A row holds a value that no file can.
        OSError: The folder cannot be written.
    """
    changed: dict[str, Any] = {}
    for name in type(config).model_fields:
        section = getattr(config, name)
        sources = getattr(section, "sources", None)
        if not isinstance(sources, tuple) or not any(isinstance(each, SourceConfig) and each.rows for each in sources):
            continue
        stored = tuple(
            source if source.rows is None else _stored(source, folder, f"{name}.sources.{index}")
            for index, source in enumerate(sources)
        )
        changed[name] = section.model_copy(update={"sources": stored})
    return config.model_copy(update=changed) if changed else config


def _stored(source: SourceConfig, folder: Path, key: str) -> SourceConfig:
    folder.mkdir(parents=True, exist_ok=True)
    rows: Any = source.rows
    if isinstance(rows, Mapping):  # a DatasetDict; the check knows that the split is there
        rows = rows[source.split]
    of_datasets = hasattr(rows, "to_parquet")
    file = folder / f"{key}{'.parquet' if of_datasets else '.jsonl'}"
    part = file.with_name(f".{file.name}.part")
    if of_datasets:
        rows.to_parquet(str(part))
    else:
        with part.open("w", encoding="utf-8") as lines:
            lines.writelines(f"{line}\n" for line in _lines(rows, source, key))
    part.replace(file)
    return source.model_copy(update={"path": str(file), "rows": None, "name": source.label, "split": "train"})


def _lines(rows: Any, source: SourceConfig, key: str) -> Iterator[str]:
    for number, row in enumerate(rows):
        try:
            yield json.dumps(_with_whole_paths(row, source.images_field), default=_data_url)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{key}.rows[{number}] cannot be written to the run's folder: {error}",
                fix="rows hold what JSON can, and images; put other values into text",
            ) from error


def _with_whole_paths(row: Mapping[str, Any], images_field: str | None) -> dict[str, Any]:
    """Return a row whose images are found from any folder: their paths are relative to the working directory."""
    found = {name: _of_messages(value) for name, value in row.items()}
    if images_field is not None and found.get(images_field) is not None:
        images = found[images_field]
        found[images_field] = [_whole(each) for each in (images if isinstance(images, list | tuple) else [images])]
    return found


def _of_messages(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_of_messages(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if is_image(value):
        return {name: each if name == "type" else _whole(each) for name, each in value.items()}
    return {name: _of_messages(each) for name, each in value.items()}


def _whole(value: Any) -> Any:
    """Return an image with its path from the root."""
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return _data_url(value["bytes"])
        return {name: _whole(each) if name in ("path", "url") else each for name, each in value.items()}
    if not isinstance(value, str) or value.startswith(("data:", "file://", *SCHEMES)):
        return value
    return str(Path(value).expanduser().resolve())


def _data_url(value: Any) -> str:
    """Return an image's bytes as JSON can hold them."""
    if hasattr(value, "save") and hasattr(value, "convert"):  # of Pillow
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        value = buffer.getvalue()
    if isinstance(value, bytes):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy
        return value.item()  # type: ignore[no-any-return]
    raise TypeError(f"{type(value).__name__} is no value of JSON")
