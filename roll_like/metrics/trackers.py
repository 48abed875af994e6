"""Where figures go beside `metrics.jsonl`: MLflow, TensorBoard, Weights & Biases, or a user's own tracker.

A tracker is a class registered with `TRACKERS.register("name")` that has a `Config` and the methods
of `Tracker`. It may raise anything at any time: `MetricsManager` counts it, warns once and retries.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import sqlite3
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from filelock import FileLock
from pydantic import Field

from roll_like.config.base import PluginConfig
from roll_like.config.run import MetricsConfig
from roll_like.errors import ConfigError, PluginError
from roll_like.metrics.rollouts import RolloutKind, RolloutRow
from roll_like.metrics.traces import TraceStore
from roll_like.registry import TRACKERS

Status = Literal["finished", "failed", "stopped"]


class Tracker(Protocol):
    """What receives a run's figures.

    A tracker is made from its `Config`, started once, given every step in order, and closed.
    """

    Config: ClassVar[type[PluginConfig]]

    def start(
        self, *, run_dir: Path, run_name: str, params: Mapping[str, Any], resume_id: str | None, resume_step: int | None
    ) -> str:
        """Begin a run, or continue one.

        Args:
            run_dir: The run's folder; its parent is the folder of all runs.
            run_name: For people.
            params: The resolved configuration, nested.
            resume_id: What `start` returned when the run began; None for a new run.
            resume_step: The last step to keep when continuing; later ones will be logged again.

        Returns:
            An id to continue the run by. One that differs from `resume_id` means that the old run
            is gone and a new one began; it is then given the whole history.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of one step."""

    def artifact(self, path: Path) -> None:
        """Keep a file with the run."""

    def close(self, status: Status) -> None:
        """End the run; everything that was logged is safe afterwards."""


def start_tracker(config: PluginConfig, key: str, start: Callable[[Tracker], str]) -> tuple[Tracker, str]:
    """Make a tracker and start it; return it with its run's id.

    Args:
        key: Where these are in the configuration, such as `metrics.trackers.0`.
        start: Calls `Tracker.start`.

    Raises:
        ConfigError: It cannot start.
    """
    tracker: Tracker = TRACKERS.get(config.type)(config)
    try:
        return tracker, start(tracker)
    except PluginError:
        raise
    except Exception as error:
        why, fix = (
            f"{type(error).__name__}: {error}",
            f"correct its settings, or remove it from {key.rpartition('.')[0]}",
        )
        if isinstance(error, ConfigError):
            why, fix = error.message, error.fix or fix
        raise ConfigError(f"{key} ({config.type}) cannot start: {why}", fix=fix) from error


@runtime_checkable
class TraceTracker(Protocol):
    """What a tracker has beside, if it wants rollouts too."""

    def trace(self, step: int, kind: RolloutKind, rows: Sequence[RolloutRow]) -> None:
        """Take some rollouts of a training step (`step`) or of an evaluation after it (`eval`).

        Args:
            step: As in `log`.
            kind: Which of the two.
            rows: As in `rollouts/*.jsonl`, each with its `id`. The same ones may come again, after a failure or when a
                run is continued; those of steps after `resume_step` are not to be there twice.
        """


@runtime_checkable
class SystemTracker(Protocol):
    """What a tracker has beside, if it shows what the libraries of a run count of themselves."""

    def watch(
        self,
        *,
        engines: Callable[[], Mapping[int, str]] | None = None,
        cluster: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """Ask these from now on; what is not given stays as it was.

        Args:
            engines: Returns the metrics of each inference engine by its rank, in Prometheus's text format.
            cluster: Returns where Ray serves its own metrics, as `host:port`.
        """


def shows_systems(config: MetricsConfig) -> bool:
    """Return whether a tracker of a run shows what its libraries count, so that they have to count."""
    return any(issubclass(TRACKERS.get(tracker.type), SystemTracker) for tracker in config.trackers)


def flatten_params(params: Mapping[str, Any]) -> dict[str, str]:
    """Return nested parameters under dotted keys, as text.

    >>> flatten_params({"model": {"path": "m"}, "use": [{"type": "math"}], "stop": []})
    {'model.path': 'm', 'use.0.type': 'math', 'stop': '[]'}
    """

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else str(key), item)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
            for index, item in enumerate(value):
                yield from walk(f"{prefix}.{index}", item)
        else:
            yield prefix, str(value)

    return dict(walk("", params))


def optional_module(module: str, extra: str) -> Any:
    """Import a module of an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PluginError(
            f"metrics.trackers names {extra!r}, but it cannot be imported: {error}",
            fix=f"pip install 'roll-like[{extra}]', or remove it from metrics.trackers",
        ) from error


