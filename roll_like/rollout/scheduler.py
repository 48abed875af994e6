"""Fills groups: which task next, on which replica, when to score, what to drop, what to abort.

One asyncio loop on the driver. Replicas and scorers are anything with these methods, so the logic is
tested with fakes of a few lines; in a run they are handles on Ray actors.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from roll_like.errors import GenerationError
from roll_like.inference.base import FailedGeneration, GenerateRequest, Generation, Sampling
from roll_like.rollout.trajectory import trajectory_of
from roll_like.types import Failure, Group, Scored, Task, Trajectory

POLL_SECONDS = 30.0


class ReplicaLost(GenerationError):
    """A replica's process is gone; its requests go to another."""


class Replica(Protocol):
    """One inference engine. Its methods raise `ReplicaLost` when its process is gone."""

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start generating."""

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        """Return what finished since the last call; wait up to `timeout` seconds for the first."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll` with their tokens so far."""


class GroupScorer(Protocol):
    """Judges one complete group."""

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with rewards; what could not be judged is in its failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What to sample for a set of tasks.

    Attributes:
        groups: How many accepted groups are wanted.
        samples_per_group: Samples of each.
        sampling: How tokens are drawn.
        initial_groups: How many to start at once; above `groups`, because some will be rejected.
        max_groups: How many may be started in all; above `groups`, rejected ones are replaced.
        seed: Seed of every sample's own seed; None leaves sampling unseeded.
        accept: Whether a scored group is kept.
        baseline: How one more sample of each group is drawn, which ends up in `Group.baselines`; none by default.
    """

    groups: int
    samples_per_group: int
    sampling: Sampling
    initial_groups: int
    max_groups: int
    seed: int | None
    accept: Callable[[Group[Scored]], bool]
    baseline: Sampling | None = None

    @property
    def requests_per_group(self) -> int:
        """Samples of a group, its baseline included."""
        return self.samples_per_group + (self.baseline is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a call of `GenerateScheduler.fill` brought back.

    Attributes:
        groups: Accepted groups, in task order.
        rejected: Groups that the filter turned down.
        unfinished: Tasks whose groups were aborted because enough others were accepted.
        failures: Samples that infrastructure lost.
        started: How many groups were started.
        generate_seconds: From the first request to the last sample.
        wait_reward_seconds: From the last sample to the last verdict.
        tokens: Sampled tokens, rejected groups included.
    """

    groups: tuple[Group[Scored], ...]
    rejected: tuple[Group[Scored], ...]
    unfinished: tuple[Task, ...]
    failures: tuple[Failure, ...]
    started: int
    generate_seconds: float
    wait_reward_seconds: float
    tokens: int


@dataclass(slots=True)
class _OpenGroup:
    """A group whose samples are being generated or judged."""

    index: int
    task: Task
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def complete(self, samples: int) -> bool:
        return len(self.trajectories) + len(self.failures) == samples


@dataclass(slots=True)
class _Pending:
    """A request and where it is."""

    request: GenerateRequest
    group: int
    sample: int
    attempts: int = 0
    replica: int | None = None


