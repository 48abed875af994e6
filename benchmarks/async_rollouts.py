"""Asynchronous against synchronous rollouts: steps an hour of the same agentic run on the same two cores.

    roll-like run --config configs/agentic_tools.yaml evaluation=null steps=7 name=tools-policy
    python benchmarks/async_rollouts.py --model runs/tools-policy/model

(`async` is a keyword of Python, so no module can have that name.)

`configs/agentic_tools.yaml` with a calculator that takes a lognormal time (`benchmarks/slow_tools.py`), as a service
elsewhere does: median 0.3 s, σ 1.5, at most 20 s. The pretrained model seldom calls it; the first command above trains
one that calls it in nearly every episode, as for most of a run, so that most steps have a call that takes many seconds.

- sync: trainer and engine share both cores and take turns; a step waits for its slowest episode.
- async: the trainer has core 0, the engine core 1; `max_staleness: 2`, `ahead: 1`.

Equal on both sides: model, tasks, seeds, times of calls, episodes a step, updates, micro-batches, `max_running`. There
is no evaluation, checkpoint or tracker. The learning rate is so small that the policy stays as it is, and rewards are
random, so that every step samples alike and trains on all episodes. Each run is a process of its own, and the sides
take turns. What counts is wall time between the ends of two steps: after `WARM_UP` steps, which compile and fill the
buffer, and before the last one, in which asynchronous rollouts stop to start groups. So no side begins the measurement
with work that the other has yet to do, or ends it with less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from common import CONFIGS, ROOT, SMOKE_MODEL, Options, finish, repetition_count, say

WARM_UP, COOL_DOWN = 2, 1
SIDES: dict[str, tuple[str, ...]] = {
    "sync": ("resources.device_mapping={training: 0-1, inference: 0-1}",),
    "async": (
        "resources.device_mapping={training: 0, inference: 1}",
        "rollout.schedule={type: async, max_staleness: 2, ahead: 1.0}",
    ),
}
#: What the table shows of a step: name in `metrics.jsonl` → heading. A synchronous step has no `util/trainer_wait`.
SHOWN = {
    "time/generate": "trainer waits, s",
    "time/train": "trains, s",
    "time/sync": "weight sync, s",
    "util/engines": "engines busy",
    "staleness/mean": "mean staleness",
    "rollout/tokens": "sampled tokens",
}
SMOKE = ("inference.type=hf", "rollout.max_response_tokens=8", "rollout.max_turns=2")

Step = Mapping[str, float]


def parser() -> Options:
    """Return the options."""
    found = Options(__doc__, steps=2, repetitions=1, episodes=2, longest_seconds=0.2)
    found.add_argument("--model", help="the policy, a directory; default: the pretrained model")
    found.add_argument("--steps", type=int, default=6, help="steps that are measured in each run")
    found.add_argument("--repetitions", type=repetition_count, default=3, help="runs of each side; the median counts")
    found.add_argument("--groups", type=int, default=1, help="groups of a step")
    found.add_argument("--episodes", type=int, default=8, help="episodes of a group")
    found.add_argument("--longest-seconds", type=float, default=20.0, help="no call takes longer")
    found.add_argument("--keep", type=Path, help="a new folder for the runs' folders; default: they are removed")
    return found


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration's environment with the slow calculator."""
    (given,) = yaml.safe_load((CONFIGS / "agentic_tools.yaml").read_text(encoding="utf-8"))["environments"]
    slow = {"median_seconds": 0.3, "sigma": 1.5, "longest_seconds": options.longest_seconds}
    return {**given, "id": "benchmarks/SlowTools-v0", "kwargs": given["kwargs"] | slow}


def run(side: str, options: argparse.Namespace, folder: Path) -> list[Step]:
    """Run one side to its end; return the lines of its metrics, after the warm-up's last."""
    command = [
        sys.executable, "run_pipeline.py", "--config", "configs/agentic_tools.yaml", f"name={side}",
        f"output_dir={folder}", "import=[slow_tools]", f"environments={json.dumps([environment(options)])}",
        "training.optimizer.lr=1.0e-12",
        f"steps={WARM_UP + options.steps + COOL_DOWN}", f"rollout.groups_per_step={options.groups}",
        f"rollout.episodes_per_group={options.episodes}", "rollout.episodes_per_step=null",
        "evaluation=null", "checkpoint.at_end=false", "checkpoint.export=false", "metrics.trackers=[]",
        "metrics.console=quiet", *SIDES[side],
        *([] if options.model is None else [f"model.path={Path(options.model).resolve()}"]),
        *((*SMOKE_MODEL, *SMOKE) if options.smoke else ()),
    ]  # fmt: skip
    modules = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": modules})
    lines = (folder / side / "metrics.jsonl").read_text(encoding="utf-8")
    steps: list[Step] = [json.loads(line) for line in lines.splitlines()]
    expected = options.groups * options.episodes
    assert all(step["rollout/samples"] == expected for step in steps), "a step has lost samples: see the run's folder"
    return steps[WARM_UP - 1 : WARM_UP + options.steps]


def step_seconds(steps: Sequence[Step]) -> float:
    """Return the wall time of a step, from the end of the first line's to the end of the last one's."""
    return (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)


def table(runs: Mapping[str, Sequence[Sequence[Step]]]) -> None:
    """Print each side's median step, and the means over all measured steps of what explains it."""
    print(f"\n| | steps an hour | step, s | {' | '.join(SHOWN.values())} | most staleness |")
    print("|---|" + "---|" * (len(SHOWN) + 3))
    for side, of_side in runs.items():
        seconds = statistics.median(map(step_seconds, of_side))
        steps = [step for one in of_side for step in one[1:]]
        means = [statistics.fmean(step[name] for step in steps) for name in SHOWN]
        oldest = max(step["staleness/max"] for step in steps)
        shown = " | ".join(f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in means)
        print(f"| {side} | {3600 / seconds:.0f} | {seconds:.1f} | {shown} | {oldest:.0f} |")


def main() -> None:
    """Let the sides take turns; print the table."""
    options = parser().parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True)
    runs: dict[str, list[list[Step]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="async-rollouts-") as temporary:
        folder = options.keep or Path(temporary)
        for repetition in range(options.repetitions):
            for side, of_side in runs.items():
                of_side.append(run(side, options, folder.resolve() / str(repetition + 1)))
                say(f"{side}: {step_seconds(of_side[-1]):.4g} s a step")
    table(runs)
    per_hour = {side: 3600 / statistics.median(map(step_seconds, of_side)) for side, of_side in runs.items()}
    figures = {
        "benchmark": "async_rollouts",
        "sync_steps_per_hour": per_hour["sync"],
        "async_steps_per_hour": per_hour["async"],
        "ratio": per_hour["async"] / per_hour["sync"],
        "samples_per_step": options.groups * options.episodes,
        "staleness_max": max(step["staleness/max"] for one in runs["async"] for step in one),
        "staleness_mean": statistics.fmean(step["staleness/mean"] for one in runs["async"] for step in one[1:]),
    }
    finish(options, figures)


if __name__ == "__main__":
    main()
