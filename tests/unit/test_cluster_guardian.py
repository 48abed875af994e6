"""What is left of processes that are ended from outside: nothing, also of what they would have removed themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from roll_like.cluster import guardian

SHARES = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Lock()
memory = SharedMemory(create=True, size=100)
print("sem." + lock._semlock.name.lstrip("/"), memory.name, flush=True)
time.sleep(600)
"""


def test_semaphores_and_shared_memory_of_killed_processes_go(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARES],
            env={**os.environ, guardian.MARKER: name},
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for name in (marker, f"{marker}-other")
    ]
    files = []
    for process in processes:
        assert process.stdout is not None
        files.append([Path("/dev/shm", name) for name in process.stdout.readline().split()])
    assert all(file.exists() for of_process in files for file in of_process)
    guardian.sweep(marker, patience=0.2)
    assert [file.exists() for file in files[0]] == [False, False]
    assert [file.exists() for file in files[1]] == [True, True], "those of others stay"
    guardian.sweep(f"{marker}-other", patience=0.2)
    assert not any(file.exists() for file in files[1])
    for process in processes:
        assert process.wait(10) != 0
        assert process.stdout is not None
        process.stdout.close()
