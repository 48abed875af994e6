"""Limits of control groups: of either version, of the process's own group, and of those above it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from roll_like.cluster.limits import available_memory, usable_cores, usable_memory

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def own(tmp_path: Path, text: str) -> Path:
    (tmp_path / "own").write_text(text)
    return tmp_path / "own"


STAT = "anon 3000\nactive_file 100\ninactive_file 200\nshmem 900"


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") == 64
    assert usable_memory(tmp_path, tmp_path / "none") == psutil.virtual_memory().total
    assert available_memory(tmp_path, own(tmp_path, "0::/\n")) > 2**20


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    lines = own(tmp_path, "0::/\n")
    group(tmp_path, memory__max="5000", memory__current="4500", memory__stat=STAT, cpu__max="150000 100000")
    assert usable_cores(tmp_path, lines) == 2  # 1.5, rounded up
    assert usable_memory(tmp_path, lines) == 5000
    assert available_memory(tmp_path, lines) == 800  # pages of files are given up
    group(tmp_path, memory__current="5900")
    assert available_memory(tmp_path, lines) == 0
    group(tmp_path, memory__max="max", cpu__max="max 100000")
    assert usable_cores(tmp_path, lines) == 64
    assert usable_memory(tmp_path, lines) == psutil.virtual_memory().total


def test_a_limit_of_a_group_above_counts_too(tmp_path: Path) -> None:
    lines = own(tmp_path, "0::/slurm/job_7/step_0\n")
    group(
        tmp_path / "slurm/job_7",
        memory__max="8000",
        memory__current="1000",
        memory__stat=STAT,
        cpu__max="400000 100000",
    )
    group(
        tmp_path / "slurm/job_7/step_0",
        memory__max="max",
        memory__current="900",
        memory__stat=STAT,
        cpu__max="max 100000",
    )
    assert (usable_cores(tmp_path, lines), usable_memory(tmp_path, lines)) == (4, 8000)
    assert available_memory(tmp_path, lines) == 7300


def test_the_first_version(tmp_path: Path) -> None:
    lines = own(tmp_path, "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 50\ntotal_active_file 50"
    # as in a container: /docker/abc of the machine is the root here
    group(tmp_path / "memory", memory__limit_in_bytes="6000", memory__usage_in_bytes="2000", memory__stat=stat)
    group(tmp_path / "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert (usable_cores(tmp_path, lines), usable_memory(tmp_path, lines)) == (3, 6000)
    assert available_memory(tmp_path, lines) == 4100
    group(tmp_path / "cpu", cpu__cfs_quota_us="-1")
    group(tmp_path / "memory", memory__limit_in_bytes=str(2**63 - 4096))  # none
    assert usable_cores(tmp_path, lines) == 64
    assert usable_memory(tmp_path, lines) == psutil.virtual_memory().total
