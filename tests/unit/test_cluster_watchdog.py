"""Workers that hang are found, shown and killed; workers that only take their time are left alone."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from roll_like.cluster import watchdog
from roll_like.cluster.cluster import WorkerDied
from roll_like.cluster.node_watch import FOLDER_PREFIX, NodeWatch, RoleMemory, Sighting, page_prefix
from roll_like.cluster.progress import _LAYOUT, STACKS, VARIABLE, Page, Work, started_at
from roll_like.cluster.watchdog import ANSWER_SECONDS, Deadlines, Hang, Hangs, ManyNodes, Watchdog
from roll_like.errors import RETRY, WorkerError
from roll_like.training.plugin import COLLECTIVE_TIMEOUT

# ---- deadlines: pure ----------------------------------------------------------------------------


def test_a_deadline_follows_from_the_longest_gap() -> None:
    deadlines = Deadlines("cuda", 600.0)
    assert deadlines.of("training", "forward_backward") == 600  # nothing is known
    deadlines.progressed("training", "forward_backward", 20.0)
    deadlines.progressed("training", "forward_backward", 40.0)
    assert deadlines.of("training", "forward_backward") == 600  # not enough
    deadlines.progressed("training", "forward_backward", 30.0)
    assert deadlines.of("training", "forward_backward") == 200  # 5 × 40 s
    for _ in range(1000):
        deadlines.progressed("training", "forward_backward", 1.0)
    assert deadlines.of("training", "forward_backward") == 200  # a kernel may be compiled again
    assert deadlines.of("critic", "forward_backward") == deadlines.of("training", "optimizer_step") == 600


@pytest.mark.parametrize(("device", "least"), [("cuda", 60.0), ("cpu", 120.0)])
def test_deadlines_have_bounds(device: str, least: float) -> None:
    deadlines = Deadlines(device, 5.0)
    assert deadlines.of("training", "optimizer_step") == least
    for _ in range(3):
        deadlines.progressed("training", "optimizer_step", 0.1)
        deadlines.progressed("training", "forward", 1000.0)
    assert deadlines.of("training", "optimizer_step") == least
    assert deadlines.of("training", "forward") == 1800


def test_a_long_first_gap_is_allowed_again() -> None:
    deadlines = Deadlines("cuda", 100.0)
    deadlines.progressed("training", "forward", 90.0)
    assert deadlines.of("training", "forward") == 450


def test_the_first_checkpoints_may_take_as_long_as_anything_may() -> None:
    deadlines = Deadlines("cuda", 600.0)
    assert {deadlines.of("training", phase) for phase in ("start", "save", "load", "export")} == {1800}
    for _ in range(3):
        deadlines.progressed("training", "save", 30.0)
    assert deadlines.of("training", "save") == 150


def test_collectives_wait_longer_than_any_deadline() -> None:
    assert COLLECTIVE_TIMEOUT.total_seconds() >= watchdog.MOST_SECONDS + 60


# ---- who hangs: pure ----------------------------------------------------------------------------

TRAINING = (0, Work.SHARED, "forward_backward")


class Scene:
    """Processes as a story: each look, some of them move."""

    def __init__(self, **processes: tuple[int, Work, str]) -> None:
        self.pages = {
            name: Page(started=1, events=1, ticks=ticks, gpu_bytes=0, work=work, phase=phase)
            for name, (ticks, work, phase) in processes.items()
        }
        self.states = dict.fromkeys(processes, "S")
        self.hangs = Hangs(Deadlines("cuda", 100.0))

    def sightings(self) -> list[Sighting]:
        found = []
        for name, page in self.pages.items():
            role, rank = name.rstrip("abc").split("_")  # a letter tells several processes of a worker apart
            found.append(Sighting(name, role, int(rank), 4711, self.states[name], page))
        return found

    def change(self, name: str, ticks: int, work: Work, phase: str) -> None:
        self.pages[name] = Page(1, self.pages[name].events + 1, ticks, 0, work, phase)

    def move(self, *names: str) -> None:
        for name in names:
            self.change(name, self.pages[name].ticks + 1, self.pages[name].work, self.pages[name].phase)

    def looks(self, seconds: float, *moving: str) -> list[Hang]:
        found = []
        for _ in range(int(seconds / 2)):
            self.move(*moving)
            found += self.hangs.look(self.sightings(), 2.0)
        return found


def test_a_stopped_worker_is_found_whatever_it_does() -> None:
    scene = Scene(training_0=(0, Work.SHARED, "save"), rewards_1=(0, Work.NONE, ""), rewards_0=(0, Work.NONE, ""))
    scene.states["rewards_1"] = "T"
    (hang,) = scene.looks(60, "training_0")
    assert (hang.role, hang.ranks, hang.stopped, hang.seconds) == ("rewards", (1,), True, 16)
    assert hang.doomed == {"rewards_1"}
    assert hang.witnesses == {"rewards_0", "rewards_1"}
    assert hang.text(Path("runs/x/stacks"), []) == "rewards 1 was stopped for 16 s; killed; stacks in runs/x/stacks"


def test_a_short_stop_is_no_hang() -> None:
    scene = Scene(rewards_0=(0, Work.NONE, ""))
    for _ in range(20):
        scene.states["rewards_0"] = "T"
        assert scene.looks(12) == []
        scene.states["rewards_0"] = "S"
        assert scene.looks(2) == []


def test_an_idle_worker_never_hangs() -> None:
    assert Scene(training_0=(0, Work.NONE, ""), inference_0=(9, Work.NONE, "")).looks(50_000) == []


def test_a_long_generation_that_ticks_never_hangs() -> None:
    assert Scene(inference_0=(0, Work.OWN, "generate")).looks(20_000, "inference_0") == []


def test_an_engine_without_tokens_hangs_and_the_others_do_not() -> None:
    scene = Scene(inference_0=(5, Work.OWN, "generate"), inference_1=(9, Work.OWN, "generate"))
    (hang,) = scene.looks(200, "inference_0")
    assert (hang.role, hang.ranks, hang.phase, hang.stopped) == ("inference", (1,), "generate", False)
    assert hang.seconds == 60  # the other one has shown how long a token takes
    assert hang.text(Path("s"), []) == "inference 1 hung in generate: no progress for 60 s; killed; stacks in s"


def test_engines_that_hang_together_are_both_guilty() -> None:
    scene = Scene(inference_0=(5, Work.OWN, "generate"), inference_1=(9, Work.OWN, "generate"))
    (hang,) = scene.looks(200)
    assert hang.ranks == (0, 1)


def test_the_rank_that_did_least_is_the_one_that_others_wait_for() -> None:
    work = (Work.SHARED, "forward_backward")
    scene = Scene(training_0=(4, *work), training_1=(3, *work), training_2=(4, *work))
    (hang,) = scene.looks(190)
    assert (hang.ranks, hang.phase) == ((1,), "forward_backward")
    assert hang.doomed == {"training_1"}
    assert hang.witnesses == {"training_0", "training_1", "training_2"}
    (others,) = scene.looks(100)  # they did not notice that it is gone
    assert others.ranks == (0, 2)


def test_a_tie_condemns_all_ranks_that_work() -> None:
    scene = Scene(training_0=TRAINING, training_1=TRAINING, critic_0=TRAINING)
    (hang,) = scene.looks(130, "critic_0")
    assert (hang.role, hang.ranks) == ("training", (0, 1))
    assert hang.text(Path("s"), [7]) == (
        "training 0 and 1 hung in forward_backward: no progress for 100 s; killed, but still there: process 7, which "
        "waits for a disk or a device; stacks in s"
    )


def test_ranks_that_wait_for_a_slow_one_do_not_hang() -> None:
    scene = Scene(training_0=(9, Work.SHARED, "forward_backward"), training_1=TRAINING)
    assert scene.looks(2000, "training_1") == []
    (hang,) = scene.looks(100)
    assert hang.ranks == (0,)  # it has done less than the other by now


def test_a_stopped_rank_is_guilty_of_its_peers_standstill() -> None:
    scene = Scene(training_0=(1, Work.SHARED, "save"), training_1=(3, Work.SHARED, "save"))
    scene.states["training_1"] = "T"
    (hang,) = scene.looks(30)
    assert (hang.ranks, hang.phase, hang.stopped) == ((1,), "save", True)


def test_ranks_that_wait_for_engines_do_not_hang() -> None:
    scene = Scene(training_0=(1, Work.ELSEWHERE, "send_weights"), training_1=(1, Work.SHARED, "send_weights"))
    assert scene.looks(5000) == []
    scene.change("training_0", 1, Work.SHARED, "send_weights")
    (hang,) = scene.looks(5000)
    assert hang.ranks == (0, 1)


def test_all_processes_of_a_worker_go_with_it() -> None:
    scene = Scene(inference_0a=(0, Work.OWN, "generate"), inference_0b=(0, Work.NONE, ""), inference_1a=TRAINING)
    scene.states["inference_0b"] = "T"
    (hang,) = scene.looks(20, "inference_0a", "inference_1a")
    assert (hang.ranks, hang.phase, hang.stopped) == ((0,), "generate", True)
    assert hang.doomed == {"inference_0a", "inference_0b"}


def test_what_was_seen_of_a_phase_counts() -> None:
    scene = Scene(training_0=TRAINING)
    for _ in range(3):
        assert scene.looks(8) == []
        assert scene.looks(2, "training_0") == []
    (hang,) = scene.looks(80)
    assert hang.seconds == 60  # 5 × 10 s is less than the least
    fast = Scene(training_0=TRAINING)
    for _ in range(4):
        assert fast.looks(38) == []
        assert fast.looks(2, "training_0") == []
    (hang,) = fast.looks(1000)
    assert hang.seconds == 200


def test_a_process_that_comes_back_under_a_name_is_followed_anew() -> None:
    scene = Scene(training_0=TRAINING)
    assert len(scene.looks(130)) == 1
    pages, scene.pages = scene.pages, {}
    assert scene.looks(2) == []
    scene.pages = pages
    assert len(scene.looks(130)) == 1


# ---- a node: a made-up /proc --------------------------------------------------------------------


def stat(pid: int, state: str, started: int, parent: int = 1) -> str:
    return f"{pid} (ray::Worker) x) {state} {parent} " + " ".join(["0"] * 17) + f" {started} 0 0\n"


def written(folder: Path, name: str, started: int, phase: str = "", gpu_bytes: int = 0) -> None:
    work = Work.OWN if phase else Work.NONE
    (folder / name).write_bytes(_LAYOUT.pack(started, 1, 0, gpu_bytes, work, phase.encode()))
    (folder / (name + STACKS)).write_text("")


def test_a_node_finds_who_lives_and_sweeps_the_pages_of_others(tmp_path: Path) -> None:
    proc, folder = tmp_path / "proc", tmp_path / "pages"
    watch = NodeWatch(folder, proc)
    for pid, state, started in ((11, "S", 5), (12, "T", 6), (13, "Z", 7), (14, "R", 999)):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "stat").write_text(stat(pid, state, started))
    written(folder, "0.training.11", 5, "save")
    written(folder, Path(page_prefix(folder, "my/pool.a", 3)).name + ".12", 6)
    written(folder, "1.training.13", 7)  # a zombie
    written(folder, "2.training.14", 8)  # another process has its id now
    written(folder, "3.training.15", 9)  # gone
    (folder / "4.training.16").write_bytes(b"")  # just being made
    (folder / "5.training.17").symlink_to("gone")  # and one that goes while it is looked at
    found = {one.name: one for one in watch.look()}
    assert {(one.role, one.rank, one.pid, one.state) for one in found.values()} == {
        ("training", 0, 11, "S"),
        ("my/pool.a", 3, 12, "T"),
    }
    assert found["0.training.11"].page.phase == "save"
    left = {path.name for path in folder.iterdir() if path.suffix != STACKS}
    assert left == {*found, "4.training.16", "5.training.17"}
    watch.close()
    assert not folder.exists()


def test_the_kernels_start_time_is_read_behind_any_name() -> None:
    assert started_at(stat(1, "S", 42)) == 42
    assert started_at(Path("/proc/self/stat").read_text()) > 0


class DeadNode:
    """A cluster of two nodes, one of which is lost, or does not answer."""

    def __init__(self, error: WorkerError) -> None:
        self.rank = -1
        self.error = error

    def __len__(self) -> int:
        return 2

    def only(self, ranks: Sequence[int], *, within: float) -> DeadNode:
        (self.rank,) = ranks
        assert within == ANSWER_SECONDS
        return self

    def on(self, rank: int, method: Callable[..., object], *arguments: object) -> object:
        assert rank == 0
        if self.rank == 0:
            raise self.error
        page = Page(1, 1, 0, 0, Work.NONE, "")
        sighting = Sighting("0.rewards.9", "rewards", 0, 9, "S", page)
        return {
            "look": [sighting, sighting],
            "evidence": {"0.rewards.9": "text"},
            "end": [9],
            "memory": {"rewards": RoleMemory(5, 0)},
        }[method.__name__]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorkerDied("the node is gone"), []),
        (WorkerError("late"), ["workers of node 0 that hang are not noticed any more: late"]),
    ],
)
def test_a_node_that_is_lost_is_left_out(error: WorkerError, said: list[str]) -> None:
    warnings: list[str] = []
    nodes = ManyNodes(DeadNode(error), warnings.append)  # type: ignore[arg-type]
    assert [one.name for one in nodes.look()] == ["0.rewards.9"]
    assert nodes.evidence(["0.rewards.9"]) == {"0.rewards.9": "text"}
    assert nodes.end(["0.rewards.9"]) == [9]
    assert nodes.memory() == {"rewards": RoleMemory(5, 0)}
    assert warnings == said


class TwoNodes:
    """A cluster of two nodes; a role has a process on each."""

    def __len__(self) -> int:
        return 2

    def only(self, ranks: Sequence[int], *, within: float) -> TwoNodes:
        (self.rank,) = ranks
        return self

    def on(self, rank: int, method: Callable[..., object]) -> object:
        assert method is NodeWatch.memory
        return [{"training": RoleMemory(5, 7), "judge": RoleMemory(1, 0)}, {"training": RoleMemory(3, 8)}][self.rank]


def test_memory_of_a_role_is_that_of_all_nodes() -> None:
    nodes = ManyNodes(TwoNodes(), pytest.fail)  # type: ignore[arg-type]
    assert nodes.memory() == {"training": RoleMemory(8, 8), "judge": RoleMemory(1, 0)}


def test_memory_of_a_role_is_that_of_its_processes_and_of_all_that_they_started(tmp_path: Path) -> None:
    proc, folder = tmp_path / "proc", tmp_path / "pages"
    watch = NodeWatch(folder, proc)
    processes = {
        # pid: parent, peak in kB
        20: (1, 1000),
        21: (20, 200),  # a child that is not watched
        22: (21, 30),  # and its own
        23: (20, 4),  # a child that is watched too: an engine's core
        30: (1, 5),
        40: (1, 70000),  # of nobody
        41: (40, 80000),
        50: (1, 900000),  # watched once; another process has its id now
    }
    for pid, (parent, peak) in processes.items():
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "stat").write_text(stat(pid, "S", pid, parent))
        (proc / str(pid) / "status").write_text(f"Name:\tpython\nVmPeak:\t 9 kB\nVmHWM:\t  {peak} kB\nVmRSS:\t 3 kB\n")
    (proc / "60").mkdir()  # one that has just ended
    (proc / "meminfo").write_text("")
    for pid, gpu in ((20, 3), (23, 11), (30, 2)):
        written(folder, f"0.{'inference' if pid < 30 else 'training'}.{pid}", pid, gpu_bytes=gpu)
    written(folder, "0.judge.50", 49)
    assert watch.memory() == {"inference": RoleMemory(1234 * 1024, 11), "training": RoleMemory(5 * 1024, 2)}


# ---- real processes -----------------------------------------------------------------------------

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


def wait_for_a_report(reports: list[tuple[Hang, str]], seconds: float = 20.0) -> tuple[Hang, str]:
    until = time.monotonic() + seconds
    while not reports and time.monotonic() < until:
        time.sleep(0.05)
    assert reports, "nothing was reported"
    return reports[0]


def test_folders_of_drivers_that_were_killed_are_removed(tmp_path: Path) -> None:
    watches = (
        "import pathlib, sys; from roll_like.cluster.node_watch import NodeWatch\n"
        "watch = NodeWatch(pathlib.Path(sys.argv[1])); print('ready', flush=True); input()"
    )
    folders = [tmp_path / f"{FOLDER_PREFIX}{name}" for name in ("killed-a", "watched-b", "new-c")]
    processes = [
        subprocess.Popen([sys.executable, "-c", watches, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for folder in folders[:2]
    ]
    try:
        for folder, process in zip(folders, processes, strict=False):
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            written(folder, "0.training.12", 6)
        processes[0].kill()
        processes[0].wait()
        folders[2].mkdir()
        for folder in folders[:2]:
            os.utime(folder, (1, 1))
        watch = NodeWatch(tmp_path / f"{FOLDER_PREFIX}own")
        assert [folder.is_dir() for folder in folders] == [False, True, True]
        watch.close()
        assert {path.name for path in tmp_path.iterdir()} == {folder.name for folder in folders[1:]}
    finally:
        for process in processes:
            process.communicate(b"\n")


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
        assert stopped.wait(5) == -signal.SIGKILL
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
        assert stuck.wait(5) == -signal.SIGKILL
        time.sleep(1.0)
    assert (hang.role, hang.ranks, hang.phase) == ("training", (0,), "forward_backward")
    assert text.startswith("training 0 hung in forward_backward: no progress for 1 s; killed; stacks in ")
    evidence = (tmp_path / "stacks" / "7-training-0.txt").read_text()
    assert "in waits_for_a_lock_that_nobody_gives_back" in evidence
    assert "forward_backward, 1 units done" in evidence
    assert "--- kernel, status" in evidence
    left = child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    if left:
        child.kill()
    assert not left
    assert idle.poll() is None
    assert (len(reports), warnings) == (1, [])


@pytest.mark.usefixtures("impatient")
def test_processes_that_wait_or_work_are_left_alone(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
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
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: float(next(clock)))
    passed: list[float] = []
    monkeypatch.setattr(Hangs, "look", lambda self, sightings, seconds: passed.append(seconds) or [])
    with watched(tmp_path, []):
        time.sleep(0.5)
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
    assert stuck.wait(5) == -signal.SIGKILL
    assert len(warnings) == 1
    assert warnings[0].startswith("stacks of training cannot be kept: ")


def test_a_watchdog_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.05)

    def fail(self: Hangs, sightings: list[Sighting], passed: float) -> list[Hang]:
        raise ValueError("a bug")

    monkeypatch.setattr(Hangs, "look", fail)
    with watched(tmp_path, []) as warnings:
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
    nodes, moved, codes = Still(), [0], threading.Event()
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
        moves=lambda: moved[0],
        report=lambda hang, text: None,
        warn=lambda text: found.append(-1),
        end=end,
    )
    with dog:
        assert not codes.wait(0.8), "a worker goes on"
        nodes.moving = False
        for _ in range(16):
            moved[0] += 1
            assert not codes.wait(0.05), "the driver goes on"
        assert codes.wait(20)
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
        assert codes.get(timeout=20) == RETRY
    assert "raylet was stopped for 16 s; the run ends, and --resume continues it" in capsys.readouterr().err
