"""A run under way: its steps, its checkpoints, its metrics, and what a pipeline is built on."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll_like.cluster import Hang, ResourceManager, WorkerDied
from roll_like.config.load import dump_config
from roll_like.config.run import RunConfig
from roll_like.config.sampling import SamplingRunConfig
from roll_like.errors import CheckpointError, DiskFullError, GuardError
from roll_like.metrics import files
from roll_like.metrics.callbacks import CallbackList
from roll_like.metrics.guards import Guards, NothingLearned, skipped_updates
from roll_like.metrics.manager import MetricsManager
from roll_like.metrics.rollouts import RolloutKind
from roll_like.metrics.timing import StepTimer
from roll_like.rollout.collection import Collected
from roll_like.rollout.metrics import rollout_rows
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.source import KeptRollouts
from roll_like.rollout.storage import write_groups
from roll_like.rollout.thumbnails import keep_thumbnails, thumbnails_folder
from roll_like.run.checkpoint import Checkpoint, CheckpointClock, CheckpointStore
from roll_like.run.profile import StepProfiler
from roll_like.run.signals import StopRequested, StopSignal
from roll_like.run.snapshots import Snapshots
from roll_like.training.engine import PolicyCopy, TrainingEngine
from roll_like.types import Callbacks, Group, Scored, TrainingValues
from roll_like.values import Last, Max, Metric, Metrics, Sum

#: Checkpoints in a row that could not be written for want of space, until the run ends.
MOST_FAILED_WRITES = 3


class Stateful(Protocol):
    """A part of the driver whose state a checkpoint keeps."""

    def state(self) -> dict[str, Any]:
        """Return it as plain JSON."""

    def load_state(self, state: Mapping[str, Any], /) -> None:
        """Continue where `state` was taken."""


class SavedEngine(Protocol):
    """A part whose state is files."""

    def save(self, directory: Path) -> None:
        """Write it."""

    def load(self, directory: Path) -> None:
        """Read it back."""


class Evaluates(Protocol):
    """Measures the model that is trained."""

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""

    def evaluate(self) -> tuple[Mapping[str, Metric], Collected | None]:
        """Return `eval/…`, and the scored answers where there are any."""

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of."""


