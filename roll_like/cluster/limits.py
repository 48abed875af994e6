"""How many cores and how much memory of this machine a process may use.

Containers, Slurm and systemd limit a process by its control group, of which `os.cpu_count` and `psutil` know nothing. A
limit of any of the groups above its own counts too. In a container the group's own folder is often not visible, and the
root of the hierarchy is that group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores(groups: Path = GROUPS, own: Path = _OWN) -> int:
    """Return how many cores this process may keep busy: those of its affinity, or fewer where a quota says so."""
    allowed = [len(os.sched_getaffinity(0))]
    for folder in _folders("cpu", groups, own):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                allowed.append(math.ceil(int(quota) / int(period)))
        except (OSError, ValueError):  # this group has no limit, or says "max"
            continue
    return max(1, min(allowed))


def usable_memory(groups: Path = GROUPS, own: Path = _OWN) -> int:
    """Return how many bytes this process and those beside it may take in all."""
    machine: int = psutil.virtual_memory().total
    return min([machine, *(limit for limit, _ in _memory(groups, own))])


def available_memory(groups: Path = GROUPS, own: Path = _OWN) -> int:
    """Return how many bytes processes can still take."""
    left = [max(limit - used, 0) for limit, used in _memory(groups, own)]
    machine: int = psutil.virtual_memory().available
    return min([machine, *left])


def _memory(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group that has a limit of memory."""
    for folder in _folders("memory", groups, own):
        second = (folder / "memory.max").exists()
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            limit, used = (int((folder / name).read_text()) for name in names)
            lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        except (OSError, ValueError):  # this group has no limit, or says "max"
            continue
        # pages of files on disk count as used, and are given up when something needs the memory
        pages = {"active_file", "inactive_file"} if second else {"total_active_file", "total_inactive_file"}
        yield limit, used - sum(int(value) for name, value in lines if name in pages)


def _folders(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it, of both versions of control groups."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder == root or root in folder.parents)
