"""Semaphores of Python that a worker makes: they have names in `/dev/shm`, which outlive a process that is killed."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from roll_like.cluster import guardian

#: Environment variable of every process of a worker, so that they can be found: role, rank, and a number.
WORKER_MARKER = "ROLL_LIKE_WORKER"


def name_semaphores() -> None:
    """Let semaphores of this process and of those that it starts be found by their names."""
    prefix = _prefix(os.environ.get(WORKER_MARKER, ""))
    multiprocessing.current_process()._config["semprefix"] = f"/{prefix}"  # type: ignore[attr-defined]


def remove_semaphores(marker: str) -> None:
    """Remove what is left of a worker's, which has ended.

    Args:
        marker: Its `WORKER_MARKER`.
    """
    for path in Path("/dev/shm").glob(f"sem.{_prefix(marker)}-*"):
        path.unlink(missing_ok=True)


def _prefix(marker: str) -> str:
    # the session first: `guardian` removes all that begin with it
    return "-".join([os.environ.get(guardian.MARKER, "roll-none"), *marker.split()[-2:]])
