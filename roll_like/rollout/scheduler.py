"""Fills groups: which task next, when to score, what to drop, what to abort.

One asyncio loop on the driver. Scorers are anything with these methods, so the logic is tested with
fakes of a few lines; in a run they are handles on Ray actors.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from roll_like.inference.base import GenerateRequest, Sampling
from roll_like.rollout.router import Replica, RequestAborted, Router, SampleLost
from roll_like.rollout.trajectory import trajectory_of
from roll_like.types import Failure, Group, Scored, Task, Trajectory


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


class GenerateScheduler:
    """Fills groups through a router, and has each scored as soon as it is complete.

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
        self._router = Router(replicas, max_in_flight=max_in_flight, retries=retries)
        self._scorer = scorer
        self._progress = progress
        self._serial = itertools.count()

    async def fill(self, tasks: Iterator[Task], plan: GroupPlan) -> Collected:
        """Generate and judge groups until `plan.groups` are accepted.

        Consumes tasks from `tasks` as groups start; waits for replicas and scorers; comes back with
        fewer groups when `plan.max_groups` were started and not enough were accepted.

        Raises:
            GenerationError: No replica is left.
        """
        return await _Filling(self._router, self._scorer, self._progress, tasks, plan, next(self._serial)).run()


class _Filling:
    """The state of one `fill`: open groups, each an asyncio task that samples and then judges."""

    def __init__(
        self,
        router: Router,
        scorer: GroupScorer,
        progress: Callable[[int, int], None],
        tasks: Iterator[Task],
        plan: GroupPlan,
        serial: int,
    ) -> None:
        self._router = router
        self._scorer = scorer
        self._progress = progress
        self._tasks = tasks
        self._plan = plan
        self._serial = serial
        self._open: dict[int, Task] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._requested: dict[int, set[str]] = {}
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
        """Loop: start groups, wait for one of them to end."""
        try:
            self._start_groups(self._plan.initial_groups)
            while self._open and len(self._accepted) < self._plan.groups:
                finished, _ = await asyncio.wait(self._work, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    self._work.discard(task)
                    task.result()  # an error of a plugin or an engine ends the fill here
                self._start_groups(self._plan.groups)
            await self._abort_surplus()
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
        return self._collected()

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
            self._open[group] = task
            self._requested[group] = set()
            self._work.add(asyncio.create_task(self._play(group, task)))

    async def _play(self, group: int, task: Task) -> None:
        """Sample one group, have it judged, and put it where it belongs."""
        results = await asyncio.gather(
            *(self._sample(group, task, sample) for sample in range(self._plan.requests_per_group))
        )
        if group not in self._open:
            return  # aborted meanwhile
        trajectories = tuple(result for result in results if isinstance(result, Trajectory))
        failures = tuple(result for result in results if isinstance(result, Failure))
        scored: Group[Scored] = Group(task=task, samples=(), failures=failures)
        if trajectories:
            scored = await self._scorer.score(Group(task=task, samples=trajectories, failures=failures))
        scored = self._set_baseline_apart(scored)
        self._failures.extend(scored.failures)
        if self._open.pop(group, None) is None:
            return
        accepted = len(self._accepted) < self._plan.groups and self._plan.accept(scored)
        (self._accepted if accepted else self._rejected)[group] = scored

    async def _sample(self, group: int, task: Task, sample: int) -> Trajectory | Failure | None:
        """Return one sample, or why there is none; None where the group is aborted."""
        request = self._request(task, group, sample)
        self._requested[group].add(request.request_id)
        try:
            generation = await self._router.generate(request, home=(self._serial, group))
        except RequestAborted:
            return None
        except SampleLost as error:
            return Failure(stage="generate", name=f"sample {sample}", error=error.message, origin=task.origin)
        if group in self._open:
            self._last_sample = time.perf_counter()
            self._finished_samples += 1
            self._tokens += len(generation.token_ids)
            self._progress(self._finished_samples, self._started * self._plan.requests_per_group)
        return trajectory_of(task, sample, generation)

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
        self._unfinished = dict(self._open)
        self._open.clear()
        await self._router.abort([request_id for group in self._unfinished for request_id in self._requested[group]])

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
