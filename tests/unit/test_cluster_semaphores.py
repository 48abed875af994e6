"""Semaphores of workers that were killed, and of what else would have removed them, are found by their names."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_like.cluster import guardian
from roll_like.cluster.guardian import WORKER_MARKER, remove_semaphores

DIES = """
import multiprocessing, os, signal
from multiprocessing import resource_tracker
from roll_like.cluster.guardian import name_semaphores

name_semaphores()
lock = multiprocessing.get_context("spawn").Lock()
print("sem." + lock._semlock.name.lstrip("/"), flush=True)
for pid in (resource_tracker._resource_tracker._pid, os.getpid()):
    os.kill(pid, signal.SIGKILL)
"""
WORKER = "inference 0 0123456789abcdef"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(guardian.MARKER, f"roll-{uuid.uuid4().hex[:8]}")
    return os.environ[guardian.MARKER]


@pytest.fixture
def left(session: str) -> Iterator[Path]:
    """The semaphore of a worker that was killed."""
    environment = {**os.environ, guardian.MARKER: session, WORKER_MARKER: WORKER}
    done = subprocess.run([sys.executable, "-c", DIES], env=environment, capture_output=True, text=True, check=False)
    path = Path("/dev/shm", done.stdout.strip())
    assert path.is_file(), done.stderr
    yield path
    path.unlink(missing_ok=True)


def test_those_of_a_worker_go_and_those_of_others_stay(left: Path) -> None:
    remove_semaphores(WORKER.replace(" 0 ", " 1 "))
    assert left.exists()
    remove_semaphores(WORKER)
    assert not left.exists()


def test_all_of_a_session_go_with_it(left: Path, session: str, tmp_path: Path) -> None:
    def clear_up(name: str) -> None:
        command = [sys.executable, "-I", "-S", guardian.__file__, name, str(tmp_path / "none")]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=60)

    clear_up(f"{session}x")
    assert left.exists()
    clear_up(session)
    assert not left.exists()
