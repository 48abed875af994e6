"""A run from its folder to its summary: steps, checkpoints, signals, resumption."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll_like.cluster import RaySession, ResourceManager
from roll_like.config.load import dump_config
from roll_like.config.run import RunConfig
from roll_like.errors import CheckpointError, ConfigError
from roll_like.metrics import files
from roll_like.metrics.manager import MetricsManager
from roll_like.metrics.summary import Summary, write_summary
from roll_like.metrics.timing import StepTimer
from roll_like.models.precision import settled
from roll_like.rollout.collection import Collected
from roll_like.rollout.metrics import rollout_rows
from roll_like.run.checkpoint import Checkpoint, CheckpointStore
from roll_like.run.signals import StopRequested, StopSignal
from roll_like.types import Group, Scored
from roll_like.values import Metric, Metrics


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
        """Return `eval/…`, and the judged answers where there are any."""

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of."""


class Pipeline(Protocol):
    """What `launch` runs."""

    run_state: RunState

    def run(self) -> None:
        """Train to the end."""

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the trained model as a Hugging Face directory."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left behind.

    Attributes:
        name: Name of the run.
        directory: Its folder.
        summary: Its `figures` are those of `summary.json`; None when no step was finished.
        metrics: One dictionary a step, as in `metrics.jsonl`.
        stopped: Whether SIGTERM ended it before its last step.
    """

    name: str
    directory: Path
    summary: Summary | None
    metrics: Sequence[Mapping[str, float]]
    stopped: bool


class RunState:
    """Counts steps, writes checkpoints when they are due, hands metrics on.

    Args:
        directory: The run's folder.
        config: The whole configuration.
        metrics: Where figures go.
        signal: SIGTERM.
        resumed: The checkpoint to continue from.
    """

    def __init__(
        self,
        *,
        directory: Path,
        config: RunConfig,
        metrics: MetricsManager,
        signal: StopSignal,
        store: CheckpointStore,
        resumed: Checkpoint | None,
    ) -> None:
        self.directory = directory
        self.metrics = metrics
        self.timer = StepTimer(on_enter=metrics.phase)
        self.first_step = resumed.step if resumed else 0
        self.finished = self.first_step
        self._config = config
        self._signal = signal
        self._store = store
        self._resumed = resumed
        self._parts: Mapping[str, Stateful] = {}
        self._engines: list[SavedEngine] = []
        self._boundary: dict[str, Any] = {}
        self._written_at: int | None = resumed.step if resumed else None
        self._score: float | None = None
        self._noted: list[Metrics] = []
        self._sampled: list[Group[Scored]] = []

    def keep(self, engines: Sequence[SavedEngine], **parts: Stateful) -> None:
        """Name what checkpoints hold, and bring it to where the resumed checkpoint left it."""
        self._parts = parts
        self._engines = list(engines)
        if self._resumed is not None:
            for name, part in parts.items():
                part.load_state(self._resumed.state[name])
            for engine in self._engines:
                engine.load(self._resumed.path)
        self._boundary = self._states()

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left, 0-based; between two of them, write a checkpoint when one is due."""
        for step in range(self.first_step, self._config.total_steps):
            if self._signal.requested:
                raise StopRequested
            self.timer.restart()
            yield step
            every = self._config.checkpoint.every
            if every and self.finished % every == 0:
                self.write_checkpoint()
        if self._config.checkpoint.at_end:
            self.write_checkpoint()

    def log(self, step: int, *parts: Metrics) -> dict[str, float]:
        """Finish a step: hand its figures on, and take the driver's states for a checkpoint."""
        values = self.metrics.log(step + 1, *parts, *self._noted, self.timer.metrics())
        self.finished = step + 1
        self._boundary = self._states()
        if self._sampled:
            self.metrics.log_rollouts(self.finished, rollout_rows(self._sampled))
        self._noted, self._sampled = [], []
        return values

    def note(self, figures: Metrics, collected: Collected | None = None) -> None:
        """Take figures and samples of the step under way, from a part that the loop does not mention."""
        self._noted.append(figures)
        if collected is not None:
            self._sampled += collected.groups

    def keep_rollouts(self, collected: Collected) -> None:
        """Write the samples of the step that was just logged, for people."""
        self.metrics.log_rollouts(self.finished, rollout_rows(collected.groups))

    def evaluate(self, evaluator: Evaluates | None) -> None:
        """Evaluate the current weights if that is due after the steps that are finished."""
        if evaluator is None or not evaluator.due(self.finished, self._config.total_steps):
            return
        if self.finished in self._evaluated_steps():  # a resumed run did it before it was killed
            return
        self.metrics.phase("evaluating")
        with self.interruptible():
            metrics, collected = evaluator.evaluate()
        values = self.metrics.log_evaluation(self.finished, metrics)
        if collected is not None:
            self.metrics.log_rollouts(self.finished, rollout_rows(collected.groups), kind="eval")
        self._score = evaluator.score(values)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let SIGTERM cut this block short."""
        with self._signal.interruptible():
            yield

    def write_checkpoint(self) -> None:
        """Write the state of the last finished step, unless that is on disk already."""
        if self._written_at == self.finished:
            return
        self.metrics.phase("checkpoint")
        self._store.write(self.finished, self._save_engines, self._boundary, score=self._score)
        self._written_at = self.finished
        self._score = None

    def _evaluated_steps(self) -> set[int]:
        return {int(record["step"]) for record in files.read(self.directory / files.EVALUATIONS)}

    def _save_engines(self, directory: Path) -> None:
        (directory / "config.yaml").write_text(dump_config(self._config))
        for engine in self._engines:
            engine.save(directory)

    def _states(self) -> dict[str, Any]:
        return {"metrics": self.metrics.state(), **{name: part.state() for name, part in self._parts.items()}}


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


def launch(
    config: RunConfig,
    build: Callable[[Any, RunContext], Pipeline],
    *,
    resume: str | None = None,
) -> RunResult:
    """Run a pipeline in a folder of its own, and leave nothing running whatever happens.

    Args:
        config: The validated configuration.
        build: Makes the pipeline.
        resume: None starts anew; "" continues the run of this name; else the run (or folder) to continue.

    Raises:
        RollLikeError: Something of the run failed; the message says what and how to go on.
    """
    config = settled(config)
    directory, resumed_run = find_run(config, resume)
    stopped = False
    with ExitStack() as stack:
        stack.enter_context(locked(directory))
        warnings: list[str] = []
        checkpoints = config.checkpoint
        store = CheckpointStore(
            directory / "checkpoints", keep=checkpoints.keep, keep_best=checkpoints.keep_best, warn=warnings.append
        )
        checkpoint = store.latest() if resumed_run else None
        (directory / "config.yaml").write_text(dump_config(config))
        signal = stack.enter_context(StopSignal())
        metrics = stack.enter_context(
            MetricsManager(
                config.metrics,
                directory,
                directory.name,
                config.total_steps,
                config.model_dump(mode="json", by_alias=True),
                state=checkpoint.state["metrics"] if checkpoint else None,
            )
        )
        for warning in warnings:
            metrics.warn(warning)
        if resumed_run and checkpoint is None:
            metrics.warn(f"{directory} has no checkpoint yet; the run starts from its first step")
        stack.enter_context(RaySession(config.resources, directory / "logs"))
        signal.claim()
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        state = RunState(
            directory=directory, config=config, metrics=metrics, signal=signal, store=store, resumed=checkpoint
        )
        with signal.interruptible():
            pipeline = build(config, RunContext(state=state, resources=resources, stack=stack))
        try:
            pipeline.run()
        except StopRequested:
            stopped = True
            state.write_checkpoint()
            metrics.warn(f"stopped by SIGTERM after step {state.finished}; continue with --resume {directory.name}")
            metrics.close("stopped")
        if not stopped and config.checkpoint.export:
            metrics.phase("exporting")
            pipeline.export(directory / "model", write_summary(directory))
    return RunResult(
        name=directory.name,
        directory=directory,
        summary=metrics.summary,
        metrics=[values for _, values in metrics.history],
        stopped=stopped,
    )


@contextmanager
def measuring(config: RunConfig) -> Iterator[tuple[ResourceManager, ExitStack]]:
    """Hold the configuration's hardware for an evaluation without a run; what goes onto the stack is closed first."""
    with ExitStack() as stack:
        stack.enter_context(RaySession(config.resources, config.output_dir / "evaluation-logs"))
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        yield resources, stack


