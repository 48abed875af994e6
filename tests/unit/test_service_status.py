"""What a service writes of what it is doing, and what a watcher shows of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from roll_like import cli
from roll_like.errors import ConfigError
from roll_like.metrics import sinks
from roll_like.metrics.names import METRICS
from roll_like.metrics.prometheus import TARGETS, PrometheusConfig
from roll_like.metrics.trackers import TensorBoardTracker
from roll_like.run.folder import locked
from roll_like.run.signals import StopRequested
from roll_like.service import status as status_module
from roll_like.service.status import ModelLine, Rates, ServiceStatus, StatusWriter, watch_status

NOW = ServiceStatus(
    name="tiny",
    base_model="a/model",
    sessions=2,
    models=[
        ModelLine(model="m:train:0", rank=8, updates=1234, queued=3),
        ModelLine(model="w", rank=None, updates=0, queued=0, loaded=False),
    ],
    unfinished=5,
    train_tokens_per_second=1500.0,
    sampled_tokens_per_second=0.0,
    requests=70,
    failed=1,
)


def test_every_figure_has_a_name_in_the_table() -> None:
    assert set(NOW.metrics) == {info.name for info in METRICS if info.name.startswith("service/")}


def test_rates_are_those_between_two_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 15.0, 20.0, 24.0, 40.0))
    monkeypatch.setattr(status_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    rates = Rates()
    told = [rates.of(*totals) for totals in ((100, 10), (300, 20), (400, 20), (500, 20))]
    # ten seconds each, and then twenty: a look between two logs has the figures of the last one
    assert told == [(0.0, 0.0), (30.0, 2.0), (30.0, 2.0), (10.0, 0.0)]


def test_figures_are_written_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(sinks, "PATIENCE", 0.0)
    monkeypatch.setattr(status_module, "METRICS_SECONDS", 1e9)
    monkeypatch.setattr(TensorBoardTracker, "start", lambda self, **_: "id")
    monkeypatch.setattr(TensorBoardTracker, "log", lambda self, step, values: logged.append((step, values)) or 1 / 0)
    monkeypatch.setattr(TensorBoardTracker, "close", lambda self, status: logged.append(status))
    writer = StatusWriter(tmp_path, "tiny", [TensorBoardTracker.Config()], {})
    writer.write(NOW)
    writer.write(NOW)
    monkeypatch.setattr(status_module, "METRICS_SECONDS", 0.0)
    writer.write(NOW)
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["service/queue"]) for line in lines] == [(1, 5.0), (2, 5.0)]
    # in order: what the tracker has not taken comes first again
    assert logged == [(1, NOW.metrics), (1, NOW.metrics), (1, NOW.metrics), "finished"]
    assert "trackers.0 (tensorboard) could not be written (ZeroDivisionError: division by zero); the service goes" in (
        caplog.text
    )
    assert "trackers.0 (tensorboard) lacks 2 figures" in caplog.text
    assert json.loads((tmp_path / "status.json").read_text())["models"][0]["updates"] == 1234


def test_prometheus_reads_a_service_and_its_engines(tmp_path: Path) -> None:
    with StatusWriter(tmp_path, "tiny", [PrometheusConfig(port=0)], {}) as writer:
        writer.watch(engines=lambda: {1: "# TYPE vllm:x gauge\nvllm:x 3.0\n"}, cluster=lambda: ["10.0.0.1:8080"])
        writer.write(NOW)
        own, nodes = json.loads((tmp_path / TARGETS).read_text())
        assert (nodes["targets"], nodes["labels"]["job"]) == (["10.0.0.1:8080"], "ray")
        with urlopen(f"http://{own['targets'][0]}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        assert {'roll_like_service_requests{run="tiny"} 70.0', 'vllm:x{replica="1",run="tiny"} 3.0'} <= {*lines}
    assert not (tmp_path / TARGETS).exists()


@pytest.mark.parametrize(("error", "status"), [(StopRequested("SIGTERM"), "finished"), (OSError(), "failed")])
def test_a_signal_is_the_end_of_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(TensorBoardTracker, "start", lambda self, **_: "id")
    monkeypatch.setattr(TensorBoardTracker, "close", lambda self, status: closed.append(status))
    with pytest.raises(type(error)), StatusWriter(tmp_path, "tiny", [TensorBoardTracker.Config()], {}):
        raise error
    assert closed == [status]


def test_a_tracker_that_cannot_start_ends_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    starts = iter(["id", ConnectionError("no server")])

    def start(tracker: Any, **arguments: Any) -> Any:
        if isinstance(found := next(starts), Exception):
            raise found
        return found

    monkeypatch.setattr(TensorBoardTracker, "start", start)
    monkeypatch.setattr(TensorBoardTracker, "close", lambda self, status: closed.append(status))
    with pytest.raises(ConfigError, match=r"trackers\.1 \(tensorboard\) cannot start: ConnectionError: no server"):
        StatusWriter(tmp_path, "tiny", [TensorBoardTracker.Config()] * 2, {})
    assert closed == ["failed"]


def test_a_service_is_watched_until_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    StatusWriter(folder, "tiny", [], {}).write(NOW)
    with locked(folder):

        def leave(seconds: float) -> None:
            raise KeyboardInterrupt

        assert watch_status(folder, wait=leave) == 0
    shown = capsys.readouterr().out
    cells = ("m:train:0", "1,234", "whole", "memory", "disk")
    for words in (*cells, "70 done (1 failed)", "1,500 tokens/s trained", "the service goes on"):
        assert words in shown
    assert cli.main(["watch", "tiny", "--output-dir", str(tmp_path)]) == 0
    assert "the service has ended" in capsys.readouterr().out
