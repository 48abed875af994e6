"""Profiles of single steps: when they begin and end, and what is written of them.

RUN/profile/step_000005.json.gz              the trace: open it in ui.perfetto.dev
RUN/profile/step_000005.json                 what the report shows of it
RUN/profile/step_000005_training_0.pickle    GPU memory of a rank, for pytorch.org/memory_viz
RUN/profile/request                          written by `roll-like profile RUN`: the next step is profiled
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from roll_like.cluster import WorkerDied
from roll_like.cluster.spans import SPANS, Span
from roll_like.cluster.worker_restarts import brief
from roll_like.config.run import ProfileConfig
from roll_like.errors import WorkerError
from roll_like.metrics import files
from roll_like.metrics.manager import MetricsManager
from roll_like.metrics.profiles import profile_stem
from roll_like.metrics.timeline import drawn_lanes, largest_waits, trace_events, write_trace
from roll_like.training.engine import TrainingEngine
from roll_like.training.profiled import RANK_TRACE
from roll_like.training.rank import TrainingRank
from roll_like.types import Group, Scored


@dataclass(frozen=True, slots=True)
class _Open:
    """A step that is profiled."""

    step: int
    began: float
    engines: Sequence[TrainingEngine[Any]]


class StepProfiler:
    """Profiles the steps that are due. Nothing is recorded in others, and nothing is kept in memory.

    Args:
        metrics: Told where traces are, and what cannot be profiled.
    """

    def __init__(self, config: ProfileConfig, directory: Path, metrics: MetricsManager) -> None:
        self._config = config
        self._directory = directory
        self._request = directory / files.PROFILE / files.PROFILE_REQUEST
        self._metrics = metrics
        self._warn = metrics.warn
        self._open: _Open | None = None

    def expect(self, first: int, last: int) -> None:
        """Say which of the wanted steps do not come in a run of steps `first` to `last`; leave a step that failed."""
        self.leave()
        never = [step for step in self._config.steps if not first <= step <= last]
        if never and first <= last:
            steps = ", ".join(map(str, never))
            self._warn(f"profile.steps: {steps} will not be profiled, because this run does steps {first} to {last}")

    def leave(self) -> None:
        """Say that there is no trace of a step that has failed or ended the run, if it was profiled."""
        if self._open is not None:
            self._warn(f"step {self._open.step} was left while it was profiled: there is no trace of it")
            self._open = None
            SPANS.end()

    def begin(self, step: int, engines: Sequence[TrainingEngine[Any]]) -> None:
        """Record from now on, if this step is due.

        Raises:
            WorkerDied: A rank is gone.
        """
        if step not in self._config.steps and not self._request.exists():
            return
        try:
            self._request.parent.mkdir(exist_ok=True)
            self._request.unlink(missing_ok=True)
        except OSError as error:
            why = f"{self._request.parent} cannot be written: {error.strerror or error}"
            self._warn(f"step {step} is not profiled, because {why}")
            return
        settings = {"stacks": self._config.stacks, "memory": self._config.memory}
        try:
            for engine in engines:
                engine.cluster.everywhere(TrainingRank.begin_profile, **settings)
        except WorkerError as error:
            self._warn(f"step {step} is not profiled, because {brief(error)}")
            self._drop(engines, error)
            return
        SPANS.begin()
        self._open = _Open(step, time.time(), engines)

    def turns(self, groups: Iterable[Group[Scored]]) -> None:
        """Record when environments worked on the episodes of a step."""
        if self._open is None:
            return
        for group in groups:
            for sample in group.samples:
                for turn in sample.trajectory.record:
                    if turn.ended > turn.sampled >= self._open.began:
                        SPANS.add("environments", group.task.domain, turn.sampled, turn.ended)

    def end(self) -> None:
        """Write what was recorded of the step, if it was profiled; warn where it cannot be.

        Raises:
            WorkerDied: A rank is gone.
        """
        if self._open is None:
            return
        step, began, engines = self._open.step, self._open.began, self._open.engines
        self._open = None
        window = (began, time.time())
        # a request may be older than the step
        spans = [replace(span, track=span.track or "driver", began=max(span.began, began)) for span in SPANS.end()]
        stem = profile_stem(self._directory, step)
        ranks: dict[str, Path] = {}
        snapshots = []
        try:
            for engine in engines:
                name = engine.cluster.name
                for rank, found in enumerate(engine.cluster.everywhere(TrainingRank.end_profile, f"{stem}_{name}")):
                    label = f"{name} rank {rank}"
                    ranks[label] = found.trace
                    snapshots += [found.snapshot.name] if found.snapshot is not None else []
                    spans += [Span(label, span.name, span.began, span.ended) for span in found.spans]
            self._write(stem, step, spans, ranks, snapshots, window)
        except (OSError, ValueError) as error:
            self._warn(f"the profile of step {step} cannot be written: {type(error).__name__}: {error}")
        except WorkerError as error:
            self._warn(f"the profile of step {step} cannot be written: {brief(error)}")
            self._drop(engines, error)
        finally:
            for trace in stem.parent.glob(f"*{RANK_TRACE}"):  # those of a driver that was killed too
                trace.unlink(missing_ok=True)

    def _drop(self, engines: Sequence[TrainingEngine[Any]], error: WorkerError) -> None:
        """Have ranks record no longer after a rank raised; when this returns, none of them writes a file."""
        if isinstance(error, WorkerDied):
            raise error
        for engine in engines:
            engine.cluster.everywhere(TrainingRank.drop_profile)

    def _write(
        self,
        stem: Path,
        step: int,
        spans: Sequence[Span],
        ranks: dict[str, Path],
        snapshots: Sequence[str],
        window: tuple[float, float],
    ) -> None:
        seconds = window[1] - window[0]
        trace = stem.with_suffix(".json.gz")
        about = {"step": step, "began": window[0], "seconds": seconds}
        write_trace(trace, trace_events(spans, ranks, window[0]), about)
        tracks = list(ranks)
        waits = largest_waits(spans, tracks, window)
        lanes = drawn_lanes(spans, tracks, window)
        sentences = [wait.sentence(seconds) for wait in waits]
        self._metrics.event("profile", trace=trace.name, waits=sentences)
        self._metrics.console.print(
            Text("\n".join([f"step {step} is profiled: {trace}", *(f"  {s}" for s in sentences)]))
        )
        files.replace(
            stem.with_suffix(".json"),
            [{**about, "trace": trace.name, "snapshots": snapshots, "lanes": lanes, "waits": sentences}],
        )
