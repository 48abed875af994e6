"""Figures of runs as text: before and after, times, facts; of several seeds their mean and range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_like.metrics.names import metric_info, without_smaller_passes
from roll_like.metrics.plots import TIMER_COLOURS
from roll_like.metrics.progress import HEADLINES, STEP_PHASES, duration, format_number

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
#: Headline figures that a page shows at most.
_MOST_HEADLINES = 8


@dataclass(frozen=True, slots=True)
class Change:
    """A metric before and after training, as text.

    Attributes:
        name: Name of the metric.
        label: Short name for people.
        unit: Its unit, or "".
        before: At the start; of several seeds with their range.
        after: At the end.
        means: The same without ranges: `0.25 → 0.5`.
        extents: The ranges, `0.2–0.3 → 0.4–0.6`; "" of one run.
        change: The difference of the means, with its sign; "" where one of them is missing.
        description: What the metric says.
    """

    name: str
    label: str
    unit: str
    before: str
    after: str
    means: str
    extents: str
    change: str
    description: str


@dataclass(frozen=True, slots=True)
class Phase:
    """What a part of a step takes.

    Attributes:
        label: Its name.
        seconds: Mean seconds in a step, as text.
        share: Share of the step's time; phases may overlap.
        description: What it is.
        colour: Colour of its bar.
        part: Whether it lies within another phase.
    """

    label: str
    seconds: str
    share: float
    description: str
    colour: str
    part: bool


def figure(values: Sequence[float]) -> str:
    """Write one value, or the mean of several with their range: `0.612 (0.580–0.644)`; `–` for none."""
    mean, extent = _mean(values), _extent(values)
    return f"{mean} ({extent})" if extent else mean


def _mean(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return format_number(values[0]) if values else "–"
    return format_number(math.fsum(finite) / len(finite))


def _extent(values: Sequence[float]) -> str:
    """Write the lowest and the highest value; nothing where they read the same."""
    finite = [value for value in values if math.isfinite(value)]
    ends = [format_number(end(finite)) for end in (min, max)] if finite else []
    return "" if len(set(ends)) < 2 else "–".join(ends)


def changes(figures: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Return every compared metric of runs, in the order of the first run that has it.

    Args:
        figures: `summary.json` of each run.
    """
    names = dict.fromkeys(name for one in figures for name in one["before_after"])
    return [
        _change(name, [one["before_after"][name] for one in figures if name in one["before_after"]]) for name in names
    ]


def headlines(found: Sequence[Change]) -> list[Change]:
    """Return what comes first: evaluations and what the pipeline learns from, then the length of responses."""
    by_name = {change.name: change for change in found}
    passes = without_smaller_passes(name for name in by_name if name.startswith(("eval/pass@", "eval/maj@")))
    wanted = [*_EVALUATED[:2], *passes, *_EVALUATED[2:], *HEADLINES, "rollout/response_length/mean", "mismatch/kl"]
    return [by_name[name] for name in wanted if name in by_name][:_MOST_HEADLINES]


def _change(name: str, ends: Iterable[Sequence[float | None]]) -> Change:
    pairs = [tuple(end) for end in ends]
    before, after = ([float(value) for value in side if value is not None] for side in zip(*pairs, strict=True))
    both = [(first, last) for first, last in pairs if first is not None and last is not None]
    difference = math.fsum(last - first for first, last in both) / len(both) if both else math.nan
    info = metric_info(name)
    sign = "+" if difference >= 0 else "−"
    return Change(
        name=name,
        label=info.label,
        unit=info.unit,
        before=figure(before),
        after=figure(after),
        means=f"{_mean(before)} → {_mean(after)}",
        extents=f"{_extent(before) or _mean(before)} → {_extent(after) or _mean(after)}" if len(pairs) > 1 else "",
        change=f"{sign}{format_number(abs(difference))}" if math.isfinite(difference) else "",
        description=info.description,
    )


def phases(figures: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Return what steps spent their time on, slowest first, as a mean over runs; what took no time is left out."""
    timed = [one for one in figures if one["step_seconds"] > 0]
    names = {name for one in timed for name in one["time"]}
    found = []
    for name in names:
        share = math.fsum(one["time"].get(name, 0.0) / one["step_seconds"] for one in timed) / len(timed)
        seconds = math.fsum(one["time"].get(name, 0.0) / one["steps"] for one in timed) / len(timed)
        if share > 0:
            info, part = metric_info(name), name not in STEP_PHASES
            label = info.label if info.label != name else name.removeprefix("time/")
            colour = TIMER_COLOURS.get(name, "#8a8f98")
            found.append((share, Phase(label, f"{seconds:.2f} s", share, info.description, colour, part)))
    return [phase for _, phase in sorted(found, key=lambda one: (one[1].part, -one[0], one[1].label))]


def progress(figures: Mapping[str, Any]) -> str:
    """Write how many steps a run has taken, of how many, in which time."""
    return f"{figures['steps']} of {figures['total_steps']} steps in {duration(figures['seconds'])}"
