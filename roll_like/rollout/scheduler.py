"""Fills groups with answers to prompts: every sample is one request, every group is judged when it is complete.

One asyncio loop on the driver. Scorers are anything with these methods, so the logic is tested with
fakes of a few lines; in a run they are handles on Ray actors.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.rollout.collection import Collected, CollectionPlan, GroupCollector, SampleCounter
from roll_like.rollout.router import Replica, RequestAborted, Router, SampleLost
from roll_like.rollout.trajectory import trajectory_of
from roll_like.types import Failure, Group, Scored, Task, Trajectory


class GroupScorer(Protocol):
    """Judges one complete group."""

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with rewards; what could not be judged is in its failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan(CollectionPlan):
    """What to sample for a set of tasks.

    Attributes:
        samples_per_group: Samples of each group.
        sampling: How tokens are drawn.
        seed: Seed of every sample's own seed; None leaves sampling unseeded.
        baseline: How one more sample of each group is drawn, which ends up in `Group.baselines`; none by default.
    """

    samples_per_group: int
    sampling: Sampling
    seed: int | None
    baseline: Sampling | None = None

    @property
    def requests_per_group(self) -> int:
        """Samples of a group, its baseline included."""
        return self.samples_per_group + (self.baseline is not None)


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
        counter = SampleCounter(plan.requests_per_group, self._progress)
        player = _PromptPlayer(self._router, self._scorer, plan, counter, next(self._serial))
        return await GroupCollector(tasks, plan, player, counter).run()


class _PromptPlayer:
    """Samples the answers to one prompt and has them judged together."""

    def __init__(
        self, router: Router, scorer: GroupScorer, plan: GroupPlan, counter: SampleCounter, serial: int
    ) -> None:
        self._router = router
        self._scorer = scorer
        self._plan = plan
        self._counter = counter
        self._serial = serial
        self._requested: dict[int, list[str]] = {}
        self._stopped: set[int] = set()

    async def play(self, group: int, task: Task) -> Group[Scored]:
        """Sample one group and have it judged."""
        requests = [self._request(task, group, sample) for sample in range(self._plan.requests_per_group)]
        self._requested[group] = [request.request_id for request in requests]
        results = await asyncio.gather(
            *(self._sample(group, task, sample, request) for sample, request in enumerate(requests))
        )
        trajectories = tuple(result for result in results if isinstance(result, Trajectory))
        failures = tuple(result for result in results if isinstance(result, Failure))
        if not trajectories or group in self._stopped:
            return Group(task=task, samples=(), failures=failures)
        judged = await self._scorer.score(Group(task=task, samples=trajectories, failures=failures))
        return self._set_baseline_apart(judged)

    async def stop(self, groups: Collection[int]) -> None:
        """Stop what is still generating, and wait until replicas have let go of it."""
        self._stopped |= set(groups)
        await self._router.abort([request_id for group in groups for request_id in self._requested.get(group, ())])

    async def _sample(
        self, group: int, task: Task, sample: int, request: GenerateRequest
    ) -> Trajectory | Failure | None:
        """Return one sample, or why there is none; None where the group was taken back."""
        try:
            generation = await self._router.generate(request, affinity_key=(self._serial, group))
        except RequestAborted:
            return None
        except SampleLost as error:
            return Failure(stage="generate", name=f"sample {sample}", error=error.message, origin=task.origin)
        if group not in self._stopped:
            self._counter.sampled(len(generation.token_ids))
        return trajectory_of(task, sample, generation)

    def _request(self, task: Task, group: int, sample: int) -> GenerateRequest:
        seed = self._plan.seed
        if seed is not None:
            seed = int(np.random.SeedSequence([seed, group, sample]).generate_state(1)[0])
        # the sample after the last trained one is the group's baseline
        baseline = self._plan.baseline if sample == self._plan.samples_per_group else None
        return GenerateRequest(
            request_id=f"{self._serial}-{group}-{sample}",
            prompt_ids=task.prompt_ids,
            sampling=baseline or self._plan.sampling,
            seed=seed,
        )

    def _set_baseline_apart(self, scored: Group[Scored]) -> Group[Scored]:
        """Move the baseline out of the samples, which it was judged with."""
        last = self._plan.samples_per_group
        return replace(
            scored,
            samples=tuple(one for one in scored.samples if one.trajectory.sample_index < last),
            baselines=tuple(one for one in scored.samples if one.trajectory.sample_index >= last),
        )
