"""Workers that hang are found, shown and killed; workers that only take their time are left alone."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hygiene import ended

from roll_like.cluster import watchdog
from roll_like.cluster.node_watch import NodeWatch, Sighting, page_prefix
from roll_like.cluster.progress import VARIABLE, Page, Work
from roll_like.cluster.watchdog import Deadlines, Hang, Hangs, Watchdog
from roll_like.errors import RETRY

CHILD = """
import subprocess, sys, time
from roll_like.cluster.progress import PROGRESS, Work
PROGRESS.open()

def waits_for_a_lock_that_nobody_gives_back():
    time.sleep(600)

def idle():
    time.sleep(600)

def stuck():
    with PROGRESS.phase("forward_backward", Work.SHARED):
        PROGRESS.tick()
        waits_for_a_lock_that_nobody_gives_back()

def generating():
    PROGRESS.hold("generate", True)
    while True:
        PROGRESS.tick()
        time.sleep(0.01)

def large():
    content = b"x" * (300 << 20)
    del content
    print("freed", flush=True)
    idle()

def parent():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    stuck()

print("ready", flush=True)
globals()[sys.argv[1]]()
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become tenths of a second."""
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "STOPPED_SECONDS", 0.6)
    monkeypatch.setattr(watchdog, "LEAST_SECONDS", {"cpu": 1.0})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a worker that behaves in some way; return when its page is there."""
    children: list[subprocess.Popen[str]] = []

    def begin(behaviour: str, role: str = "training", rank: int = 0) -> subprocess.Popen[str]:
        (tmp_path / "pages").mkdir(exist_ok=True)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, behaviour],
            env={**os.environ, VARIABLE: page_prefix(tmp_path / "pages", role, rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield begin
    for child in children:
        with suppress(psutil.NoSuchProcess):  # if it was killed, and its own child was not
            for process in psutil.Process(child.pid).children(recursive=True):
                process.kill()
        child.kill()
        assert child.stdout is not None
        child.stdout.close()
        child.wait()


@contextmanager
def watched(tmp_path: Path, reports: list[tuple[Hang, str]]) -> Iterator[list[str]]:
    warnings: list[str] = []
    dog = Watchdog(
        NodeWatch(tmp_path / "pages"),
        Deadlines("cpu", 1.0),
        stacks=tmp_path / "stacks",
        step=lambda: 7,
        moves=lambda: 1,
        report=lambda hang, text: reports.append((hang, text)),
        warn=warnings.append,
    )
    with dog:
        yield warnings


def wait_for_a_report(reports: list[tuple[Hang, str]], seconds: float = 60.0) -> tuple[Hang, str]:
    until = time.monotonic() + seconds
    while not reports and time.monotonic() < until:
        time.sleep(0.05)
    assert reports, "nothing was reported"
    return reports[0]


def test_memory_that_was_given_back_counts_once(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    large = start("large")
    assert large.stdout is not None
    assert large.stdout.readline() == "freed\n"
    watch = NodeWatch(tmp_path / "pages")
    first, second = watch.memory()["training"], watch.memory()["training"]
    assert 300 << 20 < first.resident_bytes < 600 << 20
    assert 0 < second.resident_bytes < 200 << 20
    assert first.gpu_bytes == 0


@pytest.mark.usefixtures("impatient")
def test_a_stopped_process_is_killed_and_its_peers_are_asked(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    stopped, peer = start("idle", rank=1), start("idle", rank=0)
    stopped.send_signal(signal.SIGSTOP)
    reports: list[tuple[Hang, str]] = []
    with watched(tmp_path, reports):
        hang, text = wait_for_a_report(reports)
        assert stopped.wait(60) == -signal.SIGKILL
    assert (hang.ranks, hang.stopped) == ((1,), True)
    assert text.startswith("training 1 was stopped for 1 s; killed; stacks in ")
    files = {path.name: path.read_text() for path in (tmp_path / "stacks").iterdir()}
    assert files.keys() == {"7-training-0.txt", "7-training-1.txt"}
    assert "state T" in files["7-training-1.txt"]
    assert "cannot answer" in files["7-training-1.txt"]
    assert "in idle" in files["7-training-0.txt"]
    assert peer.poll() is None  # it only answered
    assert len(reports) == 1


@pytest.mark.usefixtures("impatient")
def test_a_stuck_process_says_where_and_goes_with_its_children(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    stuck, idle = start("parent"), start("idle", role="my/rewards")
    assert stuck.stdout is not None
    child = psutil.Process(int(stuck.stdout.readline()))
    reports: list[tuple[Hang, str]] = []
    with watched(tmp_path, reports) as warnings:
        hang, text = wait_for_a_report(reports)
        assert stuck.wait(60) == -signal.SIGKILL
        left = not ended(child.pid)
        time.sleep(1.0)
    assert (hang.role, hang.ranks, hang.phase) == ("training", (0,), "forward_backward")
    assert text.startswith("training 0 hung in forward_backward: no progress for 1 s; killed; stacks in ")
    evidence = (tmp_path / "stacks" / "7-training-0.txt").read_text()
    assert "in waits_for_a_lock_that_nobody_gives_back" in evidence
    assert "forward_backward, 1 units done" in evidence
    assert "--- kernel, status" in evidence
    if left:
        child.kill()
    assert not left
    assert idle.poll() is None
    assert (len(reports), warnings) == (1, [])


@pytest.mark.usefixtures("impatient")
def test_processes_that_wait_or_work_are_left_alone(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LEAST_SECONDS", {"cpu": 3.0})
    children = [start("idle"), start("generating", role="inference")]
    reports: list[tuple[Hang, str]] = []
    with watched(tmp_path, reports):
        time.sleep(4.0)
    assert reports == []
    assert [child.poll() for child in children] == [None, None]


def test_time_in_which_the_watchdog_could_not_look_counts_for_nobody(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.1)
    start("stuck")
    clock = iter(range(0, 10**9, 1000))  # the machine is suspended between any two looks
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    passed: list[float] = []
    monkeypatch.setattr(Hangs, "look", lambda self, sightings, seconds: passed.append(seconds) or [])
    with watched(tmp_path, []):
        while len(passed) < 3:
            time.sleep(0.01)
    assert set(passed) == {0.2}


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_cannot_be_written_keeps_nobody_alive(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    stuck = start("stuck")
    (tmp_path / "stacks").write_text("a file is in the way")
    reports: list[tuple[Hang, str]] = []
    with watched(tmp_path, reports) as warnings:
        wait_for_a_report(reports)
    assert stuck.wait(60) == -signal.SIGKILL
    assert len(warnings) == 1
    assert warnings[0].startswith("stacks of training cannot be kept: ")


def test_a_watchdog_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.05)

    def fail(self: Hangs, sightings: list[Sighting], passed: float) -> list[Hang]:
        raise ValueError("a bug")

    monkeypatch.setattr(Hangs, "look", fail)
    with watched(tmp_path, []) as warnings:
        while not warnings:
            time.sleep(0.01)
        time.sleep(0.3)
    assert warnings == ["hanging workers are not noticed any more: ValueError: a bug"]


def test_py_spy_is_asked_where_it_is_installed(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = start("idle")
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "native stacks by $@"\n')
    program.chmod(0o755)
    watch = NodeWatch(tmp_path / "pages")
    monkeypatch.setenv("PATH", str(tmp_path))
    (before,) = watch.evidence([f"0.training.{stopped.pid}"]).values()
    monkeypatch.setenv("PATH", str(program.parent))
    (after,) = watch.evidence([f"0.training.{stopped.pid}"]).values()
    assert "py-spy" not in before
    assert f"native stacks by dump --nonblocking --pid {stopped.pid}" in after
    assert after.count("in idle") == 1  # stacks of this time only


class Still:
    """Nodes with one process, which goes on as long as it is told to."""

    def __init__(self) -> None:
        self.moving = True
        self.events = 0

    def look(self) -> list[Sighting]:
        self.events += self.moving
        return [Sighting("0.training.1", "training", 0, 1, "S", Page(1, self.events, 0, 0, Work.NONE, ""))]

    def evidence(self, names: Collection[str]) -> dict[str, str]:
        raise AssertionError(names)

    def end(self, names: Collection[str]) -> list[int]:
        raise AssertionError(names)


def test_a_driver_that_hangs_says_where_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "DRIVER_SECONDS", 0.3)
    nodes, moved, codes = Still(), itertools.count(), threading.Event()
    goes_on = threading.Event()
    found: list[int] = []

    def end(code: int) -> None:
        found.append(code)
        codes.set()
        dog._done.set()

    dog = Watchdog(
        nodes,
        Deadlines("cpu", 1.0),
        stacks=tmp_path / "stacks",
        step=lambda: 7,
        moves=lambda: next(moved) if goes_on.is_set() else -1,
        report=lambda hang, text: None,
        warn=lambda text: found.append(-1),
        end=end,
    )
    with dog:
        assert not codes.wait(0.8), "a worker goes on"
        goes_on.set()
        nodes.moving = False
        assert not codes.wait(0.8), "the driver goes on"
        goes_on.clear()
        assert codes.wait(60)
    assert found == [RETRY]
    assert "test_a_driver_that_hangs_says_where_and_ends" in (tmp_path / "stacks" / "7-driver.txt").read_text()
    assert "the driver hung: neither it nor any worker has gone on for" in capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_a_run_whose_ray_is_gone_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[str | None] = [None]
    codes: queue.Queue[int] = queue.Queue()
    dog = Watchdog(
        NodeWatch(tmp_path / "pages"),
        Deadlines("cpu", 1.0),
        stacks=tmp_path / "stacks",
        step=lambda: 7,
        moves=lambda: 1,
        report=lambda hang, text: None,
        warn=pytest.fail,
        ray_failure=lambda passed, patience: parts[0] if 0 < passed < patience else None,
        end=codes.put,
    )
    with dog:
        with pytest.raises(queue.Empty):
            codes.get(timeout=0.5)
        parts[0] = "raylet was stopped for 16 s"
        assert codes.get(timeout=60) == RETRY
    assert "raylet was stopped for 16 s; the run ends, and --resume continues it" in capsys.readouterr().err
