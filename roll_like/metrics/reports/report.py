"""The report of a run, or of the seeds of one experiment, as one page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from roll_like.errors import ConfigError, DataError
from roll_like.metrics.names import metric_info
from roll_like.metrics.panels import choose_report_panels
from roll_like.metrics.progress import format_number
from roll_like.metrics.reports import figures as texts
from roll_like.metrics.reports.configuration import NOT_COMPARED, as_yaml, differences
from roll_like.metrics.reports.events import MOST_EVENTS, Event, events_of, failures_of
from roll_like.metrics.reports.lines import lines_of
from roll_like.metrics.reports.page import Figure, figure_of, render_page
from roll_like.metrics.rollouts import RolloutRow
from roll_like.metrics.runs import Run, labels_of, read_config, read_measured_runs
from roll_like.metrics.samples import SamplePair, pick_pairs
from roll_like.metrics.summary import figures_of, status_of

#: Characters of an answer that a page shows; of a prompt a quarter.
ANSWER_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class Seed:
    """A run in the table of runs."""

    label: str
    seed: str
    status: str
    progress: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in a sample. `prompt` is None where it answers the prompt that both share; `cut` counts characters."""

    label: str
    figures: str
    text: str
    cut: int
    id: str
    prompt: str | None


@dataclass(frozen=True, slots=True)
class ComparedSample:
    """A prompt with an answer from before and one from after."""

    prompt: str
    reference: str | None
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class EventLog:
    """The events of a run; `left_out` counts earlier ones."""

    label: str
    events: tuple[Event, ...]
    left_out: int


def report_page(folders: Sequence[Path]) -> tuple[str, list[str]]:
    """Return the page of a run, or of several that differ in their seeds, and what is to be noted of them.

    Args:
        folders: One folder, or one of each seed.

    Raises:
        ConfigError: A folder is named twice, or the runs are of different pipelines.
        DataError: A folder holds no run, a run has no steps, or a file is damaged.
    """
    runs = read_measured_runs(folders, command="report")
    pipelines = list(dict.fromkeys(str(run.info["pipeline"]) for run in runs))
    if len(pipelines) > 1:
        raise ConfigError(
            f"report: the runs are of different pipelines ({', '.join(pipelines)}); expected runs of one experiment "
            "that differ in their seeds",
            fix="report each of them, or put them beside each other: roll-like compare RUN RUN",
        )
    configs = [read_config(folder) for folder in folders]
    found = [figures_of(run) for run in runs]
    changes = texts.changes(found)
    labels = labels_of(folders)
    notes = _notes(runs, configs)
    page = render_page(
        "report.html",
        title=_title([run.name for run in runs]),
        statuses=list(dict.fromkeys(map(status_of, runs))),
        pipeline=pipelines[0],
        facts=_facts(found),
        began=_began(runs[0]) if len(runs) == 1 else "",
        notes=notes,
        **_seeds(runs, found, configs, labels),
        headlines=texts.headlines(changes),
        changes=changes,
        figures=_figures(runs),
        samples=_samples(runs[0]),
        phases=texts.phases(found),
        step_seconds=texts.figure([one["step_seconds"] / one["steps"] for one in found if one["steps"]]),
        failures=failures_of(runs),
        logs=[_log(run, label) for run, label in zip(runs, labels, strict=True)],
        differing=differences(configs) if len(runs) > 1 else {},
        labels=labels,
        config=as_yaml(configs[0]),
        versions=runs[0].info["versions"],
    )
    return page, notes


def _title(names: Sequence[str]) -> str:
    """Return what names of runs begin with, without a half-said seed: `demo` of `demo-seed-0` and `demo-seed-1`."""
    if len(names) == 1:
        return names[0]
    shared = "".join(letters[0] for letters in takewhile(lambda one: len(set(one)) == 1, zip(*names, strict=False)))
    return re.sub(r"[-_. ]+(?:seed|s)?[-_. ]*\d*$", "", shared) or names[0]