class GenerateScheduler:
    """Routes requests to replicas and scores groups as they complete.

    Args:
        replicas: The inference engines.
        scorer: Judges complete groups.
        max_in_flight: Samples that may be generating at a time.
        retries: Further attempts of a sample whose replica failed.
        progress: Called with (finished samples, expected samples).
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        scorer: GroupScorer,
        *,
        max_in_flight: int,
        retries: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._replicas = dict(enumerate(replicas))
        self._scorer = scorer
        self._max_in_flight = max_in_flight
        self._retries = retries
        self._progress = progress
        self._serial = itertools.count()

    async def fill(self, tasks: Iterator[Task], plan: GroupPlan) -> Collected:
        """Generate and judge groups until `plan.groups` are accepted.

        Consumes tasks from `tasks` as groups start; waits for replicas and scorers; comes back with
        fewer groups when `plan.max_groups` were started and not enough were accepted.

        Raises:
            GenerationError: No replica is left.
        """
        filling = _Filling(
            replicas=self._replicas,
            scorer=self._scorer,
            max_in_flight=self._max_in_flight,
            retries=self._retries,
            progress=self._progress,
            tasks=tasks,
            plan=plan,
            serial=next(self._serial),
        )
        return await filling.run()


class _Filling:
    """The state of one `fill`: open groups, waiting and running requests, verdicts on their way."""

    def __init__(
        self,
        *,
        replicas: dict[int, Replica],
        scorer: GroupScorer,
        max_in_flight: int,
        retries: int,
        progress: Callable[[int, int], None],
        tasks: Iterator[Task],
        plan: GroupPlan,
        serial: int,
    ) -> None:
        self._replicas = replicas
        self._scorer = scorer
        self._max_in_flight = max_in_flight
        self._retries = retries
        self._progress = progress
        self._tasks = tasks
        self._plan = plan
        self._serial = serial
        self._open: dict[int, _OpenGroup] = {}
        self._waiting: deque[_Pending] = deque()
        self._running: dict[str, _Pending] = {}
        self._background: set[asyncio.Task[None]] = set()  # one poller a busy replica, one scorer a complete group
        self._polled: set[int] = set()
        self._accepted: dict[int, Group[Scored]] = {}
        self._rejected: dict[int, Group[Scored]] = {}
        self._unfinished: dict[int, Task] = {}
        self._failures: list[Failure] = []
        self._started = 0
        self._exhausted = False
        self._finished_samples = 0
        self._tokens = 0
        self._began = self._last_sample = time.perf_counter()

    async def run(self) -> Collected:
        """Loop: start groups, send requests, wait for a poller or a scorer to end."""
        try:
            self._start_groups(self._plan.initial_groups)
            await self._dispatch()
            while self._open and len(self._accepted) < self._plan.groups:
                await self._wait_for_one()
                self._start_groups(self._plan.groups)
                await self._dispatch()
            await self._abort_surplus()
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
        return self._collected()

    # ---- starting ------------------------------------------------------------------------------

    def _start_groups(self, wanted: int) -> None:
        """Start groups until accepted and open ones together are as many as wanted."""
        while (
            len(self._accepted) + len(self._open) < wanted
            and self._started < self._plan.max_groups
            and not self._exhausted
        ):
            task = next(self._tasks, None)
            if task is None:
                self._exhausted = True
                return
            group = self._started
            self._started += 1
            self._open[group] = _OpenGroup(index=group, task=task)
            self._waiting.extend(
                _Pending(request=self._request(task, group, sample), group=group, sample=sample)
                for sample in range(self._plan.requests_per_group)
            )

    def _request(self, task: Task, group: int, sample: int) -> GenerateRequest:
        seed = self._plan.seed
        if seed is not None:
            seed = int(np.random.SeedSequence([seed, group, sample]).generate_state(1)[0])
        return GenerateRequest(
            request_id=f"{self._serial}-{group}-{sample}",
            prompt_ids=task.prompt_ids,
            sampling=self._sampling_of(sample),
            seed=seed,
        )

    def _sampling_of(self, sample: int) -> Sampling:
        """The sample after the last trained one is the group's baseline."""
        baseline = self._plan.baseline
        return baseline if baseline is not None and sample == self._plan.samples_per_group else self._plan.sampling

    async def _dispatch(self) -> None:
        """Send waiting requests, whole groups to the least loaded replica, one call a replica."""
        while self._waiting and len(self._running) < self._max_in_flight:
            batches: dict[int, list[_Pending]] = {}
            loads = dict.fromkeys(self._replicas, 0)
            for pending in self._running.values():
                if pending.replica in loads:
                    loads[pending.replica] += 1
            homes: dict[int, int] = {}
            while self._waiting and len(self._running) < self._max_in_flight:
                pending = self._waiting.popleft()
                home = homes.setdefault(pending.group, min(loads, key=lambda replica: loads[replica]))
                pending.replica = home
                loads[home] += 1
                self._running[pending.request.request_id] = pending
                batches.setdefault(home, []).append(pending)
            for home, batch in batches.items():
                await self._submit(home, batch)

    async def _submit(self, home: int, batch: list[_Pending]) -> None:
        try:
            await self._replicas[home].submit([pending.request for pending in batch])
        except ReplicaLost as error:
            self._lose_replica(home, error)
            return
        if home not in self._polled:
            self._polled.add(home)
            self._background.add(asyncio.create_task(self._poll_while_busy(home)))

    # ---- finishing -----------------------------------------------------------------------------

    async def _wait_for_one(self) -> None:
        finished, _ = await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            self._background.discard(task)
            task.result()  # an error of a plugin or an engine ends the fill here

    async def _poll_while_busy(self, home: int) -> None:
        """Take a replica's results once. Ends after one batch, so that the loop can send more."""
        try:
            results = await self._replicas[home].poll(POLL_SECONDS)
        except ReplicaLost as error:
            self._polled.discard(home)
            self._lose_replica(home, error)
            return
        for result in results:
            self._take(result)
        self._polled.discard(home)
        if any(pending.replica == home for pending in self._running.values()):
            self._polled.add(home)
            self._background.add(asyncio.create_task(self._poll_while_busy(home)))

    def _take(self, result: Generation | FailedGeneration) -> None:
        pending = self._running.pop(result.request_id, None)
        if pending is None or pending.group not in self._open:
            return  # aborted: its group is closed
        group = self._open[pending.group]
        if isinstance(result, FailedGeneration):
            self._retry(pending, str(result.error))
            return
        self._last_sample = time.perf_counter()
        self._finished_samples += 1
        self._tokens += len(result.token_ids)
        group.trajectories[pending.sample] = trajectory_of(group.task, pending.sample, result)
        self._progress(self._finished_samples, self._started * self._plan.requests_per_group)
        self._score_if_complete(group)

    def _retry(self, pending: _Pending, error: str) -> None:
        pending.attempts += 1
        if pending.attempts <= self._retries:
            pending.replica = None
            self._waiting.append(pending)
            return
        group = self._open[pending.group]
        group.failures.append(
            Failure(stage="generate", name=f"sample {pending.sample}", error=error, origin=group.task.origin)
        )
        self._score_if_complete(group)

    def _lose_replica(self, home: int, error: ReplicaLost) -> None:
        self._replicas.pop(home, None)
        lost = [pending for pending in self._running.values() if pending.replica == home]
        for pending in lost:
            del self._running[pending.request.request_id]
            # the replica failed, not the sample: this does not count as an attempt
            pending.replica = None
            self._waiting.append(pending)
        if not self._replicas:
            raise GenerationError(
                f"every inference replica is gone; the last one said: {error}",
                fix="look for out-of-memory kills; lower inference.kv_cache_gib or inference.max_running",
            ) from error

    def _score_if_complete(self, group: _OpenGroup) -> None:
        if group.complete(self._plan.requests_per_group):
            self._background.add(asyncio.create_task(self._score(group)))

    async def _score(self, group: _OpenGroup) -> None:
        trajectories = tuple(group.trajectories[sample] for sample in sorted(group.trajectories))
        if trajectories:
            scored = await self._scorer.score(
                Group(task=group.task, samples=trajectories, failures=tuple(group.failures))
            )
        else:
            scored = Group(task=group.task, samples=(), failures=tuple(group.failures))
        scored = self._set_baseline_apart(scored)
        self._failures.extend(scored.failures)
        if self._open.pop(group.index, None) is None:
            return
        accepted = len(self._accepted) < self._plan.groups and self._plan.accept(scored)
        (self._accepted if accepted else self._rejected)[group.index] = scored

    def _set_baseline_apart(self, scored: Group[Scored]) -> Group[Scored]:
        """Move the baseline out of the samples, which it was judged with."""
        last = self._plan.samples_per_group
        return replace(
            scored,
            samples=tuple(one for one in scored.samples if one.trajectory.sample_index < last),
            baselines=tuple(one for one in scored.samples if one.trajectory.sample_index >= last),
        )

    async def _abort_surplus(self) -> None:
        """Stop what is still generating, and wait until replicas have let go of it."""
        self._unfinished = {index: group.task for index, group in self._open.items()}
        self._open.clear()
        self._waiting.clear()
        by_replica: dict[int, list[str]] = {}
        for request_id, pending in self._running.items():
            if pending.replica is not None:
                by_replica.setdefault(pending.replica, []).append(request_id)
        for home, request_ids in by_replica.items():
            try:
                await self._replicas[home].abort(request_ids)
            except ReplicaLost as error:
                self._lose_replica(home, error)
        while self._running or self._polled:
            await self._wait_for_one()

    def _collected(self) -> Collected:
        return Collected(
            groups=tuple(self._accepted[index] for index in sorted(self._accepted)),
            rejected=tuple(self._rejected[index] for index in sorted(self._rejected)),
            unfinished=tuple(self._unfinished[index] for index in sorted(self._unfinished)),
            failures=tuple(self._failures),
            started=self._started,
            generate_seconds=self._last_sample - self._began,
            wait_reward_seconds=time.perf_counter() - self._last_sample,
            tokens=self._tokens,
        )
