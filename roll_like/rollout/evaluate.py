"""Measures the policy on tasks that it is not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from roll_like.config.sections import EvaluationConfig
from roll_like.data.tasks import TaskSet
from roll_like.inference.base import Sampling
from roll_like.loop import DriverLoop
from roll_like.rollout.failures import refuse_too_many_failures
from roll_like.rollout.filling import Collected
from roll_like.rollout.metrics import evaluation_metrics
from roll_like.rollout.scheduler import GenerateScheduler, GroupPlan
from roll_like.values import Metric


class Evaluator:
    """Samples k answers for every evaluation task and judges them with the run's rewards.

    Args:
        scheduler: The one that training uses.
        tasks: What to evaluate on.
        config: The `evaluation` section.
        max_response_tokens: Limit where the section has none.
        max_failure_fraction: Share of the answers that failures may cost.
        seed: Seed of every evaluation: two policies are compared on the same random numbers.
        runner: The driver's event loop.
    """

    def __init__(
        self,
        scheduler: GenerateScheduler,
        tasks: TaskSet,
        config: EvaluationConfig,
        *,
        max_response_tokens: int,
        max_failure_fraction: float,
        seed: int,
        runner: DriverLoop,
    ) -> None:
        self._scheduler = scheduler
        self._tasks = tuple(islice(tasks, config.max_tasks))
        self._config = config
        self._seed = seed
        self._max_failure_fraction = max_failure_fraction
        self._runner = runner
        self._sampling = Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=0,
            max_tokens=config.max_response_tokens or max_response_tokens,
            stop=config.stop,
        )

    def evaluate(self) -> tuple[Mapping[str, Metric], Collected]:
        """Return the metrics (`eval/avg`, `eval/pass`, …) and the judged answers.

        Raises:
            GenerationError: More answers were lost to failures than `rollout.max_failure_fraction`.
        """
        plan = GroupPlan(
            groups=len(self._tasks),
            samples_per_group=self._config.samples_per_prompt,
            sampling=self._sampling,
            initial_groups=len(self._tasks),
            max_groups=len(self._tasks),
            seed=self._seed,
            accept=lambda group: len(group.samples) > 0,
        )
        collected = self._runner.run(self._scheduler.fill(iter(self._tasks), plan))
        refuse_too_many_failures(collected, self._max_failure_fraction, "this evaluation")
        return evaluation_metrics(collected), collected

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        if finished == 0:
            return self._config.before
        if finished == total:
            return self._config.after
        return self._config.every > 0 and finished % self._config.every == 0
