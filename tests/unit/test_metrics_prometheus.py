"""Prometheus reads a run's newest figures, and the dashboard asks for figures that runs have."""

from __future__ import annotations

import json
import re
from asyncio import CancelledError
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from dashboards import ROOT, asked_names
from prometheus_client.parser import text_string_to_metric_families

from roll_like.config.run import MetricsConfig
from roll_like.errors import ConfigError
from roll_like.metrics import prometheus
from roll_like.metrics.names import METRICS
from roll_like.metrics.prometheus import TARGETS, PrometheusConfig, PrometheusTracker, prometheus_name
from roll_like.metrics.trackers import shows_systems, start_tracker
from roll_like.registry import TRACKERS

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


#: As vLLM tells at `/metrics`, of one of its engines.
OF_VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} 7.0
"""


def test_what_engines_count_is_beside_it_with_their_rank(tracker: PrometheusTracker) -> None:
    tracker.log(1, {"rollout/reward/mean": 0.5})
    tracker.watch(engines=lambda: {0: OF_VLLM.format(running=3.0), 2: OF_VLLM.format(running=5.0)})
    with urlopen(f"http://{tracker.address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    for line in ("# TYPE vllm:num_requests_running gauge", "# TYPE vllm:generation_tokens_total counter"):
        assert text.count(line) == 1, "a name comes once, as the format wants it"
    found = {
        (sample.labels["replica"], sample.labels["run"], sample.labels["model_name"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:num_requests_running"
    }
    assert found == {("0", "my run", "m"): 3.0, ("2", "my run", "m"): 5.0}
    assert text.count("vllm:generation_tokens_total{") == 2
    assert "roll_like_rollout_reward_mean" in text
    tracker.watch(engines=dict)
    assert "vllm:" not in urlopen(f"http://{tracker.address}/metrics", timeout=10).read().decode()


def test_a_runs_figures_are_served_whatever_its_engines_tell(tracker: PrometheusTracker) -> None:
    def gone() -> dict[int, str]:
        raise CancelledError  # as when the run's loop ends meanwhile

    tracker.log(1, {"rollout/reward/mean": 0.5})
    tracker.watch(engines=lambda: {0: "what { is this", 1: OF_VLLM.format(running=3.0)})
    assert {"roll_like_rollout_reward_mean", "vllm:num_requests_running"} <= read(tracker).keys()
    tracker.watch(engines=gone)
    assert "roll_like_rollout_reward_mean" in read(tracker)


def test_nodes_of_ray_are_found_beside_the_run(
    tracker: PrometheusTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, asked, clock = ["10.0.0.1:8080"], [0], [100.0]
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def cluster() -> list[str]:
        asked[0] += 1
        return nodes

    tracker.watch(cluster=cluster)

    def targets() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((tmp_path / TARGETS).read_text())
        return found

    labels = {"run": "my run", "pipeline": "rlvr"}
    assert targets() == [
        {"targets": [tracker.address], "labels": labels},
        {"targets": ["10.0.0.1:8080"], "labels": {**labels, "job": "ray"}},
    ]
    nodes.append("10.0.0.2:8080")
    for step in range(1000):  # steps of milliseconds do not ask Ray's head each
        clock[0] += 0.01
        tracker.log(step, {})
    assert (targets()[1]["targets"], asked) == (["10.0.0.1:8080"], [1])
    clock[0] += prometheus.NODES_SECONDS
    tracker.log(1000, {})
    assert (targets()[1]["targets"], asked) == (nodes, [2])
    assert [path.name for path in tmp_path.iterdir()] == [TARGETS]


def test_a_prometheus_elsewhere_is_given_an_address_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    tracker = PrometheusTracker(PrometheusConfig(host="0.0.0.0", port=0))
    tracker.start(run_dir=tmp_path, **START)
    try:
        [target] = json.loads((tmp_path / TARGETS).read_text())[0]["targets"]
        assert not target.startswith("0.0.0.0")
        assert urlopen(f"http://{target}/metrics", timeout=10).status == 200
    finally:
        tracker.close("finished")


def test_libraries_count_only_where_a_tracker_shows_it() -> None:
    made = [TRACKERS.get(name).Config() for name in ("mlflow", "prometheus")]
    assert not shows_systems(MetricsConfig(trackers=(made[0],)))
    assert shows_systems(MetricsConfig(trackers=tuple(made)))


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
    config = PrometheusConfig(port=port)
    with pytest.raises(ConfigError, match=r"^trackers\.2 \(prometheus\) cannot start: it cannot listen at ") as raised:
        start_tracker(config, "trackers.2", lambda made: made.start(run_dir=tmp_path, **START))
    assert str(raised.value).count("fix:") == 1


def test_nothing_is_served_after_the_end(tmp_path: Path) -> None:
    tracker = TRACKERS.get("prometheus")(PrometheusConfig(port=0))
    assert tracker.start(run_dir=tmp_path, **{**START, "resume_id": "old", "resume_step": 3}) == "old"
    address = tracker.address
    tracker.close("stopped")
    assert not (tmp_path / TARGETS).exists()
    with pytest.raises(URLError):
        urlopen(f"http://{address}/metrics", timeout=5)


def test_the_dashboard_shows_figures_that_runs_have() -> None:
    """Those of vLLM and Ray are looked for in real runs: `test_rlvr_pipeline.py`, `test_hosted_trackers.py`."""
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    names = {prometheus_name(metric.name) for metric in METRICS} | {"roll_like_step"}
    asked = asked_names()
    assert asked["roll_like"] <= names
    assert [len(asked[library]) > 1 for library in ("roll_like", "vllm", "ray")] == [True] * 3
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("dashboard") / "modules" / "reporter" / "reporter_agent.py"
    # as text: to import it needs `ray[default]`
    gauges = set(re.findall(r'"(node_[a-z_]+)"', source.read_text()))
    assert {name.removeprefix("ray_") for name in asked["ray"]} <= gauges
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_prometheus_finds_runs_by_their_files() -> None:
    config = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    [files] = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert (GRAFANA / files).parent.parent.resolve() == ROOT / "runs"
    assert files.endswith(f"*/{TARGETS}")
