"""Do asynchronous runs learn as synchronous ones do? The same runs under each schedule, by seed.

    python benchmarks/async_learning.py                                    # 24 runs, two hours on two idle cores
    python benchmarks/async_learning.py --configs rlvr_quickstart --seeds 0
    python benchmarks/async_learning.py --configs rlvr_quickstart --steps 24 --folder runs/long
    python benchmarks/async_learning.py --configs rlvr_quickstart --schedules sync int8

Schedules: `sync`; `async_1_1` and `async_2_1`, named by `max_staleness` and `ahead`, with a core for the trainer and
one for the engine; `control`, which is `async_2_1` without the correction for old samples: configurations like that
are refused, so it is made here; and, if asked for, `int8`: `sync` with 8-bit weights in the engine. All else is as
shipped. Each run is a process of its own and leaves a folder CONFIG_SCHEDULE-seed-N; a finished one is not repeated,
one that was cut short is continued, and one of another configuration is refused.

Printed for each schedule: the evaluation before and after, by seed, with mean and sample standard deviation; then the
difference between its mean and that of `sync`, beside the pooled standard deviation of both, and the mean reward of the
last quarter of the steps. `--figure` draws the mean reward by step, with the range over seeds.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from common import CONFIGS, ROOT, SMOKE_MODEL, SMOKE_RUN, Options, finish, say
from seeds import EVALUATION, MARK, TRAINING, Run, mean_of, measure, read_runs, series, spread, style, table

from roll_like.config.algorithm import CorrectionConfig
from roll_like.config.load import dump_config, load_config
from roll_like.config.run import RunConfig
from roll_like.models.precision import settled
from roll_like.run.folder import as_begun

SCHEDULES: Mapping[str, tuple[int, float] | None] = {
    "sync": None,
    "async_1_1": (1, 1.0),
    "async_2_1": (2, 1.0),
    "control": (2, 1.0),
    "int8": None,
}
#: What a configuration does not have.
ABSENT = "(absent)"
#: The key that says where runs are.
PLACE = "output_dir"
SMOKE: Mapping[str, tuple[str, ...]] = {
    "rlvr_quickstart": (*SMOKE_RUN, "evaluation.samples_per_prompt=1"),
    "agentic_tools": (*SMOKE_MODEL, "inference.type=hf", "rollout.max_turns=1", "evaluation.seeds=1"),
}


def parser() -> Options:
    """Return the options."""
    found = Options(__doc__, configs=["rlvr_quickstart"], schedules=["sync", "control"], seeds=[0])
    found.add_argument("--configs", nargs="+", choices=list(SMOKE), default=list(SMOKE), help="files of configs/")
    found.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES)[:-1])
    found.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    found.add_argument("--steps", type=int, help="steps of each run, where they are not to be as shipped")
    found.add_argument("--keys", nargs="*", default=[], help="KEY=VALUE that all runs have beside")
    found.add_argument("--folder", type=Path, help="where runs are kept; default: `runs` of the repository")
    found.add_argument("--figure", type=Path, help="a PNG file to draw the curves into")
    found.add_argument("--one", action="store_true", help="the run of one configuration, schedule and seed, here")
    return found


def run_name(config: str, schedule: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{config}_{schedule}{MARK}{seed}"


def configured(
    name: str,
    schedule: str,
    seed: int,
    folder: Path,
    *,
    keys: Sequence[str] = (),
    steps: int | None = None,
    smoke: bool = False,
) -> RunConfig:
    """Return a shipped configuration under a schedule."""
    overrides = [f"name={run_name(name, schedule, seed)}", f"seed={seed}", f"output_dir={folder}"]
    overrides += ["metrics.trackers=[]", "metrics.console=quiet", "checkpoint.export=false", *keys]
    if (chosen := SCHEDULES[schedule]) is not None:
        staleness, ahead = chosen
        overrides += [
            "resources.device_mapping={training: 0, inference: 1}",
            f"rollout.schedule={{type: async, max_staleness: {staleness}, ahead: {ahead}}}",
        ]
    if schedule == "int8":
        overrides.append("inference.quantization=int8")
    if steps is not None:
        overrides.append(f"steps={steps}")
    if smoke:
        overrides += ["steps=1", *SMOKE[name]]
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    return without_correction(config) if schedule == "control" else config


def without_correction(config: Any) -> Any:
    """Return a configuration without the weights that correct for old samples; it is not validated again."""
    algorithm = config.algorithm.model_copy(update={"correction": CorrectionConfig(type="none")})
    return config.model_copy(update={"algorithm": algorithm})


def refuse_other_configuration(folder: Path, config: RunConfig) -> None:
    """Raise where a folder holds a run of another configuration; a folder of another name is the same one."""
    if not (folder / "config.yaml").is_file():
        return
    kept = flat(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    wanted = flat(yaml.safe_load(dump_config(settled(as_begun(config, str(folder))))))
    keys = [key for key in {**kept, **wanted} if kept.get(key, ABSENT) != wanted.get(key, ABSENT)]
    if differing := [f"{key} {kept.get(key, ABSENT)}, not {wanted.get(key, ABSENT)}" for key in keys if key != PLACE]:
        raise SystemExit(
            f"{folder} holds a run of another configuration ({'; '.join(differing)}): remove it, or give --folder "
            "another place"
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def finished(folder: Path) -> bool:
    """Return whether a run's folder is that of a run that has ended well."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "finished"


