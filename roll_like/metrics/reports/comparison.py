"""Runs beside each other: their figures and the keys that differ in tables, their curves in one page or image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from roll_like.errors import ConfigError
from roll_like.metrics.names import metric_info
from roll_like.metrics.panels import Panel, choose_report_panels, split_panels
from roll_like.metrics.progress import duration, format_number
from roll_like.metrics.reports import figures as texts
from roll_like.metrics.reports.configuration import ABSENT, differences
from roll_like.metrics.reports.lines import Line, lines_beside
from roll_like.metrics.reports.page import figure_of, legend_of, render_page, unwritable, write_page
from roll_like.metrics.reports.svg import DASHES, ON_WHITE, draw_lines, style_axis
from roll_like.metrics.rollout_text import printable
from roll_like.metrics.runs import Run, labels_of, read_config, read_measured_runs
from roll_like.metrics.summary import figures_of, status_of

#: Figures that a console shows besides the headlines.
_COSTS = ("train/kl", "throughput/tokens_per_second", "time/step", "memory/rss_gib")
#: Columns of a terminal for the names of rows, and the least for a run.
_NAMES, _LEAST = 34, 18


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs and what is to be said of them beside each other.

    Attributes:
        runs: By their labels, in the order in which they were named.
        figures: `summary.json` of each.
        differing: Keys of the configuration that differ, each with its values in the order of the runs.
        notes: What limits the comparison.
    """

    runs: Mapping[str, Run]
    figures: Sequence[Mapping[str, Any]]
    differing: Mapping[str, Sequence[str]]
    notes: Sequence[str]

    def tables(self, width: int) -> list[Table]:
        """Return what the console prints: figures, then keys that differ; several tables where columns are too many.

        Args:
            width: Columns of the terminal.
        """
        at_once = max(1, (width - _NAMES) // _LEAST)
        parts = [range(start, min(start + at_once, len(self.runs))) for start in range(0, len(self.runs), at_once)]
        tables = [self._table("figures, before → after", self.rows(brief=True), part) for part in parts]
        if self.differing:
            keys = list(self.differing.items())
            tables += [self._table("keys of the configuration that differ", keys, part) for part in parts]
        return tables

    def _table(self, title: str, rows: Sequence[tuple[str, Sequence[str]]], part: Sequence[int]) -> Table:
        labels = list(self.runs)
        table = Table(title=title, title_justify="left")
        table.add_column("", overflow="fold", max_width=_NAMES)
        for index in part:
            table.add_column(Text(printable(labels[index])), justify="right", overflow="fold")
        for name, values in rows:
            table.add_row(*(Text(printable(cell)) for cell in (name, *(values[index] for index in part))))
        return table

    def rows(self, *, brief: bool) -> list[tuple[str, list[str]]]:
        """Return a name and a value of each run for every figure; of metrics `before → after`.

        Args:
            brief: Headline figures and costs only.
        """
        rows = [
            ("pipeline", [str(one["pipeline"]) for one in self.figures]),
            ("status", [status_of(run) for run in self.runs.values()]),
            ("steps", [f"{one['steps']}/{one['total_steps']}" for one in self.figures]),
            ("duration", [duration(one["seconds"]) for one in self.figures]),
        ]
        for name, key, write in (("samples/s", "samples_per_second", _rate), ("best evaluation", "eval_best", _best)):
            if any(one[key] is not None for one in self.figures):
                rows.append((name, ["–" if one[key] is None else write(one) for one in self.figures]))
        changes = texts.changes(self.figures)
        wanted = texts.headlines(changes) if brief else changes
        names = dict.fromkeys(change.name for change in (*wanted, *(one for one in changes if one.name in _COSTS)))
        rows += [(_label(name), [_ends(one["before_after"].get(name)) for one in self.figures]) for name in names]
        rows += [(key, [str(one[key]) for one in self.figures]) for key in ("failures", "warnings")]
        return rows

    def curves(self) -> list[tuple[Panel, list[Line]]]:
        """Return a panel for each metric that is drawn, with a line for each run."""
        panels = [panel for run in self.runs.values() for panel in choose_report_panels(run.steps, run.evaluations)]
        drawn = [(panel, lines_beside(panel, self.runs)) for panel in split_panels(panels)]
        return [(panel, lines) for panel, lines in drawn if any(line.points[0] for line in lines)]


def _label(name: str) -> str:
    unit = metric_info(name).unit
    return f"{name} ({unit})" if unit else name


def _rate(figures: Mapping[str, Any]) -> str:
    return format_number(figures["samples_per_second"])


def _best(figures: Mapping[str, Any]) -> str:
    """Write the best evaluation, and that it is no achievement of the run where it came before the first step."""
    return format_number(figures["eval_best"]) + (" (before training)" if figures["eval_best_step"] == 0 else "")


def _ends(ends: Sequence[float | None] | None) -> str:
    if ends is None or all(value is None for value in ends):
        return "–"
    return " → ".join("–" if value is None else format_number(value) for value in ends)


def compare(folders: Sequence[Path]) -> RunComparison:
    """Read runs and put them beside each other; they may be of different pipelines.

    Raises:
        ConfigError: There are fewer than two, or one is named twice.
        DataError: A folder holds no run, a run has no steps, or a file is damaged.
    """
    if len(folders) < 2:
        raise ConfigError(
            f"compare: only {folders[0]} was named; expected two runs or more",
            fix="name another run, or describe this one: roll-like report RUN",
        )
    labels = labels_of(folders)
    runs = dict(zip(labels, read_measured_runs(folders, command="compare"), strict=True))
    configs = [read_config(folder) for folder in folders]
    notes = [f"{label} has no config.yaml" for label, config in zip(labels, configs, strict=True) if not config]
    pipelines = list(dict.fromkeys(str(run.info["pipeline"]) for run in runs.values()))
    differing = differences(configs, leave_out=("name", "output_dir"))
    if len(pipelines) > 1:
        notes.append(
            f"the runs are of different pipelines ({', '.join(pipelines)}): not all figures are in all of them, and of "
            "the configuration those keys are shown that all of them have"
        )
        differing = {key: values for key, values in differing.items() if ABSENT not in values}
    return RunComparison(runs, [figures_of(run) for run in runs.values()], differing, notes)


def write_comparison(comparison: RunComparison, path: Path) -> None:
    """Write curves over each other, as a page (`.html`) or as an image (`.png`).

    Raises:
        ConfigError: The file's name ends otherwise, or it cannot be written.
    """
    kind = path.suffix.lower()
    if kind == ".png":
        draw_comparison(comparison, path)
    elif kind in {".html", ".htm"}:
        write_page(path, comparison_page(comparison))
    else:
        raise ConfigError(f"-o {path}: expected a name that ends in .html or .png", fix=f"write -o {path}.html")


def comparison_page(comparison: RunComparison) -> str:
    """Return the page: tables, and a figure for each metric with a line for each run."""
    labels = list(comparison.runs)
    figures = [
        figure_of(panel, lines, index, legend=False)
        for index, (panel, lines) in enumerate(comparison.curves(), start=1)
    ]
    return render_page(
        "comparison.html",
        title=f"{len(labels)} runs",
        labels=labels,
        legend=legend_of(labels),
        notes=comparison.notes,
        rows=comparison.rows(brief=False),
        figures=figures,
        differing=comparison.differing,
    )


def draw_comparison(comparison: RunComparison, path: Path) -> None:
    """Draw a panel for each metric into a PNG file, with one legend below.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    curves, labels = comparison.curves(), list(comparison.runs)
    columns = min(3, len(curves)) or 1
    rows = math.ceil(len(curves) / columns) or 1
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(4.6 * columns, 2.9 * rows + 0.3 + 0.2 * len(labels) / columns), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, (panel, lines) in zip(axes, curves, strict=False):
            draw_lines(axis, lines, ON_WHITE)
            style_axis(axis, ink="#1c2430", grid="#cfd5dd")
            axis.set_title(panel.title, fontsize=11)
            axis.set_ylabel(metric_info(lines[0].name).unit)
        for axis in axes[len(curves) :]:
            axis.set_visible(False)
        handles = [
            Line2D(
                [], [], color=ON_WHITE[index % len(ON_WHITE)], linestyle=DASHES[index // len(ON_WHITE) % len(DASHES)]
            )
            for index in range(len(labels))
        ]
        # matplotlib leaves out what begins with an underscore
        named = [f" {label}" if label.startswith("_") else label for label in labels]
        figure.legend(handles, named, loc="outside lower center", ncols=columns, frameon=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=110)
        except OSError as error:
            raise unwritable(path, error) from error
