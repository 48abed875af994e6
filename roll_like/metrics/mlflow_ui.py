"""The MLflow user interface on the store that runs log to."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roll_like.errors import OK, ConfigError, DataError, PluginError
from roll_like.metrics.commands import refuse_used_port
from roll_like.metrics.runs import CONFIG, find_run, read_config, without_secrets
from roll_like.metrics.trackers import MLFLOW_ENVIRONMENT

#: MLflow's jobs evaluate traces with language models; their processes outlive the server by a minute or two.
_NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
#: The store of a folder of runs, where `metrics.trackers` names no other.
DATABASE = "mlflow.db"
_SQLITE = "sqlite:///"
_NO_STORE = "runs log to MLflow with metrics.trackers: [{type: mlflow}]; --output-dir names another folder of runs"


def find_store(run: str | None, output_dir: Path) -> str:
    """Return the URI of the store that a run, or the runs of a folder, log to.

    Args:
        run: Name or folder of a run; None for all runs of `output_dir`.

    Raises:
        ConfigError: There is no such run or no store, or the runs of the folder log to several.
        DataError: A configuration cannot be read.
    """
    if run is not None:
        folder = find_run(run, output_dir, command="ui")
        stores = _stores(folder, read_config(folder))
        if not stores:
            raise ConfigError(f"{folder} does not log to MLflow", fix=f"name another run; {_NO_STORE}")
        return _existing(stores[0])
    if (output_dir / DATABASE).is_file():
        return _sqlite(output_dir / DATABASE)
    found: dict[str, None] = {}
    for path in sorted(output_dir.glob(f"*/{CONFIG}")):
        try:
            found.update(dict.fromkeys(_stores(path.parent, read_config(path.parent))))
        except DataError:  # another run of the folder may say it
            continue
    if not found:
        raise ConfigError(f"there is no MLflow store in {output_dir}: no {DATABASE}", fix=_NO_STORE)
    if len(found) > 1:
        raise ConfigError(
            f"the runs of {output_dir} log to several MLflow stores: {', '.join(map(without_secrets, found))}",
            fix="name a run: roll-like ui RUN",
        )
    return _existing(next(iter(found)))


def _stores(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the MLflow stores of a run's configuration; without one, the store beside the run."""
    metrics = config.get("metrics")
    trackers = metrics.get("trackers") if isinstance(metrics, Mapping) else None
    if not isinstance(trackers, list):  # not kept, so the default
        return [_sqlite(folder.parent / DATABASE)]
    return [
        str(tracker.get("tracking_uri") or _sqlite(folder.parent / DATABASE))
        for tracker in trackers
        if isinstance(tracker, Mapping) and tracker.get("type") == "mlflow"
    ]


def _sqlite(database: Path) -> str:
    return f"{_SQLITE}{database.resolve()}"


def _existing(uri: str) -> str:
    """Return a URI; that of a local database with its whole path."""
    if not uri.startswith(_SQLITE):
        return uri
    database = Path(uri.removeprefix(_SQLITE))
    if not database.is_file():
        raise ConfigError(
            f"there is no MLflow store at {database}",
            fix="it is written when a run starts; start `roll-like ui` in the folder in which the run was started",
        )
    return _sqlite(database)


def serve_mlflow(
    store: str,
    host: str,
    port: int,
    *,
    execute: Callable[[str, list[str], Mapping[str, str]], None] = os.execve,
) -> int:
    """Print the address of the user interface, and become its server; of a store that is a server, only print it.

    Args:
        store: URI of the store.
        host: Name or address to listen on.
        port: TCP port to listen on.
        execute: Replaces this process by a program: its path, arguments and environment.

    Returns:
        Exit code, if the process was not replaced.

    Raises:
        ConfigError: The port is in use, or the host is not this machine's.
        PluginError: MLflow is not installed.
    """
    shown = without_secrets(store)
    if store.startswith(("http://", "https://")):
        print(f"the runs log to the MLflow server {shown}")
        return OK
    if importlib.util.find_spec("mlflow") is None:
        raise PluginError("MLflow is not installed, so its user interface cannot be served", fix="pip install mlflow")
    refuse_used_port(host, port, command="ui")
    local = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    print(f"MLflow starts on http://{local}:{port}, store {shown}; Ctrl-C ends it", flush=True)
    if store.startswith(_SQLITE):
        os.chdir(Path(store.removeprefix(_SQLITE)).parent)  # what the server writes stays beside the store
    # the store in the environment: arguments are seen by everybody on this machine
    environment = {**MLFLOW_ENVIRONMENT, **_NO_JOBS, **os.environ, "MLFLOW_BACKEND_STORE_URI": store}
    arguments = ["-m", "mlflow", "ui", "--host", host, "--port", str(port), "--workers", "1"]
    execute(sys.executable, [sys.executable, *arguments], environment)
    return OK
