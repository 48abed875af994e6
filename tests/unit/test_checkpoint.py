"""A checkpoint is whole or it does not count, whatever the disk and `kill -9` do."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from roll_like.errors import CheckpointError
from roll_like.run.checkpoint import CheckpointClock, CheckpointStore, read_checkpoint, require_checkpoint


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


def test_a_score_that_is_no_number_is_never_best(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, keep=9)
    store.write(1, save, {}, score=math.nan)
    assert not (tmp_path / "best").exists()
    store.write(2, save, {}, score=0.1)
    store.write(3, save, {}, score=math.nan)
    assert (tmp_path / "best").resolve().name == "step_000002"


def test_step_1000000_comes_after_step_999999(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path, keep=2, keep_best=False)
    for step in (999_998, 999_999, 1_000_000):
        store.write(step, save, {})
    assert names(tmp_path) == ["step_1000000", "step_999999"]
    assert store.latest().step == store.newest_step() == 1_000_000  # type: ignore[union-attr]


@pytest.mark.parametrize("content", ["{}", "[]", "", '{"format": 1, "step": "two", "score": "high", "files": {}}'])
def test_a_damaged_record_of_the_best_is_passed_over(tmp_path: Path, content: str) -> None:
    store, warnings = make_store(tmp_path, keep=3)
    store.write(1, save, {}, score=0.9)
    (tmp_path / "step_000001" / "manifest.json").write_text(content)
    store.write(2, save, {}, score=0.5)
    assert (tmp_path / "best").resolve().name == "step_000002"
    (warning,) = warnings
    assert warning.endswith("best/manifest.json is damaged; step_000002 is the best checkpoint from now on")


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


#: Does something to a file.
Damage = Callable[[Path], object]


def sized(change: Callable[[bytes], bytes]) -> Damage:
    return lambda file: file.write_bytes(change(file.read_bytes()))


def truncated(part: float) -> Damage:
    return sized(lambda content: content[: int(len(content) * part)])


def rewritten(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Damage of a JSON file that stays JSON."""

    def rewrite(file: Path) -> None:
        content = json.loads(file.read_text())
        changed = change(content)
        content = changed if isinstance(changed, list) else content
        file.write_text(json.dumps(content))

    return rewrite


def flipped(at: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        index = int(at * (len(content) - 1))
        return content[:index] + bytes([content[index] ^ 0x41]) + content[index + 1 :]

    return flip


class Runs:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


#: What may happen to any file of a checkpoint.
DAMAGE: dict[str, Damage] = {
    **{f"truncated to {part}": truncated(part) for part in (0.0, 0.3, 0.9)},
    **{f"flipped at {at}": sized(flipped(at)) for at in (0.0, 0.2, 0.5, 0.8, 1.0)},
    "all zeros": sized(lambda content: bytes(len(content))),
    "longer": sized(lambda content: content + b"x"),
    "twice": sized(lambda content: 2 * content),
    "missing": Path.unlink,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a link out": lambda file: (file.unlink(), file.symlink_to("/etc/hostname")),
    "code": lambda file: file.write_bytes(pickle.dumps(Runs(file.parents[-2] / "ran"))),
    "renamed": lambda file: file.rename(file.with_name("other")),
}
#: What may be wrong in files that are JSON.
WRONG: dict[str, dict[str, Callable[[dict[str, Any]], object]]] = {
    "manifest.json": {
        "of another format": lambda manifest: manifest.update(format=2),
        "without a format": lambda manifest: manifest.pop("format"),
        "of another step": lambda manifest: manifest.update(step=1),
        "with a step in words": lambda manifest: manifest.update(step="2"),
        "with a negative step": lambda manifest: manifest.update(step=-2),
        "with an unknown key": lambda manifest: manifest.update(more=1),
        "with a list of files": lambda manifest: manifest.update(files=list(manifest["files"])),
        "without files": lambda manifest: manifest.update(files={}),
        "without one file": lambda manifest: manifest["files"].popitem(),
        "with a name out of it": lambda manifest: manifest["files"].update({"../x": manifest["files"]["state.json"]}),
        "with an absolute name": lambda manifest: manifest["files"].update({"/etc/hostname": {"bytes": 1, "xxh3": ""}}),
        "with sizes in words": lambda manifest: manifest["files"]["state.json"].update(bytes="1"),
        "without checksums": lambda manifest: manifest["files"]["state.json"].pop("xxh3"),
        "that is a list": lambda manifest: [manifest],
    },
}
FURTHER_FILES = (
    *("config.yaml", "engine/states_0.pt", "engine/states_1.pt", "engine/rank_0.pt", "engine/rank_1.pt"),
    *("critic/states_0.pt", "critic/rank_0.pt", "rollouts.npz", "rollouts.json"),
)
FILES = ("manifest.json", "state.json", *FURTHER_FILES)
CASES = [
    *((file, name, damage) for file in FILES for name, damage in DAMAGE.items()),
    *((file, name, rewritten(change)) for file, changes in WRONG.items() for name, change in changes.items()),
]


def save_all(directory: Path) -> None:
    save(directory)
    (directory / "critic").mkdir()
    for name in FURTHER_FILES:
        (directory / name).write_bytes(f"{name} of {directory.name}".encode() * 20)


@pytest.mark.parametrize(
    ("file", "damage"),
    [(file, damage) for file, _, damage in CASES],
    ids=[f"{file} {name}" for file, name, _ in CASES],
)
def test_whatever_is_wrong_with_a_file_the_checkpoint_before_is_used(tmp_path: Path, file: str, damage: Damage) -> None:
    store, warnings = make_store(tmp_path)
    for step in (1, 2):
        store.write(step, save_all, {"position": step})
    damage(tmp_path / "step_000002" / file)
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.state) == (1, {"position": 1})
    assert len(warnings) == 1
    assert "step_000002" in warnings[0]
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_checkpoint_is_noticed(tmp_path: Path, file: str) -> None:
    store, warnings = make_store(tmp_path)
    for step in (1, 2):
        store.write(step, save_all, {"position": step})
    shutil.copy(tmp_path / "step_000001" / file, tmp_path / "step_000002" / file)
    assert store.latest().step == 1  # type: ignore[union-attr]
    (tmp_path / "step_000002" / "engine" / "more.pt").write_bytes(b"")
    assert store.latest().step == 1  # type: ignore[union-attr]
    assert len(warnings) == 2


