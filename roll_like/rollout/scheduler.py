"""Samples groups of answers to prompts: every sample is one request, every group is scored when it is complete."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from roll_like.config.inference import POLICY
from roll_like.data.kept import joined_kept
from roll_like.inference.interface import GenerateRequest, Generation, Sampling, derived_seed
from roll_like.rollout.collection import GroupRunner, SampleCounter, SampleProgress, no_progress
from roll_like.rollout.reward_pools import RewardPools
from roll_like.rollout.router import RequestAborted, Router, SampleLost
from roll_like.types import Failure, Group, Origin, Part, Scored, Task, Trajectory


class OffPolicyAnswers(Protocol):
    """What joins a group beside the samples of its policy."""

    def to_score(self, task: Task) -> Sequence[Trajectory]:
        """Return answers to a task that are scored with the group's samples."""

    def join(self, group: Group[Scored], scored: Sequence[Scored]) -> Group[Scored]:
        """Return a scored group with what joins it.

        Args:
            scored: What of `to_score` could be scored.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """How groups are sampled.

    Attributes:
        samples_per_group: Samples of each group that are kept.
        redundant: Further samples of each group; the first `samples_per_group` that finish are kept and scored, the
            others are aborted. Short answers finish first, so they are kept more often than they are drawn.
        sampling: How tokens are drawn.
        baseline: How one more sample of each group is drawn, which ends up in `Group.baselines`; none by default.
        adapter: What samples (`GenerateRequest.adapter`).
        urgent: Whether requests go before those of plans that are not.
        stops_answers: Whether stop strings end answers alone, and not the reasoning before them.
        off_policy: What joins a group beside its samples; nothing by default.
    """

    samples_per_group: int
    sampling: Sampling
    baseline: Sampling | None = None
    redundant: int = 0
    adapter: str = POLICY
    urgent: bool = False
    stops_answers: bool = False
    off_policy: OffPolicyAnswers | None = None

    @property
    def drawn_per_group(self) -> int:
        """Samples of a group that are started; the next index is that of its baseline."""
        return self.samples_per_group + self.redundant

    @property
    def kept_per_group(self) -> int:
        """Samples of a group that are kept, its baseline included."""
        return self.samples_per_group + (self.baseline is not None)


class GenerateScheduler:
    """Samples groups through a router, and has each scored as soon as it is complete."""

    def __init__(self, router: Router, scorer: RewardPools) -> None:
        self.engines = router
        self.scorer = scorer
        self._serial = itertools.count()

    def runner(self, plan: GroupPlan, seed: int | None, progress: SampleProgress = no_progress) -> GroupRunner:
        """Return what samples and scores groups by `plan`.

        Args:
            seed: Seed of every sample's own seed; None leaves sampling unseeded.
            progress: Told of finished samples.
        """
        return _PromptRunner(self, plan, seed, progress, next(self._serial))


@dataclass(slots=True)
class _Drawing:
    """A group that is being sampled.

    Attributes:
        requests: Those of its samples, then that of its baseline.
        kept: The samples that are kept, in the order in which they finished.
        finished: How many these are, with the baseline.
        stopped: Whether the group is not needed any more.
        abort: Takes back the samples that redundancy made superfluous.
    """

    requests: Sequence[GenerateRequest]
    kept: list[int] = field(default_factory=list)
    finished: int = 0
    stopped: bool = False
    abort: asyncio.Task[None] | None = None


class _PromptRunner:
    """Samples the answers to one prompt and has them scored together."""

    def __init__(
        self, scheduler: GenerateScheduler, plan: GroupPlan, seed: int | None, progress: SampleProgress, serial: int
    ) -> None:
        self._router = scheduler.engines
        self._scorer = scheduler.scorer
        self._plan = plan
        self._seed = seed
        self.counter = SampleCounter(plan.kept_per_group, progress)
        self._serial = serial
        self._drawn: dict[int, _Drawing] = {}

    async def run(self, group: int, task: Task) -> Group[Scored]:
        """Sample one group and have it scored."""
        count = self._plan.drawn_per_group + (self._plan.baseline is not None)
        drawing = self._drawn[group] = _Drawing([self._request(task, group, sample) for sample in range(count)])
        try:
            return await self._sample_and_score(group, task, drawing)
        finally:
            del self._drawn[group]
            self._router.forget([self._key(group)])

    async def _sample_and_score(self, group: int, task: Task, drawing: _Drawing) -> Group[Scored]:
        results = await self._sample(group, task, drawing)
        trajectories = tuple(result for result in results if isinstance(result, Trajectory))
        failures = tuple(result for result in results if isinstance(result, Failure))
        if not trajectories or drawing.stopped:
            return Group(task=task, samples=(), failures=failures)
        last = self._plan.drawn_per_group  # the next index is that of the group's baseline, and then others' answers
        joining, beyond = self._plan.off_policy, last + 1
        others = () if joining is None else joining.to_score(task)
        given = tuple(replace(one, sample_index=beyond + place) for place, one in enumerate(others))
        scored = await self._scorer.score(Group(task=task, samples=(*trajectories, *given), failures=failures))
        known = sum(one.trajectory.sample_index >= beyond for one in scored.samples)
        own = len(scored.failures) - (len(given) - known)  # they are in the order of the samples
        lost = tuple(replace(one, stage=Origin.DEMONSTRATION.value) for one in scored.failures[own:])
        of_policy = replace(
            scored,
            failures=(*scored.failures[:own], *lost),
            samples=tuple(one for one in scored.samples if one.trajectory.sample_index < last),
            baselines=tuple(one for one in scored.samples if one.trajectory.sample_index == last),
        )
        if joining is None or not of_policy.samples:
            return of_policy
        return joining.join(of_policy, [one for one in scored.samples if one.trajectory.sample_index >= beyond])

    async def stop(self, groups: Collection[int]) -> None:
        """Stop what is still generating, and wait until replicas have dropped it."""
        stopped = [self._drawn[group] for group in groups if group in self._drawn]
        for drawing in stopped:
            drawing.stopped = True
        await self._router.abort([request.request_id for drawing in stopped for request in drawing.requests])

    def prioritize(self, groups: Collection[int]) -> None:
        """Let what groups are still to generate go first."""
        self._router.prioritize([self._key(group) for group in groups])

    def describe(self, group: int) -> str:
        """Return how many samples of a group are finished."""
        drawing, wanted = self._drawn.get(group), self._plan.kept_per_group
        finished = 0 if drawing is None else drawing.finished
        return "waiting for its rewards" if finished >= wanted else f"{finished} of {wanted} samples finished"

    async def _sample(self, group: int, task: Task, drawing: _Drawing) -> list[Trajectory | Failure]:
        """Return the samples that are kept, in order, and why others are lost."""
        key, urgent = self._key(group), self._plan.urgent
        futures = [self._router.submit(request, key, urgent) for request in drawing.requests]
        for sample, future in enumerate(futures):
            future.add_done_callback(partial(self._finished, drawing, sample))
        generations = await asyncio.gather(*futures, return_exceptions=True)
        if drawing.abort is not None:
            await drawing.abort
        kept = {*drawing.kept, self._plan.drawn_per_group}
        results: list[Trajectory | Failure] = []
        for sample, generation in enumerate(generations):
            if isinstance(generation, SampleLost):
                name = f"sample {sample}"
                results.append(Failure(stage="generate", name=name, error=generation.message, origin=task.origin))
            elif isinstance(generation, BaseException):
                if not isinstance(generation, RequestAborted):
                    raise generation
            elif sample in kept:
                results.append(_trajectory(task, sample, generation))
        return results

    def _finished(self, drawing: _Drawing, sample: int, future: asyncio.Future[Generation]) -> None:
        """Count a sample if it is kept; with the last of them, take back the others."""
        if future.cancelled() or future.exception() is not None:
            return
        is_baseline = sample == self._plan.drawn_per_group
        if not is_baseline:
            if len(drawing.kept) == self._plan.samples_per_group:
                return
            drawing.kept.append(sample)
        drawing.finished += 1
        if not drawing.stopped:
            self.counter.sampled(len(future.result().token_ids))
        if self._plan.redundant and not is_baseline and len(drawing.kept) == self._plan.samples_per_group:
            samples = drawing.requests[: self._plan.drawn_per_group]  # those that are still generating
            drawing.abort = asyncio.create_task(self._router.abort([one.request_id for one in samples]))

    def _request(self, task: Task, group: int, sample: int) -> GenerateRequest:
        baseline = self._plan.baseline if sample == self._plan.drawn_per_group else None
        return GenerateRequest(
            request_id=f"{self._serial}-{group}-{sample}",
            prompt_ids=task.prompt_ids,
            sampling=baseline or self._plan.sampling,
            seed=derived_seed(self._seed, group, sample),
            images=task.images,
            adapter=self._plan.adapter,
            reasoning=task.reasoning if self._plan.stops_answers else None,
        )

    def _key(self, group: int) -> tuple[int, int]:
        """Return the affinity key of a group: its samples share the prompt."""
        return self._serial, group


def _trajectory(task: Task, sample_index: int, generation: Generation) -> Trajectory:
    """Join a prompt and its response; nothing is decoded or tokenised again."""
    prompt_length = len(task.prompt_ids)
    length = prompt_length + len(generation.token_ids)
    sampled = np.arange(length) >= prompt_length
    logprobs = np.zeros(length, np.float32)
    logprobs[prompt_length:] = generation.logprobs
    return Trajectory(
        task=task,
        sample_index=sample_index,
        token_ids=np.concatenate([task.prompt_ids, generation.token_ids], dtype=np.int32),
        sampled=sampled,
        logprobs=logprobs,
        turns=sampled.astype(np.int32) - 1,
        parts=(Part(start=0, end=length, prompt_length=prompt_length),),
        segments=tuple(segment.shifted(prompt_length) for segment in generation.segments),
        text=generation.text,
        stop_reason=generation.stop_reason,
        images=task.images,
        routes=generation.routes,
        kept=joined_kept([(None, prompt_length), (generation.kept, len(generation.token_ids))]),
    )
