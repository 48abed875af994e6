"""How long a run stands still when one of its processes dies.

    python benchmarks/recovery.py

Runs the quickstart once for each fault, with two engines, so that one can go on. A few seconds after a step has ended,
a process is killed by SIGKILL, or stopped by SIGSTOP. The table says how long it takes from there to the end of the
next step, beside the median of the steps that nothing happened to, how long the run itself says that the replacement
took, and how long a step waits until its state is kept in memory, also as a share of the step. The driver and Ray are
killed under `--restart`; environments are those of FrozenLake; the judge is the quickstart's model.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import CONFIGS, QUICKSTART, ROOT, SMOKE_RUN, Options, finish, quickstart, say

#: Environment variable that names the role and the rank of a worker's processes.
MARKER = "ROLL_LIKE_WORKER"
AFTER_STEP = 2


def parser() -> Options:
    arguments = Options(__doc__, roles=["training", "inference"], delay=0.2)
    arguments.add_argument("--roles", nargs="*", choices=[*FAULTS], default=[*FAULTS], help="what dies, in a run each")
    arguments.add_argument("--delay", type=float, default=2.0, help="seconds from the end of a step to the death")
    return arguments


def worker_of(role: str) -> Callable[[psutil.Process], psutil.Process]:
    """Return what finds the worker with rank 0 of a role among a run's processes."""

    def find(run: psutil.Process) -> psutil.Process:
        for process in run.children(recursive=True):
            try:
                if process.environ().get(MARKER, "").startswith(f"{role} 0 ") and process.name().startswith("ray::"):
                    return process
            except psutil.Error:
                continue
        raise RuntimeError(f"no process of {role} was found")

    return find


def engine_core(run: psutil.Process) -> psutil.Process:
    """Return vLLM's own process of the first engine."""
    worker = worker_of("inference")(run)
    return next(child for child in worker.children(recursive=True) if "EngineCore" in child.name())


def judge_server(run: psutil.Process) -> psutil.Process:
    """Return the server of the run's judge."""
    return next(one for one in run.children(recursive=True) if "roll_like.inference.vllm.server" in one.cmdline())


def driver(run: psutil.Process) -> psutil.Process:
    """Return the process that `--restart` watches over."""
    return next(child for child in run.children() if "auto" in child.cmdline())


def raylet(run: psutil.Process) -> psutil.Process:
    """Return a process of the run's own Ray that no call can do without."""
    return next(child for child in driver(run).children() if child.name() == "raylet")


@dataclass(frozen=True)
class Fault:
    """What happens to whom.

    Attributes:
        find: Returns the process, of a run.
        signal: What it gets.
        overrides: What the run needs for it.
        config: The run; its name is the file's.
    """

    find: Callable[[psutil.Process], psutil.Process]
    signal: int = signal.SIGKILL
    overrides: tuple[str, ...] = ()
    config: Path = QUICKSTART


REFERENCE = ("reference={}", "algorithm.kl={use: loss, coefficient: 0.001}")
JUDGE = (
    f"judge={{path: '{quickstart().model.path}', max_model_len: 1024, kv_cache_gib: 0.5}}",
    "rewards.use=[{type: llm_judge, judges: [{url: judge, model: judge, max_tokens: 64}], "
    "rubric: Does the answer follow the instruction?}]",
    "inference.replicas=1",
)
FAULTS = {
    "training": Fault(worker_of("training")),
    "training_stopped": Fault(worker_of("training"), signal.SIGSTOP),
    "inference": Fault(worker_of("inference")),
    "inference_stopped": Fault(worker_of("inference"), signal.SIGSTOP),
    "engine_core": Fault(engine_core),
    "reference": Fault(worker_of("reference"), overrides=REFERENCE),
    "judge": Fault(judge_server, overrides=JUDGE),
    "rewards": Fault(worker_of("rewards")),
    "environments": Fault(worker_of("environments"), config=CONFIGS / "agentic_frozenlake.yaml"),
    "driver": Fault(driver, overrides=("--restart", "1")),
    "raylet": Fault(raylet, overrides=("--restart", "1")),
}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines() if line] if path.exists() else []


def wait_for(run: subprocess.Popen[bytes], ended: Callable[[], bool]) -> None:
    while not ended():
        if run.poll() is not None:
            sys.exit(f"the run ended with exit code {run.returncode}")
        time.sleep(0.05)


def measure(role: str, options: Any, folder: Path) -> dict[str, float]:
    """Run until a step after the death has ended; return seconds."""
    fault = FAULTS[role]
    metrics = folder / fault.config.stem / "metrics.jsonl"
    command = [
        sys.executable, "run_pipeline.py", "--config", str(fault.config), f"steps={AFTER_STEP + 2}",
        f"output_dir={folder}", "metrics.console=quiet", "metrics.trackers=[]", "checkpoint.export=false",
        "checkpoint.every=1", "evaluation=null", "inference.replicas=2",
        *(SMOKE_RUN if options.smoke else ()),
        *fault.overrides,
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT) as run:
        try:
            wait_for(run, lambda: len(lines_of(metrics)) == AFTER_STEP)
            time.sleep(options.delay)
            fault.find(psutil.Process(run.pid)).send_signal(fault.signal)
            died = time.monotonic()
            wait_for(run, lambda: len(lines_of(metrics)) == AFTER_STEP + 1)
            seconds = time.monotonic() - died
            if run.wait():
                sys.exit(f"the run ended with exit code {run.returncode}")
        finally:
            if run.poll() is None:
                run.terminate()
    lines = lines_of(metrics)
    undisturbed = [line["time/step"] for line in lines[1:] if line["step"] != AFTER_STEP + 1]
    stalls = [line["checkpoint/stall_seconds"] for line in lines if "checkpoint/stall_seconds" in line]
    found = {"to_next_step": seconds, "step": statistics.median(undisturbed), "stall": statistics.median(stalls)}
    recovery = lines[AFTER_STEP].get("health/recovery_seconds")
    return found if recovery is None else found | {"replacement": recovery}


def main() -> None:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run is ended too
    figures: dict[str, Any] = {"benchmark": "recovery"}
    print(f"{'what dies':17}  {'to the next step':>16}  {'replacement':>11}  {'a step':>7}  {'its state':>9}")
    for role in options.roles:
        folder = Path(tempfile.mkdtemp(prefix="recovery-"))
        try:
            found = measure(role, options, folder)
        finally:
            shutil.rmtree(folder)
        replacement = f"{found['replacement']:.1f} s" if "replacement" in found else "–"
        own = f"{found['step']:5.1f} s  {found['stall']:7.2f} s ({found['stall'] / found['step']:.0%})"
        print(f"{role:17}  {found['to_next_step']:14.1f} s  {replacement:>11}  {own}", flush=True)
        say(f"{role} done")
        figures |= {f"{role}_{name}": value for name, value in found.items()}
    finish(options, figures)


if __name__ == "__main__":
    assert os.name == "posix"
    main()
