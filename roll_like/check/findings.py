"""What a check finds."""

from __future__ import annotations

import re
from pathlib import Path

from roll_like.config.violations import Finding
from roll_like.errors import RollLikeError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*|[\w-]+")
_FILE_SUFFIXES = {".json", ".jsonl", ".parquet", ".gz", ".zst", ".gguf"}


def failed(key: str, error: RollLikeError) -> Finding:
    """Return an error as a finding, its remedy included."""
    message = error.message if error.fix is None else f"{error.message}; {error.fix}"
    return Finding("error", key, message.removeprefix(f"{key}: "))


def is_hub_id(path: str) -> bool:
    """Return whether `path` means something on the hub: it has the form of an id and is nothing local."""
    local = Path(path).expanduser()
    return not local.exists() and local.suffix not in _FILE_SUFFIXES and _HUB_ID.fullmatch(path) is not None


__all__ = ["Finding", "failed", "is_hub_id"]
