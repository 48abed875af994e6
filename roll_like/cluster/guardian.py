"""Outlives the driver by a moment, and takes everything that the driver started with it.

Run as a script, with nothing but the standard library, so that it costs a few megabytes:

    python -I -S guardian.py [--events FILE] [--since TIME] [--rescue SNAPSHOTS CHECKPOINTS] MARKER DIRECTORY … < pipe

The driver holds the pipe's other end, and writes `DONE` to it before it closes it. When it closes, because the driver
is done or because it was killed, processes that inherited the marker in their environment are ended, the newest
checkpoint that lies in memory only is brought to disk, and the directories are removed. If it was killed, so are
containers that have the marker in a label or in a mounted folder. That it was killed is added to the run's events. If
this process is killed too, the next run starts it again (`orphans.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

#: Name of the environment variable that every process of a session inherits.
MARKER = "ROLL_LIKE_SESSION"
#: The same of every process of a worker: role, rank, and a number.
WORKER_MARKER = "ROLL_LIKE_WORKER"
#: How long processes may take to end by themselves: after the driver was killed, and after it has ended Ray. Seconds.
PATIENCE, LEFT_OVER = 3.0, 0.3
#: Longest removal of an engine's containers. Seconds.
REMOVAL_SECONDS = 60.0
#: The label with the name of a project of Docker Compose.
PROJECT = "com.docker.compose.project"
#: What the driver writes when it ends by itself.
DONE = b"done"
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
    """Wait until the marked processes have ended, and kill those that have not.

    A process shows no environment for a moment while it starts, so none are left only if none is seen twice.
    """
    until = time.monotonic() + patience
    left = marked(value, name)
    while time.monotonic() < until:
        time.sleep(0.1)
        before, left = left, marked(value, name)
        if not before and not left:
            return
    until = time.monotonic() + 1.0
    while left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return
        time.sleep(0.05)
        left = marked(value, name)  # they may have started others meanwhile


def remove_containers(value: str, engines: Iterable[str] = ("docker", "podman", "apptainer")) -> None:
    """Remove the containers that have a value in a label, of the engines that there are.

    Those of Apptainer have no labels and end with their processes, which have a folder with the value in its path.
    """
    for engine in filter(shutil.which, engines):
        until = time.monotonic() + REMOVAL_SECONDS
        # engines refuse what they remove already, or start just now
        while _end_mounting(value) if engine == "apptainer" else _end_labelled(engine, value):
            if time.monotonic() > until:
                break
            time.sleep(0.1)


def _end_labelled(engine: str, value: str) -> bool:
    """Remove an engine's containers that have a value in a label; return whether there were any.

    Where they are of a project of Compose, its networks and volumes, which have not the value, go with them.
    """
    run = partial(subprocess.run, check=False, capture_output=True, text=True, timeout=30)
    try:
        listed = run([engine, "ps", "--all", "--format={{.ID}} {{.Labels}}"])
        lines = [line for line in listed.stdout.splitlines() if value in line]
        found = [line.split()[0] for line in lines]
        if found:  # killed first: an engine waits for what it only asks to end
            run([engine, "kill", *found])
            run([engine, "rm", "--force", "--volumes", *found])
        for project in {name for line in lines for name in re.findall(rf"\b{PROJECT}=([^,\s]+)", line)}:
            for kind in ("network", "volume"):
                listed = run([engine, kind, "ls", "--quiet", f"--filter=label={PROJECT}={project}"])
                run([engine, kind, "rm", *listed.stdout.split()])
    except subprocess.TimeoutExpired:
        return True
    return bool(found)


def _end_mounting(value: str) -> bool:
    """Kill processes that have a folder mounted whose path has a value in it; return whether there were any."""
    found = False
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            if value in (entry / "mountinfo").read_text(encoding="utf-8", errors="replace"):
                os.kill(int(entry.name), signal.SIGKILL)
                found = True
    return found


def temporary_folder(name: str, place: str | None = None) -> Path:
    """Make a folder for temporary files, whose path has the session's marker in it.

    Args:
        name: The end of its name; no other has it.
        place: Where it is made; default: where `TMPDIR` says, else in the folder of the session, which goes also where
            that is killed.
    """
    marker = os.environ.get(MARKER, "roll")
    folder = Path(place or os.environ.get("TMPDIR") or session_folder() or "/tmp", f"{marker}-{name}")
    folder.mkdir(mode=0o700)
    return folder


def remove_folder(folder: str | Path) -> None:
    """Remove a folder, also where folders in it may not be read, as those that overlay file systems leave."""

    def allow(function: object, path: str, error: object) -> None:
        del function, error
        with suppress(OSError):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(folder, onerror=allow)


def session_folder() -> Path | None:
    """Return the folder that goes with the session; None where there is none."""
    folder = Path("/tmp", os.environ.get(MARKER, "none"))
    return folder if folder.is_dir() else None


def name_semaphores() -> None:
    """Let semaphores of Python, of this process and of those that it starts, be found by their names.

    They are files in `/dev/shm`, which outlive a process that is killed.
    """
    import multiprocessing

    prefix = f"/{_semaphores(os.environ.get(WORKER_MARKER, ''))}"
    multiprocessing.current_process()._config["semprefix"] = prefix  # type: ignore[attr-defined]


def remove_semaphores(marker: str) -> None:
    """Remove what is left of a worker's, which has ended.

    Args:
        marker: Its `WORKER_MARKER`.
    """
    _unlink_semaphores(_semaphores(marker))


def _semaphores(marker: str) -> str:
    # the session first: the guardian removes all that begin with it
    return "-".join([os.environ.get(MARKER, "roll-none"), *marker.split()[-2:]])


def _unlink_semaphores(prefix: str) -> None:
    for path in Path("/dev/shm").glob(f"sem.{prefix}-*"):
        path.unlink(missing_ok=True)


def copy_to_disk(source: Path, target: Path) -> None:
    """Copy a directory so that `target` is there as a whole and on disk, or not at all.

    Args:
        target: What the copy is called, in a directory that is there. One of this name is replaced.
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


