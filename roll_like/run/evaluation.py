"""Evaluations that are a function of the weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from roll_like.config.evaluation import ScheduleConfig
from roll_like.rollout.collection import Collected
from roll_like.values import Metric

#: `eval/…` metrics, and the scored answers where some were sampled.
Evaluated: TypeAlias = tuple[Mapping[str, Metric], Collected | None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measures the model that is trained.

    Attributes:
        schedule: When.
        measure: Returns the `eval/…` metrics of the current weights, and the scored answers where some were sampled.
        best: What the best checkpoint has most of: the first of these metrics that there is. Of one that is written
            with a minus, it has least.
    """

    schedule: ScheduleConfig
    measure: Callable[[], Evaluated]
    best: Sequence[str] = ("-eval/loss",)

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self.schedule.due(finished, total)

    def evaluate(self) -> Evaluated:
        """Return the `eval/…` metrics, and the scored answers where there are any."""
        return self.measure()

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of."""
        for name in self.best:
            found = values.get(name.removeprefix("-"))
            if found is not None:
                return -found if name.startswith("-") else found
        return None


def pair_evaluation(schedule: ScheduleConfig, measure: Callable[[], Mapping[str, Metric]]) -> Evaluation:
    """Return what measures how often a model prefers what it should; the best checkpoint has the highest accuracy.

    Args:
        measure: Returns `train/loss` and `preference/…` of the evaluation's pairs, without a step.
    """

    def metrics() -> tuple[Mapping[str, Metric], None]:
        measured = measure()
        names = {"train/loss": "eval/loss"} | {
            name: f"eval/{name.removeprefix('preference/')}" for name in measured if name.startswith("preference/")
        }
        return {names[name]: metric for name, metric in measured.items() if name in names}, None

    return Evaluation(schedule=schedule, measure=metrics, best=("eval/pair_accuracy", "eval/accuracy", "-eval/loss"))
