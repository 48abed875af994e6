"""The evaluation of pipelines that learn from given data: metrics of data that is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from roll_like.config.evaluation import ScheduleConfig
from roll_like.values import Metric


class OfflineEvaluator:
    """Measures the model on data that it is not trained on.

    Args:
        schedule: When.
        measure: Returns the `eval/…` metrics of the current weights, without a step.
        best: Metrics of which the best checkpoint has most, the first that there is; without one, the lowest
            `eval/loss` is best.
    """

    def __init__(
        self, schedule: ScheduleConfig, measure: Callable[[], Mapping[str, Metric]], *, best: Sequence[str] = ()
    ) -> None:
        self._schedule = schedule
        self._measure = measure
        self._best = best

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._schedule.due(finished, total)

    def evaluate(self) -> tuple[Mapping[str, Metric], None]:
        """Return the `eval/…` metrics; no answers are sampled."""
        return self._measure(), None

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of."""
        for name in self._best:
            if name in values:
                return values[name]
        return -values["eval/loss"] if "eval/loss" in values else None


def pair_evaluator(schedule: ScheduleConfig, measure: Callable[[], Mapping[str, Metric]]) -> OfflineEvaluator:
    """Return what measures how often a model prefers what it should; the best checkpoint has the highest accuracy.

    Args:
        schedule: When.
        measure: Returns `train/loss` and `preference/…` of the evaluation's pairs, without a step.
    """

    def metrics() -> dict[str, Metric]:
        measured = measure()
        names = {"train/loss": "eval/loss"} | {
            name: f"eval/{name.removeprefix('preference/')}" for name in measured if name.startswith("preference/")
        }
        return {names[name]: metric for name, metric in measured.items() if name in names}

    return OfflineEvaluator(schedule, metrics, best=("eval/pair_accuracy", "eval/accuracy"))
