"""Trackio and SwanLab take a run's figures, and Ray serves its own: with packages that are installed for the test."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import venv
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

import pytest
from dashboards import asked_names
from hygiene import nothing_left
from prometheus_client.parser import text_string_to_metric_families
from run_config import start_run, wait_for, write_run

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
from roll_like.metrics.dashboards import SwanLabConfig, SwanLabTracker, TrackioConfig, TrackioTracker

folder = Path(sys.argv[1])
params = {"pipeline": "rlvr", "model": {"path": "m"}, "use": [{"type": "math"}]}
for tracker in (TrackioTracker(TrackioConfig()), SwanLabTracker(SwanLabConfig(mode="offline"))):
    run = tracker.start(run_dir=folder, run_name="mine", params=params, resume_id=None, resume_step=None)
    tracker.log(1, {"rollout/reward/mean": 0.25})
    tracker.log(2, {"rollout/reward/mean": 0.5})
    tracker.close("stopped")
    again = type(tracker)(tracker._config)
    assert again.start(run_dir=folder, run_name="mine", params=params, resume_id=run, resume_step=2) == run
    again.log(3, {"rollout/reward/mean": 0.75})
    again.close("finished")
"""

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_figures_reach_trackio_and_swanlab(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    needs = ["trackio", "swanlab", "pydantic", "omegaconf", "filelock", "numpy", "pyyaml", "rich"]
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", *needs], capture_output=True, text=True, check=False
    )
    if installed.returncode:
        pytest.skip(f"pip cannot install trackio and swanlab: {installed.stderr[-500:]}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [python, "-c", PROGRAM, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with closing(sqlite3.connect(tmp_path / "trackio" / "rlvr.db")) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    rewards = [(step, json.loads(values)["rollout/reward/mean"]) for step, values in rows]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75)]
    kept = list((tmp_path / "swanlab").glob("run-*/run-*.swanlab"))
    assert len(kept) == 2
    assert all(b"rollout/reward/mean" in path.read_bytes() for path in kept)


#: What `ray[default]` adds to serve metrics, without what is installed here already.
OF_RAY = (
    *("aiohttp_cors", "colorful", "smart_open", "wrapt"),
    *("opencensus", "opencensus-context", "six", "google-api-core", "googleapis-common-protos", "google-auth"),
)


def test_ray_serves_its_own_metrics_beside_a_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    exporter = f"opentelemetry-exporter-prometheus=={version('opentelemetry-semantic-conventions')}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, *OF_RAY, exporter]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"pip cannot install what ray[default] adds: {installed.stderr[-500:]}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), str(ROOT)]))
    monkeypatch.delenv("RAY_enable_metrics_collection", raising=False)
    tracker = {"type": "prometheus", "port": 0}
    config = write_run(
        tmp_path,
        tiny_model,
        steps=10_000,
        checkpoint={"every_minutes": 0, "at_end": False, "export": False},
        metrics={"trackers": [tracker], "console": "plain"},
    )
    targets = tmp_path / "runs" / "tiny" / "prometheus.json"
    with nothing_left():
        process = start_run(config)
        wait_for(process, "step     1/")
        own, nodes = json.loads(targets.read_text())
        assert (len(own["targets"]), nodes["labels"]["job"], nodes["labels"]["run"]) == (1, "ray", "tiny")
        wanted, found, until = asked_names()["ray"], set[str](), time.monotonic() + 240
        while not wanted <= found:  # Ray collects every few seconds
            assert time.monotonic() < until, wanted - found
            with urlopen(f"http://{nodes['targets'][0]}/metrics", timeout=60) as answer:
                families = text_string_to_metric_families(answer.read().decode())
            found = {sample.name for family in families for sample in family.samples}
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert not targets.exists()
