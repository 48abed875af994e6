"""Trackio and SwanLab take a run's figures: with their own libraries, in an environment of their own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import venv
from contextlib import closing
from pathlib import Path

import pytest

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
