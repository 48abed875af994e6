"""What a rank computes while a step is profiled: operators and kernels (`torch.profiler`), phases, GPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from roll_like.cluster.spans import SPANS, Span

#: How the names of ranks' own traces end, which become parts of the step's: not like a profile's (`metrics.profiles`).
RANK_TRACE = ".trace"
#: Allocations and frees that a memory snapshot goes back to.
_MEMORY_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What one rank recorded.

    Attributes:
        trace: `torch.profiler`'s own trace, for the driver to put into the step's.
        snapshot: A snapshot of GPU memory for pytorch.org/memory_viz; None on a CPU, and where none is wanted.
        spans: Its phases.
    """

    trace: Path
    snapshot: Path | None
    spans: list[Span]


class RankProfiler:
    """Records this process from now on, until `finish`, in the thread that makes it.

    Args:
        device: `cpu` or `cuda`.
        stacks: Whether with the lines of Python that each operator was called from.
        memory: Whether with allocations.
    """

    def __init__(self, device: str, *, stacks: bool, memory: bool) -> None:
        cuda = device == "cuda"
        self._snapshots = cuda and memory
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(activities=activities, profile_memory=memory, with_stack=stacks)
        self._profile.start()
        SPANS.begin()

    def finish(self, stem: Path) -> RankProfile:
        """Record no longer; write `STEM.trace`, and `STEM.pickle` with the snapshot of memory."""
        self._profile.stop()
        spans = SPANS.end()
        trace, snapshot = stem.with_suffix(RANK_TRACE), None
        try:
            self._profile.export_chrome_trace(str(trace))
            if self._snapshots:
                snapshot = stem.with_suffix(".pickle")
                torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
        finally:
            self._forget_memory()
        return RankProfile(trace, snapshot, spans)

    def drop(self) -> None:
        """Record no longer; write nothing."""
        self._profile.stop()
        SPANS.end()
        self._forget_memory()

    def _forget_memory(self) -> None:
        if self._snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)