def find_run(config: RunConfig, resume: str | None) -> tuple[Path, bool]:
    """Return the run's folder and whether it is continued.

    A new run never writes into an old one's folder: the name gets `-2`, `-3`, … A bare `--resume`
    continues the latest of them.

    Raises:
        ConfigError: The run to continue does not exist.
    """
    if resume:
        named = Path(resume) if Path(resume).is_dir() else config.output_dir / resume
        if not (named / "config.yaml").is_file():
            raise ConfigError(
                f"--resume {resume}: there is no run in {named}",
                fix=f"name one of: {', '.join(_runs(config.output_dir)) or 'none yet'}",
            )
        return named, True
    pattern = re.compile(rf"{re.escape(config.name)}(?:-(\d+))?")
    numbers = [int(match[1] or 1) for name in _runs(config.output_dir) if (match := pattern.fullmatch(name))]
    last = max(numbers, default=0)
    if resume == "" and last:
        return config.output_dir / (config.name if last == 1 else f"{config.name}-{last}"), True
    directory = config.output_dir / (config.name if last == 0 else f"{config.name}-{last + 1}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory, False


def _runs(output_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in output_dir.glob("*/config.yaml"))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a run's folder; the lock goes with the process, even a killed one.

    Raises:
        CheckpointError: Another process runs in it.
    """
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is running in {directory}", fix="wait for it, or choose another `name`"
            ) from error
        yield
