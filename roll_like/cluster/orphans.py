"""Clears up after sessions whose driver and guardian were both killed, as by a machine that ran out of memory.

A session's folder has a note of what its guardian was started with. The driver and the guardian hold a lock on it: one
that can be locked is of a session that nobody clears up. The next run starts that guardian again.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path

from roll_like.cluster import guardian

#: Name of the note in a session's folder.
NOTE = "session.json"
#: How long a note may be empty while its session starts. Seconds.
NEW_SECONDS = 60.0


def hold_session(folder: Path, whole: Sequence[str], run: Sequence[str], lock: int | None) -> int:
    """Write a session's note; return the descriptor of its lock, which goes with the last process that has it.

    Args:
        whole: Arguments of the guardian that say what is removed.
        run: Those that say what it writes into the run's folder.
        lock: Descriptor of the file whose lock is the run's folder; None where there is none.
    """
    note = {"whole": [*whole], "run": [*run], "lock": None if lock is None else os.readlink(f"/proc/self/fd/{lock}")}
    descriptor = os.open(folder / NOTE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, json.dumps(note).encode())
    return descriptor


def clear_up_orphans(place: Path = Path("/tmp")) -> None:
    """End and remove what is left of this user's sessions on this machine that have neither driver nor guardian."""
    for path in place.glob(f"roll-*/{NOTE}"):
        with suppress(OSError), path.open("r+b") as note:  # it goes, is another user's, or lives: it is locked
            status = os.fstat(note.fileno())
            if status.st_uid != os.geteuid():
                continue
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            written = note.read()
            if not written and time.time() < status.st_mtime + NEW_SECONDS:
                continue
            try:
                whole, run, lock = itemgetter("whole", "run", "lock")(json.loads(written))
            except (ValueError, KeyError, TypeError) as error:  # the power failed, or there was no room
                print(
                    f"{path} is damaged ({type(error).__name__}: {error}): what its run left is not removed; when no "
                    f"process of that run is left, delete {path.parent}",
                    file=sys.stderr,
                )
                continue
            print(f"ending and removing what a run that was killed left in {path.parent}", file=sys.stderr)
            _clear_up(whole, run, lock, note.fileno())


def _clear_up(whole: Sequence[str], written: Sequence[str], locked: str | None, descriptor: int) -> None:
    """Do what the session's guardian would have done; `descriptor` is the note's, the rest its content."""
    with ExitStack() as stack:
        run: list[str] = []
        held = [descriptor]
        if locked is not None:
            with suppress(OSError):  # the folder is gone, or another process runs in it: it keeps its own state
                lock = stack.enter_context(Path(locked).open("rb+"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(lock.fileno())
                run = [*written, f"--since={os.fstat(descriptor).st_mtime}"]
        command = [sys.executable, "-I", "-S", guardian.__file__, *run, *whole]
        subprocess.run(command, stdin=subprocess.DEVNULL, pass_fds=held, start_new_session=True, check=False)
