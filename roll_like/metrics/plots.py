"""The figure of a run: what it learned, what that did to its answers, and where the time went."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from roll_like.metrics.names import describe, without_smaller_passes

Record = Mapping[str, Any]

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
_DOMAIN = re.compile(r"rollout/domain/.+/reward")
LINE, LIGHT, SECOND, THIRD = "#1d5fa8", "#a9c8e8", "#d1642e", "#2a9d8f"


def draw_curves(path: Path, name: str, steps: Sequence[Record], evaluations: Sequence[Record]) -> None:
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
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
    figure.savefig(path)


def _panels(steps: Sequence[Record], evaluations: Sequence[Record]) -> list[Callable[[Any], None]]:
    """Return what draws each panel: those of runs that sample, or of runs that learn from given answers."""

    def of_steps(title: str, *names: str) -> Callable[[Any], None]:
        return lambda axis: _draw_lines(axis, steps, title, names)

    def of_evaluations(*names: str, title: str = "Evaluation") -> Callable[[Any], None]:
        return lambda axis: _draw_lines(axis, evaluations, title, names, marker="o")

    def reward(axis: Any) -> None:
        _draw_reward(axis, steps)

    costs = [of_steps("Gradient norm before clipping", "train/grad_norm"), lambda axis: _draw_time(axis, steps)]
    measured = without_smaller_passes(sorted({name for record in evaluations for name in record}, reverse=True))
    # pass@k before maj@k: an axis has room for three
    solved = [name for name in measured if name.startswith(("eval/success", "eval/pass@", "eval/maj@"))]
    if any("train/perplexity" in record for record in steps):
        return [
            of_steps("Loss", "train/loss"),
            of_evaluations("eval/loss"),
            of_steps("Learning rate", "train/lr"),
            of_steps("Tokens per second", "throughput/tokens_per_second"),
            *costs,
        ]
    if any("preference/accuracy" in record for record in steps):
        paired = ["eval/pair_accuracy"] if any("eval/pair_accuracy" in record for record in evaluations) else []
        sampled = any("rollout/reward/mean" in record for record in steps)
        given = not sampled or any("eval/accuracy" in record for record in evaluations)
        of_rewards = [reward, of_evaluations("eval/avg", *solved)]
        kinds = ("chosen", "rejected")
        what = "score" if any("preference/score_chosen" in record for record in steps) else "reward"
        return [
            *(of_rewards if sampled else ()),
            of_steps("Loss", "train/loss"),
            *([of_evaluations("eval/accuracy", *paired)] if given else ()),
            of_steps("Right preferences in training", "preference/accuracy"),
            of_steps(f"{what.capitalize()} of chosen and rejected", *(f"preference/{what}_{kind}" for kind in kinds)),
            *costs,
        ]
    if any("distill/kl" in record for record in steps):
        return [
            of_steps("Divergence and its loss", "distill/kl", "train/loss"),
            of_evaluations("eval/kl", "eval/cross_entropy"),
            of_steps("Most likely token as the teacher's", "distill/top1_agreement"),
            of_evaluations("eval/top1_agreement", title="The same in the evaluation"),
            *costs,
        ]
    on_policy_distill = any("distill/reverse_kl" in record for record in steps)
    panels = [
        of_steps("Reverse KL to the teachers", "distill/reverse_kl") if on_policy_distill else reward,
        of_evaluations(*(("eval/reverse_kl", "eval/avg") if on_policy_distill else ("eval/avg", *solved))),
        of_steps("Response length", "rollout/response_length/mean"),
        of_steps("KL from reference, engine mismatch", "train/kl", "mismatch/kl"),
        *costs,
    ]
    if on_policy_distill and any("rollout/reward/mean" in record for record in steps):
        panels.append(reward)
    domains = sorted({key for record in steps for key in record if _DOMAIN.fullmatch(key)})
    if domains:
        panels.append(lambda axis: _draw_domains(axis, steps, domains))
    if any("util/trainer_wait" in record for record in steps):
        panels.append(of_steps("Staleness of samples, in versions", "staleness/mean", "staleness/max"))
        panels.append(of_steps("Trainer waiting, engines busy", "util/trainer_wait", "util/engines"))
    if any("critic/explained_variance" in record for record in steps):
        panels.append(of_steps("Explained variance of the critic", "critic/explained_variance"))
    return panels


def _series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], float(record[name])) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a centred window of an eighth of the run (at least three steps)."""
    radius = max(1, len(values) // 16)
    return [float(np.mean(values[max(0, i - radius) : i + radius + 1])) for i in range(len(values))]


def _draw_reward(axis: Any, steps: Sequence[Record]) -> None:
    x, mean = _series(steps, "rollout/reward/mean")
    axis.set_title("Training reward")
    axis.set_ylabel("mean reward")
    if not x:
        _not_measured(axis)
        return
    axis.plot(x, mean, color=LIGHT, linewidth=1.2, label="each step")
    axis.plot(x, _smooth(mean), color=LINE, linewidth=2.2, label="smoothed")
    axis.legend(frameon=False, loc="best", fontsize=8)


def _draw_domains(axis: Any, steps: Sequence[Record], names: Sequence[str]) -> None:
    axis.set_title("Training reward by domain, smoothed")
    axis.set_ylabel("mean reward")
    for name, colour in zip(names, cycle(DOMAIN_COLOURS), strict=False):
        x, y = _series(steps, name)
        axis.plot(x, _smooth(y), color=colour, linewidth=1.8, label=describe(name).label)
    axis.legend(frameon=False, loc="best", fontsize=8)


def _draw_lines(axis: Any, records: Sequence[Record], title: str, names: Sequence[str], marker: str = "") -> None:
    axis.set_title(title)
    drawn = []
    for name, colour in zip(names, (LINE, SECOND, THIRD), strict=False):
        x, y = _series(records, name)
        if x:
            axis.plot(x, y, color=colour, linewidth=1.8, marker=marker, markersize=5, label=name)
            drawn.append(name)
    if not drawn:
        _not_measured(axis)
        return
    first = describe(drawn[0])
    # the legend names several lines
    axis.set_ylabel(first.unit or (first.label if len(drawn) == 1 else ""))
    if len(names) > 1:
        axis.legend(frameon=False, loc="best", fontsize=8)


def _draw_time(axis: Any, steps: Sequence[Record]) -> None:
    axis.set_title("Time of a step")
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
        axis.bar(x, layer, width=width, bottom=bottom, color=TIMER_COLOURS[name], label=describe(name).label)
        bottom += np.asarray(layer)
    # a step that evaluates or saves is far taller than the others
    axis.set_ylim(0, float(np.percentile(bottom, 90)) * 1.35)
    axis.legend(frameon=False, ncols=3, fontsize=8, loc="upper right")


def _not_measured(axis: Any) -> None:
    axis.text(0.5, 0.5, "not measured", ha="center", va="center", color="#999999", transform=axis.transAxes)
    axis.set_yticks([])
