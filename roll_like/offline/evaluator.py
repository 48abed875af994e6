"""Evaluations on given data that is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roll_like.config.evaluation import ScheduleConfig
from roll_like.run.evaluation import Evaluation
from roll_like.values import Metric


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
