"""Rows of a JSON-lines file, for environments that play from one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from roll_like.errors import DataError


@functools.lru_cache(maxsize=8)
def read_rows(path: str, required: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Return the rows of a file, read once per process.

    Args:
        path: A JSON-lines file.
        required: Fields that each row must have.

    Raises:
        DataError: There is no such file, it has no rows, or a line is no object with these fields.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"no such file: {path}", fix="correct `path` of the environment's kwargs")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            rows.append(_read(line, f"{path}:{number}", required))
    if not rows:
        raise DataError(f"{path} has no rows", fix="correct `path` of the environment's kwargs")
    return tuple(rows)


def _read(line: str, origin: str, required: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{origin}: not JSON: {error}", fix="write one JSON object per line") from error
    if not isinstance(row, dict):
        raise DataError(f"{origin}: expected a JSON object, found {type(row).__name__}")
    for name in required:
        if name not in row:
            raise DataError(f"{origin}: the field {name!r} is missing; found {', '.join(row) or 'none'}")
    return {**row, "origin": origin}
