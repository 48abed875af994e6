"""Collects groups, for every schedule: a `GroupStream` runs each as an asyncio task, and hands out batches.

The rule of what starts and what is trained is `StalenessManager` (`staleness.py`), pure and synchronous. Asynchronous
rollouts have one stream for the whole run. A synchronous step, or an evaluation, is a stream that ends with its first
batch (`collect_batch`). A `GroupRunner` samples a group: answers to a prompt (`scheduler.py`), or episodes of many
turns (`env_manager.py`).

Who waits for what, and what unblocks it:

    a step or an evaluation, in `batch`   groups missing from its batch   a group's end, or its error; without either
                                                                          for `stall_seconds` it is an error
    a full batch, in `batch`              groups that are given back      `GroupRunner.stop`: they generate no more
    a task that may start                 room                            `published`, a batch that was taken, a group
                                                                          that was not accepted
    a running group                       engines, environments, rewards  its `GroupRunner`
    `close`                               every running group             their cancellation

No group waits for another, or for the trainer: they go on between two calls of `batch`. Everything runs on one event
loop, without threads and without knowledge of Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from roll_like.errors import GenerationError
from roll_like.rollout.staleness import Admitted, StalenessManager
from roll_like.types import Failure, Group, Scored, Task
from roll_like.values import Metric

#: Called with (finished samples, expected samples).
SampleProgress: TypeAlias = Callable[[int, int], object]
#: Groups that the message about a stalled stream names.
NAMED_GROUPS = 5


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A step's groups, and what collecting them took.

    Attributes:
        groups: What is trained on; of a synchronous step or an evaluation in task order.
        rejected: Groups that the filter turned down, or that failures left without samples; in order of admission.
        failures: Samples that infrastructure lost.
        started: How many groups were started.
        tokens: Sampled tokens, rejected groups included.
        unfinished: Tasks whose groups were not needed because enough others were accepted, in task order. Their groups
            were aborted, or are complete and left out.
        wait_reward_seconds: From the last sample to the last result; 0 if other groups are sampled meanwhile.
        metrics: Further figures of the collection, by their names.
    """

    groups: tuple[Group[Scored], ...]
    rejected: tuple[Group[Scored], ...]
    failures: tuple[Failure, ...]
    started: int
    tokens: int
    unfinished: tuple[Task, ...] = ()
    wait_reward_seconds: float = 0.0
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
        of_policy = [failure for failure in self.failures if failure.of_policy]
        lost = len(of_policy)
        if not lost or lost <= accepted * (scored + lost):
            return
        first = of_policy[0]
        raise GenerationError(
            f"{lost} of {scored + lost} samples of {what} were lost to failures, above "
            f"rollout.max_failure_fraction: {accepted:g}. The first, at {first.stage} "
            f"{first.name!r} for {first.origin}:\n{first.error}",
            fix=f"fix the failing {first.stage}; failed samples are dropped, not scored 0",
        )


class GroupRunner(Protocol):
    """Samples and scores groups, many at a time.

    Attributes:
        counter: Counts what it samples.
    """

    counter: SampleCounter

    async def run(self, group: int, task: Task) -> Group[Scored]:
        """Return a scored group; lost samples are in its failures. `group` counts the groups of one stream."""

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
        progress: Told after each sample.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, samples_per_group: int, progress: SampleProgress, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._samples_per_group = samples_per_group
        self._progress = progress
        self._clock = clock
        self._last = clock()
        self.started = 0
        self.samples = 0
        self.tokens = 0

    def sampled(self, tokens: int) -> None:
        """Count a finished sample."""
        self._last = self._clock()
        self.samples += 1
        self.tokens += tokens
        self._progress(self.samples, self.started * self._samples_per_group)

    def seconds_since_last(self) -> float:
        """Return the time since the last finished sample."""
        return self._clock() - self._last


#: Makes what samples and scores groups, of the seed of its samples (None leaves them unseeded) and who is told of them.
MakeRunner: TypeAlias = Callable[[int | None, SampleProgress], GroupRunner]


