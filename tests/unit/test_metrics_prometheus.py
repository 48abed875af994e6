"""Prometheus reads a run's newest figures, and the dashboard asks for figures that runs have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from roll_like.errors import ConfigError
from roll_like.metrics.names import METRICS
from roll_like.metrics.prometheus import TARGETS, PrometheusConfig, PrometheusTracker, prometheus_name
from roll_like.registry import TRACKERS

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "examples" / "grafana"
START: dict[str, Any] = {"run_name": "my run", "params": {"pipeline": "rlvr"}, "resume_id": None, "resume_step": None}


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[PrometheusTracker]:
    tracker = PrometheusTracker(PrometheusConfig(port=0))
    tracker.start(run_dir=tmp_path, **START)
    yield tracker
    tracker.close("finished")


def read(tracker: PrometheusTracker) -> dict[str, tuple[dict[str, str], float]]:
    with urlopen(f"http://{tracker.address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}


def test_the_newest_figures_are_served(tracker: PrometheusTracker, tmp_path: Path) -> None:
    assert read(tracker) == {}
    tracker.log(0, {"eval/avg": 0.25, "eval/pass@4": 0.5})
    tracker.log(1, {"rollout/reward/mean": 0.5, "train/loss": float("inf")})
    tracker.log(2, {"rollout/reward/mean": 0.75})
    found = read(tracker)
    assert {name: value for name, (_, value) in found.items()} == {
        "roll_like_eval_avg": 0.25,
        "roll_like_eval_pass_4": 0.5,
        "roll_like_rollout_reward_mean": 0.75,
        "roll_like_train_loss": float("inf"),
        "roll_like_step": 2.0,
    }
    assert all(labels == {"run": "my run"} for labels, _ in found.values())
    [target] = json.loads((tmp_path / TARGETS).read_text())
    assert target == {"targets": [tracker.address], "labels": {"run": "my run", "pipeline": "rlvr"}}


def test_names_that_would_be_one_stay_two(tracker: PrometheusTracker) -> None:
    for _ in range(2):
        tracker.log(1, {"eval/avg/a?b": 1.0, "eval/avg/a*b": 2.0, "eval/avg/数学": 3.0})
    found = {name: value for name, (_, value) in read(tracker).items()}
    assert found.pop("roll_like_eval_avg_a_b") == 1.0
    assert sorted(found.values()) == [1.0, 2.0, 3.0]


def test_a_port_in_use_is_named(tracker: PrometheusTracker, tmp_path: Path) -> None:
    port = int(tracker.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"cannot listen at 127.0.0.1:{port}: .*in use") as raised:
        PrometheusTracker(PrometheusConfig(port=port)).start(run_dir=tmp_path, **START)
    assert "to 0 for any" in str(raised.value)


def test_nothing_is_served_after_the_end(tmp_path: Path) -> None:
    tracker = TRACKERS.get("prometheus")(PrometheusConfig(port=0))
    assert tracker.start(run_dir=tmp_path, **{**START, "resume_id": "old", "resume_step": 3}) == "old"
    address = tracker.address
    tracker.close("stopped")
    assert not (tmp_path / TARGETS).exists()
    with pytest.raises(URLError):
        urlopen(f"http://{address}/metrics", timeout=5)


def test_the_dashboard_shows_figures_that_runs_have() -> None:
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    names = {prometheus_name(metric.name) for metric in METRICS} | {"roll_like_step"}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) > 15
    for expression in asked:
        match = re.fullmatch(r'(\w+)\{run=~"\$run"\}', expression)
        assert match is not None, expression
        assert match[1] in names, expression
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_prometheus_finds_runs_by_their_files() -> None:
    config = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    [files] = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert (GRAFANA / files).parent.parent.resolve() == ROOT / "runs"
    assert files.endswith(f"*/{TARGETS}")
