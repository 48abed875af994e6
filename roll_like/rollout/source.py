"""Where a step's groups come from: one `collect`, whatever the schedule."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from roll_like.config.rlvr import RolloutConfig
from roll_like.data.order import TaskOrder
from roll_like.data.tasks import TaskSet
from roll_like.inference.base import Sampling
from roll_like.loop import DriverLoop
from roll_like.rollout.failures import refuse_too_many_failures
from roll_like.rollout.filling import Collected
from roll_like.rollout.scheduler import GenerateScheduler, GroupPlan
from roll_like.types import Group, Scored, Task

#: How fast the estimate of the share of accepted groups follows the last step.
ACCEPTANCE_MEMORY = 0.7


class RolloutSource(Protocol):
    """Brings a step's scored groups. Synchronous, prefetched and replayed rollouts all look like this."""

    def collect(self, step: int) -> Collected:
        """Return the groups that `step` trains on."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; plain JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""


class SynchronousRollouts:
    """Generates a step's groups with the current policy, while nothing else happens.

    Args:
        scheduler: Fills groups.
        taskset: All tasks.
        order: The same tasks, in a resumable order.
        config: The `rollout` section.
        seed: Seed of the run.
        runner: The driver's event loop.
        greedy_baseline: Whether each group comes with one greedy sample to compare with.
        filters: Whether groups without signal are replaced, of domains that say so themselves.
    """

    def __init__(
        self,
        scheduler: GenerateScheduler,
        taskset: TaskSet,
        order: TaskOrder,
        config: RolloutConfig,
        *,
        seed: int,
        runner: DriverLoop,
        greedy_baseline: bool = False,
        filters: Mapping[str, bool] | None = None,
    ) -> None:
        self._filters = filters or {}
        self._scheduler = scheduler
        self._greedy_baseline = greedy_baseline
        self._taskset = taskset
        self._order = order
        self._config = config
        self._seed = seed
        self._runner = runner
        self._returned: deque[Task] = deque()
        self._acceptance = 1.0

    def collect(self, step: int) -> Collected:
        """Generate, judge and filter until the step has its groups.

        Raises:
            GenerationError: More samples were lost to failures than `rollout.max_failure_fraction`.
        """
        config = self._config
        most = math.floor(config.prompts_per_step * config.max_oversampling)
        plan = GroupPlan(
            groups=config.prompts_per_step,
            samples_per_group=config.samples_per_prompt,
            sampling=sampling_of(config),
            initial_groups=min(most, math.ceil(config.prompts_per_step / max(self._acceptance, 0.05))),
            max_groups=most,
            seed=self._step_seed(step) if config.seeded else None,
            accept=self._accept,
            baseline=replace(sampling_of(config), temperature=0.0) if self._greedy_baseline else None,
        )
        collected = self._runner.run(self._scheduler.fill(self._tasks(), plan))
        self._returned.extendleft(reversed(collected.unfinished))
        judged = len(collected.groups) + len(collected.rejected)
        if judged:
            share = len(collected.groups) / judged
            self._acceptance = ACCEPTANCE_MEMORY * self._acceptance + (1 - ACCEPTANCE_MEMORY) * share
        refuse_too_many_failures(collected, config.max_failure_fraction, f"step {step + 1}")
        return collected

    def state(self) -> dict[str, Any]:
        """Return the data position, with the tasks that were started and given back."""
        return {
            "order": self._order.state(),
            "returned": [task.task_id for task in self._returned],
            "acceptance": self._acceptance,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._order.load_state(state["order"])
        by_id = {task.task_id: task for task in self._taskset}
        self._returned = deque(by_id[task_id] for task_id in state["returned"])
        self._acceptance = state["acceptance"]

    def _tasks(self) -> Iterator[Task]:
        while True:
            yield self._returned.popleft() if self._returned else self._order.next()

    def _accept(self, group: Group[Scored]) -> bool:
        rewards = [sample.reward for sample in group.samples]
        if self._greedy_baseline and not group.baselines:  # it was lost to a failure: nothing to compare with
            return False
        if self._filters.get(group.task.domain, self._config.drop_groups_without_signal):
            return len(rewards) > 1 and not np.allclose(rewards, rewards[0], rtol=0, atol=1e-8)
        return len(rewards) > 0

    def _step_seed(self, step: int) -> int:
        return int(np.random.SeedSequence([self._seed, step]).generate_state(1)[0])


def sampling_of(config: RolloutConfig) -> Sampling:
    """Return how training samples are drawn."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_response_tokens,
        stop=config.stop,
    )
