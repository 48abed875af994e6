"""Reads a file of lines while another process writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roll_like.errors import DataError


class Tail:
    """The lines of a file of JSON that were not read yet.

    A half-written last line is left for the next time. A run that is continued replaces its files by shorter ones: they
    are read anew.

    Args:
        path: The file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new lines, and whether they are those of another file than before.

        Raises:
            DataError: A whole line is not a JSON object.
        """
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                found = (status.st_dev, status.st_ino)
                replaced = self._file is not None and (found != self._file or status.st_size < self._offset)
                if replaced:
                    self._offset = 0
                self._file = found
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # not written yet, or moved aside by a new run of the same folder
            replaced, self._file, self._offset = self._file is not None, None, 0
            return [], replaced
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [self._record(line) for line in whole.splitlines() if line.strip()], replaced

    def _record(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise DataError(
                f"{self._path}: expected one JSON object per line, found {line[:60]!r}",
                fix="restore the file, or remove the damaged line",
            )
        return record