def test_the_state_must_be_an_object(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    store.write(1, save_all, {})

    def a_list(directory: Path) -> None:
        save_all(directory)

    for content in ("[]", "1", "null"):
        store.write(2, a_list, {})
        file = tmp_path / "step_000002" / "state.json"
        file.write_text(content)
        manifest = json.loads((tmp_path / "step_000002" / "manifest.json").read_text())
        checksum = xxhash.xxh3_128(content.encode()).hexdigest()
        manifest["files"]["state.json"] = {"bytes": len(content), "xxh3": checksum}
        (tmp_path / "step_000002" / "manifest.json").write_text(json.dumps(manifest))
        assert store.latest().step == 1  # type: ignore[union-attr]


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


def test_unhealthy_checkpoints_are_not_resumed_and_the_last_healthy_one_is_kept(tmp_path: Path) -> None:
    store, warnings = make_store(tmp_path, keep=2)
    for step, healthy in {1: True, 2: True, 3: False, 4: False, 5: False}.items():
        store.write(step, save, {}, healthy=healthy)
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000005"]
    assert store.latest().step == 2  # type: ignore[union-attr]
    assert [text.partition(" was written")[0][-11:] for text in warnings] == ["step_000005", "step_000004"]
    store.write(6, save, {})
    assert names(tmp_path) == ["step_000005", "step_000006"]
    shutil.rmtree(tmp_path / "step_000006")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is unhealthy"):
        store.latest()


def test_the_clock_asks_for_a_checkpoint_when_the_last_is_old_enough() -> None:
    now = 0.0
    clock = CheckpointClock(10, lambda: now)
    now = 599.0
    assert (clock.due, clock.age) == (False, 599)
    now = 600.0
    assert clock.due
    with clock.attempt():
        now = 605.0
    assert (clock.due, clock.age, clock.stall) == (False, 0, 5)
    now = 1204.0
    assert (clock.due, clock.age) == (False, 599)
    now = 1205.0
    assert clock.due


def test_checkpoints_by_the_clock_take_at_most_a_fiftieth_of_the_time() -> None:
    now = 600.0
    clock = CheckpointClock(10, lambda: now)
    with clock.attempt():
        now = 660.0
    now = 660.0 + 2999
    assert not clock.due
    now = 660.0 + 3000
    assert clock.due  # 60 s in 3,000 s


def test_a_failed_attempt_is_made_again_after_the_same_time_and_the_last_checkpoint_ages() -> None:
    now = 0.0
    clock = CheckpointClock(10, lambda: now)
    now = 600.0
    with pytest.raises(OSError, match="full"), clock.attempt():
        raise OSError("full")
    assert (clock.due, clock.age) == (False, 600)
    now = 1200.0
    assert (clock.due, clock.age) == (True, 1200)


def test_without_an_age_the_clock_asks_for_none() -> None:
    now = 0.0
    clock = CheckpointClock(math.inf, lambda: now)
    now = 1e9
    assert not clock.due


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


@pytest.mark.parametrize("named", ["step_000003", "", "..", "../checkpoints/last"])
def test_a_wrong_name_of_a_checkpoint_gets_the_names_there_are(tmp_path: Path, named: str) -> None:
    store, _ = make_store(tmp_path / "checkpoints")
    store.write(1, save, {}, score=1.0)
    store.write(2, save, {}, score=0.5)
    require_checkpoint(store.directory / "best")
    with pytest.raises(CheckpointError, match="checkpoints: best, step_000001, step_000002"):
        require_checkpoint(store.directory / named)


def test_a_run_that_wrote_no_checkpoint_has_its_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="such as runs/NAME/checkpoints"):
        require_checkpoint(tmp_path / "checkpoints" / "best")
    (tmp_path / "config.yaml").touch()
    for wrong in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "best"):
        with pytest.raises(CheckpointError, match=f"no checkpoint: {tmp_path} has written none\n  fix: set"):
            require_checkpoint(wrong)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(CheckpointError, match=f"its model after the last step is in {tmp_path / 'model'}; set"):
        require_checkpoint(tmp_path / "checkpoints" / "best")