class MLflowConfig(PluginConfig):
    """MLflow; without `tracking_uri`, a SQLite store beside the runs that `mlflow ui` opens."""

    type: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = Field(
        default=None, description="`http://…` or `sqlite:///…`; default: `mlflow.db` in `output_dir`."
    )
    experiment: str | None = Field(default=None, description="Experiment of the run; default: the pipeline's name.")


MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # a step must not wait minutes for a server that is away: the manager retries at the next one
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
#: Most metrics of a request: MLflow's own limit is 1,000, that of Azure's servers 200.
MLFLOW_BATCH = 200
#: How long another run may take to create the store. Seconds.
LOCK_SECONDS = 120.0
#: What is logged a second time, under a name that MLflow's pages show first: they sort charts by the part of a name
#: before its last slash, and digits come before letters.
MLFLOW_FIRST = {"rollout/reward/mean": "0 reward/training", "eval/avg": "0 reward/evaluation"}
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w\-. :/]")
_MOST_IN_MLFLOW_NAMES = 250


@TRACKERS.register("mlflow")
class MLflowTracker:
    """Logs through `MlflowClient` in batches: about 7 ms a step, where fluent calls take 5 ms a value.

    Opening the store takes 2–3 s, most of it imports; a store is created under a file lock,
    because runs that start together would create its tables twice.
    """

    Config = MLflowConfig

    def __init__(self, config: MLflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._traces: TraceStore | None = None
        self._run_id = ""
        self._keys: dict[str, str] = {}
        #: What is being logged, and how many of its metrics MLflow has.
        self._under_way: tuple[Mapping[str, float] | None, int] = (None, 0)

    def start(
        self, *, run_dir: Path, run_name: str, params: Mapping[str, Any], resume_id: str | None, resume_step: int | None
    ) -> str:
        """Open the store, then continue `resume_id` or create a run.

        Raises:
            OSError: The local store cannot be written or is no database.
        """
        folder = run_dir.parent.resolve()
        database = folder / "mlflow.db"
        uri = self._config.tracking_uri or f"sqlite:///{database}"
        if uri.startswith("sqlite:///"):
            database = Path(uri.removeprefix("sqlite:///"))
            _check_database(database)
        with FileLock(folder / ".mlflow.lock", timeout=LOCK_SECONDS), _quiet_mlflow():
            self._client = _open_mlflow(uri)
            artifacts = None if self._config.tracking_uri else (folder / "mlartifacts").as_uri()
            experiment = self._experiment(
                self._config.experiment or str(params.get("pipeline", "roll_like")), artifacts
            )
        self._run_id = self._continue(resume_id) or self._create(experiment, run_name, run_dir)
        with _quiet_mlflow():
            experiment = str(self._client.get_run(self._run_id).info.experiment_id)  # another one, when continued
            self._traces = TraceStore(self._client, uri, experiment, self._run_id)
        if self._run_id == resume_id and resume_step is not None:
            self._traces.cut(resume_step)
            if uri.startswith("sqlite:///"):
                _cut_series(database, self._run_id, resume_step)
        self._log_params(flatten_params(params))
        return self._run_id

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        if found.lifecycle_stage == "deleted":  # deleted in the UI; its name stays taken
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _create(self, experiment: str, run_name: str, run_dir: Path) -> str:
        tags = {"roll_like.run_dir": str(run_dir.resolve())}
        return str(self._client.create_run(experiment, run_name=run_name, tags=tags).info.run_id)

    def _continue(self, run_id: str | None) -> str | None:
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run.info.lifecycle_stage == "deleted":
            self._client.restore_run(run_id)
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _key(self, name: str) -> str:
        """Return a name as MLflow takes it: its characters, no empty or relative part of a path, so many characters.

        Sources and rewards are called as users like. Two names that would be one get the hash of the later one.
        """
        if name not in self._keys:
            parts = (part for part in _NOT_IN_MLFLOW_NAMES.sub("_", name).split("/") if part)
            key = "/".join(part if part.strip(".") else "_" * len(part) for part in parts) or "_"
            if len(key) > _MOST_IN_MLFLOW_NAMES or key in self._keys.values():
                digest = f"_{zlib.crc32(name.encode('utf-8', 'surrogatepass')):08x}"
                key = key[: _MOST_IN_MLFLOW_NAMES - len(digest)] + digest
            self._keys[name] = key
        return self._keys[name]

    def _log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        clean = {self._key(key): value[:6000] for key, value in params.items()}
        new = [Param(key, value) for key, value in clean.items() if key not in known]
        # a parameter cannot be changed in MLflow, and a resumed run may have new settings
        changed = [RunTag(f"resumed.{k}", v) for k, v in clean.items() if k in known and known[k] != v]
        for start in range(0, max(len(new), len(changed)), 100):
            part = slice(start, start + 100)
            self._client.log_batch(self._run_id, params=new[part], tags=changed[part])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step's values, `MLFLOW_BATCH` at a time; `MLFLOW_FIRST` under both names.

        The same values that come again after a failure go on from there: MLflow keeps points of another time twice, and
        its databases may refuse those of the same time (mlflow#24612).
        """
        from mlflow.entities import Metric

        now, done = int(time.time() * 1000), self._under_way[1] if values is self._under_way[0] else 0
        named = {**{first: values[name] for name, first in MLFLOW_FIRST.items() if name in values}, **values}
        metrics = [Metric(self._key(name), value, now, step) for name, value in named.items()]
        for start in range(done, len(metrics), MLFLOW_BATCH):
            self._under_way = (values, start)
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MLFLOW_BATCH])
        self._under_way = (None, 0)

    def trace(self, step: int, kind: RolloutKind, rows: Sequence[RolloutRow]) -> None:
        """Write each rollout as a trace of the run: about 20 ms for an episode of ten turns, 8 ms for an answer."""
        if self._traces is not None:
            self._traces.write(step, kind, rows)

    def artifact(self, path: Path) -> None:
        """Copy a file to the run's artifacts."""
        self._client.log_artifact(self._run_id, str(path))

    def close(self, status: Status) -> None:
        """End the run as FINISHED, FAILED or KILLED (stopped, and can be resumed)."""
        names = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
        self._client.set_terminated(self._run_id, names[status])


def _open_mlflow(uri: str) -> Any:
    for key, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):  # table creation reports every migration
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


@contextmanager
def _quiet_mlflow() -> Iterator[None]:
    """Silence what MLflow's imports and its own use of SQLAlchemy say about themselves."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield


def _check_database(path: Path) -> None:
    """Fail at once for a file that MLflow would retry for half an hour."""
    try:
        with closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise OSError(f"{path} cannot be used as a SQLite store: {error}") from error


def _cut_series(database: Path, run_id: str, last_step: int) -> None:
    """Remove a run's points after `last_step`, so that steps which are run again are not there twice.

    MLflow's client removes no points. A new run that is given the whole history through it takes 9 s of computing for
    1,000 steps of 80 metrics, and is no longer the run that links lead to.
    """
    with closing(sqlite3.connect(database, timeout=10)) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE run_uuid = ? AND step > ?", (run_id, last_step))
        connection.execute("DELETE FROM latest_metrics WHERE run_uuid = ?", (run_id,))
        # SQLite takes the bare columns from the row that holds the maximum
        connection.execute(
            "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
            "SELECT key, value, timestamp, MAX(step), is_nan, run_uuid FROM metrics WHERE run_uuid = ? GROUP BY key",
            (run_id,),
        )


class TensorBoardConfig(PluginConfig):
    """TensorBoard event files in the run's folder."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: str = Field(default="tensorboard", description="Folder of the event files, within the run's.")


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Writes TensorBoard's event files with PyTorch's writer."""

    Config = TensorBoardConfig

    def __init__(self, config: TensorBoardConfig) -> None:
        self._config = config
        self._writer: Any = None

    def start(
        self,
        *,
        run_dir: Path,
        run_name: str,  # noqa: ARG002 - TensorBoard names a run by its folder
        params: Mapping[str, Any],
        resume_id: str | None,  # noqa: ARG002 - the folder is the id
        resume_step: int | None,
    ) -> str:
        """Open a new event file; steps after `resume_step` in older files are hidden."""
        writers = optional_module("torch.utils.tensorboard", "tensorboard")
        folder = run_dir / self._config.folder
        purged = 0 if resume_step is None else resume_step + 1
        self._writer = writers.SummaryWriter(str(folder), purge_step=purged)
        if resume_step is None:
            rows = (f"| {key} | {value} |" for key, value in flatten_params(params).items())
            self._writer.add_text("config", "\n".join(["| key | value |", "|---|---|", *rows]))
        return str(folder.relative_to(run_dir))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def artifact(self, path: Path) -> None:
        """Files already lie beside the event files."""

    def close(self, status: Status) -> None:  # noqa: ARG002 - event files have no status
        """Write what is buffered."""
        self._writer.close()


class LibraryRunTracker:
    """The part that is the same for every library whose run takes a step's figures by `log`."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._run: Any = None

    def project(self, params: Mapping[str, Any]) -> str:
        """Return the project of a run: that of the pipeline where none is configured."""
        return self._config.project or str(params.get("pipeline", "roll_like"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step's values."""
        self._run.log(dict(values), step=step)

    def artifact(self, path: Path) -> None:
        """Files stay in the run's folder."""


class WandbConfig(PluginConfig):
    """Weights & Biases."""

    type: Literal["wandb"] = "wandb"
    project: str | None = Field(default=None, description="Project of the run; default: the pipeline's name.")
    entity: str | None = Field(default=None, description="User or team; default: your own.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="`offline` writes files that `wandb sync` sends later."
    )


@TRACKERS.register("wandb")
class WandbTracker(LibraryRunTracker):
    """Logs to Weights & Biases, whose own steps are the training steps."""

    Config = WandbConfig

    def start(
        self,
        *,
        run_dir: Path,
        run_name: str,
        params: Mapping[str, Any],
        resume_id: str | None,
        resume_step: int | None,  # noqa: ARG002 - W&B drops points of steps that it already has
    ) -> str:
        """Begin or continue a run; its files go to `wandb/` in the run's folder."""
        wandb = optional_module("wandb", "wandb")
        run_id = resume_id or uuid.uuid4().hex[:12]
        online = self._config.mode == "online"
        self._run = wandb.init(
            project=self.project(params),
            entity=self._config.entity,
            name=run_name,
            id=run_id,
            dir=str(run_dir),
            mode=self._config.mode,
            config=dict(params),
            resume="allow" if online and resume_id else None,
            # stdout belongs to the console; the machine's load is not the run's
            # W&B's process flushes its file every 15 s by default, and a killed run would lose that much
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_stats=True, x_transaction_log_flush_interval=1.0
            ),
        )
        return run_id

    def artifact(self, path: Path) -> None:
        """Keep a copy of a file with the run: what lies in its folder is uploaded."""
        shutil.copy(path, self._run.dir)

    def close(self, status: Status) -> None:
        """End the run; only a finished one exits with 0.

        Offline, `finish` returns before W&B's process has written its buffers to the run's file: this waits for the
        process to exit, unless another run of this process still uses it.
        """
        self._run.finish(exit_code=0 if status == "finished" else 1)
        wandb = optional_module("wandb", "wandb")
        if self._config.mode == "offline" and wandb.setup().most_recent_active_run is None:
            wandb.teardown()
