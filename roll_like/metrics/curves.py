"""Which curves say what a run learned, what that did to its answers and what it cost, and the lines of each.

A metric that is to be drawn has a row in `names.METRICS` and one in `PANELS`. Images (`plots.py`) and the page of
`roll-like report` draw the same `Line`s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from roll_like.metrics.guards import without_update
from roll_like.metrics.names import TIMERS, metric_info, without_smaller_passes
from roll_like.metrics.runs import MetricRecord, Run

#: Steps and a value for each; NaN where there was no finite one.
Points: TypeAlias = tuple[Sequence[int], Sequence[float]]
#: Stretches of a longer curve, each of which is drawn by its lowest and its highest value: a page stays small.
STRETCHES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One axis of a figure.

    Attributes:
        title: What it shows.
        names: The metrics of its lines: regular expressions in `PANELS`, names where a run is drawn.
        of: Kinds of runs whose `curves.png` has it (`_KINDS`); a page shows every panel of which something is logged.
        kind: `steps` draws metrics of training steps, `evaluations` those of evaluations, `time` stacks the parts of
            each step.
        smooth: Whether the metrics are too noisy to be read step by step.
        needs: A metric without which there is no such panel.
    """

    title: str
    names: tuple[str, ...]
    of: str = ""
    kind: Literal["steps", "evaluations", "time"] = "steps"
    smooth: bool = False
    needs: str = ""


#: Kinds of runs, each by a metric that only it logs: given answers, preferences, distillation; else policies.
_KINDS = {"train/perplexity": "given", "preference/accuracy": "preferences", "distill/cross_entropy": "distillation"}
_ALL = "given preferences distillation policy"
#: What is evaluated beside `eval/avg`: what stays as it is (the base model) comes before shares of solved tasks.
_BESIDE, _SOLVED = r"eval/(base|adapter/[^/]+)/avg", r"eval/(success|pass@\d+|maj@\d+)"

#: Every panel there is, in the order in which they are shown. A metric is drawn by the first one that names it.
PANELS = (
    Panel(title="Reverse KL to the teachers", names=("distill/reverse_kl",), of="policy"),
    Panel(title="Training reward", names=("rollout/reward/mean",), of="policy preferences", smooth=True),
    Panel(
        title="Divergence and its loss",
        names=("distill/kl", "train/loss"),
        of="distillation policy",
        needs="distill/kl",
    ),
    Panel(
        title="Evaluation",
        names=("eval/reverse_kl", "eval/avg", _BESIDE, _SOLVED),
        of="policy preferences",
        kind="evaluations",
    ),
    Panel(title="Loss", names=("train/loss",), of="given preferences"),
    Panel(title="Evaluation", names=("eval/kl", "eval/cross_entropy"), of="distillation", kind="evaluations"),
    Panel(title="Evaluation", names=("eval/accuracy", "eval/pair_accuracy"), of="preferences", kind="evaluations"),
    Panel(title="Evaluation", names=("eval/loss",), of="given", kind="evaluations"),
    Panel(title="Most likely token as the teacher's", names=("distill/top1_agreement",), of="distillation"),
    Panel(title="The same in the evaluation", names=("eval/top1_agreement",), of="distillation", kind="evaluations"),
    Panel(title="Right preferences in training", names=("preference/accuracy",), of="preferences"),
    Panel(
        title="Score of chosen and rejected",
        names=("preference/score_chosen", "preference/score_rejected"),
        of="preferences",
    ),
    Panel(
        title="Reward of chosen and rejected",
        names=("preference/reward_chosen", "preference/reward_rejected"),
        of="preferences",
    ),
    Panel(title="Learning rate", names=("train/lr",), of="given"),
    Panel(title="Tokens per second", names=("throughput/tokens_per_second",), of="given"),
    Panel(title="Response length", names=("rollout/response_length/mean",), of="policy"),
    Panel(title="KL from reference, engine mismatch", names=("train/kl", "mismatch/kl"), of="policy"),
    Panel(title="Gradient norm before clipping", names=("train/grad_norm",), of=_ALL),
    Panel(title="Time of a step", names=tuple(TIMERS), of=_ALL, kind="time"),
    Panel(title="Training reward by domain, smoothed", names=("rollout/domain/.+/reward",), of="policy", smooth=True),
    Panel(
        title="Staleness of samples, in versions",
        names=("staleness/mean", "staleness/max"),
        of="policy",
        needs="util/trainer_wait",
    ),
    Panel(
        title="Trainer waiting, engines busy",
        names=("util/trainer_wait", "util/engines"),
        of="policy",
        needs="util/trainer_wait",
    ),
    Panel(title="Explained variance of the critic", names=("critic/explained_variance",), of="policy"),
    Panel(title="Solved episodes", names=("rollout/success",)),
    Panel(title="Entropy of the policy", names=("train/entropy",)),
    Panel(title="Clipped tokens", names=("train/clip_fraction_high", "train/clip_fraction_low")),
    Panel(title="Truncated responses", names=("rollout/truncated",)),
    Panel(title="Turns of an episode", names=("rollout/turns",)),
    Panel(title="Resident memory of all processes", names=("memory/rss_gib",)),
)
#: What a metric of a panel of two is called by itself.
_ALONE = {"train/kl": "KL from reference", "mismatch/kl": "Engine mismatch"}


