"""What the driver and Ray cost: their share of a quickstart step.

    python benchmarks/overhead.py

Two things are counted, and added although they overlap in part, so that the share is an upper bound:

- waiting: the step's wall time in which no engine had a request: step − generate − train − sync, where
  train is what the trainer's own clock says, and generate runs from the first request to the last sample;
- computing: processor time that the driver and Ray's own processes (raylet, GCS, agents) used during the steps,
  divided by the machine's cores. The engines' and reward workers' processes are not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from common import ROOT, SMOKE_RUN, Options, finish, say

RAY_ITSELF = ("raylet", "gcs_server", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "dashboard", "log_monitor")


def parser() -> Options:
    arguments = Options(__doc__, steps=3)
    arguments.add_argument("--steps", type=int, default=6, help="steps to run; the first is not counted")
    return arguments


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def processor_seconds(driver: psutil.Process) -> float:
    """Return processor time of the driver and of Ray's own processes so far."""
    total = 0.0
    for process in (driver, *driver.children(recursive=True)):
        try:
            name = " ".join(process.cmdline()) or process.name()
            if process == driver or any(word in name for word in RAY_ITSELF):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue  # it ended meanwhile
    return total


def main() -> None:
    options = parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    command = [
        sys.executable, "run_pipeline.py", "--config", "configs/rlvr_quickstart.yaml", f"steps={options.steps}",
        f"output_dir={folder}", "metrics.console=quiet", "checkpoint.at_end=false", "checkpoint.export=false",
        "evaluation=null", *((*SMOKE_RUN, "metrics.trackers=[]") if options.smoke else ()),
    ]  # fmt: skip
    metrics = folder / "rlvr_quickstart" / "metrics.jsonl"
    used: dict[int, float] = {}
    with subprocess.Popen(command, cwd=ROOT) as run:
        driver = psutil.Process(run.pid)
        while run.poll() is None:
            done = len(lines_of(metrics))
            if done and done not in used:
                used[done] = processor_seconds(driver)
                say(f"step {done} of {options.steps}")
            time.sleep(0.1)
        if run.returncode:
            sys.exit(f"the quickstart ended with exit code {run.returncode}")
    steps = lines_of(metrics)[1:]
    shutil.rmtree(folder)
    waiting = [
        step["time/step"] - step["time/generate"] - step["time/train_compute"] - step["time/sync"] for step in steps
    ]
    wall = statistics.median(step["time/step"] for step in steps)
    seconds = (used[max(used)] - used[min(used)]) / (max(used) - min(used)) / (os.cpu_count() or 1)
    figures = {
        "benchmark": "overhead",
        "step_seconds": wall,
        "waiting_seconds": statistics.median(waiting),
        "computing_seconds": seconds,
        "ratio": (statistics.median(waiting) + seconds) / wall,
    }
    finish(options, figures)


if __name__ == "__main__":
    main()