def _facts(found: Sequence[Mapping[str, Any]]) -> str:
    def rate(name: str) -> list[float]:
        return [one[name] for one in found if one[name]]

    facts = [texts.progress(found[0]) if len(found) == 1 else f"{len(found)} runs"]
    facts += [
        f"{texts.figure(values)} {unit}/s"
        for unit, name in (("samples", "samples_per_second"), ("tokens", "tokens_per_second"))
        if (values := rate(name))
    ]
    if idle := sum(one["steps_without_update"] for one in found):
        facts.append(f"{idle} step{'s' * (idle != 1)} without an update")
    warnings = sum(one["warnings"] for one in found)
    return " · ".join([*facts, f"{warnings} warning{'s' * (warnings != 1)}"])


def _began(run: Run) -> str:
    first = min((*run.steps, *run.evaluations), key=lambda record: float(record["time"]), default=None)
    if first is None or not float(first["time"]):
        return ""
    began = datetime.fromtimestamp(float(first["time"]) - float(first["elapsed"]), tz=UTC)
    return f"began {began:%Y-%m-%d %H:%M} UTC · {run.folder.name}"


def _notes(runs: Sequence[Run], configs: Sequence[Mapping[str, Any]]) -> list[str]:
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


def _seeds(
    runs: Sequence[Run],
    found: Sequence[Mapping[str, Any]],
    configs: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
) -> dict[str, Any]:
    """Return the table of runs: what it holds, and the names of its last columns."""
    names = [change.name for change in texts.headlines(texts.changes(found))][:4]
    seeds = []
    for run, one, config, label in zip(runs, found, configs, labels, strict=True):
        ends = [one["before_after"].get(name, (None, None)) for name in names]
        values = tuple(texts.figure([] if after is None else [after]) for _, after in ends)
        seeds.append(Seed(label, str(config.get("seed", "–")), status_of(run), texts.progress(one), values))
    return {"seeds": seeds, "seed_columns": [metric_info(name).label for name in names]}


def _figures(runs: Sequence[Run]) -> list[Figure]:
    steps = [record for run in runs for record in run.steps]
    evaluations = [record for run in runs for record in run.evaluations]
    drawn = [(panel, lines_of(panel, runs)) for panel in choose_report_panels(steps, evaluations)]
    return [
        figure_of(panel, lines, number, legend=True) for number, (panel, lines) in enumerate(drawn, start=1) if lines
    ]


def _samples(run: Run) -> list[ComparedSample]:
    try:
        pairs = pick_pairs(run.folder, int(run.info["sampled_rollouts"]))
    except (ValueError, KeyError) as error:
        raise DataError(
            f"the rollouts of {run.folder} cannot be read: {error}",
            fix="move the damaged file out of rollouts/; the report is made without it",
        ) from error
    return [_sample(pair) for pair in pairs]


def _sample(pair: SamplePair) -> ComparedSample:
    shared = pair.before["prompt"] == pair.after["prompt"]
    reference = pair.before.get("reference")
    return ComparedSample(
        prompt=_cut(str(pair.before["prompt"]), ANSWER_CHARACTERS // 4),
        reference=str(reference) if shared and reference is not None else None,
        answers=(
            _answer(pair.before, pair.before_label, shared=True),
            _answer(pair.after, pair.after_label, shared=shared),
        ),
    )


def _answer(row: RolloutRow, label: str, *, shared: bool) -> Answer:
    text = str(row["text"]).strip("\n")
    figures = [f"reward {format_number(float(row['reward']))}"]
    figures += [f"{row['tokens']} tokens"] if "tokens" in row else []
    figures += [f"ended by {row['stop_reason']}"] if "stop_reason" in row else []
    figures += [f"read as {row['answer']}"] if row.get("answer") is not None else []
    return Answer(
        label=label,
        figures=", ".join(figures),
        text=text[:ANSWER_CHARACTERS] or "(empty)",
        cut=max(0, len(text) - ANSWER_CHARACTERS),
        id=str(row.get("id", "ID")),
        prompt=None if shared else _cut(str(row["prompt"]), ANSWER_CHARACTERS // 4),
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def _log(run: Run, label: str) -> EventLog:
    return EventLog(label, tuple(events_of(run)), max(0, len(run.events) - MOST_EVENTS))
