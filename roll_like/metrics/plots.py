"""The figure of a run: what it learned, what that did to its answers, and where the time went."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from roll_like.metrics.guards import without_update
from roll_like.metrics.names import metric_info
from roll_like.metrics.panels import REWARD, TIME, MetricRecord, Panel, choose_panels

TIMER_COLOURS = {
    "time/generate": "#2a9d8f",
    "time/reward": "#9b5de5",
    "time/teachers": "#f4845f",
    "time/logprobs": "#48cae4",
    "time/train": "#3a6ea5",
    "time/sync": "#e9c46a",
    "time/evaluate": "#8ab17d",
    "time/idle": "#d9d9d9",
}
DOMAIN_COLOURS = ("#1d5fa8", "#d1642e", "#2a9d8f", "#9b5de5", "#b8860b", "#7a7a7a")
LINE, LIGHT, SECOND, THIRD = "#1d5fa8", "#a9c8e8", "#d1642e", "#2a9d8f"
NOTE, LOST = "#999999", "#c62828"


def draw_curves(path: Path, name: str, steps: Sequence[MetricRecord], evaluations: Sequence[MetricRecord]) -> None:
    """Draw panels into a PNG file: reward, evaluation, length, KL, gradient norm, time; domains and critic if any.

    Args:
        path: The file.
        name: The run's name, for the title.
        steps: Lines of `metrics.jsonl`, one per step, in order.
        evaluations: Lines of `evaluations.jsonl`, in order.

    Raises:
        OSError: The file cannot be written.
    """
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # says that it builds a cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(steps, evaluations)
    columns = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(1 + 4 * columns, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(name, fontsize=14, fontweight="bold")
    axes = figure.subplots(2, columns).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        panel(axis)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis in axes:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
    figure.savefig(path)


def _panels(steps: Sequence[MetricRecord], evaluations: Sequence[MetricRecord]) -> list[Callable[[Any], None]]:
    """Return what draws each panel."""
    return [partial(_draw, panel, steps, evaluations) for panel in choose_panels(steps, evaluations)]


def _draw(panel: Panel, steps: Sequence[MetricRecord], evaluations: Sequence[MetricRecord], axis: Any) -> None:
    if panel.kind == "reward":
        _draw_reward(axis, steps)
    elif panel.kind == "domains":
        _draw_domains(axis, steps, panel)
    elif panel.kind == "time":
        _draw_time(axis, steps)
    elif panel.kind == "evaluations":
        _draw_lines(axis, evaluations, panel, marker="o")
    else:
        _draw_lines(axis, steps, panel)


def series(records: Sequence[MetricRecord], name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a metric, and its values."""
    points = [(record["step"], float(record[name])) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def plot_finite(axis: Any, steps: Sequence[int], values: Sequence[float], *, marker: str = "", **style: Any) -> None:
    """Plot a line that ends where a value is not finite; a value between two such gets a mark, as it has no line."""
    finite = [value if math.isfinite(value) else math.nan for value in values]
    there = [False, *(not math.isnan(value) for value in finite), False]
    alone = [index for index in range(len(finite)) if there[index + 1] and not there[index] and not there[index + 2]]
    marks = {"marker": "o", "markevery": alone} if alone and not marker else {"marker": marker}
    axis.plot(steps, finite, **{"markersize": 4, **marks, **style})


def mark_lost(axis: Any, steps: Sequence[int]) -> None:
    """Mark at the bottom of an axis the steps whose value was not finite, so that no gap is overlooked."""
    if steps:
        bottom = axis.get_xaxis_transform()  # x in steps, y in shares of the axis
        axis.plot(steps, [0.03] * len(steps), "x", color=LOST, markersize=6, transform=bottom, label="not finite")


def lost(steps: Sequence[int], values: Sequence[float]) -> list[int]:
    """Return the steps whose value is not finite."""
    return [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]


def fit_constant(axis: Any, values: Sequence[float]) -> None:
    """Give an axis whose values are all the same one limits that show how large they are: from 0 to twice that.

    Matplotlib's are a few percent around the value, and ±0.05 around 0, as if there were something to see.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        axis.set_yticks([])
    if not finite or max(finite) - min(finite) > 1e-9 * abs(max(finite)):
        return
    value = finite[0]
    low, high = min(0.0, 2 * value), max(0.0, 2 * value)
    axis.set_ylim((-0.05, 1.0) if value == 0 else (low, high))
    if value == 0:
        axis.text(0.5, 0.5, "0 throughout", ha="center", va="center", color=NOTE, transform=axis.transAxes)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean over a centred window of an eighth of the run (at least three steps).

    Of fewer than six steps each stays as it is: such a window would be most of the run.
    """
    radius = max(1, len(values) // 16) if len(values) >= 6 else 0
    parts = (values[max(0, i - radius) : i + radius + 1] for i in range(len(values)))
    finite = ([value for value in part if math.isfinite(value)] for part in parts)
    return [float(np.mean(part)) if part else math.nan for part in finite]


def _draw_reward(axis: Any, steps: Sequence[MetricRecord]) -> None:
    x, mean = series(steps, "rollout/reward/mean")
    axis.set_title(REWARD.title)
    axis.set_ylabel("mean reward")
    plot_finite(axis, x, mean, color=LIGHT, linewidth=1.2, label="each step")
    plot_finite(axis, x, smoothed(mean), color=LINE, linewidth=2.2, label="smoothed")
    mark_lost(axis, lost(x, mean))
    fit_constant(axis, mean)
    if idle := [record["step"] for record in steps if without_update(record) is not None]:
        bottom = axis.get_xaxis_transform()  # x in steps, y in shares of the axis
        axis.plot(idle, [0.02] * len(idle), "|", color=SECOND, markersize=9, transform=bottom, label="no update")
    axis.legend(frameon=False, loc="best", fontsize=8)


def _draw_domains(axis: Any, steps: Sequence[MetricRecord], panel: Panel) -> None:
    axis.set_title(panel.title)
    axis.set_ylabel("mean reward")
    drawn: list[float] = []
    for name, colour in zip(panel.names, cycle(DOMAIN_COLOURS), strict=False):
        x, y = series(steps, name)
        plot_finite(axis, x, smoothed(y), color=colour, linewidth=1.8, label=metric_info(name).label)
        drawn += y
    fit_constant(axis, drawn)
    axis.legend(frameon=False, loc="best", fontsize=8)


def _draw_lines(axis: Any, records: Sequence[MetricRecord], panel: Panel, marker: str = "") -> None:
    axis.set_title(panel.title)
    found = {name: points for name in panel.names if (points := series(records, name))[0]}
    for (name, (x, y)), colour in zip(found.items(), (LINE, SECOND, THIRD), strict=False):
        plot_finite(axis, x, y, color=colour, linewidth=1.8, marker=marker, markersize=5, label=name)
    gone = sorted({step for x, y in found.values() for step in lost(x, y)})
    mark_lost(axis, gone)
    fit_constant(axis, [value for _, y in found.values() for value in y])
    first = metric_info(next(iter(found)))
    # the legend names several lines
    axis.set_ylabel(first.unit or (first.label if len(found) == 1 else ""))
    if len(panel.names) > 1 or gone:
        axis.legend(frameon=False, loc="best", fontsize=8)


def _draw_time(axis: Any, steps: Sequence[MetricRecord]) -> None:
    axis.set_title(TIME.title)
    axis.set_ylabel("seconds")
    known = [name for name in TIMER_COLOURS if any(record.get(name, 0) for record in steps)]
    if not known:
        _not_measured(axis)
        return
    x = [record["step"] for record in steps]
    layers = [[float(record.get(name, 0.0)) for record in steps] for name in known]
    width = 1.0 if len(x) > 1 else 0.4
    bottom = np.zeros(len(x))
    for name, layer in zip(known, layers, strict=True):
        axis.bar(x, layer, width=width, bottom=bottom, color=TIMER_COLOURS[name], label=metric_info(name).label)
        bottom += np.asarray(layer)
    # a step that evaluates or saves is far taller than the others
    axis.set_ylim(0, float(np.percentile(bottom, 90)) * 1.35)
    axis.legend(frameon=False, ncols=3, fontsize=8, loc="upper right")


def _not_measured(axis: Any) -> None:
    axis.text(0.5, 0.5, "not measured", ha="center", va="center", color=NOTE, transform=axis.transAxes)
    axis.set_yticks([])
