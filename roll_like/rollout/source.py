"""Where a step's groups come from: one `collect`, whatever the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.rollout import GroupRolloutConfig
from roll_like.errors import WorkerError
from roll_like.inference.interface import Sampling, derived_seed
from roll_like.rollout.collection import Collected, MakeRunner, SampleProgress, collect_batch, no_progress
from roll_like.rollout.experience import ExperiencePool
from roll_like.rollout.metrics import rewards_differ, speculation_metrics
from roll_like.rollout.router import Router
from roll_like.types import Group, Scored, Task, by_agent
from roll_like.values import Metrics, Sum

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

    def save(self, directory: Path) -> None:
        """Write what of the last `state` is no JSON into a checkpoint."""

    def load(self, directory: Path) -> None:
        """Read back what `save` wrote; `load_state` was called before."""


class TaskSampler(Protocol):
    """What groups attempt: endless and resumable."""

    def next(self) -> Task:
        """Return what the next group attempts."""

    def find(self, task_id: str) -> Task:
        """Return a task by its id."""

    def state(self) -> dict[str, Any]:
        """Return where the sequence stands; plain JSON."""

    def load_state(self, state: Mapping[str, Any], /) -> None:
        """Go on where `state` was taken."""


class GroupFilter:
    """Tells which scored groups are trained on.

    Args:
        config: The `rollout` section.
        needs_baseline: Whether groups without `baselines` are of no use.
        domains: Whether groups with zero reward variance are replaced, for domains with a setting of their own.
        of_steps: Whether scores of steps are learned from, not rewards alone.
    """

    def __init__(
        self,
        config: GroupRolloutConfig,
        *,
        needs_baseline: bool = False,
        domains: Mapping[str, bool] | None = None,
        of_steps: bool = False,
    ) -> None:
        self._drop_zero_variance = config.drop_zero_variance_groups
        self._of_steps = of_steps
        self._needs_baseline = needs_baseline
        self._domains = domains or {}

    def __call__(self, group: Group[Scored]) -> bool:
        """Return whether a group is trained on."""
        if self._needs_baseline and not group.baselines:  # it was lost to a failure: nothing to compare with
            return False
        if self._domains.get(group.task.domain, self._drop_zero_variance):
            greedy = group.baselines if self._needs_baseline else ()
            # an agent is compared with itself: that one of two players always wins is no signal
            # its off-policy answers are learned from as well
            agents = by_agent([group.whole]) if group.samples else []
            return any(rewards_differ((*one.samples, *greedy), of_steps=self._of_steps) for one in agents)
        return bool(group.samples)


@dataclass(frozen=True, kw_only=True)
class GroupSource:
    """Where groups come from, whatever the schedule.

    Attributes:
        make_runner: Makes what samples and scores groups.
        engines: What samples.
        order: What groups attempt.
        accept: Whether a scored group is trained on; called once for each, as it ends.
        figures: What is to be logged of what was attempted since the last call.
        begin_step: Told of each step, counted from 0, when its groups are collected.
        experience: Right answers of earlier steps, which join the groups; None where none do.
    """

    make_runner: MakeRunner
    engines: Router
    order: TaskSampler
    accept: Callable[[Group[Scored]], bool]
    figures: Callable[[], Metrics] = dict
    begin_step: Callable[[int], object] = lambda step: None
    experience: ExperiencePool | None = None

    def tasks(self, first: Iterable[Task] = ()) -> Iterator[Task]:
        """Yield tasks without end, these ones first."""
        yield from first
        while True:
            yield self.order.next()

    def step_figures(self) -> Metrics:
        """Return `figures`, and how much of what engines guessed since the last call was accepted, in all requests."""
        return {**self.figures(), **speculation_metrics(self.engines.take_guesses())}


class SynchronousRollouts:
    """Generates a step's groups with the current policy, while nothing else happens.

    A task whose group was not needed is given back. It is among the first of the next step, and is waited for there,
    so no task is given back twice. A step has at most `config.groups` of such tasks; more wait for the step after.

    Args:
        source: Where groups come from.
        config: The `rollout` section.
        seed: Seed of the run.
        progress: Told of finished samples.
        unit: What groups are collected for, for messages.
    """

    def __init__(
        self,
        source: GroupSource,
        config: GroupRolloutConfig,
        *,
        seed: int,
        runner: DriverLoop,
        progress: SampleProgress = no_progress,
        unit: str = "step",
    ) -> None:
        self._source = source
        self._config = config
        self._seed = seed
        self._runner = runner
        self._progress = progress
        self._unit = unit
        self._returned: list[Task] = []
        self._acceptance = 1.0

    def collect(self, step: int) -> Collected:
        """Generate, score and filter until the step has its groups.

        Raises:
            GenerationError: More samples were lost to failures than `rollout.max_failure_fraction`.
        """
        before = self.state()
        try:
            collected = self._runner.wait_for(self._collect(step))
        except WorkerError:  # the run may go on, and collects this step's groups again then
            self.load_state(before)
            raise
        self._returned.extend(collected.unfinished)
        scored = len(collected.groups) + len(collected.rejected)
        if scored:
            share = len(collected.groups) / scored
            self._acceptance = ACCEPTANCE_MEMORY * self._acceptance + (1 - ACCEPTANCE_MEMORY) * share
        collected.refuse_too_many_failures(self._config.max_failure_fraction, f"{self._unit} {step + 1}")
        return collected

    async def _collect(self, step: int) -> Collected:
        """Collect, and add how long engines had requests: a mean over replicas."""
        source, config = self._source, self._config
        source.begin_step(step)
        most = math.floor(config.groups * config.max_oversampling)
        again, self._returned = self._returned[: config.groups], self._returned[config.groups :]
        seed = derived_seed(self._seed, step) if config.seeded else None
        replicas, before = source.engines.replicas, source.engines.busy_seconds()
        collected = await collect_batch(
            source.make_runner(seed, self._progress),
            source.tasks(again),
            source.accept,
            groups=config.groups,
            at_once=min(most, math.ceil(config.groups / max(self._acceptance, 0.05))),
            max_started=most,
            waited_for=len(again),
        )
        busy = (source.engines.busy_seconds() - before) / replicas
        return replace(collected, metrics={"time/engines": Sum(busy), **source.step_figures()})

    def state(self) -> dict[str, Any]:
        """Return the data position, with the tasks that were started and given back."""
        return {
            "order": self._source.order.state(),
            "returned": [task.task_id for task in self._returned],
            "acceptance": self._acceptance,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._source.order.load_state(state["order"])
        self._returned = [self._source.order.find(task_id) for task_id in state["returned"]]
        self._acceptance = state["acceptance"]

    def save(self, directory: Path) -> None:
        """Write nothing: between two steps no group is left."""

    def load(self, directory: Path) -> None:
        """Read nothing. Groups of an asynchronous run that were ready are sampled again."""


class KeptRollouts:
    """Keeps the groups of a step until a checkpoint has what was learned from them.

    When the trainer starts again from its last checkpoint, it is given the same groups: nothing is sampled twice.

    Args:
        source: Where groups come from.
        until_checkpoint: Whether checkpoints will be written. If not, only the groups of the last step are kept.
    """

    def __init__(self, source: RolloutSource, *, until_checkpoint: bool) -> None:
        self._source = source
        self._until_checkpoint = until_checkpoint
        self._kept: dict[int, Collected] = {}

    def collect(self, step: int) -> Collected:
        """Return the groups that `step` trains on, the same at every call."""
        if step not in self._kept:
            if not self._until_checkpoint:
                self._kept.clear()
            self._kept[step] = self._source.collect(step)
        return self._kept[step]

    def holds(self, steps: range) -> bool:
        """Return whether the groups of all these steps are there."""
        return self._kept.keys() >= set(steps)

    def forget(self, finished: int) -> None:
        """Let go of the groups of the first `finished` steps."""
        self._kept = {step: collected for step, collected in self._kept.items() if step >= finished}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; plain JSON."""
        return self._source.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._source.load_state(state)

    def save(self, directory: Path) -> None:
        """Write what of the last `state` is no JSON into a checkpoint."""
        self._source.save(directory)

    def load(self, directory: Path) -> None:
        """Read back what `save` wrote."""
        self._source.load(directory)


def sampling_of(config: GroupRolloutConfig) -> Sampling:
    """Return how training samples are drawn."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.max_response_tokens,
        stop=config.stop,
    )
