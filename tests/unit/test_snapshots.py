"""States in memory: when they are taken, what is kept, how they come to disk, and what a killed driver leaves."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_like.cluster import WorkerDied, guardian
from roll_like.errors import CheckpointError, DiskFullError
from roll_like.run import folder
from roll_like.run import snapshots as module
from roll_like.run.checkpoint import CheckpointStore, checkpoint_name, read_checkpoint
from roll_like.run.folder import locked
from roll_like.run.snapshots import Snapshots

CONTENT = b"weights" * 1000


class Clock:
    """A clock that stands still unless it is told otherwise."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def save(directory: Path) -> None:
    (directory / "policy").mkdir()
    (directory / "policy" / "weights").write_bytes(CONTENT)


def make(tmp_path: Path, clock: Callable[[], float] = time.monotonic, *, durable: bool = True) -> tuple[Snapshots, Any]:
    warnings: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", keep=9, keep_best=True, warn=warnings.append)
    return Snapshots(tmp_path / "memory", store, durable=durable, warn=warnings.append, clock=clock), warnings


def take(snapshots: Snapshots, step: int, save: Callable[[Path], None] = save, *, expected: int = 1) -> bool:
    return snapshots.take(step, save, {"position": step}, score=None, expected=lambda: expected)


def in_memory(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "memory").iterdir())


def on_disk(tmp_path: Path) -> list[int]:
    return [read_checkpoint(path).step for path in sorted((tmp_path / "checkpoints").glob("step_*"))]


def test_the_newest_state_replaces_the_one_before_it(tmp_path: Path) -> None:
    snapshots, _ = make(tmp_path)
    assert snapshots.newest() is None
    for step in (1, 2, 3):
        assert take(snapshots, step)
    newest = snapshots.newest()
    assert newest is not None
    assert (newest.step, newest.state) == (3, {"position": 3})
    assert (newest.path / "policy" / "weights").read_bytes() == CONTENT
    assert in_memory(tmp_path) == ["step_000003"]
    assert not (tmp_path / "checkpoints").exists()


def test_they_are_due_as_often_as_they_take_two_percent_of_the_time(tmp_path: Path) -> None:
    clock = Clock()
    snapshots, _ = make(tmp_path, clock)
    assert snapshots.due

    def slowly(directory: Path) -> None:
        save(directory)
        clock.now += 3.0

    assert take(snapshots, 1, slowly)
    assert snapshots.stall == 3.0
    clock.now += 149.0
    assert not snapshots.due
    clock.now += 1.0
    assert snapshots.due


def test_the_same_step_is_taken_once(tmp_path: Path) -> None:
    snapshots, _ = make(tmp_path)
    assert take(snapshots, 1)
    assert take(snapshots, 1, lambda directory: pytest.fail(f"{directory} is written again"))


def test_half_of_the_memory_must_hold_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 2000)
    snapshots, _ = make(tmp_path)
    assert not take(snapshots, 1, expected=500)
    monkeypatch.setattr(module, "available_memory", lambda: 2400)
    assert take(snapshots, 1, lambda directory: None, expected=500)


def test_without_a_folder_in_memory_none_is_taken(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_best=False, warn=print)
    snapshots = Snapshots(None, store, durable=True, warn=print)
    assert not snapshots.due
    assert not take(snapshots, 1)
    snapshots.copy()
    assert snapshots.copied(wait=True) is None
    snapshots.close(None, None, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), DiskFullError("rank 0 cannot")])
def test_memory_that_is_full_all_the_same_is_not_tried_again(tmp_path: Path, error: Exception) -> None:
    def full(directory: Path) -> None:
        save(directory)
        raise error

    snapshots, _ = make(tmp_path)
    assert take(snapshots, 1)
    assert not take(snapshots, 2, full)
    assert not take(snapshots, 3)
    assert not snapshots.due
    assert in_memory(tmp_path) == ["step_000001"]


def test_one_of_several_ranks_that_cannot_write_is_an_error(tmp_path: Path) -> None:
    def half(directory: Path) -> None:
        raise CheckpointError("rank 1 cannot write")

    snapshots, _ = make(tmp_path)
    with pytest.raises(CheckpointError, match="rank 1 cannot write"):
        take(snapshots, 1, half)
    assert in_memory(tmp_path) == []


def test_what_a_rank_that_died_left_is_not_in_the_way_of_the_next_state(tmp_path: Path) -> None:
    def die(directory: Path) -> None:
        save(directory)
        raise WorkerDied("training worker 1 in save: its process is gone")

    snapshots, _ = make(tmp_path)
    with pytest.raises(WorkerDied):
        take(snapshots, 1, die)
    assert take(snapshots, 2)
    assert in_memory(tmp_path) == ["step_000002"]


def test_a_state_comes_to_disk_while_later_ones_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, copy = threading.Event(), CheckpointStore.copy

    def slow_copy(store: CheckpointStore, snapshot: Path) -> Path:
        assert let_go.wait(20)
        return copy(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "copy", slow_copy)
    snapshots, _ = make(tmp_path)
    assert take(snapshots, 1)
    snapshots.copy()
    assert take(snapshots, 2)
    assert not take(snapshots, 3)  # one that is being copied and one that is whole: no third
    assert snapshots.copied() is None
    assert in_memory(tmp_path) == ["step_000001", "step_000002"]
    let_go.set()
    assert snapshots.copied(wait=True) == 1
    assert (on_disk(tmp_path), in_memory(tmp_path)) == ([1], ["step_000002"])
    assert take(snapshots, 3)
    assert snapshots.copied() is None


