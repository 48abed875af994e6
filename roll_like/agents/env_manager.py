"""Runs groups of episodes, hundreds at a time: each is an asyncio task that waits for a turn or for its environment.

Episodes do not wait for each other: a slow one delays its own group only, and with redundant episodes
not even that. If an environment crashes, hangs or loses its process, its episode is run again from the same
seed, and then it is a failure: counted, never trained on, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roll_like.agents.conversation import Renderer
from roll_like.agents.episode import (
    EnvironmentPool,
    EnvironmentSpec,
    EpisodeLimits,
    EpisodeSettings,
    EpisodeSpec,
    Generator,
    ProgramSpec,
    play,
)
from roll_like.agents.episode_rewards import EpisodeRewards
from roll_like.errors import EnvError
from roll_like.inference.interface import Sampling, derived_seed
from roll_like.rollout.collection import GroupRunner, Progress, SampleCounter, no_progress
from roll_like.rollout.router import SampleLost
from roll_like.rollout.source import EngineTime
from roll_like.types import Failure, Group, Scored, Task

if TYPE_CHECKING:
    from roll_like.agents.agent_program import AgentPrograms

#: How often an episode may lose its worker because of another episode before that counts as its own failure.
INNOCENT_LOSSES = 5


class EnvironmentLost(EnvError):
    """An environment's process was replaced because of another environment."""


class TurnRouter(Generator, EngineTime, Protocol):
    """Samples the turns of many episodes: a `Router`."""

    def prioritize(self, keys: Iterable[Hashable]) -> None:
        """Serve turns with these affinity keys before others, those to come included, until `forget`."""

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop what is known of affinity keys that no further turn will have."""

    def unfinished(self, keys: Collection[Hashable]) -> int:
        """Return how many turns with these affinity keys are being sampled, or wait for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """How groups of episodes are run.

    Attributes:
        episodes_per_group: Episodes of each group that are kept.
        redundant: Further episodes of each group; the first `episodes_per_group` that end well are kept, the others
            are stopped.
        sampling: How each turn is drawn.
        limits: Where an episode ends at the latest.
        urgent: Whether requests go before those of plans that are not.
    """

    episodes_per_group: int
    sampling: Sampling
    limits: EpisodeLimits
    redundant: int = 0
    urgent: bool = False


def episode_task(spec: EpisodeSpec, seed: int) -> Task:
    """Return what a group attempts: an environment or a program from a seed.

    Its prompt is known when the first episode began.
    """
    what = spec.env_id if isinstance(spec, EnvironmentSpec) else shlex.join(spec.command)
    return Task(
        task_id=f"{spec.name}:{seed}",
        source=spec.name,
        domain=spec.name,
        messages=(),
        prompt_ids=np.zeros(0, np.int32),
        answer=None,
        metadata={"environment": spec.name, "seed": seed},
        origin=f"{what} with seed {seed}",
    )


class EnvManager:
    """Runs groups of episodes.

    Args:
        engines: Sample the policy's turns.
        environments: Hosts the environments.
        specs: The environments and programs.
        renderer: Chat template and tokenizer of the policy.
        retries: Further attempts of an episode whose environment or turn failed.
        programs: Runs the programs; None where there are none.
        rewards: Adds rewards to those of the environments; None where there are none.
    """

    def __init__(
        self,
        engines: TurnRouter,
        environments: EnvironmentPool,
        specs: Collection[EpisodeSpec],
        renderer: Renderer,
        *,
        retries: int,
        programs: AgentPrograms | None = None,
        rewards: EpisodeRewards | None = None,
    ) -> None:
        if programs is None and any(isinstance(spec, ProgramSpec) for spec in specs):
            raise ValueError("`specs` has programs and `programs` is None; pass AgentPrograms")
        self.engines = engines
        self._environments = environments
        self._specs = {spec.name: spec for spec in specs}
        self._renderer = renderer
        self._retries = retries
        self._programs = programs
        self._rewards = rewards
        self._serial = itertools.count()

    def runner(self, plan: EpisodePlan, seed: int | None, progress: Progress = no_progress) -> GroupRunner:
        """Return what runs groups of episodes by `plan`.

        Args:
            plan: How groups are run.
            seed: Seed of every episode's sampling; None leaves it unseeded.
            progress: Told of finished episodes.
        """
        return _EpisodeRunner(self, plan, seed, progress, next(self._serial))

    async def rewarded(self, group: Group[Scored]) -> Group[Scored]:
        """Return a finished group with the rewards beside the environment's; other groups are played meanwhile."""
        return group if self._rewards is None else await self._rewards.add(group)

    async def episode(self, task: Task, plan: EpisodePlan, index: int, name: str, seed: int | None) -> Scored | Failure:
        """Run one episode, again where something failed; return it, or why there is none."""
        spec = self._specs[task.source]
        failed = lost = 0
        while True:
            try:
                return await self._attempt(spec, task, plan, index, name, failed + lost, seed)
            except EnvironmentLost as error:
                lost += 1
                if lost > INNOCENT_LOSSES:
                    return Failure(stage="environment", name=spec.name, error=str(error), origin=task.origin)
            except (EnvError, SampleLost) as error:
                failed += 1
                if failed > self._retries:
                    stage = "generate" if isinstance(error, SampleLost) else "environment"
                    return Failure(stage=stage, name=spec.name, error=str(error), origin=task.origin)

    async def _attempt(
        self, spec: EpisodeSpec, task: Task, plan: EpisodePlan, index: int, name: str, attempt: int, seed: int | None
    ) -> Scored:
        settings = EpisodeSettings(
            task=task,
            sample_index=index,
            sampling=plan.sampling,
            limits=plan.limits,
            name=f"{name}-{attempt}",
            affinity_key=name,
            sampling_seed=seed,
            urgent=plan.urgent,
        )
        if isinstance(spec, ProgramSpec):
            assert self._programs is not None, "refused at the start"
            return await self._programs.play(spec, settings)
        environment = self._environments.open(spec)
        try:
            return await play(environment, self.engines, self._renderer, settings)
        finally:
            await environment.close()


