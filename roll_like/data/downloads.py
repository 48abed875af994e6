"""Images that rows have on servers: downloaded once, several at a time, and kept.

A run reads what is kept, so it neither depends on the servers later, nor sees that an image was replaced there.
"""

from __future__ import annotations

import http.client
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from roll_like.errors import DataError

#: How URLs that are downloaded begin.
SCHEMES = ("http://", "https://")
_AT_A_TIME = 16
_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
_TIMEOUT_SECONDS = 60.0
_MOST_BYTES = 64 * 2**20


def downloaded(url: str) -> Path:
    """Return the file of an image that is on a server, which is downloaded at the first call.

    Raises:
        DataError: The server does not answer, does not have it, or sends more than 64 MiB.
    """
    folder = Path.home() / ".cache" / "roll_like" / "images"
    target = folder / sha256(url.encode()).hexdigest()
    if target.is_file():
        return target
    data = _fetched(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(data)
        os.replace(file.name, target)
    except OSError as error:
        raise DataError(f"images are kept in {folder}: {error}", fix="make room, or set HOME") from error
    return target


def download_all(urls: Iterable[str]) -> None:
    """Download images side by side. What fails is tried again, and told, where its row is read."""

    def attempt(url: str) -> None:
        with suppress(DataError):
            downloaded(url)

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(attempt, dict.fromkeys(urls)))


def _fetched(url: str) -> bytes:
    for attempt in range(_ATTEMPTS):
        try:
            # some servers refuse urllib's own name
            request = urllib.request.Request(url, headers={"User-Agent": "roll_like"})
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                data: bytes = response.read(_MOST_BYTES + 1)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # a server that says no will say so again, but for "too many requests"
            said_no = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429
            if said_no or isinstance(error, ValueError) or attempt == _ATTEMPTS - 1:
                raise DataError(
                    f"{url[:200]} cannot be downloaded: {error}", fix="replace it in the row, or remove the row"
                ) from error
            time.sleep(_PAUSE_SECONDS * 2**attempt)
            continue
        if len(data) > _MOST_BYTES:
            raise DataError(f"{url[:200]} has more than 64 MiB", fix="replace it in the row, or remove the row")
        return data
    raise AssertionError("every attempt returns or raises")
