"""Which curves say what a run learned, what that did to its answers and what it cost: those that its pipeline logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from roll_like.metrics.names import metric_info, without_smaller_passes

#: A line of `metrics.jsonl` or `evaluations.jsonl`.
MetricRecord: TypeAlias = Mapping[str, Any]
_DOMAIN = re.compile(r"rollout/domain/.+/reward")
_BESIDE = re.compile(r"eval/(base|adapter/[^/]+)/avg")


@dataclass(frozen=True, slots=True)
class Panel:
    """One axis of a figure.

    Attributes:
        title: What it shows.
        names: The metrics of its lines.
        kind: `steps` draws metrics of training steps, `evaluations` those of evaluations, `reward` and `domains` smooth
            noisy rewards of steps, and `time` stacks what a step's time went into.
    """

    title: str
    names: tuple[str, ...]
    kind: Literal["steps", "evaluations", "reward", "domains", "time"] = "steps"


REWARD = Panel("Training reward", ("rollout/reward/mean",), "reward")
THROUGHPUT = Panel("Tokens per second", ("throughput/tokens_per_second",))
TIME = Panel("Time of a step", ("time/step",), "time")
#: Two divergences of policies that share a panel of one run, and what each is called by itself.
_DIVERGENCES = {"train/kl": "KL from reference", "mismatch/kl": "Engine mismatch"}
_COSTS = (Panel("Gradient norm before clipping", ("train/grad_norm",)), TIME)
#: What a report shows beside, where it is logged and no other panel has it.
_FURTHER = (
    Panel("Solved episodes", ("rollout/success",)),
    Panel("Loss", ("train/loss",)),
    *(Panel(title, (name,)) for name, title in _DIVERGENCES.items()),
    Panel("Entropy of the policy", ("train/entropy",)),
    Panel("Clipped tokens", ("train/clip_fraction_high", "train/clip_fraction_low")),
    Panel("Response length", ("rollout/response_length/mean",)),
    Panel("Truncated responses", ("rollout/truncated",)),
    Panel("Turns of an episode", ("rollout/turns",)),
    THROUGHPUT,
    Panel("Resident memory of all processes", ("memory/rss_gib",)),
)


def choose_panels(steps: Sequence[MetricRecord], evaluations: Sequence[MetricRecord]) -> list[Panel]:
    """Return the panels of `curves.png`: those of runs that sample, or of runs that learn from given answers.

    A panel of which nothing is logged is left out; that of the time stays.

    Args:
        steps: Lines of `metrics.jsonl`.
        evaluations: Lines of `evaluations.jsonl`.
    """
    logged, evaluated = _names(steps), _names(evaluations)
    return [panel for panel in _of_pipeline(logged, evaluated) if panel is TIME or _shows(panel, logged, evaluated)]


def _names(records: Sequence[MetricRecord]) -> set[str]:
    return {name for record in records for name in record}


def _shows(panel: Panel, logged: set[str], evaluated: set[str]) -> bool:
    return not (evaluated if panel.kind == "evaluations" else logged).isdisjoint(panel.names)


def _of_pipeline(logged: set[str], evaluated: set[str]) -> list[Panel]:
    measured = without_smaller_passes(sorted(evaluated, reverse=True))
    # pass@k before maj@k: an axis has room for three
    solved = [name for name in measured if name.startswith(("eval/success", "eval/pass@", "eval/maj@"))]
    # what stays as it is beside what is trained
    solved = [name for name in measured if _BESIDE.fullmatch(name)] or solved
    if "train/perplexity" in logged:
        loss, rate = Panel("Loss", ("train/loss",)), Panel("Learning rate", ("train/lr",))
        return [loss, _evaluation("eval/loss"), rate, THROUGHPUT, *_COSTS]
    if "preference/accuracy" in logged:
        return _of_preferences(logged, evaluated, solved)
    if "distill/kl" in logged:
        return [
            Panel("Divergence and its loss", ("distill/kl", "train/loss")),
            _evaluation("eval/kl", "eval/cross_entropy"),
            Panel("Most likely token as the teacher's", ("distill/top1_agreement",)),
            _evaluation("eval/top1_agreement", title="The same in the evaluation"),
            *_COSTS,
        ]
    return _of_policy(logged, solved)


def choose_report_panels(steps: Sequence[MetricRecord], evaluations: Sequence[MetricRecord]) -> list[Panel]:
    """Return the same and further ones, without those of which nothing is logged, and without the time of a step."""
    logged, evaluated = _names(steps), _names(evaluations)
    chosen = choose_panels(steps, evaluations)
    shown = {name for panel in chosen for name in panel.names}
    chosen += [panel for panel in _FURTHER if shown.isdisjoint(panel.names)]
    return [panel for panel in chosen if panel.kind != "time" and _shows(panel, logged, evaluated)]


def split_panels(panels: Iterable[Panel]) -> list[Panel]:
    """Return a panel for each metric, each metric once: with several runs in it, a panel has room for one."""
    found: dict[tuple[str, str], Panel] = {}
    for panel in panels:
        for name in panel.names:
            title = panel.title if len(panel.names) == 1 else f"{panel.title}: {metric_info(name).label}"
            title = _DIVERGENCES.get(name, title)
            found.setdefault((panel.kind, name), Panel(title, (name,), panel.kind))
    return list(found.values())


def _evaluation(*names: str, title: str = "Evaluation") -> Panel:
    return Panel(title, names, "evaluations")


def _of_preferences(logged: set[str], evaluated: set[str], solved: Sequence[str]) -> list[Panel]:
    paired = ["eval/pair_accuracy"] if "eval/pair_accuracy" in evaluated else []
    sampled = "rollout/reward/mean" in logged
    given = not sampled or "eval/accuracy" in evaluated
    what = "score" if "preference/score_chosen" in logged else "reward"
    kinds = ("chosen", "rejected")
    return [
        *((REWARD, _evaluation("eval/avg", *solved)) if sampled else ()),
        Panel("Loss", ("train/loss",)),
        *([_evaluation("eval/accuracy", *paired)] if given else ()),
        Panel("Right preferences in training", ("preference/accuracy",)),
        Panel(f"{what.capitalize()} of chosen and rejected", tuple(f"preference/{what}_{kind}" for kind in kinds)),
        *_COSTS,
    ]


def _divergences(logged: set[str]) -> Panel:
    """Return a panel that names those of two divergences that a run logs: one without a reference has no KL from it."""
    names = tuple(name for name in _DIVERGENCES if name in logged)
    first, *others = [_DIVERGENCES[name] for name in names] or [""]
    return Panel(", ".join([first, *map(str.lower, others)]), names)


def _of_policy(logged: set[str], solved: Sequence[str]) -> list[Panel]:
    distilled = "distill/reverse_kl" in logged
    panels = [
        Panel("Reverse KL to the teachers", ("distill/reverse_kl",)) if distilled else REWARD,
        _evaluation(*(("eval/reverse_kl", "eval/avg") if distilled else ("eval/avg", *solved))),
        Panel("Response length", ("rollout/response_length/mean",)),
        _divergences(logged),
        *_COSTS,
    ]
    if distilled and "rollout/reward/mean" in logged:
        panels.append(REWARD)
    domains = tuple(sorted(name for name in logged if _DOMAIN.fullmatch(name)))
    if domains:
        panels.append(Panel("Training reward by domain, smoothed", domains, "domains"))
    if "util/trainer_wait" in logged:
        panels.append(Panel("Staleness of samples, in versions", ("staleness/mean", "staleness/max")))
        panels.append(Panel("Trainer waiting, engines busy", ("util/trainer_wait", "util/engines")))
    if "critic/explained_variance" in logged:
        panels.append(Panel("Explained variance of the critic", ("critic/explained_variance",)))
    return panels
