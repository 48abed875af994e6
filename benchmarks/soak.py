"""What a long run leaves behind: memory, descriptors, threads, files, step after step.

    python benchmarks/soak.py --figure docs/images/soak.png

Runs the quickstart for a thousand steps on a model of two narrow layers, with checkpoints, evaluations, rewards and
MLflow, and looks at all of its processes every few seconds. The table says how fast each figure grows after
`--from-step`, by a line through what was seen (least squares), beside what is allowed: the run's own records may grow,
by as much each step. A second table says whose memory grows. The exit code is 1 if something grows faster.

Memory is what no file backs. Pages of files, such as libraries, count for less as soon as another run uses them too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import ROOT, Options, finish, quickstart, say

#: Environment variable that every process of a run inherits; its value is also the name of Ray's folder.
SESSION = "ROLL_LIKE_SESSION"
#: Starts the names of figures that are the memory of one process.
OF_PROCESS = "memory of "


@dataclass(frozen=True)
class Figure:
    """Something that must not grow without end.

    Attributes:
        title: With its unit.
        most: How much it may grow a step.
        scale: What its samples are divided by for people.
    """

    title: str
    most: float
    scale: float = 1.0


FIGURES: Mapping[str, Figure] = {
    "memory": Figure("memory of all processes, MiB", 20 * 2**10, 2**20),
    "processes": Figure("processes", 0.01),
    "threads": Figure("threads", 0.02),
    "descriptors": Figure("open files and sockets", 0.02),
    "zombies": Figure("zombies", 0.01),
    "shared_memory": Figure("/dev/shm, MiB", 2**10, 2**20),
    "ray": Figure("Ray's folder (logs), KiB", 2 * 2**10, 2**10),
    "mlflow": Figure("mlflow.db, KiB", 32 * 2**10, 2**10),
}


def parser() -> Options:
    """Return the options."""
    arguments = Options(__doc__, steps=12, from_step=3, interval=1.0)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--from-step", type=int, default=200, help="what grows before counts as warming up")
    arguments.add_argument("--interval", type=float, default=3.0, help="seconds between two looks")
    arguments.add_argument("--figure", type=Path, help="a PNG file to draw into")
    return arguments


def narrow_model(folder: Path) -> Path:
    """Write a model of two narrow layers with the tokenizer of the quickstart's."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from roll_like.models.load import resolve_model

    path = resolve_model(quickstart().model).path
    config = AutoConfig.from_pretrained(path)
    for name, value in {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }.items():
        setattr(config, name, value)
    config.layer_types = None
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files; some may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def process_name(process: psutil.Process, run: psutil.Process) -> str:
    """Return what people call a process of a run: its class for an actor, the program for others."""
    if process == run:
        return "driver"
    title = " ".join(process.cmdline())
    if title.startswith("ray::"):
        return title.removeprefix("ray::").partition(".")[0].strip()  # what follows is the method that runs
    return process.name()


