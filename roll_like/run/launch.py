"""Starts what a run or an evaluation stands on, and leaves nothing running."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from roll_like.check.findings import Finding, failed
from roll_like.check.gpus import require_capable, require_room
from roll_like.cluster import RaySession, ResourceManager, metrics_addresses, watching
from roll_like.cluster.driver_loop import rare_garbage_collection
from roll_like.cluster.node_watch import RoleMemory
from roll_like.cluster.orphans import clear_up_orphans
from roll_like.config.load import dump_config
from roll_like.config.run import RunConfig
from roll_like.config.training import LoRAConfig
from roll_like.data.stored_rows import with_stored_rows
from roll_like.errors import CheckpointError, ConfigError
from roll_like.metrics import files
from roll_like.metrics.manager import MetricsManager
from roll_like.metrics.trackers import shows_systems
from roll_like.run.checkpoint import Checkpoint, CheckpointStore
from roll_like.run.folder import is_finished, locked, next_run, resolve_run_folder
from roll_like.run.signals import StopSignal
from roll_like.run.snapshots import Snapshots
from roll_like.run.state import RunContext, RunState
from roll_like.run.streams import lasting_streams
from roll_like.types import Callbacks
from roll_like.values import Max, Metric, Sum


@contextmanager
def running(
    config: RunConfig, resume: str | None, *, began: float | None = None, callbacks: Callbacks | None = None
) -> Iterator[RunContext]:
    """Hold a run's folder, its metrics, Ray and the hardware; whatever happens, nothing is left running.

    Args:
        config: The validated configuration, with its number of steps.
        resume: None starts anew; "" continues the run of this name; else the run (or folder) to continue.
        began: When the run began, on the monotonic clock; default: now.
        callbacks: What is called after each step and each evaluation.

    Raises:
        RollLikeError: The run to continue does not exist or is finished without a checkpoint, its folder is in use, or
            the hardware is not there.
        StopRequested: A signal to stop arrived meanwhile.
    """
    directory, resumed_run = resolve_run_folder(config, resume)
    clear_up_orphans()  # first: its own newest checkpoint may be among what is left
    with ExitStack() as stack:
        lock = stack.enter_context(locked(directory))
        stack.enter_context(rare_garbage_collection())
        warnings: list[str] = []
        checkpoints = config.checkpoint
        store = CheckpointStore(
            directory / "checkpoints", keep=checkpoints.keep, keep_best=checkpoints.keep_best, warn=warnings.append
        )
        schedule = config.evaluation
        if schedule is not None:
            store.require_links()
        checkpoint = store.latest() if resumed_run else None
        if resumed_run and checkpoint is None and is_finished(directory, config):
            raise ConfigError(
                f"{directory} is finished, and has no checkpoint to continue from",
                fix=f"{_on_from_the_model(directory)}repeat it with --resume and more `steps`; or leave --resume out. "
                "checkpoint.at_end: true always writes a checkpoint",
            )
        if checkpoint is not None:
            refuse_other_run(config, checkpoint)
            warnings += other_rates(config, checkpoint)
        try:
            config = with_stored_rows(config, directory / "data")
        except OSError as error:
            raise ConfigError(
                f"the rows of `data` cannot be written into {directory}: {error}", fix="make room, or set output_dir"
            ) from error
        (directory / "config.yaml").write_text(dump_config(config))
        stack.enter_context(lasting_streams())
        signal = stack.enter_context(StopSignal())
        with signal.interruptible():
            metrics = stack.enter_context(
                MetricsManager(
                    config.metrics,
                    directory,
                    directory.name,
                    config.total_steps,
                    config.model_dump(mode="json", by_alias=True),
                    evaluations=[] if schedule is None else schedule.steps_due(config.total_steps),
                    devices=config.resources.nodes * config.resources.devices_per_node,
                    state=checkpoint.state["metrics"] if checkpoint else None,
                    began=began,
                )
            )
            for warning in warnings:
                metrics.warn(warning)
            store.warn = metrics.warn
            if resumed_run and checkpoint is None:
                metrics.warn(
                    f"{directory} has no checkpoint; the run starts from its first step (checkpoint.every and "
                    "checkpoint.at_end say when checkpoints are written)"
                )
            metrics.phase("starting Ray")
            durable = bool(checkpoints.every or checkpoints.every_minutes)
            with signal.lent():
                session = stack.enter_context(
                    RaySession(
                        config.resources,
                        directory / "logs",
                        checkpoints=store.directory if durable else None,
                        lock=lock,
                        events=directory / files.EVENTS,
                        metrics=shows_systems(config.metrics),
                    )
                )
                metrics.watch(cluster=metrics_addresses)
            snapshots = Snapshots(session.snapshots, store, durable=durable, warn=metrics.warn)
            stack.push(snapshots.close)
            resources = stack.enter_context(ResourceManager(config.resources))
            resources.allocate()
            require_capable(config, resources.gpus)
            require_room(config, resources.gpus)
            state = RunState(
                directory=directory,
                config=config,
                metrics=metrics,
                signal=signal,
                store=store,
                snapshots=snapshots,
                resumed=checkpoint,
                callbacks=callbacks,
            )
            stack.callback(state.close)
            resources.report = state.recovered
            nodes = stack.enter_context(
                watching(
                    resources,
                    session.memory,
                    stacks=directory / "stacks",
                    step=lambda: state.finished + 1,
                    moves=lambda: metrics.phases,
                    report=state.note_hang,
                    warn=metrics.warn,
                    ended=metrics.note_lost,
                )
            )
            metrics.usage = lambda: memory_metrics(nodes.memory())
        yield RunContext(state=state, resources=resources, stack=stack)


def _on_from_the_model(directory: Path) -> str:
    model = directory / "model"
    if not (model / "config.json").is_file():
        return ""
    return f"train its model further in a new run, with model.path: {model} and another name; or "


def check_resumption(config: RunConfig, resume: str) -> list[Finding]:
    """Return what is wrong with the checkpoint that a run would continue from, for `--check --resume`.

    Nothing is written, and of the checkpoint's weights only the sizes are looked at. The run may go on meanwhile.
    """
    directory, resumed = next_run(config, resume)
    if not resumed:
        return []
    kept = config.checkpoint
    passed_over: list[str] = []
    errors: list[Finding] = []
    store = CheckpointStore(
        directory / "checkpoints", keep=kept.keep, keep_best=kept.keep_best, warn=passed_over.append
    )
    try:
        while (checkpoint := store.latest(checksums=False)) is not None:
            try:
                refuse_other_run(config, checkpoint)
            except FileNotFoundError:
                if checkpoint.path.is_dir():
                    raise
            else:
                break
    except CheckpointError as error:
        errors = [failed("--resume", error)]
    return [*errors, *(Finding.warning("--resume", warning) for warning in dict.fromkeys(passed_over))]


def refuse_other_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise where a checkpoint is of another pipeline or training backend, or its adapters of another base or scale."""
    path = checkpoint.path / "config.yaml"
    fix = f"continue with the configuration of the run ({path}), or leave --resume out to start a new one"
    saved = yaml.safe_load(path.read_text())
    found = saved.get("pipeline")
    if found != config.pipeline:
        raise CheckpointError(
            f"{checkpoint.path} is of pipeline: {found}, and this configuration is of pipeline: {config.pipeline}",
            fix=fix,
        )
    for section, trained in config.trained.items():
        backend = (saved.get(section) or {}).get("backend")
        if backend not in (None, trained.backend):
            raise CheckpointError(
                f"{checkpoint.path} was written with {section}.backend: {backend}, and {trained.backend} cannot "
                "read it",
                fix=f"set {section}.backend: {backend}. To go on with the weights alone, without the optimizer: "
                f"`roll-like export --checkpoint {checkpoint.path} -o MODEL`, then start a run with model.path: MODEL "
                "and another name",
            )
        values = (saved.get(section) or {}).get("lora")
        if trained.lora is None or values is None:
            continue  # other tensors, which loading refuses
        before = LoRAConfig.from_values(values)
        for key in ("rank", "alpha", "rslora", "quantization"):
            was, now = getattr(before, key), getattr(trained.lora, key)
            if was != now:
                raise CheckpointError(
                    f"the adapters in {checkpoint.path} were trained with {section}.lora.{key}: {was}, and this "
                    f"configuration has {now}: with it they are another model",
                    fix=fix,
                )


