"""The watched processes of one node: what they do, evidence of one that hangs, and its end."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import psutil

from roll_like.cluster.progress import STACKS, Page, Work, started_at

#: What names of folders begin with that only their driver removes: those on a Ray cluster that was joined.
FOLDER_PREFIX = "roll-progress-"
#: How old such a folder is before it may be taken for one whose driver was killed. Seconds.
ABANDONED_SECONDS = 60.0
#: How long all evidence of a role may take on a node, and how long Python's stacks may. Seconds.
EVIDENCE_SECONDS = 5.0
STACKS_SECONDS = 2.0
#: How long a process may take to be gone after SIGKILL; one that waits for a disk stays until that answers. Seconds.
END_SECONDS = 10.0
#: Files of `/proc/PID` that say what the kernel knows of a process; the last one is for root only.
_KERNEL = ("wchan", "status", "stack")


def page_prefix(folder: Path, role: str, rank: int) -> str:
    """Return a worker's value of `VARIABLE`: where its page goes, without the process id at the end."""
    return str(folder / f"{rank}.{quote(role, safe='')}")


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders that no process watches any more: their drivers were killed."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # it is watched, another user's, or gone
            if time.time() - folder.stat().st_mtime < ABANDONED_SECONDS:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


@dataclass(frozen=True, slots=True)
class Sighting:
    """A process as it was found.

    Attributes:
        name: Name of its page, unique in the run.
        role: The role of its worker.
        rank: The rank of its worker, which may have several processes.
        pid: Its process id on its node.
        state: One letter of `/proc/PID/stat`; T is stopped.
        page: What it is doing.
    """

    name: str
    role: str
    rank: int
    pid: int
    state: str
    page: Page


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """What the processes of a role hold at most.

    Attributes:
        resident_bytes: Their largest resident memory, added up; pages that they share count in each.
        gpu_bytes: Largest peak of allocated GPU memory among them; 0 where none uses a GPU.
    """

    resident_bytes: int
    gpu_bytes: int

    def __add__(self, other: RoleMemory) -> RoleMemory:
        """Return the memory of both, of one role."""
        return RoleMemory(self.resident_bytes + other.resident_bytes, max(self.gpu_bytes, other.gpu_bytes))


class NodeWatch:
    """Reads the pages in a folder of this node; an actor on nodes other than the driver's."""

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        self._folder = folder
        self._proc = proc
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # ends with this process, whatever ends it
        _remove_abandoned(folder.parent)

    def look(self) -> list[Sighting]:
        """Return the processes that live; remove the pages of those that do not."""
        found = []
        for path in self._folder.iterdir():
            if path.suffix == STACKS:
                continue
            page = Page.read(_bytes(path))
            if page is None:
                continue
            rank, _, rest = path.name.partition(".")
            role, _, pid = rest.rpartition(".")
            try:
                stat = (self._proc / pid / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                stat = ""
            state = stat.rpartition(")")[2].split()[0] if stat else "X"
            if state in "XZ" or started_at(stat) != page.started:
                path.unlink(missing_ok=True)
                path.with_name(path.name + STACKS).unlink(missing_ok=True)
                continue
            found.append(Sighting(path.name, unquote(role), int(rank), int(pid), state, page))
        return found

    def memory(self) -> dict[str, RoleMemory]:
        """Return what each role's processes on this node, with all that they started, hold at most.

        Resident memory is that since the last call where the kernel lets its peak be reset, else since their start.
        """
        held: dict[str, RoleMemory] = {}
        parents = self._parents()
        watched = {one.pid: one for one in self.look()}
        for pid in parents:
            above: int | None = pid
            while above is not None and above not in watched:
                above = parents.get(above)
            if above is None:
                continue
            one = watched[above]
            peak = RoleMemory(self._peak_resident_bytes(pid), one.page.gpu_bytes if pid == above else 0)
            held[one.role] = held.get(one.role, RoleMemory(0, 0)) + peak
        return held

    def evidence(self, names: Collection[str]) -> dict[str, str]:
        """Return what can be known of processes, by the names of their pages: stacks of Python and of the kernel.

        A stopped process does not answer, and is left as it is: if it was continued, its work would go on.
        """
        until = time.monotonic() + EVIDENCE_SECONDS
        processes = [one for one in self.look() if one.name in names]
        stacks = self._stacks([one for one in processes if one.state != "T"])
        texts = {}
        for one in processes:
            own = self._proc / str(one.pid)
            parts = {
                "Python, by SIGUSR2": stacks.get(one.name, "the process is stopped and cannot answer"),
                **{f"kernel, {name}": _content(own / name) for name in _KERNEL},
                "Python, by py-spy": _py_spy(one.pid, until - time.monotonic()),
            }
            doing = one.page.phase if one.page.work is not Work.NONE else "idle"
            head = f"{one.role} {one.rank}: process {one.pid}, state {one.state}, {doing}, {one.page.ticks} units done"
            shown = [f"--- {title}\n{text.rstrip()}" for title, text in parts.items() if text.strip()]
            texts[one.name] = "\n\n".join([head, *shown]) + "\n"
        return texts

    def end(self, names: Collection[str]) -> list[int]:
        """Kill processes and their children; return the ids of those that are still there after `END_SECONDS`."""
        left: list[psutil.Process] = []
        for one in self.look():
            if one.name in names:
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(one.pid)
                    left += [process, *process.children(recursive=True)]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        until = time.monotonic() + END_SECONDS
        while (left := [process for process in left if _lives(process)]) and time.monotonic() < until:
            time.sleep(0.05)
        return [process.pid for process in left]

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _parents(self) -> dict[int, int]:
        """Return the parent of each process of this node."""
        found = {}
        for folder in self._proc.iterdir():
            if folder.name.isdecimal() and (stat := _content(folder / "stat")):
                found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        return found

    def _peak_resident_bytes(self, pid: int) -> int:
        """Return the largest resident memory of a process, and reset it to what it is now."""
        peak = re.search(r"^VmHWM:\s*(\d+) kB$", _content(self._proc / str(pid) / "status"), re.MULTILINE)
        with suppress(OSError):  # the process has ended, or the kernel does not allow it
            (self._proc / str(pid) / "clear_refs").write_text("5")
        return 0 if peak is None else int(peak[1]) * 1024

    def _stacks(self, processes: Iterable[Sighting]) -> dict[str, str]:
        """Ask processes for their stacks, and return what is new in each one's file when it does not grow any more."""
        files = {one.name: self._folder / (one.name + STACKS) for one in processes}
        before = {name: len(_bytes(file)) for name, file in files.items()}
        for one in processes:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGUSR2)
        until = time.monotonic() + STACKS_SECONDS
        sizes: dict[str, int] = {}
        while time.monotonic() < until:
            time.sleep(0.1)
            last, sizes = sizes, {name: len(_bytes(file)) for name, file in files.items()}
            if sizes == last and all(size > before[name] for name, size in sizes.items()):
                break
        return {
            name: _bytes(file)[before[name] :].decode(errors="replace") or "no answer" for name, file in files.items()
        }


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""  # another watch of this machine has swept it up


def _content(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # not readable for this user, or not there any more


def _py_spy(pid: int, seconds: float) -> str:
    """Return what py-spy says, where it is installed; it reads the memory of a process without stopping it."""
    program = shutil.which("py-spy")
    if program is None or seconds <= 0:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "no answer in time"
    return done.stdout or done.stderr


def _lives(process: psutil.Process) -> bool:
    try:
        # a zombie stays where its parent does not reap it
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
