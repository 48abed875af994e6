"""What a run may leave on the machine: nothing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

#: Everything that a test starts inherits this; runs of others on the machine do not have it.
TEST_MARKER = "ROLL_LIKE_TEST"
#: What stays of the test session's own Ray: processes without work, and those of `warm_workers`.
STAYS = ("ray::IDLE", "ray::RankHost", "ray::EngineHost")


def _is_ours(process: psutil.Process) -> bool:
    return process.environ().get(TEST_MARKER) == str(os.getpid())


def _processes() -> dict[int, str]:
    """Process ids and names of everything that this test session's runs started, in processes of their own or here."""
    found = {}
    for process in psutil.process_iter(["pid", "name", "status"]):
        try:
            if not _is_ours(process) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if not process.name().startswith(STAYS):
                found[process.pid] = process.name()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def ended(*pids: int, seconds: float = 20.0) -> bool:
    """Return whether processes have ended, or do so soon: those that are killed are there for a moment still."""
    until = time.monotonic() + seconds
    while any(map(_lives, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _files() -> set[Path]:
    """Shared memory and folders of Ray, except those of others on the machine, such as other test workers."""
    found = {*Path("/tmp").glob("roll-*")}
    for names in ("roll*", "psm_*", "sem.roll-*"):
        found |= {*Path("/dev/shm").glob(names)}
    return without_others(found)


def without_others(files: set[Path]) -> set[Path]:
    """Return those that no process of others has mapped, names in its command line, or is named in."""
    left = {file for file in files if not _is_of_another_driver(file)}
    for process in psutil.process_iter() if left else ():
        try:
            if process.pid == os.getpid() or _is_ours(process):
                continue
            lines = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
            mapped = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
            named = {Path(name) for name in (*process.cmdline(), *mapped)}
            left = {file for file in left if not named & {file, _session_of(file)}}
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
            continue
    return left


def _session_of(semaphore: Path) -> Path:
    """Return the name of the folder of the run that a semaphore is of, which the process that clears up is given."""
    return Path("-".join(semaphore.name.removeprefix("sem.").split("-")[:2]))


def _is_of_another_driver(folder: Path) -> bool:
    """Whether these are the pages of workers of a driver that lives and that this session did not start."""
    named = re.match(r"roll-progress-(\d+)-", folder.name)
    try:
        return named is not None and int(named[1]) != os.getpid() and not _is_ours(psutil.Process(int(named[1])))
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


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
