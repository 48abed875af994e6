"""Takes every role's figures, reduces each by its own rule, and hands them to files, trackers and console.

    with MetricsManager(config.metrics, run_dir, config.name, config.steps, params) as metrics:
        metrics.log(1, rollout_metrics, train_metrics, timer.metrics())

Made and entered after the worker actors were requested, its start (2–3 s with MLflow) overlaps with theirs.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roll_like.config.base import PluginConfig
from roll_like.config.run import MetricsConfig
from roll_like.metrics import files
from roll_like.metrics.console import Console, LiveConsole, make_console
from roll_like.metrics.names import STEP_PHASES
from roll_like.metrics.progress import Progress
from roll_like.metrics.rollout_text import sample_line
from roll_like.metrics.rollouts import (
    KINDS,
    ROLLOUT_FIELDS,
    RolloutKind,
    read_rollouts,
    rollout_steps,
    subsample,
    with_ids,
)
from roll_like.metrics.runs import CONFIG
from roll_like.metrics.sinks import Payload, Sink
from roll_like.metrics.summary import ARTIFACTS, Summary, versions, write_summary
from roll_like.metrics.timing import process_tree_rss_gib
from roll_like.metrics.trackers import Status, SystemTracker, TraceTracker, Tracker, start_tracker
from roll_like.values import Max, Metrics, merge, reduce

#: Steps whose rollouts wait for a tracker that does not take them; the oldest are given up beyond it.
TRACED_STEPS = 8


class MetricsManager:
    """One run's figures. Steps count from 1; an evaluation before training is step 0.

    A tracker that cannot start is an error. One that fails later is warned of once, retried at
    following steps, and reported at the end; the run goes on, and `metrics.jsonl` has everything.

    Args:
        run_dir: The run's folder, `output_dir/name`.
        total_steps: Steps of the whole run.
        params: The resolved configuration as plain data, with its `pipeline`.
        evaluations: After how many steps evaluations are due, for the time that is left.
        devices: Devices of the run on all nodes, for rates of one.
        state: `state()` of an earlier process, to continue its run. Lines of steps that it had not
            reached are removed: those steps are run again. Without it, what an earlier run left in
            the folder is moved to `earlier-N`.
        began: When the run began, on the monotonic clock, if that was before now.
    """

    def __init__(
        self,
        config: MetricsConfig,
        run_dir: Path,
        run_name: str,
        total_steps: int,
        params: Mapping[str, Any],
        *,
        evaluations: Collection[int] = (),
        devices: int = 1,
        state: Mapping[str, Any] | None = None,
        began: float | None = None,
    ) -> None:
        self.summary: Summary | None = None
        #: Number of finished steps and figures of every evaluation, those before a resumption included.
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self._config = config
        self._run_dir = run_dir
        self._run_name = run_name
        self._total_steps = total_steps
        self._params = params
        self._devices = devices
        self._resumed = state
        self._step = 0 if state is None else int(state["step"])
        now = time.monotonic()
        self._start = (now if began is None else began) - (0.0 if state is None else float(state["elapsed"]))
        #: When each phase before the first step began; None once the run has started.
        self._startup: list[tuple[str, float]] | None = [] if began is None else [("checking", began)]
        self._progress = Progress(total_steps, evaluations)
        #: How often the run has said what it does.
        self.phases = 0
        #: Returns what each role holds of memory; called once a step.
        self.usage: Callable[[], Metrics] = dict
        self._trackers: dict[str, Tracker] = {}
        self._run_ids: dict[str, str] = {}
        self._warned_names: set[str] = set()
        self._closed = False
        self._warning = threading.RLock()
        self.console: Console
        self._events = Sink(files.EVENTS, self._write_line, lambda text: self.console.warn(text))  # noqa: PLW0108 - made later
        self._lines = Sink("metrics.jsonl", self._write_line, self.warn)
        self._rollouts = Sink("rollouts", self._write_rollouts, self.warn, keep=2)
        self._sinks: dict[str, Sink] = {"metrics.jsonl": self._lines}
        self._traces: dict[str, Sink] = {}

    def __enter__(self) -> Self:
        """Prepare the folder, then start console and trackers.

        Raises:
            ConfigError: A tracker cannot start; names its key.
            OSError: The folder cannot be written.
        """
        (self._run_dir / files.ROLLOUTS).mkdir(parents=True, exist_ok=True)
        aside = _set_aside(self._run_dir) if self._resumed is None else None
        removed = 0 if self._resumed is None else self._continue_files()
        self._write_run_file()
        title = f"roll_like · {self._run_name}"
        self.console = make_console(self._config.console, title=title, progress=self._progress)
        try:
            if aside is not None:
                self.warn(f"{self._run_dir} held an earlier run's figures; they are now in {aside.name}")
            if removed:
                self.warn(f"{removed} steps after the checkpoint of step {self._step} are run again")
            self.phase("opening metrics trackers")
            self._start_trackers()
        except BaseException:
            self.console.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close as finished, stopped (Ctrl-C, `SystemExit`) or failed."""
        if error is None:
            self.close("finished")
        else:
            self.close("stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed")

    def watch(
        self,
        *,
        engines: Callable[[], Mapping[int, str]] | None = None,
        cluster: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """Tell the trackers that show it whom to ask about engines and Ray. See `SystemTracker.watch`."""
        for key, tracker in self._trackers.items():
            if isinstance(tracker, SystemTracker):
                self._sinks[key].attempt(partial(tracker.watch, engines=engines, cluster=cluster), "told of engines")

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what the run is doing now."""
        self.phases += 1
        if self._startup is not None:
            self._startup.append((name, time.monotonic()))
        self.console.phase(name, done, total)

    def started(self) -> None:
        """Say how long what came before the first step or evaluation took; only the first call does."""
        if self._startup is None:
            return
        begun, self._startup = self._startup, None
        ends = [*(at for _, at in begun[1:]), time.monotonic()]
        phases: dict[str, float] = {}
        for (name, at), end in zip(begun, ends, strict=True):  # a phase may be said again, with what is done of it
            phases[name] = phases.get(name, 0.0) + end - at
        if phases:
            self.console.started(phases)
            self.event("started", phases=phases)

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """Step and figures of every training step, those before a resumption included, as they are on disk."""
        return [
            (int(record["step"]), files.values_of(record)) for record in files.read_jsonl(self._run_dir / files.METRICS)
        ]

    def log(self, step: int, *parts: Metrics) -> dict[str, float]:
        """Take the figures of a training step, from as many roles as there are.

        Adds throughput where tokens, samples and `time/step` are known (`rollout/…`; `train/…` of a run that
        learns from given answers or pairs), the shares of the step's phases, the busy share of engines, and memory.

        Returns:
            Every figure of the step, reduced.

        Raises:
            ValueError: The step is not the next, or a name is reserved.
            TypeError: One name is used with two reductions.
        """
        if step <= self._step:
            raise ValueError(f"step {step} was logged after step {self._step}; steps count up from 1, each once")
        merged = merge([*parts, self.usage()])
        if "memory/rss_gib" not in merged:
            merged = merge([merged, {"memory/rss_gib": Max(process_tree_rss_gib())}])
        values = _with_rates(reduce(merged), self._devices)
        self._record(files.METRICS, step, values)
        self._step = step
        self.console.step(step, values)
        return values

    def log_evaluation(self, step: int, *parts: Metrics) -> dict[str, float]:
        """Take the figures of an evaluation after `step` training steps (`eval/avg`, …), and return them reduced."""
        values = reduce(merge(parts))
        self._record(files.EVALUATIONS, step, values)
        self.evaluations.append((step, values))
        self.console.evaluation(step, values)
        return values

    def log_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]], *, kind: RolloutKind = "step") -> None:
        """Write rollouts of a training step or an evaluation to `rollouts/`, and give trackers some as traces.

        Raises:
            ValueError: A row has no `task_id`, `prompt`, `text` or `reward`.
        """
        kept = [dict(row) for row in rows]
        for index, row in enumerate(kept):
            missing = ROLLOUT_FIELDS - row.keys()
            if missing:
                raise ValueError(f"rollout row {index} of step {step} has no {', '.join(sorted(missing))}")
        named = with_ids(step, kind, kept)
        if kind == "step" and named and isinstance(self.console, LiveConsole):
            self.console.sample(sample_line(named[step % len(named)]))
        self._rollouts.send(step, {"kind": kind, "rows": named})
        chosen = subsample(named, self._config.traces_per_step)
        for sink in self._traces.values() if chosen else ():
            sink.send(step, {"kind": kind, "rows": chosen})

    def warn(self, text: str) -> None:
        """Show a warning and keep it in `events.jsonl`; may be called from any thread."""
        with self._warning:
            self.console.warn(text)
            self.event("warning", text=text)

    def event(self, kind: str, **content: Any) -> None:
        """Keep something that happened in `events.jsonl`; may be called from any thread."""
        line = self._event(kind, content)
        with self._warning:
            self._events.send(self._step, {"file": files.EVENTS, "line": line})

    def note_lost(self, why: str) -> None:
        """Write to `events.jsonl` that the run ends now, whatever the other threads are doing: it waits for no lock."""
        with suppress(OSError):
            files.append(
                self._run_dir / files.EVENTS, [self._event("end", {"status": "failed", "why": why, "failures": {}})]
            )

    def _event(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "step": self._step, "time": time.time(), "elapsed": self._elapsed(), **content}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of the last logged step keeps, as plain JSON.

        `step` and `elapsed` (seconds) of the run, the `trackers`' run ids, and what is `pending`
        because a tracker or the disk did not take it yet.
        """
        return {
            "step": self._step,
            "elapsed": self._elapsed(),
            "trackers": dict(self._run_ids),
            "pending": {
                key: [[step, payload] for step, payload in sink.pending]
                for key, sink in self._sinks.items()
                if sink.pending
            }
            # the rows themselves lie in rollouts/
            | {
                sink.name: [[step, {"kind": payload["kind"]}] for step, payload in sink.pending]
                for sink in self._traces.values()
                if sink.pending
            },
        }

    def close(self, status: Status) -> None:
        """Deliver what is pending, write the summary, and end every tracker's run. May be called again."""
        if self._closed:
            return
        self._closed = True
        sinks = (*self._sinks.values(), self._rollouts, *self._traces.values())
        for sink in sinks:
            sink.flush()
            report = sink.report()
            if report["undelivered"]:
                self.warn(f"{sink.name}: {report['undelivered']} steps never arrived ({report['last_error']})")
        reports = {sink.name: sink.report() for sink in sinks if sink.failures}
        self.event("end", status=status, failures=reports)
        self.console.close()
        self._summarise()
        self._deliver_events()
        for key, tracker in self._trackers.items():
            sink = self._sinks[key]
            for name in ARTIFACTS:
                path = self._run_dir / name
                if path.exists():
                    sink.attempt(partial(tracker.artifact, path), f"given {name}")
            sink.attempt(partial(tracker.close, status), "closed")

    def _deliver_events(self) -> None:
        """Write what `events.jsonl` lacks, although it has failed a moment ago; say what still does not arrive."""
        with self._warning:
            self._events.flush()
            missing = self._events.report()
        if missing["undelivered"]:
            self.console.warn(f"{files.EVENTS}: {missing['undelivered']} lines never arrived ({missing['last_error']})")

    def _summarise(self) -> None:
        if not (self._step or (self._run_dir / files.EVALUATIONS).exists()):
            return
        try:
            self.summary = write_summary(self._run_dir)
        except (OSError, ValueError, RuntimeError) as error:
            self.warn(f"the summary could not be written: {type(error).__name__}: {error}")
            return
        self.console.print(*self.summary.tables())

    # ------------------------------------------------------------------ files

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _record(self, file: str, step: int, values: dict[str, float]) -> None:
        reserved = files.RESERVED & values.keys()
        if reserved:
            raise ValueError(f"a metric is called {sorted(reserved)[0]!r}, which every line has; use a name with a /")
        for name, value in values.items():
            # an infinite gradient is what float16 finds its scale with, or has a warning of its own (`skipped_updates`)
            if not math.isfinite(value) and name not in self._warned_names and not name.endswith("/grad_norm"):
                self._warned_names.add(name)
                self.warn(f"{name} is {value} at step {step}")
        line = {"step": step, "time": time.time(), "elapsed": self._elapsed(), **values}
        self._lines.send(step, {"file": file, "line": line})
        for key in self._trackers:
            self._sinks[key].send(step, dict(values))

    def _write_line(self, step: int, payload: Payload) -> None:  # noqa: ARG002 - the line knows its step
        files.append(self._run_dir / payload["file"], [payload["line"]])

    def _write_rollouts(self, step: int, payload: Payload) -> None:
        files.replace(files.rollouts_path(self._run_dir, step, kind=payload["kind"]), payload["rows"])

    def _write_run_file(self) -> None:
        run = {
            "name": self._run_name,
            "pipeline": self._params.get("pipeline"),
            "total_steps": self._total_steps,
            "sampled_rollouts": self._config.sampled_rollouts,
            "resumed_from": None if self._resumed is None else self._step,
            "versions": versions(),
        }
        files.replace(self._run_dir / files.RUN, [run])

    def _continue_files(self) -> int:
        """Cut every file to the checkpoint's step and read what is left; return how many steps were cut."""
        removed = files.cut_after(self._run_dir / files.METRICS, self._step)
        files.cut_after(self._run_dir / files.EVALUATIONS, self._step)
        for path in (self._run_dir / files.ROLLOUTS).glob("*_*.*"):
            number = path.stem.rpartition("_")[2]
            if number.isdigit() and int(number) > self._step:
                path.unlink()
        for record in files.read_jsonl(self._run_dir / files.EVALUATIONS):
            self.evaluations.append((int(record["step"]), files.values_of(record)))
            self._progress.add_evaluation(*self.evaluations[-1])
        for record in files.read_jsonl(self._run_dir / files.METRICS):
            self._progress.add(int(record["step"]), files.values_of(record), timed=False)
        return removed

    # --------------------------------------------------------------- trackers

    def _start_trackers(self) -> None:
        pending = {} if self._resumed is None else self._resumed["pending"]
        self._lines.hold((step, payload) for step, payload in pending.get("metrics.jsonl", ()))
        self._lines.flush()
        try:
            for index, config in enumerate(self._config.trackers):
                key = config.type if config.type not in self._trackers else f"{config.type}-{index}"
                self._start_tracker(config, f"metrics.trackers.{index}", key, pending.get(key, ()))
        except BaseException:
            for key, tracker in self._trackers.items():
                self._sinks[key].attempt(partial(tracker.close, "failed"), "closed")
            raise

    def _start_tracker(
        self, config: PluginConfig, place: str, key: str, pending: Iterable[tuple[int, Payload]]
    ) -> None:
        old_id = None if self._resumed is None else self._resumed["trackers"].get(key)
        tracker, run_id = start_tracker(
            config,
            place,
            lambda made: made.start(
                run_dir=self._run_dir,
                run_name=self._run_name,
                params=self._params,
                resume_id=old_id,
                resume_step=None if old_id is None else self._step,
            ),
        )
        sink = self._sinks[key] = Sink(key, tracker.log, self.warn)
        self._trackers[key] = tracker
        self._run_ids[key] = run_id
        if self._resumed is not None and run_id != old_id:
            if old_id is not None:
                self.warn(f"{key} no longer has run {old_id}; run {run_id} begins with the history of metrics.jsonl")
            pending = self._whole_history()
        sink.hold((step, payload) for step, payload in pending)
        sink.flush()
        if isinstance(tracker, TraceTracker) and self._config.traces_per_step != 0:
            self._start_traces(key, tracker, again=self._resumed is not None and run_id == old_id)

    def _start_traces(self, key: str, tracker: TraceTracker, *, again: bool) -> None:
        """Give a tracker rollouts from now on; when a run is continued, also those that may not have arrived.

        A checkpoint is written before its own step's rollouts, so these are sent again: a trace that is there already
        is replaced.
        """
        sink = self._traces[key] = Sink(
            f"{key} traces", partial(self._write_traces, tracker), self.warn, keep=TRACED_STEPS
        )
        if not again or self._resumed is None:
            return
        pending = self._resumed["pending"].get(sink.name, [])
        held = {(step, payload["kind"]) for step, payload in pending}
        held |= {(self._step, kind) for kind in KINDS if self._step in rollout_steps(self._run_dir, kind)}
        sink.hold((step, {"kind": kind}) for step, kind in sorted(held))
        sink.flush()

    def _write_traces(self, tracker: TraceTracker, step: int, payload: Payload) -> None:
        rows = payload.get("rows")
        if rows is None:  # of an earlier process
            rows = subsample(read_rollouts(self._run_dir, step, payload["kind"]), self._config.traces_per_step)
        tracker.trace(step, payload["kind"], rows)

    def _whole_history(self) -> list[tuple[int, Payload]]:
        records = files.read_jsonl(self._run_dir / files.EVALUATIONS) + files.read_jsonl(self._run_dir / files.METRICS)
        return [(one["step"], dict(files.values_of(one))) for one in sorted(records, key=lambda one: one["step"])]


def _with_rates(values: dict[str, float], devices: int) -> dict[str, float]:
    seconds = values.get("time/step", 0.0)
    # what a run is given in each step comes first: it may sample in some steps only
    sampling = "train/samples" not in values and any(name.startswith("rollout/") for name in values)
    kind = "rollout" if sampling else "train"
    derived = {
        f"throughput/{what}_per_second": values[f"{kind}/{what}"] / seconds
        for what in ("tokens", "samples")
        if seconds > 0 and f"{kind}/{what}" in values
    }
    if "throughput/tokens_per_second" in derived:
        rate = derived["throughput/tokens_per_second"]
        derived["throughput/tokens_per_second_per_device"] = rate / devices
    if seconds > 0:
        derived |= {
            f"share/{name.removeprefix('time/')}": values[name] / seconds for name in STEP_PHASES if name in values
        }
    if seconds > 0 and "time/engines" in values:
        derived["util/engines"] = values["time/engines"] / seconds
    return {**derived, **values}


def _set_aside(run_dir: Path) -> Path | None:
    """Move an earlier run's figures out of the way; return where they went, or None when there are none."""
    if not any((run_dir / name).exists() for name in (files.METRICS, files.EVALUATIONS)):
        return None
    number = 1
    while (target := run_dir / f"earlier-{number}").exists():
        number += 1
    target.mkdir()
    for name in (files.METRICS, files.EVALUATIONS, files.EVENTS, files.RUN, files.ROLLOUTS, files.PROFILE, *ARTIFACTS):
        if name != CONFIG and (run_dir / name).exists():
            shutil.move(run_dir / name, target / name)
    (run_dir / files.ROLLOUTS).mkdir()
    return target