class _EpisodeRunner:
    """Runs a group's episodes concurrently and keeps the first that end well."""

    def __init__(
        self, manager: EnvManager, plan: EpisodePlan, seed: int | None, progress: Progress, serial: int
    ) -> None:
        self._manager = manager
        self._plan = plan
        self._seed = seed
        self.counter = SampleCounter(plan.episodes_per_group, progress)
        self._serial = serial
        self._running: dict[int, list[asyncio.Task[Scored | Failure]]] = {}

    async def run(self, group: int, task: Task) -> Group[Scored]:
        """Run one group."""
        wanted = self._plan.episodes_per_group
        running = self._running[group] = [
            asyncio.create_task(self._episode(task, index, name, derived_seed(self._seed, group, index)))
            for index, name in enumerate(self._names(group))
        ]
        kept: list[Scored] = []
        failures: list[Failure] = []
        stopped = False
        try:
            while running and len(kept) < wanted:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ended = [one for one in running if one.done()]
                running[:] = [one for one in running if not one.done()]
                stopped = stopped or any(one.cancelled() for one in ended)
                for result in (one.result() for one in ended if not one.cancelled()):
                    if isinstance(result, Failure):
                        failures.append(result)
                    else:
                        kept.append(result)
        finally:
            await _stopped(running)
            del self._running[group]
            self._manager.engines.forget(self._names(group))
        kept = sorted(kept[:wanted], key=lambda sample: sample.trajectory.sample_index)
        begun = kept[0].trajectory.task if kept else task
        # one task object for the whole group
        samples = tuple(replace(sample, trajectory=replace(sample.trajectory, task=begun)) for sample in kept)
        played = Group(task=begun, samples=samples, failures=tuple(failures))
        return played if stopped else await self._manager.rewarded(played)

    async def stop(self, groups: Collection[int]) -> None:
        """Stop the episodes of running groups."""
        for group in groups:
            await _stopped(self._running.get(group, []))

    def prioritize(self, groups: Collection[int]) -> None:
        """Let the coming turns of groups go first."""
        self._manager.engines.prioritize([name for group in groups for name in self._names(group)])

    def describe(self, group: int) -> str:
        """Return how many episodes of a group are under way, and what they wait for."""
        running = self._running.get(group)
        if running is None:
            return "waiting for its rewards"
        sampled = self._manager.engines.unfinished(self._names(group))
        return f"{len(running)} of its episodes under way, {sampled} of them in a turn of the policy"

    async def _episode(self, task: Task, index: int, name: str, seed: int | None) -> Scored | Failure:
        result = await self._manager.episode(task, self._plan, index, name, seed)
        if isinstance(result, Scored):
            self.counter.sampled(result.trajectory.response_length)
        return result

    def _names(self, group: int) -> list[str]:
        """Return what the episodes of a group are called; also the affinity keys of their turns."""
        count = self._plan.episodes_per_group + self._plan.redundant
        return [f"{self._serial}-{group}-{index}" for index in range(count)]


async def _stopped(tasks: Collection[asyncio.Task[Scored | Failure]]) -> None:
    """Cancel tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
