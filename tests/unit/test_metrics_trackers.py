"""Real MLflow, TensorBoard and offline W&B: what is logged can be read back with their own readers."""

from __future__ import annotations

import math
import sqlite3
import struct
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from roll_like.config.run import MetricsConfig
from roll_like.errors import ConfigError, PluginError
from roll_like.metrics.manager import MetricsManager
from roll_like.metrics.trackers import (
    MLflowConfig,
    MLflowTracker,
    TensorBoardConfig,
    TensorBoardTracker,
    WandbConfig,
    WandbTracker,
    flatten_params,
)
from roll_like.registry import TRACKERS
from roll_like.values import Mean

PARAMS: dict[str, Any] = {"pipeline": "rlvr", "steps": 4, "model": {"path": "m" * 9000}, "use": [{"type": "math"}]}
NEW: dict[str, Any] = {"resume_id": None, "resume_step": None}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs whose MLflow store is created once: that takes a second or two."""
    return tmp_path_factory.mktemp("runs")


def run_dir(runs: Path, name: str) -> Path:
    path = runs / name
    path.mkdir()
    return path


def mlflow_tracker(path: Path, params: dict[str, Any] = PARAMS, **resume: Any) -> tuple[MLflowTracker, str, Any]:
    tracker = MLflowTracker(MLflowConfig())
    run_id = tracker.start(run_dir=path, run_name=path.name, params=params, **(resume or NEW))
    return tracker, run_id, tracker._client


def test_names() -> None:
    assert {"mlflow", "tensorboard", "wandb"} <= set(TRACKERS.names())
    assert [tracker.type for tracker in MetricsConfig().trackers] == ["mlflow"]


def test_flatten_keeps_every_leaf() -> None:
    nested = {"a": {"b": 1, "c": []}, "d": [{"e": None}, 2], "f": "x", "g": {}}
    assert flatten_params(nested) == {"a.b": "1", "a.c": "[]", "d.0.e": "None", "d.1": "2", "f": "x", "g": "{}"}


def test_mlflow_keeps_figures_parameters_and_files(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = run_dir(runs, "first")
    tracker, run_id, client = mlflow_tracker(path)
    tracker.log(1, {"rollout/reward/mean": 0.5, "eval/pass@4": 1.0, "train/loss": math.nan})
    tracker.log(2, {"rollout/reward/mean": 0.75, **{f"many/{index}": 1.0 for index in range(1200)}})
    (path / "summary.json").write_text("{}")
    tracker.artifact(path / "summary.json")
    tracker.close("finished")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.metrics["rollout/reward/mean"] == 0.75
    assert min(run.data.metrics) == "0 reward/training"  # MLflow's pages sort charts by their names
    assert [point.value for point in client.get_metric_history(run_id, "0 reward/training")] == [0.5, 0.75]
    assert run.data.metrics["eval/pass_4"] == 1.0
    assert math.isnan(run.data.metrics["train/loss"])
    assert len(run.data.metrics) == 1204
    assert run.data.params["use.0.type"] == "math"
    assert client.get_experiment(run.info.experiment_id).name == "rlvr"
    assert [file.path for file in client.list_artifacts(run_id)] == ["summary.json"]
    assert (runs / "mlartifacts" / run_id / "artifacts" / "summary.json").exists()
    assert capfd.readouterr() == ("", "")


MLFLOW_NAMES = {
    "eval/pass@4/gsm8k": "eval/pass_4/gsm8k",
    "eval/avg/org//data set?": "eval/avg/org/data set_",
    "/absolute": "absolute",
    "eval/avg/../x": "eval/avg/__/x",
    "eval/avg/.": "eval/avg/_",
    "eval/avg/数学": "eval/avg/数学",
    "trailing/": "trailing",
    "//": "_",
    "eval/avg/" + "x" * 300: "eval/avg/" + "x" * 232 + "_492c504d",
}


def test_requests_to_mlflow_are_as_small_as_any_server_takes() -> None:
    sizes: list[int] = []
    tracker = MLflowTracker(MLflowConfig())
    tracker._client = SimpleNamespace(log_batch=lambda _, metrics: sizes.append(len(metrics)))
    tracker.log(1, {f"train/{number}": 1.0 for number in range(450)})
    assert sizes == [200, 200, 50]


def test_a_step_that_mlflow_took_a_part_of_goes_on_from_there() -> None:
    points: list[tuple[int, str]] = []
    away = [False, True, False, False, False]

    def log_batch(run: str, metrics: Sequence[Any]) -> None:
        if away and away.pop(0):
            raise ConnectionError("away")
        points.extend((each.step, each.key) for each in metrics)

    tracker = MLflowTracker(MLflowConfig())
    tracker._client = SimpleNamespace(log_batch=log_batch)
    values = {f"train/{number}": 1.0 for number in range(250)}
    with pytest.raises(ConnectionError):
        tracker.log(3, values)
    assert len(points) == 200
    tracker.log(3, values)
    tracker.log(4, values)
    assert points == [(step, name) for step in (3, 4) for name in values]


def test_any_name_reaches_mlflow(runs: Path) -> None:
    tracker, run_id, client = mlflow_tracker(run_dir(runs, "names"))
    tracker.log(1, {name: float(index) for index, name in enumerate(MLFLOW_NAMES)})
    tracker.close("finished")
    assert client.get_run(run_id).data.metrics == {key: index for index, key in enumerate(MLFLOW_NAMES.values())}


def test_names_that_mlflow_would_take_for_one_stay_two(runs: Path) -> None:
    tracker, run_id, client = mlflow_tracker(run_dir(runs, "alike"))
    for step in (1, 2):
        tracker.log(step, {"eval/avg/a?b": 1.0, "eval/avg/a*b": 2.0})
    tracker.close("finished")
    found = client.get_run(run_id).data.metrics
    assert found.pop("eval/avg/a_b") == 1.0
    ((other, value),) = found.items()
    assert other.startswith("eval/avg/a_b_")
    assert value == 2.0


def test_mlflow_continues_the_same_run_without_repeating_a_step(runs: Path) -> None:
    path = run_dir(runs, "resumed")
    tracker, run_id, _ = mlflow_tracker(path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": float(step), **({"only/early": 1.0} if step == 1 else {})})
    tracker.log(3, {"only/late": 1.0})
    tracker.close("failed")

    changed = {**PARAMS, "steps": 9, "new": 1}
    tracker, again, client = mlflow_tracker(path, changed, resume_id=run_id, resume_step=2)
    assert again == run_id
    run = client.get_run(run_id)
    assert run.info.status == "RUNNING"
    assert run.data.metrics == {"train/loss": 2.0, "only/early": 1.0}
    for step in (3, 4):
        tracker.log(step, {"train/loss": 10.0 * step})
    tracker.close("stopped")
    run = client.get_run(run_id)
    history = client.get_metric_history(run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    assert client.get_metric_history(run_id, "only/late") == []
    assert run.data.metrics["train/loss"] == 40.0
    assert (run.data.params["steps"], run.data.params["new"]) == ("4", "1")
    assert run.data.tags["resumed.steps"] == "9"
    assert run.info.status == "KILLED"


def test_mlflow_leaves_other_runs_alone_when_it_continues_one(runs: Path) -> None:
    other, other_id, _ = mlflow_tracker(run_dir(runs, "other"))
    other.log(5, {"train/loss": 5.0})
    tracker, run_id, _ = mlflow_tracker(run_dir(runs, "mine"))
    tracker.log(5, {"train/loss": 6.0})
    _, _, client = mlflow_tracker(runs / "mine", resume_id=run_id, resume_step=1)
    assert client.get_run(other_id).data.metrics == {"train/loss": 5.0}
    assert client.get_run(run_id).data.metrics == {}


def test_mlflow_starts_anew_when_the_run_is_gone(runs: Path) -> None:
    path = run_dir(runs, "gone")
    _, run_id, _ = mlflow_tracker(path, resume_id="0" * 32, resume_step=3)
    assert run_id != "0" * 32


def test_mlflow_revives_what_was_deleted_in_its_ui(runs: Path) -> None:
    path = run_dir(runs, "deleted")
    params = {**PARAMS, "pipeline": "deleted-experiment"}
    _, run_id, client = mlflow_tracker(path, params)
    client.delete_run(run_id)
    client.delete_experiment(client.get_experiment_by_name("deleted-experiment").experiment_id)
    _, again, client = mlflow_tracker(path, params, resume_id=run_id, resume_step=0)
    assert again == run_id
    assert client.get_run(run_id).info.lifecycle_stage == "active"


def test_a_broken_store_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is no database, whatever its name says" * 100)
    metrics = MetricsManager(MetricsConfig(console="quiet"), tmp_path / "demo", "demo", 1, PARAMS)
    with (
        pytest.raises(
            ConfigError, match=r"metrics\.trackers\.0 \(mlflow\) cannot start: OSError: .*mlflow\.db"
        ) as caught,
        metrics,
    ):
        pytest.fail("it must not start")
    assert isinstance(caught.value.__cause__.__cause__, sqlite3.DatabaseError)  # type: ignore[union-attr]


def test_a_whole_run_through_the_manager(runs: Path) -> None:
    config = MetricsConfig(trackers=("mlflow", "tensorboard"), console="quiet")
    with MetricsManager(config, runs / "whole", "whole", 2, PARAMS) as metrics:
        metrics.log_evaluation(0, {"eval/avg": Mean(0.2)})
        metrics.log(1, {"rollout/reward/mean": Mean(0.5)})
        metrics.log(2, {"rollout/reward/mean": Mean(0.6)})
        run_id = metrics.state()["trackers"]["mlflow"]
    _, _, client = mlflow_tracker(runs / "whole", resume_id=run_id, resume_step=2)
    assert [point.step for point in client.get_metric_history(run_id, "rollout/reward/mean")] == [1, 2]
    assert {file.path for file in client.list_artifacts(run_id)} == {"curves.png", "summary.json"}
    assert scalars(runs / "whole" / "tensorboard", "rollout/reward/mean") == [(1, 0.5), (2, pytest.approx(0.6))]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the reader's own imports deprecate
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader = EventAccumulator(str(folder))
        reader.Reload()
    if tag not in reader.Tags()["tensors"] + reader.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_tensorboard_hides_steps_that_are_run_again(tmp_path: Path) -> None:
    for resume_id, resume_step, steps in ((None, None, (1, 2, 3)), ("tensorboard", 2, (3, 4))):
        tracker = TensorBoardTracker(TensorBoardConfig())
        run_id = tracker.start(
            run_dir=tmp_path, run_name="demo", params=PARAMS, resume_id=resume_id, resume_step=resume_step
        )
        assert run_id == "tensorboard"
        for step in steps:
            tracker.log(step, {"train/loss": step + 0.5 * len(steps)})
        tracker.close("finished")
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(1, 2.5), (2, 3.5), (3, 4.0), (4, 5.0)]


def test_an_optional_tracker_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = MetricsConfig(trackers=({"type": "wandb", "mode": "offline"},), console="quiet")
    metrics = MetricsManager(config, tmp_path / "demo", "demo", 1, PARAMS)
    with pytest.raises(PluginError, match=r"pip install 'roll-like\[wandb\]'"), metrics:
        pytest.fail("it must not start")


def test_wandb_offline_keeps_figures_parameters_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    config = MetricsConfig(trackers=({"type": "wandb", "mode": "offline"},), console="quiet")
    with MetricsManager(config, tmp_path / "demo", "demo", 2, PARAMS) as metrics:
        metrics.log(1, {"rollout/reward/mean": Mean(0.5)})
        metrics.log(2, {"rollout/reward/mean": Mean(0.625)})
        run_id = metrics.state()["trackers"]["wandb"]
    (folder,) = (tmp_path / "demo" / "wandb").glob(f"offline-run-*-{run_id}")
    records = wandb_records(folder / f"run-{run_id}.wandb")
    history = [
        {item.key or "/".join(item.nested_key): float(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(entry["_step"], entry["rollout/reward/mean"]) for entry in history] == [(1, 0.5), (2, 0.625)]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name) == ("rlvr", "demo")
    assert "steps" in {item.key for item in run.config.update}
    assert (folder / "files" / "summary.json").exists()


def test_wandb_offline_is_on_disk_when_it_is_closed_however_slow_its_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.sdk.lib.service.service_connection import ServiceConnection

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tell = ServiceConnection.inform_finish
    stopped = []

    def tell_a_stopped_process(connection: ServiceConnection, run_id: str) -> None:
        """W&B waits for no answer to this, and its process writes the run's file when it reads it."""
        for process in psutil.Process().children(recursive=True):
            if process.name() == "wandb-core":
                process.suspend()
                stopped.append(process)
                threading.Timer(0.5, process.resume).start()
        tell(connection, run_id)

    monkeypatch.setattr(ServiceConnection, "inform_finish", tell_a_stopped_process)
    tracker, run_id = wandb_tracker(tmp_path)
    tracker.log(1, {"train/loss": 0.5})
    tracker.close("finished")
    assert stopped
    (path,) = (tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    kinds = [record.WhichOneof("record_type") for record in wandb_records(path)]
    assert (kinds.count("history"), kinds[-1]) == (1, "exit")


def test_wandb_offline_leaves_another_run_of_the_same_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    first, _ = wandb_tracker(tmp_path)
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    other = wandb.init(dir=str(tmp_path), mode="offline", reinit="create_new", settings=settings)
    first.close("finished")
    other.log({"train/loss": 1.0})
    other.finish()
    wandb.teardown()
    (path,) = (tmp_path / "wandb").glob(f"offline-run-*-{other.id}/run-{other.id}.wandb")
    assert "history" in {record.WhichOneof("record_type") for record in wandb_records(path)}


def wandb_tracker(path: Path) -> tuple[WandbTracker, str]:
    tracker = WandbTracker(WandbConfig(mode="offline"))
    return tracker, tracker.start(run_dir=path, run_name="demo", params={"pipeline": "rlvr"}, **NEW)


def wandb_records(path: Path) -> list[Any]:
    """Read W&B's file: LevelDB's log format (blocks of 32 KiB, 7-byte record headers) after a 7-byte header."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # no header fits in the rest of a block
            at += (1 << 15) - at % (1 << 15)
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records