def note_end(events: Path, since: float) -> None:
    """Add to a run's events that its process was killed, if nothing has noted an end.

    Args:
        events: The file; a line that the process left half written is cut off.
        since: When the process began, as a time of the epoch: an end before that is of an earlier attempt.
    """
    found = events.read_bytes() if events.exists() else b""
    whole = found[: found.rfind(b"\n") + 1]
    last = json.loads(whole.splitlines()[-1]) if whole else {}
    if last.get("kind") == "end" and last["time"] >= since:
        return  # the watchdog has said why
    line = {"kind": "end", "step": last.get("step", 0), "time": time.time(), "elapsed": last.get("elapsed", 0.0)}
    with events.open("ab") as file:
        file.truncate(len(whole))
        file.write(json.dumps({**line, "status": "killed", "failures": {}}).encode() + b"\n")


def main() -> None:
    """Wait for the driver's end of the pipe to close, then clear up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path)
    parser.add_argument("--rescue", type=Path, nargs=2)
    parser.add_argument("--since", type=float, default=time.time())
    parser.add_argument("value")
    parser.add_argument("directories", nargs="*")
    wanted = parser.parse_args()
    killed = sys.stdin.buffer.read() != DONE
    sweep(wanted.value, patience=PATIENCE if killed else LEFT_OVER)
    if killed:
        remove_containers(wanted.value)
    try:
        if killed and wanted.events is not None:
            note_end(wanted.events, wanted.since)
        if wanted.rescue is not None:
            rescue(*wanted.rescue)
    finally:
        for directory in wanted.directories:
            remove_folder(directory)
        _unlink_semaphores(wanted.value)  # of processes that were killed


if __name__ == "__main__":
    main()
