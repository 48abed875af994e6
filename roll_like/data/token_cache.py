"""Tokenised rows on disk: found again by what they were made of.

An entry is a folder, named by a hash of everything that decides its content: the bytes of the files, the tokenizer and
its chat template, the settings, the code. It is written under another name and renamed when it is complete, so that a
process that is killed leaves nothing that another one reads, and two processes that make the same entry do not meet.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy.typing as npt

from roll_like.data.chat import Renderer
from roll_like.data.packed import COLUMNS, mapped
from roll_like.data.reader import Reader

_META = "meta.json"
_PART = ".part-"
#: After how long what a killed process left behind is removed. Seconds.
_LEFT_OVER_SECONDS = 24 * 3600.0
_CODE = Path(__file__).parent
_LIBRARIES = ("tokenizers", "transformers", "jinja2", "numpy")


def key_of(reader: Reader[Any], renderer: Renderer, content: str) -> str:
    """Return what tokenised rows are found by.

    Args:
        reader: Makes samples of rows.
    """
    settings = {
        "source": reader.source.model_dump(mode="json", exclude={"rows", "name", "weight", "stream_block"}),
        "limits": reader.limits.model_dump(mode="json", exclude={"sources", "cache_dir", "cache_gib"}),
        "reader": [type(reader).__module__, type(reader).__qualname__],
        "code": _code_hash(getattr(sys.modules[type(reader).__module__], "__file__", None)),
        "renderer": renderer.fingerprint,
        "content": content,
    }
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=20).hexdigest()


@cache
def _code_hash(further: str | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in (*sorted(_CODE.glob("*.py")), *([Path(further)] if further else [])):
        digest.update(file.read_bytes())
    digest.update(repr([(name, version(name)) for name in _LIBRARIES]).encode())
    return digest.hexdigest()


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


class TokenCache:
    """The folder of tokenised rows.

    Args:
        folder: Where it is; default: `~/.cache/roll_like`.
        most_bytes: Entries that were not used for the longest time are removed until the others have no more.
    """

    def __init__(self, folder: Path | None, most_bytes: float) -> None:
        self.folder = (folder or Path("~/.cache/roll_like")).expanduser() / "data"
        self.most_bytes = most_bytes

    def find(self, key: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]] | None:
        """Return the columns and the facts of an entry; None where there is none that is whole."""
        entry = self.folder / key
        try:
            digest, _, text = (entry / _META).read_text(encoding="utf-8").partition("\n")
            if digest != hashlib.blake2b(text.encode()).hexdigest():
                raise ValueError("its facts are damaged")
            facts: dict[str, Any] = json.loads(text)
            if any(_hash(entry / name) != found for name, found in facts.pop("files").items()):
                raise ValueError("a file is damaged")
            columns = mapped(entry)
        except (OSError, ValueError):  # none, or of a disk that was full, or a machine that lost its power
            shutil.rmtree(entry, ignore_errors=True)
            return None
        with suppress(OSError):  # another user's, or a disk that is only read: it stays as old as it is
            os.utime(entry / _META)
        return columns, facts

    def begin(self) -> Path:
        """Return a new folder for the columns of an entry.

        Raises:
            OSError: It cannot be made.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_PART, dir=self.folder))

    def keep(self, part: Path, key: str, facts: Mapping[str, Any]) -> Path:
        """Make what was written an entry, and remove old ones; return its folder.

        Raises:
            OSError: It cannot be written.
        """
        text = json.dumps({**facts, "files": {name: _hash(part / name) for name in COLUMNS}})
        (part / _META).write_text(f"{hashlib.blake2b(text.encode()).hexdigest()}\n{text}", encoding="utf-8")
        entry = self.folder / key
        try:
            part.rename(entry)
        except OSError:
            if not (entry / _META).is_file():
                raise
            shutil.rmtree(part, ignore_errors=True)  # another process was faster
        self._prune(entry)
        return entry

    def _prune(self, newest: Path) -> None:
        now, held = time.time(), 0
        for age, size, entry in sorted(self._entries()):
            if entry.name.startswith(_PART):
                if now + age > _LEFT_OVER_SECONDS:
                    shutil.rmtree(entry, ignore_errors=True)
                continue
            held += size
            if held > self.most_bytes and entry != newest:
                shutil.rmtree(entry, ignore_errors=True)
                held -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Yield each entry with minus the time of its last use, and its bytes."""
        for entry in self.folder.iterdir():
            try:
                files = [file.stat() for file in entry.iterdir()]
            except OSError:
                continue  # removed meanwhile
            used = max((file.st_mtime for file in files), default=entry.stat().st_mtime if entry.exists() else 0.0)
            yield -used, sum(file.st_size for file in files), entry
