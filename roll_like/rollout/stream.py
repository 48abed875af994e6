"""Runs groups all the time, while the policy is trained as well: each is an asyncio task.

The staleness manager (`staleness.py`) decides what may start and what is trained next. The stream starts groups where
there is room: after a new policy version, after a group has ended, after a batch was taken. It has no thread and no
knowledge of Ray; everything in it runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_like.errors import GenerationError
from roll_like.rollout.collection import GroupRunner
from roll_like.rollout.staleness import Admitted, StalenessManager
from roll_like.types import Failure, Group, Scored, Task

#: Groups that the message about a stalled stream names.
NAMED_GROUPS = 5


@dataclass(kw_only=True)
class Since:
    """What happened since the last batch was taken.

    Attributes:
        rejected: Groups that the filter turned down, or that failures left without samples.
        failures: Samples that infrastructure lost.
        started: Groups that were admitted.
        discarded: Groups of a checkpoint that could not be trained in time any more.
        blocked_seconds: How long nothing ran because nothing could be admitted.
    """

    rejected: list[Group[Scored]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    started: int = 0
    discarded: int = 0
    blocked_seconds: float = 0.0


class GroupStream:
    """Groups that run while others are trained.

    Args:
        runner: Samples and scores groups.
        tasks: What to attempt, without end.
        staleness: Decides what starts and what is trained.
        accept: Whether a scored group is trained on.
        clock: Seconds that pass.
        stall_seconds: How long `batch` waits without any group ending before it is an error.
    """

    def __init__(
        self,
        runner: GroupRunner,
        tasks: Iterator[Task],
        staleness: StalenessManager,
        accept: Callable[[Group[Scored]], bool],
        *,
        clock: Callable[[], float],
        stall_seconds: float,
    ) -> None:
        self._runner = runner
        self._tasks = tasks
        self._staleness = staleness
        self._accept = accept
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._returned: deque[tuple[int, Task]] = deque()
        self._work: dict[int, asyncio.Task[None]] = {}
        self._admitted_at: dict[int, float] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._blocked_since: float | None = None
        self._closed = False
        self.since = Since()

    @property
    def running(self) -> int:
        """Groups that run now."""
        return self._staleness.open

    @property
    def ready(self) -> int:
        """Groups that wait to be trained."""
        return self._staleness.ready

    def published(self, version: int) -> None:
        """Start what a new policy version makes room for."""
        self._staleness.version = version
        self._start_groups()
        self._runner.prioritize(self._staleness.due())

    async def batch(self) -> list[Admitted]:
        """Return the groups of the next step, in order of admission.

        Waits for groups to end; returns at once where enough are ready. A cancelled call loses nothing.

        Raises:
            GenerationError: No group has ended for `stall_seconds`. What a group's task raised is raised as it is.
        """
        self._runner.prioritize(self._staleness.due())
        while True:
            if self._error is not None:
                raise self._error
            batch = self._staleness.take()
            if batch is not None:
                self._start_groups()
                return batch
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._stall_seconds)
            except TimeoutError:
                raise self._stalled() from None

    def report(self) -> Since:
        """Return what happened since the last report, and begin anew."""
        self._note_blocked()
        report, self.since = self.since, Since()
        return report

    def snapshot(self) -> tuple[dict[str, Any], list[Group[Scored]]]:
        """Return what a checkpoint keeps: plain JSON, and the groups that are ready."""
        state, ready = self._staleness.snapshot()
        state["open"] += [[serial, task.task_id] for serial, task in self._returned]
        return state, ready

    def restore(
        self, state: Mapping[str, Any], ready: Iterable[Group[Scored]], find: Callable[[str], Task]
    ) -> list[Admitted]:
        """Continue where `snapshot` was taken; groups that ran start again, before any other.

        Returns:
            Groups that are too old for the configuration as it is now. Their tasks start again as well.
        """
        late = self._staleness.restore(state, ready)
        returned = [(serial, find(task_id)) for serial, task_id in state["open"]]
        self._returned = deque(sorted([*returned, *((entry.serial, entry.task) for entry in late)], key=_serial))
        self.since.discarded += len(late)
        return late

    async def close(self) -> None:
        """Stop every running group. May be called twice."""
        self._closed = True
        work = list(self._work.values())
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    def _start_groups(self) -> None:
        for _ in range(0 if self._closed else self._staleness.room):
            serial, task = self._returned.popleft() if self._returned else (None, next(self._tasks))
            entry = self._staleness.admit(self._staleness.next_serial() if serial is None else serial, task)
            self.since.started += 1
            self._admitted_at[entry.serial] = self._clock()
            self._work[entry.serial] = asyncio.create_task(self._run(entry.serial, task))
        self._note_blocked()

    async def _run(self, serial: int, task: Task) -> None:
        try:
            group = await self._runner.run(serial, task)
            self._settle(serial, group)
        except Exception as error:  # noqa: BLE001 - raised by the next `batch`
            self._error = self._error or error
        finally:
            del self._work[serial], self._admitted_at[serial]
            self._changed.set()

    def _settle(self, serial: int, group: Group[Scored]) -> None:
        self.since.failures.extend(group.failures)
        accepted = self._accept(group)
        if not accepted:
            self.since.rejected.append(group)
        self._staleness.settle(serial, group, accepted=accepted)
        self._start_groups()

    def _note_blocked(self) -> None:
        """Count the time in which nothing runs."""
        now = self._clock()
        if self._blocked_since is not None:
            self.since.blocked_seconds += now - self._blocked_since
        self._blocked_since = None if self._staleness.open else now

    def _stalled(self) -> GenerationError:
        now = self._clock()
        running = sorted(self._staleness.running(), key=lambda entry: entry.serial)
        named = "\n".join(
            f"- {entry.task.origin}: running for {now - self._admitted_at[entry.serial]:.0f} s, "
            f"{self._staleness.version - entry.start} versions old, {self._runner.describe(entry.serial)}"
            for entry in running[:NAMED_GROUPS]
        )
        return GenerationError(
            f"no group has ended for {self._stall_seconds:g} s; {self.ready} groups are ready and {len(running)} are "
            f"running, the oldest of them:\n{named}",
            fix="look for an engine, environment or reward that hangs; if groups take longer than that, raise "
            "rollout.schedule.stall_seconds",
        )


def _serial(returned: tuple[int, Task]) -> int:
    return returned[0]