class GroupStream:
    """Starts groups where there is room, and hands out batches of those that are ready.

    Args:
        runner: Samples and scores groups.
        tasks: What to attempt; as many as there may be room for.
        rule: Decides what starts and what is trained.
        accept: Whether a scored group is trained on.
        clock: Seconds that pass.
        stall_seconds: How long `batch` waits without any group ending before it is an error; None: without end.
    """

    def __init__(
        self,
        runner: GroupRunner,
        tasks: Iterator[Task],
        rule: StalenessManager,
        accept: Callable[[Group[Scored]], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        stall_seconds: float | None = None,
    ) -> None:
        self._runner = runner
        self._counter = runner.counter
        self._tasks = tasks
        self._rule = rule
        self._accept = accept
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._returned: deque[tuple[int, Task]] = deque()
        self._work: dict[int, asyncio.Task[None]] = {}
        self._admitted_at: dict[int, float] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._closed = False
        self.waiting = False  # whether `batch` does
        self._rejected: dict[int, Group[Scored]] = {}
        self._failures: list[Failure] = []
        self._blocked_since: float | None = None
        self._blocked_seconds = 0.0

    @property
    def running(self) -> int:
        """Groups that run now."""
        return self._rule.open

    @property
    def ready(self) -> int:
        """Groups that wait to be trained."""
        return self._rule.ready

    def published(self, version: int) -> None:
        """Start what a new policy version makes room for."""
        self._rule.version = version
        self._start_groups()
        self._runner.prioritize(self._rule.due())

    async def batch(self) -> list[Admitted]:
        """Return the groups of the next step, in order of admission.

        Waits for groups to end; returns at once where enough are ready. A cancelled call loses nothing.

        Raises:
            GenerationError: No group has ended for `stall_seconds`. What a group's task raised is raised as it is.
        """
        self._runner.prioritize(self._rule.due())
        self.waiting = True
        try:
            while True:
                if self._error is not None:
                    raise self._error
                self._start_groups()
                await self._give_back()
                batch = self._rule.take()
                if batch is not None:
                    self._start_groups()
                    return batch
                self._changed.clear()
                try:
                    async with asyncio.timeout(self._stall_seconds):
                        await self._changed.wait()
                except TimeoutError:
                    raise self._stalled() from None
        finally:
            self.waiting = False

    def collected(self, groups: Iterable[Group[Scored]]) -> Collected:
        """Return groups that are trained on with what happened since the last call, and begin anew."""
        collected = Collected(
            groups=tuple(groups),
            rejected=tuple(self._rejected[serial] for serial in sorted(self._rejected)),
            failures=tuple(self._failures),
            started=self._counter.started,
            tokens=self._counter.tokens,
        )
        self._rejected, self._failures = {}, []
        self._counter.started = self._counter.tokens = 0
        return collected

    def blocked_seconds(self) -> float:
        """Return how long nothing ran because nothing could be admitted, since the last call."""
        self._note_blocked()
        seconds, self._blocked_seconds = self._blocked_seconds, 0.0
        return seconds

    def left(self) -> list[Task]:
        """Return the tasks that were started and not trained or turned down, in order of admission."""
        return [task for _, task in sorted([*self._returned, *self._rule.left()], key=_serial)]

    def snapshot(self) -> tuple[dict[str, Any], list[Group[Scored]]]:
        """Return what a checkpoint keeps: plain JSON, and the groups that are ready."""
        state, ready = self._rule.snapshot()
        state["open"] += [[serial, task.task_id] for serial, task in self._returned]
        return state, ready

    def restore(
        self, state: Mapping[str, Any], ready: Iterable[Group[Scored]], find: Callable[[str], Task]
    ) -> list[Admitted]:
        """Continue where `snapshot` was taken; groups that ran start again, before any other.

        Returns:
            Groups that are too old for the configuration as it is now. Their tasks start again as well.
        """
        late = self._rule.restore(state, ready)
        returned = [(serial, find(task_id)) for serial, task_id in state["open"]]
        self._returned = deque(sorted([*returned, *((entry.serial, entry.task) for entry in late)], key=_serial))
        return late

    async def close(self) -> None:
        """Stop every running group. May be called twice."""
        self._closed = True
        work = list(self._work.values())
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    def _start_groups(self) -> None:
        for _ in range(0 if self._closed else self._rule.room):
            known, task = self._returned.popleft() if self._returned else (None, next(self._tasks))
            serial = self._rule.admit(task, known)
            self._counter.started += 1
            self._admitted_at[serial] = self._clock()
            self._work[serial] = work = asyncio.create_task(self._run(serial, task))
            work.add_done_callback(partial(self._ended, serial))
        self._note_blocked()

    async def _run(self, serial: int, task: Task) -> None:
        group = await self._runner.run(serial, task)
        accepted = self._accept(group)
        if not self._rule.settle(serial, group, accepted=accepted):
            return  # it was given back meanwhile
        self._failures.extend(group.failures)
        if not accepted:
            self._rejected[serial] = group
        if not self.waiting:  # else `batch` replaces all that end at the same moment
            self._start_groups()

    def _ended(self, serial: int, work: asyncio.Task[None]) -> None:
        del self._work[serial], self._admitted_at[serial]
        if not self._closed:
            self._error = self._error or (asyncio.CancelledError() if work.cancelled() else work.exception())
        self._changed.set()

    async def _give_back(self) -> None:
        """Abort groups that the batch does not need; others may attempt their tasks again."""
        surplus = self._rule.give_back()
        if surplus:
            self._returned.extend((entry.serial, entry.task) for entry in surplus)
            await self._runner.stop([entry.serial for entry in surplus])

    def _note_blocked(self) -> None:
        """Count the time in which nothing runs."""
        now = self._clock()
        if self._blocked_since is not None:
            self._blocked_seconds += now - self._blocked_since
        self._blocked_since = None if self._rule.open else now

    def _stalled(self) -> GenerationError:
        now = self._clock()
        running = sorted(self._rule.running(), key=lambda entry: entry.serial)
        named = "\n".join(
            f"- {entry.task.origin}: running for {now - self._admitted_at[entry.serial]:.0f} s, "
            f"{self._rule.version - entry.start} versions old, {self._runner.describe(entry.serial)}"
            for entry in running[:NAMED_GROUPS]
        )
        return GenerationError(
            f"no group has ended for {self._stall_seconds:g} s; {self.ready} groups are ready and {len(running)} are "
            f"running, the oldest of them:\n{named}",
            fix="look for an engine, environment or reward that hangs; if groups take longer than that, raise "
            "rollout.schedule.stall_seconds",
        )


async def collect_batch(
    runner: GroupRunner,
    tasks: Iterator[Task],
    accept: Callable[[Group[Scored]], bool] = lambda group: True,
    *,
    groups: int,
    at_once: int = 0,
    max_started: int | None = None,
    waited_for: int = 0,
) -> Collected:
    """Start groups with one policy until enough are accepted, and abort the others: staleness 0.

    Waits for engines and scorers; comes back with fewer groups when `max_started` were started and not enough accepted.

    Args:
        runner: Samples and scores groups.
        tasks: What to attempt; consumed as groups start.
        accept: Whether a scored group is kept.
        groups: How many accepted groups are wanted.
        at_once: How many to start at once, if that is more than `groups`, because some will be rejected.
        max_started: How many may be started in all; above `groups`, rejected ones are replaced. None: without end.
        waited_for: How many of the first groups are never aborted, however many others are accepted; at most `groups`.

    Raises:
        GenerationError: No replica is left. What a group's task raised is raised as it is.
    """
    rule = StalenessManager(
        groups=groups, max_staleness=0, ahead=0, batches=1, at_once=at_once, max_started=max_started,
        waited_for=waited_for,
    )  # fmt: skip
    stream = GroupStream(runner, tasks, rule, accept)
    try:
        stream.published(1)
        batch = await stream.batch()
    finally:
        await stream.close()
    collected = stream.collected(entry.group for entry in batch if entry.group is not None)
    return replace(collected, unfinished=tuple(stream.left()), wait_reward_seconds=runner.counter.seconds_since_last())


def _serial(returned: tuple[int, Task]) -> int:
    return returned[0]