class RunState:
    """Counts steps, writes checkpoints when they are due, hands metrics on."""

    def __init__(
        self,
        *,
        directory: Path,
        config: RunConfig,
        metrics: MetricsManager,
        signal: StopSignal,
        store: CheckpointStore,
        snapshots: Snapshots,
        resumed: Checkpoint | None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.directory = directory
        self.metrics = metrics
        self.timer = StepTimer(on_enter=metrics.phase)
        self.first_step = resumed.step if resumed else 0
        #: Steps that what is trained has finished. After a failure less than were `reached`.
        self.finished = self.first_step
        #: Steps that are logged.
        self.reached = self.first_step
        #: What `config.yaml` says: rows that Python gave are files there.
        self.config = config
        self._signal = signal
        self._callbacks = CallbackList(config.callbacks, callbacks)
        #: Whether a callback wants no further step: it may have said so before a resumption.
        self._ends = bool(self._callbacks) and self.first_step in _ended_early(directory)
        self._store = store
        self._snapshots = snapshots
        self._resumed = resumed
        self._parts: Mapping[str, Stateful] = {}
        self._engines: list[SavedEngine] = []
        self._beginning: dict[str, Any] = {}
        self._boundary: dict[str, Any] = {}
        self._written_at: int | None = resumed.step if resumed else None
        self._clock = CheckpointClock(config.checkpoint.every_minutes or math.inf)
        self._failed_writes = 0
        self._guards = Guards(config.guards)
        self._profiler = StepProfiler(config.profile, directory, metrics)
        self._nothing_learned = NothingLearned()
        for _, values in metrics.history:  # of the steps before a resumption; they were warned of then
            self._guards.check(values)
        if resumed:
            self._callbacks.on_resume(metrics.history, metrics.evaluations)
        self._score: float | None = None
        self._noted: list[Metrics] = []
        self._health: list[Metrics] = []  # of workers that hung or were replaced; other threads add to it
        self._noting = threading.Lock()
        self._again = False  # the last step was logged before a failure
        self._sampled: list[Group[Scored]] = []

    def keep(self, engines: Sequence[SavedEngine], **parts: Stateful) -> None:
        """Name what checkpoints hold, and bring it to where the resumed checkpoint left it."""
        self._parts = parts
        self._engines = list(engines)
        if self._resumed is not None:
            saved = self._resumed.state.keys() - {"metrics"}
            if saved != parts.keys():
                raise CheckpointError(
                    f"{self._resumed.path} is of another configuration: it holds the state of {_listed(saved)}, and "
                    f"this run has {_listed(parts)}",
                    fix=f"continue with the configuration of the run ({self._resumed.path / 'config.yaml'}), or leave "
                    "--resume out to start a new one",
                )
            for name, part in parts.items():
                part.load_state(self._resumed.state[name])
            for engine in self._engines:
                engine.load(self._resumed.path)
        self._beginning = self._boundary = self._states()

    @property
    def trained(self) -> list[TrainingEngine[Any]]:
        """The models that are trained."""
        return [engine for engine in self._engines if isinstance(engine, TrainingEngine)]

    @property
    def _rollouts(self) -> list[KeptRollouts]:
        return [part for part in self._parts.values() if isinstance(part, KeptRollouts)]

    @property
    def replaying(self) -> bool:
        """Whether the step under way was logged before a failure, and only moves what is trained to where it was."""
        return self.finished < self.reached

    def rewind(self) -> str:
        """Bring what is trained, fresh from its start, to its newest state; say what is done again.

        That is in memory or on disk; without one it stays as it started. Rollouts stay where they are: `KeptRollouts`
        has those of the steps since.

        Raises:
            CheckpointError: The rollouts of those steps were not kept, because no checkpoints are written.
        """
        self._settle(wait=True)
        snapshot = self._snapshots.newest()
        checkpoint = snapshot or self._store.latest()
        step, states = (self.first_step, self._beginning) if checkpoint is None else (checkpoint.step, checkpoint.state)
        again = range(step, self.reached)
        if not all(rollouts.holds(again) for rollouts in self._rollouts):
            raise CheckpointError(
                f"there is no checkpoint to start the trainer again from: {len(again)} steps are lost",
                fix="set checkpoint.every_minutes or checkpoint.every",
            )
        for name, part in self._parts.items():
            if not isinstance(part, KeptRollouts):
                part.load_state(states[name])
        if checkpoint is not None:
            for engine in self.trained:
                engine.load(checkpoint.path)
        self.finished = step
        kept = "the beginning" if checkpoint is None else f"the checkpoint of step {step}"
        return self._lost(kept if snapshot is None else f"the state of step {step} in memory")

    def go_back(self) -> int | None:
        """Bring what is trained, started anew, to its last healthy checkpoint, and leave the step under way out.

        Rollouts and data stay where they are: the next step is one of new samples. Return the step of the checkpoint;
        None, and nothing is changed, if there is none.
        """
        self._settle(wait=True)
        checkpoint = self._store.latest() or self._snapshots.newest()
        if checkpoint is None:
            return None
        for engine in self.trained:
            engine.rebuild()
            engine.load(checkpoint.path)
        for name, part in self._parts.items():
            if isinstance(part, PolicyCopy):  # its numbers are with the ranks
                part.load_state(checkpoint.state[name])
        self._note_health({"health/rewinds": Sum(1.0)})
        self.log(self.finished)
        self.write_checkpoint()  # from an older one the steps that were left would be learned again
        return checkpoint.step

    def _lost(self, origin: str) -> str:
        steps = self.reached - self.finished
        self._note_health({"health/steps_replayed": Sum(float(steps))})
        if steps == 0:
            return f"the run goes on from {origin}"
        first, last = self.finished + 1, self.reached
        again = f"step {last} is" if steps == 1 else f"steps {first} to {last} are"
        return f"{again} computed again from {origin}"

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left, 0-based; between two of them, write a checkpoint when one is due."""
        self.metrics.started()
        self._profiler.expect(self.reached + 1, self.config.total_steps)
        for step in range(self.finished, self.config.total_steps):
            if self._ends and not self.replaying:
                break
            if self._signal.requested:
                raise StopRequested
            if not self.replaying:
                self._profiler.begin(step + 1, self.trained)
            self.timer.restart()
            yield step
            self._profiler.end()
            if not self.replaying:
                self._keep_step()
        if self._wanted_at_end():
            self.write_checkpoint()

    def _wanted_at_end(self) -> bool:
        settings = self.config.checkpoint
        if settings.at_end != "auto":
            return settings.at_end
        self._settle(wait=True)
        short = self._written_at is None and settings.every == 0 and settings.every_minutes > 0
        return not (short and settings.export)

    def log(self, step: int, *parts: Metrics) -> dict[str, float]:
        """Finish a step: hand its figures on, and take the driver's states for a checkpoint."""
        if self.replaying:
            self.finished = step + 1
            self._again, self._noted, self._sampled = True, [], []
            return {}
        self._again = False
        age: Metrics = {"checkpoint/age_seconds": Last(self._clock.age)}
        with self._noting:
            noted, self._noted, self._health = [*self._noted, *self._health], [], []
        values = self.metrics.log(step + 1, *parts, *noted, age, self.timer.metrics())
        self.finished = self.reached = step + 1
        self._boundary = self._states()
        if self._sampled:
            self._show(self._sampled)
        self._sampled = []
        self._watch(values)
        self._end_after(self._callbacks.on_step(self.finished, values))
        return values

    def _end_after(self, why: str | None) -> None:
        """End the run after the last finished step, if a callback wants that."""
        if why is not None and not self._ends:
            self._ends = True
            self.metrics.event("early_end", finished=self.finished, why=why)
            self.metrics.warn(f"a callback ends the run after step {self.finished}: {why}")

    def _watch(self, values: Mapping[str, float]) -> None:
        """Warn of updates that a step did not have, and of what guards find in its figures.

        Raises:
            GuardError: One of them ends the run.
        """
        alarms = self._guards.check(values)
        found = (*skipped_updates(values), *self._nothing_learned.found(values))
        for text in (*found, *(alarm.text for alarm in alarms)):
            self.metrics.warn(f"step {self.finished}: {text}")
        ending = next((alarm for alarm in alarms if alarm.stop), None)
        if ending is not None:
            with contextlib.suppress(WorkerDied):  # it was warned of, and the run ends
                self._profiler.end()
            raise GuardError(
                f"after step {self.finished} the guard {ending.guard!r} ended the run: {ending.text}",
                fix=f"leave {ending.guard!r} out of guards.stop to be warned only; --resume continues from the last "
                "healthy checkpoint",
            )

    def recovered(self, role: str, text: str, *, seconds: float | None) -> None:
        """Warn that workers were replaced, or are not going to be. May be called from any thread.

        Args:
            role: Whose workers.
            text: A plain sentence: what died, what was done, what was lost.
            seconds: From the death to the replacement; None if there is none.
        """
        self.metrics.warn(text)
        self.metrics.event("recovery", role=role, seconds=seconds)
        if seconds is not None:
            self._note_health({f"health/restarts/{role}": Sum(1.0), "health/recovery_seconds": Max(seconds)})

    def note(self, figures: Metrics, collected: Collected | None = None) -> None:
        """Take figures and samples of the step under way, from a part that the loop does not mention."""
        self._noted.append(figures)
        if collected is not None:
            self._sampled += collected.groups

    def keep_rollouts(self, collected: Collected, values: TrainingValues | None = None) -> None:
        """Write the samples of the step that was just logged: for people, and if configured to be replayed.

        Args:
            collected: The step's groups.
            values: What training made of their tokens, if that is to be written too.

        Raises:
            DataError: A sample holds what cannot be written to be replayed; names task and field.
            CheckpointError: The disk is full or not writable.
        """
        if self._again:
            return
        self._profiler.turns(collected.groups)
        # the first step trains version 1
        self._show(collected.groups, self.finished)
        if isinstance(self.config, SamplingRunConfig) and self.config.rollout.save_tokens:
            stem = tokens_stem(self.directory, self.finished)
            try:
                write_groups(stem, collected.groups, values)
            except OSError as error:
                raise CheckpointError(
                    f"the rollouts of step {self.finished} cannot be written to {stem.parent}: "
                    f"{error.strerror or error}",
                    fix="free disk space, set rollout.save_tokens: false, or set output_dir to another disk; then "
                    "continue with --resume",
                ) from error

    def _show(self, groups: Sequence[Group[Scored]], version: int | None = None, *, kind: RolloutKind = "step") -> None:
        """Write samples for people, with small copies of the images that they are about."""
        self.metrics.log_rollouts(self.finished, rollout_rows(groups, version), kind=kind)
        try:
            keep_thumbnails(self.directory, groups)
        except OSError as error:
            self.metrics.warn(
                f"small copies of this step's images cannot be written to {thumbnails_folder(self.directory)}: "
                f"{error.strerror or error}; `roll-like rollouts` will show the names of the images instead"
            )

    def evaluate(self, evaluator: Evaluates | None) -> None:
        """Evaluate the current weights if that is due after the steps that are finished."""
        total = self.finished if self._ends else self.config.total_steps
        if evaluator is None or not evaluator.due(self.finished, total):
            return
        if self.finished in self._evaluated_steps():  # a resumed run did it before it was killed
            return
        self.metrics.started()
        self.metrics.phase("evaluating")
        began = time.perf_counter()
        with self.interruptible():
            metrics, collected = evaluator.evaluate()
        seconds = Last(time.perf_counter() - began)
        values = self.metrics.log_evaluation(self.finished, metrics, {"time/evaluate": seconds})
        if collected is not None:
            self._show(collected.groups, kind="eval")
        self._score = evaluator.score(values)
        self._end_after(self._callbacks.on_evaluation(self.finished, values))

    def interruptible(self) -> AbstractContextManager[None]:
        """Let SIGTERM cut this block short."""
        return self._signal.interruptible()

    def note_hang(self, hang: Hang, text: str) -> None:
        """Warn of workers that hung and were killed, and count them; may be called from any thread."""
        self.metrics.warn(text)
        self.metrics.event("hang", role=hang.role, ranks=hang.ranks, phase=hang.phase, seconds=hang.seconds)
        self._note_health({f"health/hangs/{hang.role}": Sum(len(hang.ranks))})

    def _note_health(self, figures: Metrics) -> None:
        """Take figures of the next step that is logged, from any thread."""
        with self._noting:
            self._health.append(figures)

    def write_checkpoint(self) -> None:
        """Write the state of the last finished step, unless that is on disk already."""
        self._settle(wait=True)
        if self._written_at == self.finished or self.replaying:
            return
        self.metrics.phase("checkpoint")
        with self._clock.attempt():
            self._store.write(
                self.finished,
                self._save_engines,
                self._boundary,
                score=self._score,
                healthy=self._guards.healthy,
            )
        self._written_at, self._failed_writes = self.finished, 0
        self._score = None
        if self._guards.healthy:
            self._forget_rollouts()
        self.note({"checkpoint/stall_seconds": Last(self._clock.stall)})

    def _keep_step(self) -> None:
        """Keep the step that was just finished: in memory where that costs little, on disk when that is due.

        Raises:
            CheckpointError: Checkpoints could not be written several times in a row, or in a way that the run cannot go
                on from.
        """
        every = self.config.checkpoint.every
        due = (every and self.finished % every == 0) or self._clock.due
        try:
            self._settle(wait=due)
            # an unhealthy one is for people: nothing goes on from it
            if self._guards.healthy and (due or self._snapshots.due) and self._take_snapshot():
                if due:
                    self._score = None
                    self._clock.begin()
                    self._snapshots.copy()
            elif due:
                self.write_checkpoint()
        except DiskFullError as error:
            self._failed_writes += 1
            if self._failed_writes == MOST_FAILED_WRITES:
                raise
            self.metrics.warn(f"{error.message}; the run goes on, and tries again when the next checkpoint is due")

    def _take_snapshot(self) -> bool:
        """Keep the last finished step in memory; return False where that has no room."""
        taken = self._snapshots.take(
            self.finished,
            self._save_engines,
            self._boundary,
            score=self._score,
            expected=lambda: sum(engine.state_bytes() for engine in self.trained),
        )
        if taken:
            self._forget_rollouts()
            self.note({"checkpoint/stall_seconds": Last(self._snapshots.stall)})
        return taken

    def _settle(self, *, wait: bool = False) -> None:
        """Take note of a checkpoint that has come to disk since the last call, or of why it has not."""
        step = self._snapshots.copied(wait=wait)
        if step is not None:
            self._written_at, self._failed_writes = step, 0
            self._clock.written()

    def _forget_rollouts(self) -> None:
        for rollouts in self._rollouts:
            rollouts.forget(self.finished)

    def stop(self) -> None:
        """Write the state of the last finished step, and say which signal has ended the run."""
        self.write_checkpoint()
        self.metrics.warn(
            f"stopped by {self._signal.name} after step {self.finished}; continue with --resume {self.directory.name}"
        )
        self.close()
        self.metrics.close("stopped")

    def close(self) -> None:
        """Say what the end of the run leaves unfinished."""
        self._profiler.leave()

    def _evaluated_steps(self) -> set[int]:
        return {int(record["step"]) for record in files.read_jsonl(self.directory / files.EVALUATIONS)}

    def _save_engines(self, directory: Path) -> None:
        (directory / "config.yaml").write_text(dump_config(self.config))
        for engine in self._engines:
            engine.save(directory)

    def _states(self) -> dict[str, Any]:
        return {"metrics": self.metrics.state(), **{name: part.state() for name, part in self._parts.items()}}


def _ended_early(directory: Path) -> set[int]:
    """Return the steps after which callbacks have ended the run."""
    return {
        int(event["finished"]) for event in files.read_jsonl(directory / files.EVENTS) if event["kind"] == "early_end"
    }


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "no part"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a pipeline is built on.

    Attributes:
        state: Steps, checkpoints, metrics.
        resources: Where workers go.
        stack: Closes, in reverse order, what `build` started; also when a later part fails to start.
    """

    state: RunState
    resources: ResourceManager
    stack: ExitStack
