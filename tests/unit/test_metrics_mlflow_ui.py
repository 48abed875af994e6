"""`roll-like ui`: which store it finds, what it starts, and what it says when it cannot. MLflow is not started."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_like import cli
from roll_like.errors import ConfigError, PluginError
from roll_like.metrics.mlflow_ui import find_store, serve_mlflow


def make(folder: Path, *trackers: dict[str, Any] | None, database: bool = False) -> Path:
    """The configuration of a run, and the store of its folder; without trackers, of a run that kept none."""
    folder.mkdir(parents=True)
    content = {"metrics": {"trackers": list(trackers)}} if trackers != (None,) else {}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    (folder / "run.json").write_text("{}")
    if database:
        (folder.parent / "mlflow.db").touch()
    return folder


def test_the_store_lies_in_the_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "runs" / "demo", {"type": "mlflow"}, database=True)
    store = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    assert find_store(None, tmp_path / "runs") == store
    assert find_store("demo", tmp_path / "runs") == store
    monkeypatch.chdir(tmp_path)
    assert find_store(None, Path("runs")) == store  # a whole path: the server works in another folder
    monkeypatch.chdir("/")
    assert find_store(str(folder), Path("runs")) == store
    assert find_store(str(make(tmp_path / "runs" / "bare", None)), Path("runs")) == store


def test_the_store_is_the_one_that_the_configuration_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, local = "http://tracking.example:5000", "sqlite:///stores/mine.db"
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "mine.db").touch()
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a" / "one", {"type": "wandb"}, {"type": "mlflow", "tracking_uri": server})
    (tmp_path / "a" / "broken").mkdir()
    (tmp_path / "a" / "broken" / "config.yaml").write_text("a: [")
    assert find_store("one", tmp_path / "a") == server
    assert find_store(None, tmp_path / "a") == server
    make(tmp_path / "a" / "two", {"type": "mlflow", "tracking_uri": local})
    assert find_store("two", tmp_path / "a") == f"sqlite:///{tmp_path}/stores/mine.db"
    with pytest.raises(
        ConfigError, match=r"log to several MLflow stores: http://tracking.*, sqlite.*\n  fix: name a run"
    ):
        find_store(None, tmp_path / "a")


def test_a_missing_store_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "demo", {"type": "tensorboard"})
    gone = make(tmp_path / "gone", {"type": "mlflow", "tracking_uri": "sqlite:///gone/mine.db"})
    assert cli.main(["ui", "demo", "--output-dir", str(tmp_path)]) == 2
    assert "demo does not log to MLflow" in capsys.readouterr().err
    assert cli.main(["ui", "dem", "--output-dir", str(tmp_path)]) == 2
    assert "ui dem: there is no run in" in capsys.readouterr().err
    assert cli.main(["ui", str(gone)]) == 2
    assert "there is no MLflow store at gone/mine.db" in capsys.readouterr().err
    assert cli.main(["ui", "--output-dir", str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert "there is no MLflow store in" in err
    assert "--output-dir names another folder of runs" in err


class Executed(BaseException):
    """The process has become another one."""


def executed(store: str, host: str, port: int) -> tuple[str, list[str], dict[str, str]]:
    found: list[tuple[str, list[str], dict[str, str]]] = []

    def execute(path: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        found.append((path, list(arguments), dict(environment)))
        raise Executed

    with pytest.raises(Executed):
        serve_mlflow(store, host, port, execute=execute)
    return found[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_the_process_becomes_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/")
    port, store = free_port(), f"sqlite:///{tmp_path}/mlflow.db"
    path, arguments, environment = executed(store, "127.0.0.1", port)
    assert path == sys.executable
    assert arguments[1:] == ["-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    assert environment["MLFLOW_BACKEND_STORE_URI"] == store
    assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert environment["PATH"] == os.environ["PATH"]
    assert Path.cwd() == tmp_path
    assert capsys.readouterr().out == f"MLflow starts on http://127.0.0.1:{port}, store {store}; Ctrl-C ends it\n"


def test_a_password_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _, arguments, environment = executed("postgresql://me:word@host/db", "0.0.0.0", port := free_port())
    assert environment["MLFLOW_BACKEND_STORE_URI"] == "postgresql://me:word@host/db"
    out = capsys.readouterr().out
    assert "word" not in out + " ".join(arguments)
    assert f"http://localhost:{port}, store postgresql://(hidden)@host/db" in out


def test_of_a_server_the_address_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_mlflow("https://me:word@tracking.example", "127.0.0.1", 5000) == 0
    assert capsys.readouterr().out == "the runs log to the MLflow server https://(hidden)@tracking.example\n"


def test_what_cannot_be_served_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    store = "sqlite:////none/mlflow.db"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1 is in use\n  fix: .*--port {port + 1}"):
            serve_mlflow(store, "127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1, port 5000"):
        serve_mlflow(store, "192.0.2.1", 5000)  # an address of documentation, no machine's
    with pytest.raises(ConfigError, match="--port 70000: expected a TCP port"):
        serve_mlflow(store, "127.0.0.1", 70000)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginError, match="MLflow is not installed"):
        serve_mlflow(store, "127.0.0.1", free_port())


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("roll-like 0.")
