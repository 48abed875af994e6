"""Draw what the trainer and each group of rollouts did over time, one panel a run: docs/images/async_timeline.png.

python scripts/draw_rollouts.py sync=runs/A async=runs/B [--seconds 90] [-o FILE]

Reads `metrics.jsonl` and `rollouts/` of agentic runs, whose rows have the times of their turns. A bar below the trainer
is a group, from its first turn to its last; bars are packed into as few rows as there were groups at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.patches import Patch

ROOT = Path(__file__).resolve().parent.parent
INK, QUIET, WAITING, SYNC = "#1f2933", "#52606d", "#e4e7eb", "#1f2933"
#: Steps take turns with them.
COLOURS = ("#3b6ea5", "#c98a2b", "#5a9a5a", "#7d63b3", "#b23a48")


@dataclass(frozen=True)
class Span:
    """Something that lasted, in Unix seconds; `step` is the one that trained it, or that it was a part of."""

    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A run: when its trainer waited, trained and sent weights, and when its groups were sampled."""

    waits: Sequence[Span]
    trains: Sequence[Span]
    syncs: Sequence[Span]
    groups: Sequence[Span]


def read_timeline(folder: Path) -> Timeline:
    """Return the timeline of a run's folder."""
    waits, trains, syncs, groups = [], [], [], []
    for line in lines_of(folder / "metrics.jsonl"):
        step, end = int(line["step"]), line["time"]
        # the three follow each other, and little comes after them
        starts = end - line["time/sync"]
        syncs.append(Span(step, starts, end))
        trains.append(Span(step, starts - line["time/train"], starts))
        waits.append(Span(step, end - line["time/step"], starts - line["time/train"]))
        groups += groups_of(step, lines_of(folder / "rollouts" / f"step_{step:06d}.jsonl"))
    return Timeline(waits, trains, syncs, groups)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def groups_of(step: int, rows: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return a step's groups, from their first turn's beginning to their last turn's end."""
    turns: dict[str, list[Mapping[str, float]]] = {}
    for row in rows:
        turns.setdefault(row["id"].partition(".")[0], []).extend(row["turns"])
    return [Span(step, min(t["began"] for t in group), max(t["ended"] for t in group)) for group in turns.values()]


def packed(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Return each span with a row in which no other one is at that time."""
    ends: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda one: one.begin):
        row = next((row for row, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[row : row + 1] = [span.end]
        placed.append((row, span))
    return placed


def draw(axes: Any, title: str, timeline: Timeline, seconds: float) -> None:
    """Draw one run from the beginning of its second step, when everything is warm."""
    origin = timeline.waits[1].begin

    def bar(span: Span, y: float, height: float, colour: str) -> None:
        axes.barh(y, span.end - span.begin, height, span.begin - origin, color=colour, edgecolor="white", linewidth=0.6)

    rows = packed([span for span in timeline.groups if span.end > origin and span.begin < origin + seconds])
    lowest = 2 + max(row for row, _ in rows)
    for span in timeline.waits:
        bar(span, 0, 1.6, WAITING)
    for span in timeline.trains:
        bar(span, 0, 1.6, COLOURS[span.step % len(COLOURS)])
        middle = (span.begin + span.end) / 2 - origin
        if 0 < middle < seconds:
            axes.text(middle, 0, f"{span.step}", ha="center", va="center", size=9, color="white", weight="bold")
    for span in timeline.syncs:
        bar(span, 0, 1.6, SYNC)
    for row, span in rows:
        bar(span, 2 + row, 0.85, COLOURS[span.step % len(COLOURS)])
    axes.set_xlim(0, seconds)
    axes.set_ylim(lowest + 1, -1.2)
    axes.set_yticks([0, (lowest + 2) / 2], ["trainer", "groups"], color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", size=11, weight="bold", color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    """Write the picture."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", nargs="+", metavar="TITLE=FOLDER", help="panels, from above")
    arguments.add_argument("--seconds", type=float, default=90.0, help="how much of each run is drawn")
    arguments.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "images" / "async_timeline.png")
    options = arguments.parse_args()
    runs = [run.partition("=")[::2] for run in options.runs]
    figure, panels = pyplot.subplots(
        len(runs), 1, figsize=(11, 2.9 * len(runs)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (title, folder) in zip(panels[:, 0], runs, strict=True):
        draw(axes, title, read_timeline(Path(folder)), options.seconds)
    panels[-1, 0].set_xlabel("seconds", color=QUIET)
    shown = [
        Patch(color=COLOURS[1], label="trained, or trained on, in one step"),
        Patch(color=WAITING, label="trainer waits"),
        Patch(color=SYNC, label="weights are sent"),
    ]
    figure.legend(handles=shown, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(options.output, dpi=110)
    print(options.output)


if __name__ == "__main__":
    main()