def other_rates(config: RunConfig, checkpoint: Checkpoint) -> list[str]:
    """Return what another number of steps changes in a run that goes on: learning rates that fall to the end."""
    before = yaml.safe_load((checkpoint.path / "config.yaml").read_text()).get("steps")
    if before in (None, config.total_steps):
        return []
    return [
        f"the run had {before} steps and now has {config.total_steps}: with {section}.optimizer.schedule: "
        f"{trained.optimizer.schedule} its learning rates from here on are those of a run of {config.total_steps} steps"
        for section, trained in config.trained.items()
        if trained.optimizer.schedule != "constant"
    ]


def memory_metrics(held: Mapping[str, RoleMemory]) -> dict[str, Metric]:
    """Return `memory/ROLE_gib` of each role, and `memory/ROLE_gpu_gib` of those that use GPUs."""
    metrics: dict[str, Metric] = {}
    for role, memory in held.items():
        name = re.sub(r"[^\w.-]+", "_", "trainer" if role == "training" else role)
        metrics[f"memory/{name}_gib"] = Sum(memory.resident_bytes / 2**30)
        if memory.gpu_bytes:
            metrics[f"memory/{name}_gpu_gib"] = Max(memory.gpu_bytes / 2**30)
    return metrics


@contextmanager
def measuring(
    config: RunConfig, logs: Path | None = None, *, watched: bool = False
) -> Iterator[tuple[ResourceManager, ExitStack]]:
    """Hold the configuration's hardware without a run; what goes onto the stack is closed first.

    Args:
        logs: Where workers' output goes; default: `evaluation-logs` beside the runs.
        watched: Whether a Ray that is started here serves its metrics, if a tracker shows them.
    """
    logs = logs or config.runs_dir / "evaluation-logs"
    clear_up_orphans()
    with ExitStack() as stack:
        counts = watched and shows_systems(config.metrics)
        session = stack.enter_context(RaySession(config.resources, logs, metrics=counts))
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        require_capable(config, resources.gpus)
        stack.enter_context(
            watching(
                resources,
                session.memory,
                stacks=logs / "stacks",
                step=lambda: 0,
                moves=lambda: 0,
                report=lambda hang, text: print(text, file=sys.stderr),
                warn=lambda text: print(text, file=sys.stderr),
            )
        )
        yield resources, stack