def after(runs: Sequence[Run]) -> list[float]:
    """Return the last evaluation of each run."""
    name = measure(runs, EVALUATION, "evaluations")
    curves = [series(run.evaluations, name) for run in runs]
    return [curve[max(curve)] for curve in curves]


def last_quarter(runs: Sequence[Run]) -> float:
    """Return the mean reward of the last quarter of the steps of some runs."""
    name = measure(runs, TRAINING, "steps")
    curves = [list(series(run.steps, name).values()) for run in runs]
    return statistics.fmean(value for curve in curves for value in curve[-math.ceil(len(curve) / 4) :])


def pooled(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the pooled sample standard deviation of two samples; NaN where neither has two values."""
    degrees = len(left) + len(right) - 2
    squares = sum((value - statistics.fmean(side)) ** 2 for side in (left, right) for value in side)
    return math.sqrt(squares / degrees) if degrees else math.nan


def compare(groups: Mapping[str, Sequence[Run]], config: str) -> dict[str, float]:
    """Print how far each schedule's mean is from that of `sync`; return the differences."""
    base = after(groups[f"{config}_sync"])
    print(f"\n{config}: evaluation afterwards, against sync\n")
    print("| schedule | mean | difference | pooled spread | reward, last quarter |\n|---|---|---|---|---|")
    differences = {}
    for schedule in SCHEDULES:
        if f"{config}_{schedule}" not in groups:
            continue
        values = after(groups[f"{config}_{schedule}"])
        difference = statistics.fmean(values) - statistics.fmean(base)
        print(
            f"| {schedule} | {statistics.fmean(values):.3f} | {difference:+.3f} | {pooled(base, values):.3f} "
            f"| {last_quarter(groups[f'{config}_{schedule}']):.3f} |"
        )
        differences[f"{config}_{schedule}"] = difference
    return differences


def draw(groups: Mapping[str, Sequence[Run]], configs: Sequence[str], path: Path) -> None:
    """Draw the rewards of each configuration by step into a PNG file: mean and range over seeds of each schedule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2 * len(configs)), dpi=110, layout="constrained")
    for axis, config in zip(figure.subplots(len(configs), squeeze=False)[:, 0], configs, strict=True):
        what = measure(groups[f"{config}_sync"], TRAINING, "steps")
        for index, schedule in enumerate(SCHEDULES):
            if not (runs := groups.get(f"{config}_{schedule}")):
                continue
            curves = [series(run.steps, what) for run in runs]
            mean = mean_of(curves)
            low, high = ([choose(curve[step] for curve in curves) for step in mean] for choose in (min, max))
            colour = f"C{index}"
            axis.fill_between(list(mean), low, high, color=colour, alpha=0.15, linewidth=0)
            label = f"{schedule}: {spread(after(runs))} in the evaluation afterwards"
            axis.plot(list(mean), list(mean.values()), color=colour, linewidth=2, label=label)
        style(axis, f"{config}: {what}")
        axis.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run what is not there yet, then print the tables."""
    options = parser().parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="async-learning-") as temporary:
        folder = (options.folder or (Path(temporary) if options.smoke else ROOT / "runs")).resolve()
        changed: dict[str, Any] = {"keys": options.keys, "steps": options.steps, "smoke": options.smoke}
        if options.one:
            (config,), (schedule,), (seed,) = options.configs, options.schedules, options.seeds
            kept = folder / run_name(config, schedule, seed)
            resume = str(kept) if (kept / "config.yaml").is_file() else None
            configured(config, schedule, seed, folder, **changed).run(resume=resume)
            return
        wanted = [(c, s, n) for n in options.seeds for c in options.configs for s in options.schedules]
        for run in wanted:  # before the first one takes minutes
            refuse_other_configuration(folder / run_name(*run), configured(*run, folder, **changed))
        for config, schedule, seed in wanted:
            name = run_name(config, schedule, seed)
            if not finished(folder / name):
                say(name)
                one = ["--one", "--configs", config, "--schedules", schedule, "--seeds", str(seed)]
                smoke = ["--smoke"] if options.smoke else []
                steps = [] if options.steps is None else ["--steps", str(options.steps)]
                keys = ["--keys", *options.keys]
                subprocess.run([sys.executable, __file__, *smoke, *steps, *one, *keys, "--folder", folder], check=True)
        groups = read_runs([folder / run_name(*run) for run in wanted])
    figures: dict[str, Any] = {"benchmark": "async_learning"}
    for name, runs in groups.items():
        figures |= table(name, runs)
    for config in options.configs:
        figures |= compare(groups, config)
    if options.figure is not None:
        draw(groups, options.configs, options.figure)
    finish(options, figures)


if __name__ == "__main__":
    main()
