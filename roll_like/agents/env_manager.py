"""Runs groups of episodes, hundreds at a time: each is an asyncio task that waits for a turn or for its environment.

Episodes do not wait for each other: a slow one delays its own group only, and with redundant episodes
not even that. If an environment crashes, hangs or loses its process, its episode is run again from the same
seed, and then it is a failure: counted, never trained on, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from roll_like.agents.episode import (
    EnvironmentPool,
    EpisodeLimits,
    EpisodeSettings,
    EpisodeSpec,
    ProgramSpec,
    VerifiersLost,
    VerifiersSpec,
    play,
)
from roll_like.agents.episode_rewards import EpisodeRewards
from roll_like.data.chat import Renderer
from roll_like.errors import EnvError
from roll_like.inference.interface import Sampling, derived_seed
from roll_like.rollout.collection import GroupRunner, SampleCounter, SampleProgress, no_progress
from roll_like.rollout.router import Router, SampleLost
from roll_like.types import Failure, Group, Scored, Task

if TYPE_CHECKING:
    from roll_like.agents.agent_program import AgentPrograms
    from roll_like.agents.verifiers_episodes import VerifiersEnvironments

#: How often an episode may lose its worker because of another episode before that counts as its own failure.
INNOCENT_LOSSES = 5
#: An episode that was played: what each of its trained agents did, and earned.
Played: TypeAlias = list[Scored]


class EnvironmentLost(EnvError):
    """An environment's process was replaced because of another environment."""


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
    what = shlex.join(spec.command) if isinstance(spec, ProgramSpec) else spec.what
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
        retries: Further attempts of an episode whose environment or turn failed.
        programs: Runs the programs; None where there are none.
        verifiers: Plays in verifiers environments; None where there are none.
        rewards: Adds rewards to those of the environments; None where there are none.
    """

    def __init__(
        self,
        engines: Router,
        environments: EnvironmentPool,
        specs: Collection[EpisodeSpec],
        renderer: Renderer,
        *,
        retries: int,
        programs: AgentPrograms | None = None,
        verifiers: VerifiersEnvironments | None = None,
        rewards: EpisodeRewards | None = None,
    ) -> None:
        if programs is None and any(isinstance(spec, ProgramSpec) for spec in specs):
            raise ValueError("`specs` has programs and `programs` is None; pass AgentPrograms")
        if verifiers is None and any(isinstance(spec, VerifiersSpec) for spec in specs):
            raise ValueError("`specs` has verifiers environments and `verifiers` is None; pass VerifiersEnvironments")
        self.engines = engines
        self.environments = environments
        self.specs = {spec.name: spec for spec in specs}
        self.renderer = renderer
        self.retries = retries
        self.programs = programs
        self.verifiers = verifiers
        self.rewards = rewards
        self._serial = itertools.count()

    def runner(self, plan: EpisodePlan, seed: int | None, progress: SampleProgress = no_progress) -> GroupRunner:
        """Return what runs groups of episodes by `plan`.

        Args:
            seed: Seed of every episode's sampling; None leaves it unseeded.
            progress: Told of finished episodes.
        """
        return _EpisodeRunner(self, plan, seed, progress, next(self._serial))


class _EpisodeRunner:
    """Runs a group's episodes concurrently and keeps the first that end well."""

    def __init__(
        self, manager: EnvManager, plan: EpisodePlan, seed: int | None, progress: SampleProgress, serial: int
    ) -> None:
        self._manager = manager
        self._plan = plan
        self._seed = seed
        self.counter = SampleCounter(plan.episodes_per_group, progress)
        self._serial = serial
        self._running: dict[int, list[asyncio.Task[Played | Failure]]] = {}

    async def run(self, group: int, task: Task) -> Group[Scored]:
        """Run one group."""
        wanted = self._plan.episodes_per_group
        running = self._running[group] = [
            asyncio.create_task(self._episode(self._settings(task, group, index, name)))
            for index, name in enumerate(self._names(group))
        ]
        kept: list[Played] = []
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
        parts = [part for episode in kept[:wanted] for part in episode]
        parts.sort(key=lambda part: (part.agent, part.trajectory.sample_index))
        samples = _with_shared_tasks(parts)
        begun = samples[0].trajectory.task if samples else task
        played = Group(task=begun, samples=samples, failures=tuple(failures))
        if stopped or self._manager.rewards is None:
            return played
        return await self._manager.rewards.add(played)

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

    def _settings(self, task: Task, group: int, index: int, name: str) -> EpisodeSettings:
        return EpisodeSettings(
            task=task,
            sample_index=index,
            sampling=self._plan.sampling,
            limits=self._plan.limits,
            name=name,
            affinity_key=name,
            sampling_seed=derived_seed(self._seed, group, index),
            urgent=self._plan.urgent,
        )

    async def _episode(self, settings: EpisodeSettings) -> Played | Failure:
        """Run one episode, again where something failed; return it, or why there is none."""
        task = settings.task
        spec = self._manager.specs[task.source]
        failed = lost = 0
        while True:
            try:
                played = await self._play(spec, replace(settings, name=f"{settings.name}-{failed + lost}"))
            except (EnvironmentLost, VerifiersLost) as error:
                lost += 1
                if lost > INNOCENT_LOSSES:
                    return Failure(stage="environment", name=spec.name, error=str(error), origin=task.origin)
            except (EnvError, SampleLost) as error:
                failed += 1
                if failed > self._manager.retries:
                    stage = "generate" if isinstance(error, SampleLost) else "environment"
                    return Failure(stage=stage, name=spec.name, error=str(error), origin=task.origin)
            else:
                self.counter.sampled(sum(part.trajectory.response_length for part in played))
                return played

    async def _play(self, spec: EpisodeSpec, settings: EpisodeSettings) -> Played:
        manager = self._manager
        if isinstance(spec, VerifiersSpec):
            assert manager.verifiers is not None, "refused at the start"
            return await manager.verifiers.play(spec, settings)
        if isinstance(spec, ProgramSpec):
            assert manager.programs is not None, "refused at the start"
            return [await manager.programs.play(spec, settings)]
        environment = manager.environments.open(spec)
        try:
            return await play(environment, manager.engines, manager.renderer, settings)
        finally:
            await environment.close()

    def _names(self, group: int) -> list[str]:
        """Return what the episodes of a group are called; also the affinity keys of their turns."""
        count = self._plan.episodes_per_group + self._plan.redundant
        return [f"{self._serial}-{group}-{index}" for index in range(count)]


def _with_shared_tasks(parts: Iterable[Scored]) -> tuple[Scored, ...]:
    """Return samples of which those that began alike have the same task object; a rollout's file writes it once.

    Agents of an episode begin differently, and what one is shown first may be another's answer.
    """
    begun: dict[tuple[str, bytes, bytes], Task] = {}
    samples = []
    for part in parts:
        task = part.trajectory.task
        seen = b"".join(image.picture.digest for image in task.images)
        task = begun.setdefault((repr(task.messages), task.prompt_ids.tobytes(), seen), task)
        samples.append(replace(part, trajectory=replace(part.trajectory, task=task)))
    return tuple(samples)


async def _stopped(tasks: Collection[asyncio.Task[Played | Failure]]) -> None:
    """Cancel tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
