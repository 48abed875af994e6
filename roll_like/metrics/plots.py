"""Images of curves: `curves.png` of a run, and several runs over each other."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll_like.metrics.curves import Line, Panel, averaged, choose_panels, lines_of, thinned
from roll_like.metrics.names import TIMERS, metric_info
from roll_like.metrics.runs import Run

#: Of lines, in their order; further lines are dashed. The page has the same ones, `--line-0` to `--line-7`.
COLOURS = ("#1d5fa8", "#d1642e", "#2a9d8f", "#9b5de5", "#b8860b", "#6b7280", "#c2185b", "#5d7a1f")
DASHES = ("-", "--", ":", "-.")
LIGHT, NOTE, LOST, IDLE = "#a9c8e8", "#999999", "#c62828", "#d1642e"


def draw_curves(path: Path, run: Run) -> None:
    """Draw the panels that say most of a run into a PNG file.

    Raises:
        OSError: The file cannot be written.
    """
    panels = choose_panels(run.steps, run.evaluations, brief=True)
    draw_panels(path, [(panel, lines_of(panel, run)) for panel in panels], title=run.name)


def draw_panels(
    path: Path, panels: Sequence[tuple[Panel, Sequence[Line]]], *, title: str = "", runs: Sequence[str] = ()
) -> None:
    """Draw panels into a PNG file.

    Args:
        runs: Labels of the runs whose lines each panel has, in this order, for one legend below all panels.

    Raises:
        OSError: The file cannot be written.
    """
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # says that it builds a cache
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = max(1, min(math.ceil(len(panels) / 2), 5))
    rows = max(1, math.ceil(len(panels) / columns))
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(1 + 4 * columns, 3.4 * rows + 0.2 + 0.1 * len(runs)), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(title, fontsize=14, fontweight="bold")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, (panel, lines) in zip(axes, panels, strict=False):
            draw_panel(axis, panel, lines, legend=not runs)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        if runs:
            handles = [Line2D([], [], color=colour, linestyle=dash) for colour, dash in map(_style, range(len(runs)))]
            # matplotlib leaves out what begins with an underscore
            named = [f" {label}" if label.startswith("_") else label for label in runs]
            figure.legend(handles, named, loc="outside lower center", ncols=columns, frameon=False)
        figure.savefig(path)


def draw_panel(axis: Any, panel: Panel, lines: Sequence[Line], *, legend: bool = True) -> None:
    """Draw a panel into an axis of matplotlib.

    Args:
        legend: Whether lines are named, where there are several or something is marked.
    """
    axis.set_title(panel.title)
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    if panel.kind == "time":
        axis.set_ylabel("seconds")
        _draw_time(axis, lines)
        return
    info = metric_info(panel.names[0])
    # the legend names several lines
    axis.set_ylabel("mean reward" if panel.smooth else info.unit or (info.label if len(lines) == 1 else ""))
    for index, line in enumerate(map(thinned, lines)):
        colour, dash = _style(index)
        style = {"color": colour, "linestyle": dash, "marker": "o" if panel.kind == "evaluations" else ""}
        label = line.name if legend and not panel.smooth else line.label
        if line.faint is not None and legend:
            plot_finite(axis, line.faint, color=LIGHT, linewidth=1.2, label="each step")
            label = "smoothed"
        plot_finite(axis, line.points, linewidth=2.0, label=label, **style)
    bottom = axis.get_xaxis_transform()  # x in steps, y in shares of the axis
    lost = sorted({step for line in lines for step in line.lost})
    if lost:  # so that no gap is overlooked
        axis.plot(lost, [0.03] * len(lost), "x", color=LOST, markersize=6, transform=bottom, label="not finite")
    idle = [step for line in lines for step in line.idle] if legend else []
    if idle:
        axis.plot(idle, [0.02] * len(idle), "|", color=IDLE, markersize=9, transform=bottom, label="no update")
    drawn = [points for line in lines for points in (line.points, line.faint) if points is not None]
    fit_constant(axis, [value for _, values in drawn for value in values])
    if legend and len(axis.lines) > 1:
        axis.legend(frameon=False, loc="best", fontsize=8)


def _style(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def plot_finite(axis: Any, points: tuple[Sequence[int], Sequence[float]], *, marker: str = "", **style: Any) -> None:
    """Plot a line that ends where a value is not finite; a value between two such gets a mark, as it has no line."""
    steps, values = points
    there = [False, *(math.isfinite(value) for value in values), False]
    alone = [index for index in range(len(values)) if there[index + 1] and not there[index] and not there[index + 2]]
    marks = {"marker": "o", "markevery": alone} if alone and not marker else {"marker": marker}
    axis.plot(steps, values, **{"markersize": 4, **marks, **style})


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


def _draw_time(axis: Any, lines: Sequence[Line]) -> None:
    bottom = np.zeros(0)
    for line in lines:
        steps, layer = averaged(line.points)
        width = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 0.4
        bottom = bottom if len(bottom) else np.zeros(len(steps))
        axis.bar(steps, layer, width=width, bottom=bottom, color=TIMERS[line.name][1], label=line.label)
        bottom = bottom + layer
    # a step that evaluates or saves is far taller than the others
    axis.set_ylim(0, float(np.percentile(bottom, 90)) * 1.35)
    axis.legend(frameon=False, ncols=3, fontsize=8, loc="upper right")
