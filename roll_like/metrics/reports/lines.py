"""Lines of a panel: of one run, of the mean over seeds with its band, of several runs beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from roll_like.metrics.names import metric_info
from roll_like.metrics.panels import Panel
from roll_like.metrics.plots import lost, series, smoothed
from roll_like.metrics.runs import Run

#: Steps and a value for each.
Points: TypeAlias = tuple[Sequence[int], Sequence[float]]
#: Stretches of a longer curve, each of which is drawn by its lowest and its highest value: a page stays small.
STRETCHES = 400
#: Panels whose metrics are too noisy to be read step by step.
_SMOOTHED = ("reward", "domains")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel.

    Attributes:
        name: Its metric.
        label: What it is, for the legend.
        points: Steps and values; none is NaN or infinite.
        low: Lower end of a band around it, one value a step; empty without a band.
        high: Upper end.
        faint: Lines behind it, without a label: single steps behind a smoothed line, single runs behind a mean.
        marked: Whether each point gets a mark, as evaluations do.
        lost: Steps whose value was NaN or infinite, in any of the runs.
    """

    name: str
    label: str
    points: Points
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    faint: Sequence[Points] = ()
    marked: bool = False
    lost: Sequence[int] = ()


def lines_of(panel: Panel, runs: Sequence[Run]) -> list[Line]:
    """Return a line for each metric of a panel: of a run, or the mean over runs with a band from the least to the most.

    A mean is over steps that all runs with that metric have; beyond them each run is drawn by itself, faintly.
    """
    found = [_mean_line(panel, name, runs) for name in panel.names]
    return [line for line in found if line is not None]


def lines_beside(panel: Panel, runs: Mapping[str, Run]) -> list[Line]:
    """Return the first metric of a panel as a line for each run, by the runs' labels; one without points has none.

    They are in the order of the runs, so that a run has the same colour in each panel.
    """
    name, marked = panel.names[0], panel.kind == "evaluations"
    return [
        Line(name, label, _shown(panel, _points(panel, name, run)), marked=marked, lost=_lost(panel, name, [run]))
        for label, run in runs.items()
    ]


def _mean_line(panel: Panel, name: str, runs: Sequence[Run]) -> Line | None:
    label, marked = metric_info(name).label, panel.kind == "evaluations"
    raw = [points for run in runs if (points := _points(panel, name, run))[0]]
    if not raw:
        return None
    if len(raw) == 1:
        faint = raw if panel.kind == "reward" else []
        return Line(name, label, _shown(panel, raw[0]), faint=faint, marked=marked, lost=_lost(panel, name, runs))
    shown = [_shown(panel, points) for points in raw]
    values = [dict(zip(*points, strict=True)) for points in shown]
    steps = sorted(set.intersection(*(set(of_run) for of_run in values)))
    at = [[of_run[step] for of_run in values] for step in steps]
    return Line(
        name,
        label,
        (steps, [math.fsum(of_step) / len(of_step) for of_step in at]),
        low=[min(of_step) for of_step in at],
        high=[max(of_step) for of_step in at],
        faint=shown,
        marked=marked,
        lost=_lost(panel, name, runs),
    )


def _measured(panel: Panel, name: str, run: Run) -> tuple[list[int], list[float]]:
    return series(run.evaluations if panel.kind == "evaluations" else run.steps, name)


def _lost(panel: Panel, name: str, runs: Sequence[Run]) -> list[int]:
    return sorted({step for run in runs for step in lost(*_measured(panel, name, run))})


def _points(panel: Panel, name: str, run: Run) -> Points:
    steps, values = _measured(panel, name, run)
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]


def _shown(panel: Panel, points: Points) -> Points:
    steps, values = points
    return steps, smoothed(values) if panel.kind in _SMOOTHED else values


def thinned(line: Line) -> Line:
    """Return a line with fewer points where it has many, peaks kept.

    Of a band the lowest and the highest value of each stretch, with the mean of its means between them.
    """
    faint = tuple(map(_peaks, line.faint))
    steps, values = line.points
    if not line.low or len(steps) <= 2 * STRETCHES:
        return replace(line, points=line.points if line.low else _peaks(line.points), faint=faint)
    parts = list(_stretches(len(steps)))
    return replace(
        line,
        points=(
            [steps[(part.start + part.stop) // 2] for part in parts],
            [math.fsum(values[part]) / (part.stop - part.start) for part in parts],
        ),
        low=[min(line.low[part]) for part in parts],
        high=[max(line.high[part]) for part in parts],
        faint=faint,
    )


def _peaks(points: Points) -> Points:
    """Return the lowest and the highest point of each stretch, in their order; few points as they are."""
    steps, values = points
    if len(steps) <= 2 * STRETCHES:
        return points
    kept: list[int] = []
    for part in _stretches(len(steps)):
        inside = range(part.start, part.stop)
        kept += sorted({min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)})
    return [steps[index] for index in kept], [values[index] for index in kept]


def _stretches(count: int) -> Iterator[slice]:
    for number in range(STRETCHES):
        yield slice(number * count // STRETCHES, (number + 1) * count // STRETCHES)