def choose_panels(
    steps: Iterable[MetricRecord], evaluations: Iterable[MetricRecord], *, brief: bool = False
) -> list[Panel]:
    """Return the panels of which something is logged, each with the names of its metrics.

    Args:
        steps: Lines of `metrics.jsonl`.
        evaluations: Lines of `evaluations.jsonl`.
        brief: Only those that say most of a run of its kind: the panels of `curves.png`.
    """
    logged = {"steps": _names(steps), "evaluations": _names(evaluations)}
    logged["time"] = logged["steps"]
    run = next((kind for name, kind in _KINDS.items() if name in logged["steps"]), "policy")
    shown: set[str] = set()
    chosen = []
    for panel in PANELS:
        if brief and run not in panel.of.split():
            continue
        names = _present(panel, logged[panel.kind])
        if names and shown.isdisjoint(names):
            shown.update(names)
            chosen.append(replace(panel, names=names, title=_title(panel, names)))
    return chosen


def _names(records: Iterable[MetricRecord]) -> set[str]:
    return {name for record in records for name in record}


def _present(panel: Panel, logged: set[str]) -> tuple[str, ...]:
    """Return which of a panel's metrics are logged."""
    if panel.needs and panel.needs not in logged:
        return ()
    found: dict[str, None] = {}
    for pattern in panel.names:
        if pattern == _SOLVED and any(re.fullmatch(_BESIDE, name) for name in found):
            continue
        # pass@k before maj@k: an axis has room for three
        there = sorted((name for name in logged if re.fullmatch(pattern, name)), reverse=panel.kind == "evaluations")
        found.update(dict.fromkeys(there))
    return tuple(without_smaller_passes(found))


def _title(panel: Panel, names: Sequence[str]) -> str:
    return _ALONE.get(names[0], panel.title) if len(names) == 1 else panel.title


