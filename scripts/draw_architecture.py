"""Draw docs/images/architecture.png: the processes of a run, what passes between them, and the types of a step.

python scripts/draw_architecture.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 168, 100
INK, QUIET, RED = "#1f2933", "#52606d", "#b23a48"
FILL = {"driver": "#eef4fb", "part": "#ffffff", "actor": "#fdf3e4", "disk": "#eef7ee", "type": "#f3effa"}
EDGE = {"driver": "#3b6ea5", "part": "#8aa9c9", "actor": "#c98a2b", "disk": "#5a9a5a", "type": "#7d63b3"}
LINE = 2.5  # between two lines of small text


@dataclass(frozen=True)
class Box:
    """A rectangle by its lower left corner, in the drawing's own units."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        """Return its centre."""
        return self.x + self.width / 2, self.y + self.height / 2


def panel(axes: Any, place: Box, kind: str, *, copies: int = 1) -> None:
    """Draw an empty box; several copies stand behind each other."""
    for shift in (0.9 * copy for copy in reversed(range(copies))):
        axes.add_patch(
            FancyBboxPatch(
                (place.x + shift, place.y + shift),
                place.width,
                place.height,
                boxstyle="round,pad=0,rounding_size=1.2",
                facecolor=FILL[kind],
                edgecolor=EDGE[kind],
                linewidth=1.3,
                zorder=1 if kind == "driver" else 2,
            )
        )


def box(axes: Any, place: Box, kind: str, title: str, lines: Sequence[str], *, copies: int = 1) -> None:
    """Draw a box with a bold title and smaller lines, centred."""
    panel(axes, place, kind, copies=copies)
    x, y = place.middle
    y += LINE * len(lines) / 2
    style = {"ha": "center", "va": "center", "zorder": 3}
    axes.text(x, y, title, size=11, weight="bold", color=INK, **style)
    for number, line in enumerate(lines, 1):
        axes.text(x, y - 0.4 - LINE * number, line, size=9, color=QUIET, **style)


def arrow(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    at: tuple[float, float] = (0, 0),
    *,
    both: bool = False,
    color: str = INK,
) -> None:
    """Draw an arrow, and what passes along it at a place of its own."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="<|-|>" if both else "-|>",
            mutation_scale=13,
            color=color,
            linewidth=1.3 if color == INK else 2.4,
            zorder=4,
            shrinkA=1,
            shrinkB=1,
        )
    )
    axes.text(*at, text, ha="center", va="center", size=9, color=color, zorder=5)


def draw_driver(axes: Any) -> None:
    """Draw the driver process with its parts from top to bottom."""
    panel(axes, Box(58, 24, 50, 73), "driver")
    axes.text(83, 93.5, "driver process: the pipeline", ha="center", va="center", size=11, weight="bold", color=INK)
    box(axes, Box(63, 79, 40, 11), "part", "RolloutSource", ["task order, over-sampling,", "filters, data position"])
    box(axes, Box(63, 61, 40, 13), "part", "GenerateScheduler", ["routes, retries, aborts;", "scores complete groups"])
    box(axes, Box(63, 48, 40, 8), "part", "Advantages", ["GRPO, RLOO …, in NumPy"])
    box(axes, Box(63, 36, 40, 7.5), "part", "TrainingEngine", ["micro-batches, balanced ranks"])
    box(axes, Box(63, 26, 40, 6.5), "part", "RunState", ["steps, checkpoints, signals"])
    for text, top, bottom in (("Task", 79, 74), ("Group[Scored]", 61, 56), ("PolicySample", 48, 43.5), ("", 36, 32.5)):
        arrow(axes, (83, top), (83, bottom), text, (84 + 0.65 * len(text), (top + bottom) / 2))


def draw_processes(axes: Any) -> None:
    """Draw the actors and the run's folder around the driver, with what passes between them."""
    box(
        axes,
        Box(2, 58, 34, 19),
        "actor",
        "inference",
        ["InferenceEngine, one a replica:", "vLLM, or transformers", "takes requests at any time"],
        copies=3,
    )
    box(
        axes,
        Box(130, 59, 34, 17),
        "actor",
        "rewards",
        ["RewardWorker pool:", "rules, math, LLM judges, yours"],
        copies=3,
    )
    box(
        axes,
        Box(2, 31, 34, 14),
        "actor",
        "training",
        ["TrainingRank, one a rank:", "ZeRO 0–3, log-probs, updates"],
        copies=3,
    )
    box(axes, Box(130, 37, 34, 12), "actor", "reference", ["TrainingRank, frozen,", "only for a KL term"], copies=2)
    box(axes, Box(130, 22, 34, 11), "disk", "runs/NAME", ["checkpoints, metrics, rollouts,", "exported model, MLflow"])

    arrow(axes, (63, 70), (38, 70), "GenerateRequest", (47.5, 72))
    arrow(axes, (38, 65), (63, 65), "Generation", (47.5, 67))
    arrow(axes, (103, 70), (130, 70), "Group[Trajectory]", (119, 72))
    arrow(axes, (130, 65), (103, 65), "Group[Scored]", (119, 67))
    arrow(axes, (63, 41.5), (38, 41.5), "micro-batches", (47.5, 43.3))
    arrow(axes, (38, 37.5), (63, 37.5), "metrics", (47.5, 39.3))
    arrow(axes, (103, 41), (130, 41), "log-probs", (119, 42.8), both=True)
    arrow(axes, (103, 29), (130, 29), "states, metrics", (119, 30.8))
    arrow(axes, (19, 47), (19, 58), "WeightSync: in memory,\nversioned, checked", (31.5, 53), color=RED)


def draw_types(axes: Any) -> None:
    """Draw the chain of types that a step's data goes through."""
    axes.text(2, 17.5, "What passes through a step: one frozen type a stage", size=10.5, weight="bold", color=INK)
    chain = [
        ("", "Task", ["prompt tokens,", "reference answer"]),
        ("sample", "Trajectory", ["tokens, who sampled them,", "behaviour log-probs"]),
        ("score", "Scored", ["reward, each reward’s", "value, details"]),
        ("assign", "PolicySample", ["advantage", "of each token"]),
        ("KL term", "ReferencedSample", ["reference model’s", "log-probs"]),
        ("lay out", "MicroBatch", ["padded rows, tensors", "inside the engine only"]),
    ]
    width, gap = 22.0, 6.0
    for number, (verb, title, lines) in enumerate(chain):
        x = 2 + number * (width + gap)
        box(axes, Box(x, 2, width, 12), "type", title, lines)
        if verb:
            arrow(axes, (x - gap, 8), (x, 8), verb, (x - gap / 2, 9.8))


def main(path: Path) -> None:
    """Write the picture."""
    figure, axes = pyplot.subplots(figsize=(16.8, 10), dpi=110)
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, HEIGHT)
    axes.axis("off")
    draw_driver(axes)
    draw_processes(axes)
    draw_types(axes)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white", metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "architecture.png")
