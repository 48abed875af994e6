"""How runs learn that differ only in their seed: mean, spread and curves.

    python benchmarks/seeds.py                                # every runs/NAME-seed-N, one row of panels for each NAME
    python benchmarks/seeds.py runs/tools-seed-* -o tools.png
    python benchmarks/seeds.py runs/recipe_*-seed-* --together -o recipes.png     # one line for each NAME, in one panel
    python benchmarks/seeds.py runs/sdft-seed-* --together eval/domain/unseen_howtos/avg -o sdft.png

It reads what runs have left and starts nothing. A line is one seed, the thick one their mean; evaluations are of tasks
or seeds that training does not see. With `--together` a line is a mean, in the range over its seeds. Spread is the
sample standard deviation over seeds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import ROOT, Options, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARK = "-seed-"
#: What is drawn of a step and of an evaluation: the first that the runs have.
TRAINING = ("rollout/success", "rollout/reward/mean")
EVALUATION = ("eval/success", "eval/avg")
COLOUR, LIGHT = "#1d5fa8", "#a9c8e8"


@dataclass(frozen=True)
class Run:
    """What a run's folder says: its seed, the lines of its metrics and evaluations, and its seconds."""

    seed: str
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    seconds: float


def read_runs(folders: Sequence[Path]) -> dict[str, list[Run]]:
    """Return the finished runs by what their names have before the seed."""
    runs: dict[str, list[Run]] = {}
    for folder in sorted(folders):
        if not (folder / "summary.json").is_file():
            continue
        name, _, seed = folder.name.partition(MARK)
        steps, evaluations = (read_lines(folder / f"{what}.jsonl") for what in ("metrics", "evaluations"))
        seconds = json.loads((folder / "summary.json").read_text("utf-8"))["seconds"]
        runs.setdefault(name, []).append(Run(seed, steps, evaluations, seconds))
    return runs


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def measure(runs: Sequence[Run], names: Sequence[str], lines: str) -> str:
    """Return the first of some names that all runs have in some line."""
    return next(name for name in names if all(any(name in line for line in getattr(run, lines)) for run in runs))


def series(lines: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Return a figure by step."""
    return {line["step"]: float(line[name]) for line in lines if name in line}


def mean_of(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean at every step that all curves have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: statistics.fmean(curve[step] for curve in curves) for step in steps}


def spread(values: Sequence[float]) -> str:
    """Return mean and sample standard deviation as text; of one value itself."""
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def table(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Print a Markdown table of one group of runs; return its means."""
    figure = measure(runs, EVALUATION, "evaluations")
    curves = [series(run.evaluations, figure) for run in runs]
    before, after = ([curve[at(curve)] for curve in curves] for at in (min, max))
    names = {name for run in runs for line in run.evaluations for name in line if name.startswith("eval/pass@")}
    pass_at_k = max(names, key=lambda name: int(name.rpartition("@")[2]))
    passes = [series(run.evaluations, pass_at_k) for run in runs]
    last_pass = [curve[max(curve)] for curve in passes]
    print(f"\n{name}: {figure}\n")
    passing = pass_at_k.removeprefix("eval/")
    print(f"| seed | before | after | {passing} before → after | steps | seconds |\n|---|---|---|---|---|---|")
    for run, first, last, passed in zip(runs, before, after, passes, strict=True):
        both = f"{passed[min(passed)]:.2f} → {passed[max(passed)]:.2f}"
        print(f"| {run.seed} | {first:.2f} | {last:.2f} | {both} | {len(run.steps)} | {run.seconds:.0f} |")
    print(f"| mean ± spread | {spread(before)} | {spread(after)} | → {spread(last_pass)} | | |")
    return {f"{name} before": statistics.fmean(before), f"{name} after": statistics.fmean(after)}


def overlay(axis: Axes, curves: Mapping[str, Sequence[Mapping[int, float]]]) -> None:
    """Draw the mean of each group's curves, with the range over them; its label has the values after the last step."""
    for index, (name, found) in enumerate(curves.items()):
        mean = mean_of(found)
        low, high = ([choose(curve[step] for curve in found) for step in mean] for choose in (min, max))
        axis.fill_between(list(mean), low, high, color=f"C{index}", alpha=0.12, linewidth=0)
        label = f"{name}: {spread([curve[max(curve)] for curve in found])}"
        axis.plot(list(mean), list(mean.values()), color=f"C{index}", linewidth=2, label=label)
    axis.legend(loc="best", frameon=False, fontsize=8)


def style(axis: Axes, title: str) -> None:
    """Give a panel of figures by step its title and lines, and the limits of shares unless they are none."""
    axis.set(title=title, xlabel="step")
    if axis.dataLim.y0 >= 0 and axis.dataLim.y1 <= 1:
        axis.set_ylim(-0.02, 1.02)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)


