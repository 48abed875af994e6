"""Which groups may start and which are trained next: the rule that bounds the staleness of rollouts.

A group that starts under policy version `start` is trained at the latest by the batch that is trained from version
`start + max_staleness`; this holds for every group, because a group is admitted only if there is a place for it in
time, and because a batch is not closed while a group that can wait no longer is missing from it. Nothing is discarded
for its age.

With B groups a batch, S = `max_staleness`, v the version that samples, t the batches taken so far and U the groups that
were admitted and not yet trained:

- admit while |U| < ⌈B · ahead⌉ + B · (v − t);
- a batch is the B ready groups that started first; it waits until every group that must be in it is ready. Of the
  groups that started under version w or earlier, all but B · (w − 1 + S − t) must be in the next batch.

Example: B = 1, S = 2, ahead = 1. Versions are counted from 1, and batch 0 is trained from version 1. While version 1
samples, groups a and b run. If b is ready first, batch 0 is b, and c starts when version 2 is published. If c is ready
next, batch 1 is c. Batch 2, trained from version 3, has to be a: 3 − 1 = 2 = S. The trainer waits for it.

With S = 0 a batch has groups of its own version only: it waits for all that started, and leaves none. More than B may
start, because some will be rejected: `at_once` in the beginning, `max_started` at most. As soon as B are ready, the
running ones are given back, except the first `waited_for`. These were given back before; a task that takes long would
otherwise be given back again and again. They may bring the ready groups above B. Then the youngest are left out and
given back too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roll_like.types import Group, Scored, Task


@dataclass(slots=True, eq=False)
class Admitted:
    """A group that is running, or ready to be trained.

    Attributes:
        serial: Its number, from 0: in the batch with staleness 0, else in the run.
        task: What it attempts.
        start: Policy version at its admission; no token of it is older.
        group: The scored group; None while it runs.
    """

    serial: int
    task: Task
    start: int
    group: Group[Scored] | None = None


class StalenessManager:
    """Groups between admission and training. Synchronous, without a clock; what each group calls is O(1).

    Args:
        groups: Groups that a batch trains on, B.
        max_staleness: Most versions between the oldest sampled token of a group and the weights it trains, S.
        ahead: Groups that may be admitted beyond the next batch, as a multiple of B; at most S.
        batches: Batches of the whole run; no group is admitted that none of them could train.
        max_filtered: Groups that a filter may reject between two batches; with more, admission stops until the next
            batch. It also stops when failures cost B groups, so that a run in which nothing works any more ends.
            None: only `max_started` stops it.
        at_once: Groups to start in the beginning, whatever there is room for.
        max_started: Groups that may start in all; None: no limit.
        waited_for: How many of the first groups are never given back; at most B.
    """

    def __init__(
        self,
        *,
        groups: int,
        max_staleness: int,
        ahead: float,
        batches: int,
        max_filtered: int | None = None,
        at_once: int = 0,
        max_started: int | None = None,
        waited_for: int = 0,
    ) -> None:
        if ahead > max_staleness:
            raise ValueError(f"ahead is {ahead}, above max_staleness ({max_staleness}): the bound could not be kept")
        self._groups = groups
        self._max_staleness = max_staleness
        self._ahead = math.ceil(groups * Fraction(str(ahead)))  # 1.1 * 100 would be 111
        self._batches = batches
        self._max_filtered = max_filtered
        self._at_once = at_once
        self._max_started = max_started
        self._waited_for = waited_for
        self._admitted: dict[int, Admitted] = {}
        self._open_by_start: Counter[int] = Counter()
        self._ready = 0
        self._serial = 0
        self.version = 0
        self.taken = 0
        self.filtered = 0
        self.lost = 0

    @property
    def open(self) -> int:
        """Groups that are running."""
        return len(self._admitted) - self._ready

    @property
    def ready(self) -> int:
        """Groups that wait to be trained."""
        return self._ready

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        if self._max_filtered is not None and (self.filtered > self._max_filtered or self.lost >= self._groups):
            return 0
        pace = self._ahead + self._groups * (self.version - self.taken)
        left = self._groups * (self._batches - self.taken)
        room = max(min(pace, left) - len(self._admitted), self._at_once - self._serial)
        return max(0, room if self._max_started is None else min(room, self._max_started - self._serial))

    def admit(self, task: Task, serial: int | None = None) -> int:
        """Start a group under the version that samples now, if there is room; return its serial.

        Args:
            serial: That of a group that was started before.
        """
        if serial is None:
            serial, self._serial = self._serial, self._serial + 1
        self._admitted[serial] = Admitted(serial, task, self.version)
        self._open_by_start[self.version] += 1
        return serial

    def settle(self, serial: int, group: Group[Scored], *, accepted: bool) -> bool:
        """Take a group that has ended; one that is not accepted makes room for another. False: it was given back."""
        entry = self._admitted.get(serial)
        if entry is None:
            return False
        self._leave_open(entry)
        if accepted:
            entry.group = group
            self._ready += 1
            return True
        del self._admitted[serial]
        if group.samples:
            self.filtered += 1
        else:
            self.lost += 1
        return True

    def give_back(self) -> list[Admitted]:
        """Take out the running groups that no batch has a place for, in order of admission; with S = 0 only."""
        if self._max_staleness > 0 or self._ready < self._groups:
            return []
        surplus = [entry for entry in self.running() if entry.serial >= self._waited_for]
        for entry in surplus:
            self._leave_open(entry)
            del self._admitted[entry.serial]
        return surplus

    def take(self) -> list[Admitted] | None:
        """Return the next batch in order of admission, or None while groups are missing from it.

        A batch has fewer than B groups when admission has stopped and nothing runs.
        """
        if not self._complete():
            return None
        ready = [entry for entry in self._admitted.values() if entry.group is not None]
        batch = sorted(ready, key=lambda entry: (entry.start, entry.serial))[: self._groups]
        for entry in batch:
            del self._admitted[entry.serial]
        self._ready -= len(batch)
        self.taken += 1
        self.filtered = self.lost = 0
        return sorted(batch, key=lambda entry: entry.serial)

    def running(self) -> list[Admitted]:
        """Return the groups that are running."""
        return [entry for entry in self._admitted.values() if entry.group is None]

    def due(self) -> list[int]:
        """Return the serials of running groups that the next batch has to wait for, and that may be slow."""
        if self._max_staleness == 0:
            return [entry.serial for entry in self.running() if entry.serial < self._waited_for]
        return [entry.serial for entry in self.running() if entry.start - 1 + self._max_staleness <= self.taken]

    def left(self) -> list[tuple[int, Task]]:
        """Return the serials and tasks of the groups that are running or ready."""
        return [(entry.serial, entry.task) for entry in self._admitted.values()]

    def snapshot(self) -> tuple[dict[str, Any], list[Group[Scored]]]:
        """Return what a checkpoint keeps: plain JSON, and the groups that are ready, in the order of `ready`."""
        ready = [entry for entry in self._admitted.values() if entry.group is not None]
        state = {
            "taken": self.taken,
            "serial": self._serial,
            "open": [[entry.serial, entry.task.task_id] for entry in self.running()],
            "ready": [[entry.serial, entry.start] for entry in ready],
        }
        return state, [entry.group for entry in ready if entry.group is not None]

    @staticmethod
    def beginning(task_ids: Sequence[str]) -> dict[str, Any]:
        """Return the state, as of `snapshot`, of a manager that has to begin with these tasks."""
        waiting = [[serial, task_id] for serial, task_id in enumerate(task_ids)]
        return {"taken": 0, "serial": len(waiting), "open": waiting, "ready": []}

    def restore(self, state: Mapping[str, Any], groups: Iterable[Group[Scored]]) -> list[Admitted]:
        """Continue where `snapshot` was taken; running groups are not in it, they have to be admitted again.

        Filtered groups are counted anew: an old count could keep the groups that ran from being admitted, and the next
        batch would be trained without them.

        Returns:
            Groups that no batch can train in time, because `max_staleness` or the size of a batch was lowered
            since; they are no longer admitted.
        """
        self.taken, self._serial = state["taken"], state["serial"]
        self.filtered = self.lost = 0
        pairs = zip(state["ready"], groups, strict=True)
        entries = [Admitted(serial, group.task, start, group) for (serial, start), group in pairs]
        late = self._late(entries)
        self._admitted = {entry.serial: entry for entry in entries}
        for entry in late:
            del self._admitted[entry.serial]
        self._open_by_start.clear()
        self._ready = len(self._admitted)
        return late

    def _late(self, entries: Collection[Admitted]) -> list[Admitted]:
        """Return the groups for which there is no place in a batch before their deadline."""
        late: list[Admitted] = []
        placed = 0
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.serial)):
            batches = entry.start + self._max_staleness - self.taken  # that are left to train it
            if placed < self._groups * batches:
                placed += 1
            else:
                late.append(entry)
        return late

    def _complete(self) -> bool:
        if self._ready < self._groups and (self.open or self.room):
            return False
        running = 0
        for start in sorted(self._open_by_start):
            running += self._open_by_start[start]
            if running > self._groups * (start - 1 + self._max_staleness - self.taken):
                return False
        return True

    def _leave_open(self, entry: Admitted) -> None:
        self._open_by_start[entry.start] -= 1
        if not self._open_by_start[entry.start]:
            del self._open_by_start[entry.start]