def split_panels(panels: Iterable[Panel]) -> list[Panel]:
    """Return a panel for each metric, each metric once: with several runs in it, a panel has room for one."""
    found: dict[tuple[str, str], Panel] = {}
    for panel in panels:
        for name in panel.names if panel.kind != "time" else ():
            title = panel.title if len(panel.names) == 1 else f"{panel.title}: {metric_info(name).label}"
            found.setdefault((panel.kind, name), replace(panel, names=(name,), title=_ALONE.get(name, title)))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel.

    Attributes:
        name: Its metric.
        label: What it is, for the legend.
        points: Steps and values, NaN where the line is interrupted.
        low: Lower end of a band around it, one value a step; empty without a band.
        high: Upper end.
        faint: The single steps behind a smoothed line.
        lost: Steps whose value was NaN or infinite.
        idle: Steps in which there was nothing to learn.
    """

    name: str
    label: str
    points: Points
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    faint: Points | None = None
    lost: Sequence[int] = ()
    idle: Sequence[int] = ()


def lines_of(panel: Panel, run: Run) -> list[Line]:
    """Return a line for each metric of a panel that a run has logged."""
    return [line for name in panel.names if (line := _line(panel, name, run, metric_info(name).label)).points[0]]


def lines_beside(panel: Panel, runs: Mapping[str, Run]) -> list[Line]:
    """Return the metric of a panel as a line for each run, by the runs' labels; one without points has none.

    They are in the order of the runs, so that a run has the same colour in each panel.
    """
    return [_line(panel, panel.names[0], run, label) for label, run in runs.items()]


def mean_line(lines: Sequence[Line]) -> Line | None:
    """Return the mean of lines of different runs with a band from the least to the most; None of fewer than two.

    It covers the steps of which all runs that have the metric have a finite value.
    """
    values = [
        {step: value for step, value in zip(*line.points, strict=True) if math.isfinite(value)}
        for line in lines
        if line.points[0]
    ]
    if len(values) < 2:
        return None
    steps = sorted(set.intersection(*map(set, values)))
    at = [[of_run[step] for of_run in values] for step in steps]
    mean = [math.fsum(of_step) / len(of_step) for of_step in at]
    return Line(lines[0].name, "mean", (steps, mean), low=[*map(min, at)], high=[*map(max, at)])


def _line(panel: Panel, name: str, run: Run, label: str) -> Line:
    records = run.evaluations if panel.kind == "evaluations" else run.steps
    if panel.kind == "time":
        if not any(record.get(name, 0) for record in records):
            return Line(name, label, ([], []))
        return Line(name, label, ([record["step"] for record in records], [float(r.get(name, 0.0)) for r in records]))
    points = [(record["step"], float(record[name])) for record in records if name in record]
    steps = [step for step, _ in points]
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    lost = [step for step, value in zip(steps, values, strict=True) if math.isnan(value)]
    if not panel.smooth:
        return Line(name, label, (steps, values), lost=lost)
    idle = [record["step"] for record in records if without_update(record) is not None]
    alone = len(panel.names) == 1
    return Line(
        name,
        label,
        (steps, smoothed(values)),
        faint=(steps, values) if alone else None,
        lost=lost,
        idle=idle if alone else (),
    )


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean over a centred window of an eighth of the run (at least three steps).

    Of fewer than six steps each stays as it is: such a window would be most of the run.
    """
    radius = max(1, len(values) // 16) if len(values) >= 6 else 0
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    found = []
    for index in range(len(values)):
        first, last = max(0, index - radius), min(len(values), index + radius + 1)
        count = counts[last] - counts[first]
        found.append((sums[last] - sums[first]) / count if count else math.nan)
    return found


def thinned(line: Line) -> Line:
    """Return a line with fewer points where it has many, peaks kept.

    Of a band the lowest and the highest value of each stretch, with the mean of its means between them.
    """
    steps = line.points[0]
    if not line.low or len(steps) <= 2 * STRETCHES:
        points = line.points if line.low else _peaks(line.points)
        return replace(line, points=points, faint=None if line.faint is None else _peaks(line.faint))
    parts = list(_stretches(len(steps)))
    return replace(
        line,
        points=averaged(line.points),
        low=[min(line.low[part]) for part in parts],
        high=[max(line.high[part]) for part in parts],
    )


def _peaks(points: Points) -> Points:
    """Return the lowest and the highest point of each stretch, in their order; few points as they are."""
    steps, values = points
    if len(steps) <= 2 * STRETCHES:
        return points
    kept: list[int] = []
    for part in _stretches(len(steps)):
        inside = [index for index in range(part.start, part.stop) if not math.isnan(values[index])] or [part.start]
        kept += sorted({min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)})
    return [steps[index] for index in kept], [values[index] for index in kept]


def averaged(points: Points) -> Points:
    """Return the mean of each stretch of a long series; all values of it are finite."""
    steps, values = points
    if len(steps) <= STRETCHES:
        return points
    parts = list(_stretches(len(steps)))
    return (
        [steps[(part.start + part.stop) // 2] for part in parts],
        [math.fsum(values[part]) / (part.stop - part.start) for part in parts],
    )


def _stretches(count: int) -> Iterator[slice]:
    for number in range(STRETCHES):
        yield slice(number * count // STRETCHES, (number + 1) * count // STRETCHES)