def test_a_copy_that_fails_leaves_the_disk_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, _ = make(tmp_path)
    assert take(snapshots, 1)
    with monkeypatch.context() as full:
        full.setattr("shutil.copytree", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        snapshots.copy()
        with pytest.raises(DiskFullError, match="the checkpoint of step 1 cannot be written"):
            snapshots.copied(wait=True)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    snapshots.copy()
    assert snapshots.copied(wait=True) == 1
    assert on_disk(tmp_path) == [1]


def test_a_copy_that_never_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(CheckpointStore, "copy", lambda store, path: let_go.wait(20))
    monkeypatch.setattr(module, "COPY_SECONDS", 0.01)
    snapshots, _ = make(tmp_path)
    assert take(snapshots, 1)
    snapshots.copy()
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 did not come to"):
        snapshots.copied(wait=True)
    let_go.set()


@pytest.mark.parametrize(
    ("error", "durable", "found"),
    [(None, True, [1]), (RuntimeError(), True, [1, 2]), (KeyboardInterrupt(), True, [1, 2]), (OSError(), False, [1])],
)
def test_the_last_state_of_a_run_that_fails_comes_to_disk(
    tmp_path: Path, error: BaseException | None, durable: bool, found: list[int]
) -> None:
    snapshots, _ = make(tmp_path, durable=durable)
    assert take(snapshots, 1)
    snapshots.copy()
    assert take(snapshots, 2)
    snapshots.close(None if error is None else type(error), error, None)
    assert on_disk(tmp_path) == found
    assert not (tmp_path / "memory").exists()


def test_a_failure_is_not_hidden_by_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, warnings = make(tmp_path)
    assert take(snapshots, 1)
    monkeypatch.setattr("shutil.copytree", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    snapshots.close(RuntimeError, RuntimeError(), None)
    (warning,) = warnings
    assert warning.startswith("the checkpoint of step 1 cannot be written")


def test_a_damaged_state_is_found(tmp_path: Path) -> None:
    snapshots, _ = make(tmp_path)
    assert take(snapshots, 1)
    (tmp_path / "memory" / "step_000001" / "policy" / "weights").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="5 bytes"):
        snapshots.newest()


# ---- a driver that was killed ------------------------------------------------------------------------


def guarded(tmp_path: Path) -> subprocess.Popen[bytes]:
    rescue = ("--rescue", tmp_path / "memory", tmp_path / "checkpoints")
    command = [sys.executable, "-I", "-S", guardian.__file__, *rescue, "test-snapshots-none", tmp_path / "memory"]
    return subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE)


@pytest.mark.parametrize("there", [[], [1], [1, 4]], ids=["no checkpoint", "an older one", "the same"])
def test_the_newest_state_of_a_killed_driver_is_brought_to_disk(tmp_path: Path, there: list[int]) -> None:
    snapshots, _ = make(tmp_path)
    for step in there:
        assert take(snapshots, step)
        snapshots.copy()
        snapshots.copied(wait=True)
    assert take(snapshots, 4)
    unfinished = tmp_path / "memory" / "unfinished"
    unfinished.mkdir()
    process = guarded(tmp_path)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert on_disk(tmp_path) == sorted({*there, 4})
    assert not (tmp_path / "memory").exists()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        checkpoint_name(step) for step in {*there, 4}
    ]


def test_a_driver_that_ended_by_itself_leaves_nothing_to_rescue(tmp_path: Path) -> None:
    snapshots, _ = make(tmp_path)
    assert take(snapshots, 1)
    snapshots.close(None, None, None)
    guarded(tmp_path).communicate(timeout=20)
    assert not (tmp_path / "checkpoints").exists()


HOLDER = """
import subprocess, sys
from pathlib import Path
from roll_like.run.folder import locked
with locked(Path(sys.argv[1])) as lock:
    heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin, pass_fds=[lock])
    print("held", flush=True)
    heir.wait()
"""


def test_a_folder_is_waited_for_longer_than_a_copy_may_take() -> None:
    assert folder.CLEARING_SECONDS > module.COPY_SECONDS + guardian.PATIENCE


def test_a_folder_is_free_when_what_clears_up_after_a_killed_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder, "SILENT_SECONDS", 0.0)
    reading, writing = os.pipe()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdin=reading, stdout=subprocess.PIPE)
    os.close(reading)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(CheckpointError, match="another process is running"), locked(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    events: list[str] = []

    def wait_for_the_folder() -> None:
        with locked(tmp_path):
            events.append("free")

    waiting = threading.Thread(target=wait_for_the_folder)
    waiting.start()
    said = ""
    while not said:
        waiting.join(0.05)
        said += capsys.readouterr().err
    events.append("cleared up")
    os.write(writing, b"\n")
    os.close(writing)
    waiting.join(60)
    assert events == ["cleared up", "free"]
    assert said.startswith(f"waiting for what process {holder.pid} left in {tmp_path}")
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}"
