"""What a run may leave on the machine: nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_OURS = ("ray::", "raylet", "gcs_server", "EngineCore", "roll_like", "run_pipeline", "multiprocessing.resource_tracker")


def _processes() -> dict[int, str]:
    """Process ids and command lines of everything that a run may start, by this user's tests."""
    found = {}
    for process in psutil.process_iter(["pid", "name", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [process.info["name"] or ""])
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(word in line for word in _OURS):
            found[process.info["pid"]] = line[:150]
    return found


def _files() -> set[Path]:
    return {*Path("/dev/shm").glob("*"), *Path("/tmp").glob("roll-*")}


@contextmanager
def nothing_left(seconds: float = 20.0) -> Iterator[None]:
    """Fail unless every process, shared-memory segment and temporary folder that appears within also goes."""
    processes, files = _processes(), _files()
    yield
    until = time.monotonic() + seconds
    while True:
        new_processes = {pid: line for pid, line in _processes().items() if pid not in processes}
        new_files = _files() - files
        if not new_processes and not new_files:
            return
        if time.monotonic() > until:
            raise AssertionError(f"left behind: {new_processes} {sorted(map(str, new_files))}")
        time.sleep(0.25)
