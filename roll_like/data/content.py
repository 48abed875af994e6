"""Hashes of the content of datasets: of files, of folders, of rows in memory."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll_like.data.files import ending
from roll_like.data.folders import CARD, walk


def files_hash(path: Path) -> str:
    """Return a hash of a file, or of those files of a folder that rows may be read from.

    Raises:
        OSError: One cannot be read.
    """
    digest = hashlib.blake2b(digest_size=20)
    files = [path] if path.is_file() else sorted(file for file in walk(path) if ending(file.name) or file.name == CARD)
    for file in files:
        stat = file.stat()
        name = "" if file == path else str(file.relative_to(path))
        content = _file_hash(str(file), stat.st_ino, stat.st_size, stat.st_ctime_ns)
        digest.update(f"{name}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _file_hash(path: str, *_: int) -> str:
    """Return the hash of a file's content, computed once while inode, size and time of change stay as they are."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def rows_hash(rows: Any) -> str:
    """Return a hash of rows in memory: of a `datasets.Dataset`, or of mappings."""
    digest = hashlib.blake2b(digest_size=20)
    if hasattr(rows, "with_format"):
        digest.update(repr(rows.features).encode())
        for table in rows.with_format("arrow").iter(10_000):
            for batch in table.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return digest.hexdigest()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=_bytes_of).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _bytes_of(value: Any) -> str:
    if isinstance(value, bytes):
        return hashlib.blake2b(value).hexdigest()
    if hasattr(value, "tobytes"):  # an image or an array
        return hashlib.blake2b(value.tobytes()).hexdigest()
    return f"{type(value).__name__} {value}"