def memory_of(process: psutil.Process) -> int:
    """Return the bytes of a process's memory that no file backs; of pages that others share, its part."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
    return 1024 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss_Anon:"))


def look(run: psutil.Process, folder: Path) -> dict[str, float]:
    """Return all figures of a run now."""
    found: dict[str, float] = dict.fromkeys(FIGURES, 0.0)
    session = ""
    for process in [run, *run.children(recursive=True)]:
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                found["zombies"] += 1
                continue
            session = session or process.environ().get(SESSION, "")
            memory = memory_of(process)
            found["memory"] += memory
            name = OF_PROCESS + process_name(process, run)
            found[name] = found.get(name, 0.0) + memory
            found["threads"] += process.num_threads()
            found["descriptors"] += process.num_fds()
            found["processes"] += 1
    found["shared_memory"] = size_of(Path("/dev/shm"))
    found["ray"] = size_of(Path(tempfile.gettempdir(), session)) if session else 0.0
    database = folder / "mlflow.db"
    found["mlflow"] = database.stat().st_size if database.exists() else 0.0
    return found


def steps_of(metrics: Path) -> int:
    """Return how many steps a run has logged."""
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def watch(options: Any, folder: Path) -> list[dict[str, float]]:
    """Run to the end; return what was seen."""
    model = narrow_model(folder / "model")
    command = [
        *(sys.executable, "run_pipeline.py", "--config", "configs/rlvr_quickstart.yaml", f"steps={options.steps}"),
        *(f"output_dir={folder}", "name=soak", f"model.path={model}", "model.dtype=float32", "inference.type=hf"),
        *("metrics.console=quiet", "metrics.traces_per_step=1", "checkpoint.every=20", "checkpoint.export=false"),
        *("evaluation.every=100", "evaluation.samples_per_prompt=1", "rollout.prompts_per_step=2"),
        *("rollout.samples_per_prompt=4", "rollout.samples_per_step=8", "rollout.max_response_tokens=8"),
        "rewards.use=[{type: repetition, n: 1, by: characters, free: 0}]",
    ]
    metrics = folder / "soak" / "metrics.jsonl"
    seen = []
    with subprocess.Popen(command, cwd=ROOT) as run:
        try:
            while run.poll() is None:
                step = steps_of(metrics)
                if 0 < step < options.steps:  # not while it ends
                    seen.append({"step": float(step), **look(psutil.Process(run.pid), folder)})
                    if len(seen) % 20 == 1:
                        say(f"step {step} of {options.steps}, {seen[-1]['memory'] / 2**20:.0f} MiB")
                time.sleep(options.interval)
        except psutil.NoSuchProcess:
            pass  # it has just ended
        finally:
            if run.poll() is None:
                run.terminate()
    if run.returncode:
        sys.exit(f"the run ended with exit code {run.returncode}")
    return [each for each in seen if each["processes"]]


def slope(seen: Sequence[Mapping[str, float]], name: str, first: int) -> float:
    """Return by how much a figure grows a step, from a step on."""
    points = [(each["step"], each[name]) for each in seen if each["step"] >= first]
    steps, values = np.asarray(points).T
    return float(np.polyfit(steps, values, 1)[0]) if len(set(steps)) > 1 else 0.0


def draw(seen: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw every figure over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(11, 5.4), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    for axis, (name, figure) in zip(picture.subplots(2, 4).flat, FIGURES.items(), strict=True):
        values = [each[name] / figure.scale for each in seen]
        axis.plot([each["step"] for each in seen], values, color="#1f6f8b", linewidth=1.6)
        axis.set_title(figure.title, fontsize=9)
        axis.set_ylim(0, 1.15 * max(*values, 1))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("step", fontsize=8)
    picture.savefig(path)


def main() -> None:
    """Watch a run, print the table."""
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run is ended too
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        began = time.monotonic()
        seen = watch(options, Path(temporary))
        minutes = (time.monotonic() - began) / 60
    print(f"\n{options.steps} steps in {minutes:.1f} minutes; growth a step after step {options.from_step}\n")
    print("| | at the end | growth a step | allowed |\n|---|---|---|---|")
    figures: dict[str, Any] = {"benchmark": "soak", "minutes": minutes}
    grows = []
    for name, figure in FIGURES.items():
        found = slope(seen, name, options.from_step)
        last = seen[-1][name] / figure.scale
        print(f"| {figure.title} | {last:.0f} | {found:.3g} | {figure.most:.3g} |")
        figures[name] = found
        if found > figure.most:
            grows.append(name)
    print("\n| memory of | at the end, MiB | growth a step, KiB |\n|---|---|---|")
    for name in sorted({name for each in seen for name in each if name.startswith(OF_PROCESS)}):
        there = [each for each in seen if name in each]
        grown = slope(there, name, options.from_step)
        print(f"| {name.removeprefix(OF_PROCESS)} | {there[-1][name] / 2**20:.0f} | {grown / 2**10:.3g} |")
        figures[name] = grown
    if options.figure is not None:
        draw(seen, options.figure)
    print(f"\ngrows too fast: {', '.join(grows) or 'nothing'}")
    finish(options, figures)
    if grows and not options.smoke:
        sys.exit(1)


if __name__ == "__main__":
    assert os.name == "posix"
    main()
