"""Runs as they are looked at: their figures, the keys of their configurations that differ, their curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from roll_like.errors import ConfigError, DataError
from roll_like.metrics import files
from roll_like.metrics.curves import Line, Panel, choose_panels, lines_beside, lines_of, split_panels
from roll_like.metrics.names import metric_info, without_smaller_passes
from roll_like.metrics.plots import draw_panels
from roll_like.metrics.progress import HEADLINES, duration, format_number
from roll_like.metrics.rollout_text import printable
from roll_like.metrics.runs import ABSENT, NOT_COMPARED, Run, differences, labels_of, read_config, read_run
from roll_like.metrics.summary import figures_of, status_of

#: What a run is about, besides the console's headlines; in this order, of an evaluation first.
_EVALUATED = (
    "eval/avg",
    "eval/success",
    "eval/accuracy",
    "eval/pair_accuracy",
    "eval/perplexity",
    "eval/loss",
    "eval/top1_agreement",
    "eval/kl",
    "eval/reverse_kl",
)
#: Figures that a console shows besides the headlines.
_COSTS = ("train/kl", "throughput/tokens_per_second", "time/step", "memory/rss_gib")
#: Headline figures that are shown at most.
_MOST_HEADLINES = 8
#: Columns of a terminal for the names of rows, and the least for a run.
_NAMES, _LEAST = 34, 18


@dataclass(frozen=True, slots=True)
class RunComparison:
    """One run or several, and what is to be said of them beside each other.

    Attributes:
        runs: By their labels, in the order in which they were named.
        configs: The configuration of each, empty where it was not kept.
        figures: `summary.json` of each.
        differing: Keys of the configuration that differ, each with its values in the order of the runs.
        notes: What limits the comparison.
    """

    runs: Mapping[str, Run]
    configs: Sequence[Mapping[str, Any]]
    figures: Sequence[Mapping[str, Any]]
    differing: Mapping[str, Sequence[str]]
    notes: Sequence[str]

    def headlines(self) -> list[str]:
        """Return which metrics come first: evaluations, what the pipeline learns from, the length of responses."""
        return headlines(name for one in self.figures for name in one["before_after"])

    def curves(self) -> list[tuple[Panel, list[Line]]]:
        """Return the panels of a run with their lines; of several runs one for each metric, a line for each run."""
        chosen = [choose_panels(run.steps, run.evaluations) for run in self.runs.values()]
        if len(self.runs) == 1:
            (run,) = self.runs.values()
            return [(panel, lines_of(panel, run)) for panel in chosen[0] if panel.kind != "time"]
        panels = split_panels(panel for of_run in chosen for panel in of_run)
        return [(panel, lines_beside(panel, self.runs)) for panel in panels]

    def draw(self, path: Path) -> None:
        """Draw the curves of several runs into a PNG file.

        Raises:
            OSError: The file cannot be written.
        """
        draw_panels(path, self.curves(), runs=list(self.runs))

    def tables(self, width: int) -> list[Table]:
        """Return what the console prints: figures, then keys that differ; several tables where columns are too many.

        Args:
            width: Columns of the terminal.
        """
        at_once = max(1, (width - _NAMES) // _LEAST)
        parts = [range(start, min(start + at_once, len(self.runs))) for start in range(0, len(self.runs), at_once)]
        tables = [self._table("figures, before → after", self._rows(), part) for part in parts]
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

    def _rows(self) -> list[tuple[str, list[str]]]:
        """Return a name and a value of each run for headline figures and costs; of metrics `before → after`."""
        rows = [
            ("pipeline", [str(one["pipeline"]) for one in self.figures]),
            ("status", [status_of(run) for run in self.runs.values()]),
            ("steps", [f"{one['steps']}/{one['total_steps']}" for one in self.figures]),
            ("duration", [duration(one["seconds"]) for one in self.figures]),
        ]
        for name, key, write in (("samples/s", "samples_per_second", _rate), ("best evaluation", "eval_best", _best)):
            if any(one[key] is not None for one in self.figures):
                rows.append((name, ["–" if one[key] is None else write(one) for one in self.figures]))
        known = {name for one in self.figures for name in one["before_after"]}
        names = dict.fromkeys((*self.headlines(), *(name for name in _COSTS if name in known)))
        rows += [(_label(name), [_ends(one["before_after"].get(name)) for one in self.figures]) for name in names]
        rows += [(key, [str(one[key]) for one in self.figures]) for key in ("failures", "warnings")]
        return rows


def headlines(names: Iterable[str]) -> list[str]:
    """Return which of these metrics say most of a run, the most important first."""
    known = dict.fromkeys(names)
    passes = without_smaller_passes(name for name in known if name.startswith(("eval/pass@", "eval/maj@")))
    wanted = [*_EVALUATED[:2], *passes, *_EVALUATED[2:], *HEADLINES, "rollout/response_length/mean", "mismatch/kl"]
    return [name for name in wanted if name in known][:_MOST_HEADLINES]


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
    return read_runs(folders, command="compare")


def read_runs(folders: Sequence[Path], *, command: str, seeds: bool = False) -> RunComparison:
    """Read one run or several.

    Args:
        command: Who asks, for messages.
        seeds: Whether the runs are to differ in their seeds only; what else differs is noted.

    Raises:
        ConfigError: A folder is named twice, or seeds are of different pipelines.
        DataError: A folder holds no run, a run has no steps, or a file is damaged.
    """
    resolved = [folder.resolve() for folder in folders]
    twice = next((folder for folder in folders if resolved.count(folder.resolve()) > 1), None)
    if twice is not None:
        raise ConfigError(f"{command}: {twice} is named twice; expected another run each time", fix="name it once")
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if not (run.steps or run.evaluations):
            raise DataError(
                f"{run.folder} has no steps yet: {files.METRICS} and {files.EVALUATIONS} are empty or missing",
                fix="wait for the first step, or see in logs/ of that folder why there was none",
            )
    labels = labels_of(folders)
    configs = [read_config(folder) for folder in folders]
    pipelines = list(dict.fromkeys(str(run.info["pipeline"]) for run in runs))
    several = ", ".join(pipelines)
    if seeds and len(pipelines) > 1:
        raise ConfigError(
            f"{command}: the runs are of different pipelines ({several}); expected runs of one experiment that differ "
            "in their seeds",
            fix="report each of them, or put them beside each other: roll-like compare RUN RUN",
        )
    notes = [f"{label} has no config.yaml" for label, config in zip(labels, configs, strict=True) if not config]
    differing = differences(configs, leave_out=("name", "output_dir"))
    if len(pipelines) > 1:
        notes.append(
            f"the runs are of different pipelines ({several}): not all figures are in all of them, and of "
            "the configuration those keys are shown that all of them have"
        )
        differing = {key: values for key, values in differing.items() if ABSENT not in values}
    if seeds:
        notes = _not_mere_seeds(runs, configs)
    figures = [figures_of(run) for run in runs]
    return RunComparison(dict(zip(labels, runs, strict=True)), configs, figures, differing, notes)


def _not_mere_seeds(runs: Sequence[Run], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what makes runs no mere seeds of each other."""
    differing = list(differences(configs, leave_out=NOT_COMPARED))
    notes = []
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        notes.append(f"these runs differ in more than their seeds: {', '.join(differing[:5])}{more}")
    seeds = [str(config.get("seed")) for config in configs if "seed" in config]
    again = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if again:
        notes.append(f"several of these runs have the seed {', '.join(again)}")
    if len({len(run.steps) for run in runs}) > 1:
        notes.append("these runs have taken different numbers of steps")
    return notes
