"""Collects a step's groups: which start, which are kept, which are replaced, which are no longer needed.

A `GroupRunner` samples a group: answers to a prompt (`scheduler.py`), or episodes of many turns
(`env_manager.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from roll_like.errors import GenerationError
from roll_like.types import Failure, Group, Scored, Task
from roll_like.values import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    """How many groups are wanted, and which of them.

    Attributes:
        groups: How many accepted groups are wanted.
        initial_groups: How many to start at once; above `groups`, because some will be rejected.
        max_groups: How many may be started in all; above `groups`, rejected ones are replaced.
        accept: Whether a scored group is kept.
        waited_for: How many of the first groups are never aborted, however many others are accepted; at most `groups`.
        urgent: Whether requests go before those of plans that are not.
    """

    groups: int
    initial_groups: int
    max_groups: int
    accept: Callable[[Group[Scored]], bool]
    waited_for: int = 0
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A step's groups, and what collecting them took.

    Attributes:
        groups: Accepted groups, in task order.
        rejected: Groups that the filter turned down.
        unfinished: Tasks whose groups were not needed because enough others were accepted, in task order. Their groups
            were aborted, or are complete and left out.
        failures: Samples that infrastructure lost.
        started: How many groups were started.
        wait_reward_seconds: From the last sample to the last result.
        tokens: Sampled tokens, rejected groups included.
        metrics: Further figures of the collection, by their names.
    """

    groups: tuple[Group[Scored], ...]
    rejected: tuple[Group[Scored], ...]
    unfinished: tuple[Task, ...]
    failures: tuple[Failure, ...]
    started: int
    wait_reward_seconds: float
    tokens: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def refuse_too_many_failures(self, accepted: float, what: str) -> None:
        """Raise when infrastructure lost more samples than the configuration accepts.

        Args:
            accepted: `rollout.max_failure_fraction`.
            what: What the samples were for, in words.

        Raises:
            GenerationError: With the counts and the first failure.
        """
        scored = sum(len(group.samples) for group in (*self.groups, *self.rejected))
        lost = len(self.failures)
        if not lost or lost <= accepted * (scored + lost):
            return
        first = self.failures[0]
        raise GenerationError(
            f"{lost} of {scored + lost} samples of {what} were lost to failures, above "
            f"rollout.max_failure_fraction: {accepted:g}. The first, at {first.stage} "
            f"{first.name!r} for {first.origin}:\n{first.error}",
            fix=f"mend the {first.stage} that failed; a lost sample is never counted as reward 0",
        )


class GroupRunner(Protocol):
    """Samples and scores groups, many at a time."""

    async def run(self, group: int, task: Task) -> Group[Scored]:
        """Return a scored group; lost samples are in its failures. `group` counts the groups of one collection."""

    async def stop(self, groups: Collection[int]) -> None:
        """Cancel running groups, and wait until nothing of them generates."""

    def prioritize(self, groups: Collection[int]) -> None:
        """Let the requests of groups go before those of others, from now until each group's end."""

    def describe(self, group: int) -> str:
        """Return what a running group does, in a few words, for a message."""


class SampleCounter:
    """What has been sampled so far, for figures and for a progress bar.

    Args:
        samples_per_group: Samples of each group.
        progress: Called with (finished samples, expected samples).
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        samples_per_group: int,
        progress: Callable[[int, int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._samples_per_group = samples_per_group
        self._progress = progress
        self._clock = clock
        self.began = self.last = clock()
        self.started = 0
        self.samples = 0
        self.tokens = 0

    def sampled(self, tokens: int) -> None:
        """Count a finished sample."""
        self.last = self._clock()
        self.samples += 1
        self.tokens += tokens
        self._progress(self.samples, self.started * self._samples_per_group)

    def seconds_since_last(self) -> float:
        """Return the time since the last finished sample."""
        return self._clock() - self.last


class GroupCollector:
    """Starts groups until enough are accepted; each is an asyncio task.

    As soon as enough are accepted, the other groups are aborted and their tasks given back, except the first
    `plan.waited_for`. The tasks of these were given back before; a task that takes long would otherwise be aborted
    again and again. Their requests go first from the start, and the collection waits for them. They may bring the
    accepted groups above `plan.groups`. Then the youngest groups are left out, although they are complete, and their
    tasks are given back too. The groups that were waited for are the oldest, so they always stay.

    Args:
        tasks: What to attempt; consumed as groups start.
        plan: What is wanted.
        runner: Samples and scores a group.
        counter: What the runner counts in.
    """

    def __init__(
        self, tasks: Iterator[Task], plan: CollectionPlan, runner: GroupRunner, counter: SampleCounter
    ) -> None:
        self._tasks = tasks
        self._plan = plan
        self._runner = runner
        self._counter = counter
        self._started: list[Task] = []  # by group
        self._open: set[int] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._accepted: dict[int, Group[Scored]] = {}
        self._rejected: dict[int, Group[Scored]] = {}
        self._unfinished: set[int] = set()
        self._failures: list[Failure] = []
        self._exhausted = False

    async def run(self) -> Collected:
        """Start groups, and wait for one of them to end, until there are enough or no more may start."""
        try:
            self._start_groups(self._plan.initial_groups)
            self._runner.prioritize(range(min(self._plan.waited_for, self._counter.started)))
            while self._open:
                finished, _ = await asyncio.wait(self._work, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    self._work.discard(task)
                    task.result()  # an error of a plugin or an engine ends the collection here
                self._start_groups(self._plan.groups)
                if len(self._accepted) >= self._plan.groups:
                    await self._give_back([group for group in self._open if group >= self._plan.waited_for])
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
        return self._collected()

    def _start_groups(self, wanted: int) -> None:
        """Start groups until accepted and open ones together are as many as wanted."""
        while (
            len(self._accepted) + len(self._open) < wanted
            and self._counter.started < self._plan.max_groups
            and not self._exhausted
        ):
            task = next(self._tasks, None)
            if task is None:
                self._exhausted = True
                return
            group = self._counter.started
            self._counter.started += 1
            self._started.append(task)
            self._open.add(group)
            self._work.add(asyncio.create_task(self._run_group(group, task)))

    async def _give_back(self, groups: Collection[int]) -> None:
        """Abort groups whose tasks others may attempt again."""
        if groups:
            self._open.difference_update(groups)
            self._unfinished.update(groups)
            await self._runner.stop(groups)

    async def _run_group(self, group: int, task: Task) -> None:
        scored = await self._runner.run(group, task)
        if group not in self._open:
            return  # cancelled meanwhile
        self._open.remove(group)
        self._failures.extend(scored.failures)
        (self._accepted if self._plan.accept(scored) else self._rejected)[group] = scored

    def _collected(self) -> Collected:
        accepted = sorted(self._accepted)
        kept, surplus = accepted[: self._plan.groups], accepted[self._plan.groups :]
        given_back = sorted(self._unfinished.union(surplus))
        return Collected(
            groups=tuple(self._accepted[index] for index in kept),
            rejected=tuple(self._rejected[index] for index in sorted(self._rejected)),
            unfinished=tuple(self._started[index] for index in given_back),
            failures=tuple(self._failures),
            started=self._counter.started,
            wait_reward_seconds=self._counter.seconds_since_last(),
            tokens=self._counter.tokens,
        )
