"""Variables of the process's environment that keep a run from working, or that it does not heed."""

from __future__ import annotations

import codecs
import locale
import os
from collections.abc import Iterator
from pathlib import Path

from roll_like.config.base import Finding


def check_environment() -> Iterator[Finding]:
    """Yield the variables that keep a run from working, or that it does not heed."""
    if codecs.lookup(encoding := locale.getpreferredencoding(False)).name != "utf-8":
        yield Finding(
            "error",
            "PYTHONUTF8",
            f"this Python reads and writes text as {encoding}, which the locale (LC_ALL, "
            "LANG) says; start it with PYTHONUTF8=1",
        )
    home = os.environ.get("HOME")
    try:
        folder = Path.home()
    except RuntimeError:  # the user has no entry in /etc/passwd
        yield Finding("error", "HOME", "not set, and this user has no home folder; set it to a folder: caches go there")
    else:
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            found = f"{folder} cannot be written to" if home is None else f"found {home}, which cannot be written to"
            yield Finding("error", "HOME", f"{found}; set it to a folder: caches of models and libraries go there")
    if (address := os.environ.get("RAY_ADDRESS")) is not None:
        yield Finding(
            "warning",
            "resources.address",
            f"RAY_ADDRESS is {address}, and a run heeds resources.address only; it starts a Ray of its own. Set "
            "resources.address: auto to join that cluster",
        )
