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
WIDTH, HEIGHT = 168, 112
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
    panel(axes, Box(58, 24, 50, 86), "driver")
    axes.text(83, 107, "driver process: the pipeline", ha="center", va="center", size=11, weight="bold", color=INK)
    box(
        axes,
        Box(63, 92.5, 40, 11),
        "part",
        "RolloutSource",
        ["task order, filters, data position;", "groups: GroupStream and StalenessManager"],
    )
    box(
        axes,
        Box(63, 76, 40, 11),
        "part",
        "GenerateScheduler, EnvManager",
        ["groups of answers, or of episodes;", "score complete groups"],
    )
    box(
        axes,
        Box(63, 60, 40, 11),
        "part",
        "Router, EnginePool",
        ["queue, priorities, prefix affinity;", "replace dead replicas"],
    )
    box(axes, Box(63, 48, 40, 8), "part", "Advantages", ["GRPO, RLOO …, in NumPy"])
    box(axes, Box(63, 37, 40, 7.5), "part", "TrainingEngine", ["micro-batches, balanced ranks"])
    box(axes, Box(63, 26, 40, 7.5), "part", "RunState, Recovery", ["steps, checkpoints; ranks that start again"])
    arrow(axes, (83, 92.5), (83, 87), "Task", (87, 89.8))
    arrow(axes, (83, 76), (83, 71), "GenerateRequest, Generation", (95.5, 73.5), both=True)
    axes.plot([63, 60.5, 60.5], [79, 79, 52], color=INK, linewidth=1.3, zorder=4)
    arrow(axes, (60.5, 52), (63, 52))
    axes.text(66.5, 58, "Group[Scored]", ha="center", va="center", size=9, color=INK, zorder=5)
    arrow(axes, (83, 48), (83, 44.5), "PolicySample", (91, 46.2))
    arrow(axes, (83, 37), (83, 33.5))


def draw_processes(axes: Any) -> None:
    """Draw the actors and the run's folder around the driver, with what passes between them."""
    box(
        axes,
        Box(2, 57, 34, 16),
        "actor",
        "inference",
        ["InferenceEngine, one a replica:", "vLLM, SGLang, or transformers;", "takes requests at any time"],
        copies=3,
    )
    box(
        axes,
        Box(2, 31, 34, 14),
        "actor",
        "training",
        ["TrainingRank, one a rank:", "DeepSpeed or FSDP2"],
        copies=3,
    )
    box(
        axes,
        Box(2, 84, 34, 15),
        "actor",
        "environments",
        ["EnvWorker pool: Gymnasium, tools;", "agent programs, through the Proxy"],
        copies=3,
    )
    box(
        axes,
        Box(130, 84, 34, 13),
        "actor",
        "rewards",
        ["RewardWorker pool: rules, math,", "code in the sandbox, yours"],
        copies=3,
    )
    box(axes, Box(130, 64, 34, 11), "actor", "judge", ["JudgeServer:", "OpenAI-compatible, over HTTP"])
    box(
        axes,
        Box(130, 40, 34, 13),
        "actor",
        "reference, critic, teachers",
        ["a TrainingEngine each;", "only where the algorithm has them"],
        copies=2,
    )
    box(axes, Box(130, 24, 34, 11), "disk", "runs/NAME", ["checkpoints, metrics, rollouts,", "exported model, MLflow"])

    arrow(axes, (38, 90), (63, 84), "observations, actions", (49.5, 90.5), both=True)
    arrow(axes, (63, 67.5), (38, 67.5), "GenerateRequest", (47.5, 69.3))
    arrow(axes, (38, 63), (63, 63), "Generation", (47.5, 64.8))
    arrow(axes, (103, 84.5), (130, 92), "Group[Trajectory]", (115, 92))
    arrow(axes, (130, 87), (103, 80), "Group[Scored]", (120, 81.3))
    arrow(axes, (147, 84), (147, 75), both=True)
    arrow(axes, (63, 42.5), (38, 42.5), "micro-batches", (47.5, 44.3))
    arrow(axes, (38, 38.5), (63, 38.5), "metrics", (47.5, 40.3))
    arrow(axes, (103, 43), (130, 45), "log-probs, values", (118, 46.5), both=True)
    arrow(axes, (103, 29.5), (130, 29.5), "states, metrics", (119, 31.3))
    arrow(axes, (19, 47), (19, 57), "WeightSync: in memory,\nversioned, checked", (31.5, 52), color=RED)


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
    figure, axes = pyplot.subplots(figsize=(16.8, 11.2), dpi=110)
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
