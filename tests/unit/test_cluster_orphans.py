"""What is left where a driver and what would clear up after it were both killed: the next run ends and removes it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_like.cluster import guardian
from roll_like.cluster.orphans import NOTE, clear_up_orphans
from roll_like.metrics import files

#: A driver: it holds its run's folder and its session, and starts its guardian and a worker.
DRIVER = """
import fcntl, os, subprocess, sys, time
from pathlib import Path
from roll_like.cluster import guardian
from roll_like.cluster.orphans import hold_session

session, run = map(Path, sys.argv[1:])
lock = os.open(run / "lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
session.mkdir()
states = session / "states"
written = ["--events", str(run / "events.jsonl"), "--rescue", str(states), str(run / "checkpoints")]
whole = [session.name, str(session), str(states)]
held = hold_session(session, whole, written, lock)
command = [sys.executable, "-I", "-S", guardian.__file__, *written, *whole]
process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[held, lock])
(states / "step_000004").mkdir(parents=True)
worker = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
worker = subprocess.Popen(worker, env={**os.environ, guardian.MARKER: session.name}, start_new_session=True)
print(process.pid, worker.pid, flush=True)
time.sleep(600)
"""


class Left:
    """A session of which neither the driver nor the guardian lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"roll-{os.urandom(5).hex()}"
        self.run = folder / "run"
        self.run.mkdir()
        command = [sys.executable, "-c", DRIVER, str(self.folder), str(self.run)]
        self.driver = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.driver.stdout is not None
        self.guardian, self.worker = map(int, self.driver.stdout.readline().split())

    def kill_guardian(self) -> None:
        os.kill(self.guardian, signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is a zombie only after its locks are gone
            while ") Z " not in Path(f"/proc/{self.guardian}/stat").read_text():
                time.sleep(0.01)

    def kill_driver(self) -> None:
        self.driver.kill()
        self.driver.wait()
        assert self.driver.stdout is not None
        self.driver.stdout.close()

    def kill_worker(self) -> None:
        os.kill(self.worker, signal.SIGKILL)


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    found = Left(tmp_path)
    yield found
    for process in (found.worker, found.guardian):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    found.kill_driver()


def test_what_is_left_is_ended_and_removed_and_the_newest_state_is_kept(
    left: Left, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left.kill_guardian()
    clear_up_orphans(tmp_path)
    assert left.folder.is_dir()  # its driver lives
    assert guardian.marked(left.folder.name)
    left.kill_driver()
    clear_up_orphans(tmp_path)
    assert not left.folder.exists()
    assert not guardian.marked(left.folder.name)
    assert [path.name for path in (left.run / "checkpoints").iterdir()] == ["step_000004"]
    assert [each["status"] for each in files.read_jsonl(left.run / "events.jsonl")] == ["killed"]
    assert f"what a run that was killed left in {left.folder}" in capsys.readouterr().err


def test_what_a_guardian_clears_up_is_left_to_it(left: Left, tmp_path: Path) -> None:
    os.kill(left.guardian, signal.SIGSTOP)
    left.kill_driver()
    clear_up_orphans(tmp_path)
    assert left.folder.is_dir()


@pytest.mark.parametrize("runs", ["now", "since"])
def test_a_run_that_went_on_keeps_its_own_end(left: Left, tmp_path: Path, runs: str) -> None:
    left.kill_worker()
    left.kill_guardian()
    left.kill_driver()
    end = {"kind": "end", "step": 9, "time": time.time() + 60, "elapsed": 1.0, "status": "finished"}
    files.append(left.run / "events.jsonl", [end])
    with (left.run / "lock").open() as lock:
        if runs == "now":
            fcntl.flock(lock, fcntl.LOCK_EX)
        clear_up_orphans(tmp_path)
    assert not left.folder.exists()
    assert files.read_jsonl(left.run / "events.jsonl") == [end]
    assert (left.run / "checkpoints").exists() == (runs == "since")


def test_damaged_notes_are_named_and_what_is_whole_is_cleared_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / f"roll-{os.urandom(5).hex()}"
    notes = {whole: json.dumps({"whole": [whole.name, str(whole)], "run": [], "lock": None}).encode()}
    damaged = [b'{"whole": ["roll-a", "/t', b"\0\0\0\0", b"\xff", b"[]", b"null", b'{"whole": []}', b""]
    notes.update({tmp_path / f"roll-damaged-{number}": text for number, text in enumerate(damaged)})
    for folder, text in notes.items():
        folder.mkdir()
        (folder / NOTE).write_bytes(text)
        os.utime(folder / NOTE, (0, 0))
    clear_up_orphans(tmp_path)
    assert {*tmp_path.iterdir()} == notes.keys() - {whole}
    said = capsys.readouterr().err
    assert f"left in {whole}\n" in said
    for folder in notes.keys() - {whole}:
        assert f"{folder / NOTE} is damaged" in said
        assert f"delete {folder}\n" in said
        assert f"left in {folder}\n" not in said


def test_notes_that_are_not_written_yet_or_are_of_others_are_passed_over(tmp_path: Path) -> None:
    for name, text in {"roll-new": "", "roll-other": json.dumps({"whole": ["none", str(tmp_path)]})}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / NOTE).write_text(text)
    (tmp_path / "roll-other" / NOTE).chmod(0o600)
    if os.geteuid() == 0:
        os.chown(tmp_path / "roll-other" / NOTE, 1, 1)
    else:
        (tmp_path / "roll-other" / NOTE).chmod(0)
    clear_up_orphans(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["roll-new", "roll-other"]
