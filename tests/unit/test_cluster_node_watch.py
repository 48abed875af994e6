"""A node's watch: who lives, whose pages are left over, how much memory a role uses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from roll_like.cluster import WorkerDied
from roll_like.cluster.node_watch import FOLDER_PREFIX, NodeWatch, RoleMemory, Sighting, page_prefix
from roll_like.cluster.progress import _LAYOUT, STACKS, Page, Work, started_at
from roll_like.cluster.watchdog import ANSWER_SECONDS, ManyNodes
from roll_like.errors import WorkerError


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