def draw(groups: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draw training and evaluation of each group into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4 * len(groups)), dpi=110, layout="constrained")
    axes = figure.subplots(len(groups), 2, squeeze=False)
    for row, (name, runs) in zip(axes, groups.items(), strict=True):
        for axis, names, lines in ((row[0], TRAINING, "steps"), (row[1], EVALUATION, "evaluations")):
            what = measure(runs, names, lines)
            curves = [series(getattr(run, lines), what) for run in runs]
            marker = "" if lines == "steps" else "o"
            for curve in curves:
                axis.plot(list(curve), list(curve.values()), color=LIGHT, linewidth=1.2, marker=marker)
            mean = mean_of(curves)
            axis.plot(list(mean), list(mean.values()), color=COLOUR, linewidth=2.4, marker=marker)
            style(axis, f"{name}: {what}")
        ends = mean_of([series(run.evaluations, measure(runs, EVALUATION, "evaluations")) for run in runs])
        for step, value in ends.items():
            row[1].annotate(f"{value:.2f}", (step, value), textcoords="offset points", xytext=(8, 6))
    figure.savefig(path)


def draw_together(groups: Mapping[str, Sequence[Run]], figures: Sequence[str], path: Path) -> None:
    """Draw figures of all groups into a PNG file, a panel for each."""
    from matplotlib.figure import Figure

    together = [run for runs in groups.values() for run in runs]
    names = figures or [measure(together, TRAINING, "steps"), measure(together, EVALUATION, "evaluations")]
    drawn = Figure(figsize=(5.5 * len(names), 4.4), dpi=110, layout="constrained")
    for axis, name in zip(drawn.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        lines = "evaluations" if name.startswith("eval/") else "steps"
        curves = {group: [series(getattr(run, lines), name) for run in runs] for group, runs in groups.items()}
        measured = {group: found for group, found in curves.items() if all(found)}
        if not measured:
            raise SystemExit(f"{name}: no runs of one name all have it; a figure of {', '.join(groups)} was expected")
        overlay(axis, measured)
        style(axis, name)
    drawn.savefig(path)


def made_up(parent: Path) -> list[Path]:
    """Write two runs of three steps, such as no model has made, for `--smoke`; return their folders."""
    folders = []
    for seed in range(2):
        folder = parent / f"made-up{MARK}{seed}"
        folder.mkdir()
        steps = [{"step": step, "rollout/success": 0.2 * step} for step in (1, 2, 3)]
        evaluations = [{"step": step, "eval/success": 0.2 * step + 0.1 * seed, "eval/pass@4": 0.9} for step in (0, 3)]
        for name, lines in (("metrics", steps), ("evaluations", evaluations)):
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (folder / "summary.json").write_text('{"seconds": 1.0}')
        folders.append(folder)
    return folders


def parser() -> Options:
    """Return the options."""
    found = Options(__doc__)
    found.add_argument("runs", nargs="*", type=Path, help="folders of finished runs (default: runs/*-seed-*)")
    found.add_argument("-o", "--output", type=Path, default=Path("seeds.png"), help="the figure")
    found.add_argument(
        "--together",
        nargs="*",
        metavar="FIGURE",
        help="draw all names into one panel, for each of these figures (default: the first of training and evaluation)",
    )
    return found


def main() -> None:
    """Print the tables and draw the figure."""
    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = made_up(Path(folder)) if options.smoke else options.runs or list((ROOT / "runs").glob(f"*{MARK}*"))
        groups = read_runs(runs)
    if not groups:
        raise SystemExit(f"no finished run was found; expected folders such as runs/quickstart{MARK}0")
    figures: dict[str, Any] = {"benchmark": "seeds"}
    for name, runs in groups.items():
        figures |= table(name, runs)
    if options.together is None:
        draw(groups, options.output)
    else:
        draw_together(groups, options.together, options.output)
    print(f"\n{options.output}")
    finish(options, figures)


if __name__ == "__main__":
    main()
