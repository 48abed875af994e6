"""A checkpoint is whole or it does not count, whatever the disk and `kill -9` do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from roll_like.errors import CheckpointError
from roll_like.run.checkpoint import CheckpointStore, read_checkpoint


def make_store(directory: Path, **changes) -> tuple[CheckpointStore, list[str]]:  # type: ignore[no-untyped-def]
    warnings: list[str] = []
    settings = {"keep": 2, "keep_best": True} | changes
    return CheckpointStore(directory, warn=warnings.append, **settings), warnings


def save(directory: Path) -> None:
    (directory / "engine").mkdir()
    (directory / "engine" / "weights.bin").write_bytes(b"w" * 1000)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_latest_comes_back_and_old_ones_go(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    assert store.latest() is None
    for step in (1, 2, 3):
        store.write(step, save, {"position": step})
    assert names(tmp_path) == ["step_000002", "step_000003"]
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.state) == (3, {"position": 3})


def test_the_best_is_kept_beside_the_latest(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, keep=1)
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.5), (4, None)):
        store.write(step, save, {}, score=score)
    assert names(tmp_path) == ["best", "step_000002", "step_000004"]
    assert (tmp_path / "best").resolve().name == "step_000002"


def test_a_step_that_is_reached_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    store.write(1, save, {"try": 1})
    store.write(1, save, {"try": 2})
    assert store.latest().state == {"try": 2}  # type: ignore[union-attr]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "state", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, damage: str) -> None:
    store, warnings = make_store(tmp_path)
    store.write(1, save, {"position": 1})
    store.write(2, save, {"position": 2})
    weights = tmp_path / "step_000002" / "engine" / "weights.bin"
    {
        "flip": lambda: weights.write_bytes(b"w" * 999 + b"x"),
        "truncate": lambda: weights.write_bytes(b"w" * 10),
        "remove": weights.unlink,
        "state": lambda: (tmp_path / "step_000002" / "state.json").write_text("{"),
        "manifest": lambda: (tmp_path / "step_000002" / "manifest.json").write_text("{}"),
    }[damage]()
    assert store.latest().step == 1  # type: ignore[union-attr]
    assert len(warnings) == 1
    assert "step_000002" in warnings[0]
    shutil.rmtree(tmp_path / "step_000001")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        store.latest()


def test_a_full_disk_leaves_earlier_checkpoints_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = make_store(tmp_path)
    store.write(1, save, {})

    def full(directory: Path) -> None:
        save(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        store.write(2, full, {})
    assert "checkpoint.keep" in str(caught.value)
    assert names(tmp_path) == ["step_000001"]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(CheckpointError, match=r"takes 0.0 GiB, and .* has 0.0 GiB free"):
        store.write(2, save, {})
    assert store.latest().step == 1  # type: ignore[union-attr]


WRITER = """
import sys, time
from pathlib import Path
from roll_like.run.checkpoint import CheckpointStore

def save(directory):
    for index in range(20):
        (directory / f"{index}.bin").write_bytes(bytes(200_000))
        print("writing", flush=True)
        time.sleep(0.005)

store = CheckpointStore(Path(sys.argv[1]), keep=2, keep_best=True, warn=print)
for step in range(1, 1000):
    store.write(step, save, {"step": step}, score=step)
"""


@pytest.mark.parametrize("moment", [5, 25, 47])
def test_kill_9_while_writing_leaves_a_whole_checkpoint(tmp_path: Path, moment: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(moment):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store, warnings = make_store(tmp_path)
    latest = store.latest()
    assert (latest.step if latest else 0) in {moment // 20, moment // 20 + 1}
    assert warnings == []
    store.write(1001, save, {})
    assert not [name for name in names(tmp_path) if name.startswith(".writing")]


def test_reading_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no whole checkpoint"):
        read_checkpoint(tmp_path)
