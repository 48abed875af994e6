"""Outlives the driver by a moment, and takes everything that the driver started with it.

Run as a script, with nothing but the standard library, so that it costs a few megabytes:

    python -I -S guardian.py MARKER [--rescue SNAPSHOTS CHECKPOINTS] DIRECTORY … < pipe

The driver holds the pipe's other end. When it closes, because the driver is done or because it was killed,
processes that inherited the marker in their environment are ended, the newest checkpoint that lies in memory only is
brought to disk, and the directories are removed.
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
#: What the name of a directory that is not whole yet begins with.
TEMPORARY = ".writing-"


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


def copy_to_disk(source: Path, target: Path) -> None:
    """Copy a directory so that `target` is there as a whole and on disk, or not at all.

    Args:
        source: The directory.
        target: What it is called at its destination, in a directory that is there. One of this name is replaced.
    """
    temporary = target.with_name(TEMPORARY + target.name)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    publish(temporary, target)


def publish(temporary: Path, target: Path) -> None:
    """Write a directory's files to disk, then give it its name."""
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    if target.exists():  # a resumed run reached this step again
        shutil.rmtree(target)
    temporary.rename(target)
    _sync(target.parent)


def rescue(snapshots: Path, checkpoints: Path) -> None:
    """Bring the newest checkpoint that is whole in memory to disk, if it is not there.

    A driver that ends by itself has removed its snapshots: they are of one that was killed.
    """
    found = sorted(snapshots.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    if found and not (checkpoints / found[-1].name).exists():
        checkpoints.mkdir(exist_ok=True)
        copy_to_disk(found[-1], checkpoints / found[-1].name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> None:
    """Wait for the driver's end of the pipe to close, then clear up."""
    value, *arguments = sys.argv[1:]
    sys.stdin.buffer.read()
    sweep(value)
    rescued = arguments[0] == "--rescue"
    try:
        if rescued:
            rescue(Path(arguments[1]), Path(arguments[2]))
    finally:
        for directory in arguments[3:] if rescued else arguments:
            shutil.rmtree(directory, ignore_errors=True)
        for semaphore in Path("/dev/shm").glob(f"sem.{value}-*"):  # of processes that were killed
            semaphore.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
