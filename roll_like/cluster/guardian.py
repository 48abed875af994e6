"""Outlives the driver by a moment, and takes everything that the driver started with it.

Run as a script, with nothing but the standard library, so that it costs a few megabytes:

    python -I -S guardian.py MARKER DIRECTORY … < pipe

The driver holds the pipe's other end. When it closes, because the driver is done or because it was killed,
processes that inherited the marker in their environment are ended, and the directories are removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

#: Name of the environment variable that every process of a session inherits.
MARKER = "ROLL_LIKE_SESSION"
#: How long processes may take to end by themselves. Seconds.
PATIENCE = 3.0


def marked(value: str, name: str = MARKER) -> list[int]:
    """Return the ids of all other living processes whose environment holds the marker."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it ended, or is another user's
    return found


def sweep(value: str, *, name: str = MARKER, patience: float = PATIENCE) -> None:
    """Wait until the marked processes have ended, and end those that have not."""
    until = time.monotonic() + patience
    while (left := marked(value, name)) and time.monotonic() < until:
        time.sleep(0.1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        until = time.monotonic() + 1.0
        while (left := marked(value, name)) and time.monotonic() < until:
            time.sleep(0.05)


def main() -> None:
    """Wait for the driver's end of the pipe to close, then sweep."""
    value, *directories = sys.argv[1:]
    sys.stdin.buffer.read()
    sweep(value)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
