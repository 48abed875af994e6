"""Measures the policy on tasks that it is not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.evaluation import EvaluationSchedule
from roll_like.inference.interface import Sampling
from roll_like.rollout.collection import Collected, MakeRunner, SampleProgress, collect_batch, no_progress
from roll_like.rollout.metrics import evaluation_metrics
from roll_like.types import Task
from roll_like.values import Metric


class Evaluator:
    """Samples k answers (or runs k episodes) for every evaluation task and scores them.

    Args:
        make_runner: Makes what samples and scores groups; its requests are urgent.
        schedule: The `evaluation` section.
        samples_per_group: K of avg@k and pass@k.
        max_failure_fraction: Share of the answers that failures may cost.
        seed: Seed of every evaluation: two policies are compared on the same random numbers.
        beside: `make_runner` of what is measured beside the policy and stays as it is, by what its metrics have after
            `eval/`. It is sampled once, and reported with each evaluation.
        progress: Told of finished samples.
    """

    def __init__(
        self,
        make_runner: MakeRunner,
        tasks: Iterable[Task],
        schedule: EvaluationSchedule,
        *,
        samples_per_group: int,
        max_failure_fraction: float,
        seed: int,
        runner: DriverLoop,
        beside: Mapping[str, MakeRunner] | None = None,
        progress: SampleProgress = no_progress,
    ) -> None:
        self._make_runner = make_runner
        self._tasks = tuple(tasks)
        self._schedule = schedule
        self._samples_per_group = samples_per_group
        self._seed = seed
        self._max_failure_fraction = max_failure_fraction
        self._runner = runner
        self._beside = beside or {}
        self._progress = progress
        self._measured_beside: dict[str, Metric] | None = None

    def evaluate(self) -> tuple[Mapping[str, Metric], Collected]:
        """Return the metrics (`eval/avg`, `eval/pass@k`, …) and the scored answers.

        Raises:
            GenerationError: More answers were lost to failures than `rollout.max_failure_fraction`.
        """
        collected = self._collect(self._make_runner, "this evaluation")
        metrics = evaluation_metrics(collected, self._samples_per_group)
        if self._measured_beside is None:
            self._measured_beside = self._measure_beside()
        return {**metrics, **self._measured_beside}, collected

    def _measure_beside(self) -> dict[str, Metric]:
        """Return the metrics of what stays as it is."""
        found: dict[str, Metric] = {}
        for name, make_runner in self._beside.items():
            collected = self._collect(make_runner, f"the evaluation of {name}")
            metrics = evaluation_metrics(collected, self._samples_per_group)
            found |= {f"eval/{name}/{key.removeprefix('eval/')}": metric for key, metric in metrics.items()}
        return found

    def _collect(self, make_runner: MakeRunner, unit: str) -> Collected:
        """Sample and score all tasks."""
        count = len(self._tasks)
        collecting = collect_batch(
            make_runner(self._seed, self._progress),
            iter(self._tasks),
            lambda group: len(group.samples) > 0,
            groups=count,
            max_started=count,
        )
        collected = self._runner.wait_for(collecting)
        collected.refuse_too_many_failures(self._max_failure_fraction, unit)
        return collected

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of: avg@k."""
        return values.get("eval/avg")

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._schedule.due(finished, total)


def evaluation_sampling(schedule: EvaluationSchedule, max_response_tokens: int) -> Sampling:
    """Return how evaluated samples are drawn.

    Args:
        schedule: The `evaluation` section.
        max_response_tokens: Limit where the section has none.
    """
    return Sampling(
        temperature=schedule.temperature,
        top_p=schedule.top_p,
        top_k=schedule.top_k,
        min_p=schedule.min_p,
        max_tokens=schedule.max_response_tokens or max_response_tokens,
        stop=schedule.stop,
    )
