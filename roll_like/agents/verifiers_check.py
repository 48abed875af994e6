"""Whether a policy can be trained in a verifiers environment: what `roll-like check-env --config` tries.

Two servers are started, and the tasks of both compared. A policy without a model plays the first ones, each twice: its
answers are texts that no environment expects. Nothing else of a run is needed than the tokenizer.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_like.agents.env_manager import episode_task
from roll_like.agents.episode import EpisodeLimits, EpisodeSettings, VerifiersSpec
from roll_like.agents.proxy import Proxy
from roll_like.agents.verifiers_episodes import VerifiersEnvironments, place_of
from roll_like.agents.verifiers_process import VerifiersProcess
from roll_like.data.chat import Renderer
from roll_like.envs import EnvReport
from roll_like.envs.probes import GARBAGE, EnvFindings
from roll_like.errors import RollLikeError
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.types import Segment, StopReason

#: Tasks that are played, and those that are compared.
_PLAYED, _COMPARED = 4, 256
_ORDER_FIX = "have `load` return the tasks in one order: a run that is resumed counts on from where it was"


class GarbagePolicy:
    """Answers with texts that are no answers: the same at the same turn of each of its plays."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    async def generate(self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False) -> Generation:
        """Answer a request: its name ends with the number of the turn."""
        del affinity_key, urgent
        text = GARBAGE[int(request.request_id.rpartition("-")[2]) % len(GARBAGE)] or "…"
        ids = self._renderer.encode(text)[: request.sampling.max_tokens]
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            segments=(Segment(start=0, end=len(ids), policy_version=0),),
            text=self._renderer.decode(ids),
            stop_reason=StopReason.STOP,
        )


@dataclass(frozen=True, slots=True)
class _Started:
    """What a server says before it plays."""

    about: dict[str, Any]
    count: int | None
    tasks: Sequence[dict[str, Any]]
    seconds: float


async def check_verifiers(
    spec: VerifiersSpec, renderer: Renderer, *, sampling: Sampling, limits: EpisodeLimits
) -> EnvReport:
    """Try a verifiers environment out and report what is wrong with it.

    Args:
        limits: Where an episode ends at the latest.

    Raises:
        EnvError: It does not start.
    """
    findings = EnvFindings()
    first, second = await _started(spec), await _started(spec)
    figures = {"seconds to start": first.seconds, "tasks": math.inf if first.count is None else float(first.count)}
    _compare(spec, first, second, findings)
    training = place_of(0, first.count, spec)
    async with Proxy(GarbagePolicy(renderer), renderer) as proxy:
        environments = VerifiersEnvironments(proxy, limits)
        try:
            figures.update(await _played(spec, environments, findings, sampling=sampling, limits=limits))
        finally:
            await environments.close()
    shown = first.tasks[training]["prompt"] if training < len(first.tasks) else ""
    return EnvReport(env_id=spec.name, findings=tuple(findings.found), figures=figures, first_observation=shown)


async def _started(spec: VerifiersSpec) -> _Started:
    """Start a server, and read its tasks."""
    process, began = VerifiersProcess(spec, key=""), time.perf_counter()
    try:
        about = await process.start(serve=False)
        seconds = time.perf_counter() - began
        count = (await process.read("count"))["count"]
        found = await process.read("tasks", first=0, count=_COMPARED)
        return _Started(about, count, found["tasks"], seconds)
    finally:
        await process.close()


def _compare(spec: VerifiersSpec, first: _Started, second: _Started, findings: EnvFindings) -> None:
    """Find tasks that are others in each server, and tasks that are there twice."""
    keys = [[task["key"] for task in one.tasks] for one in (first, second)]
    if keys[0] != keys[1]:
        place = next((at for at, (a, b) in enumerate(zip(*keys, strict=False)) if a != b), min(map(len, keys)))
        findings.error("order", f"task {place} is another one when the server starts again", _ORDER_FIX)
    held_out, trained = keys[0][: spec.held_out], keys[0][spec.held_out :]
    if both := set(held_out) & set(trained):
        text = f"{len(both)} of the {spec.held_out} tasks that are held out are also trained on"
        findings.warning("tasks", text, "remove the duplicates from the taskset, or exclude them in `select`")
    if len(set(keys[0])) < len(keys[0]):
        findings.warning(
            "tasks", f"{len(keys[0]) - len(set(keys[0]))} of the first {len(keys[0])} tasks are duplicates"
        )


async def _played(
    spec: VerifiersSpec,
    environments: VerifiersEnvironments,
    findings: EnvFindings,
    *,
    sampling: Sampling,
    limits: EpisodeLimits,
) -> dict[str, float]:
    """Play the first tasks, each twice; return figures."""

    def settings(seed: int, member: int) -> EpisodeSettings:
        name = f"{seed}-{member}"
        return EpisodeSettings(
            task=episode_task(spec, seed),
            sample_index=member,
            sampling=sampling,
            limits=limits,
            name=name,
            affinity_key=name,
            sampling_seed=None,
        )

    began = time.perf_counter()
    plays = [settings(seed, member) for seed in range(_PLAYED) for member in range(2)]
    played = await asyncio.gather(*(environments.play(spec, one) for one in plays), return_exceptions=True)
    seconds = time.perf_counter() - began
    for one in played:
        if isinstance(one, RollLikeError):
            findings.error("episode", str(one))
        elif isinstance(one, BaseException):
            raise one
    ended = [one for one in played if not isinstance(one, BaseException)]
    for one, other in zip(played[::2], played[1::2], strict=True):
        if isinstance(one, BaseException) or isinstance(other, BaseException):
            continue
        if [part.reward for part in one] != [part.reward for part in other]:
            findings.warning("reward", "the same answers to the same task have different rewards")
    parts = [part for one in ended for part in one]
    if not parts:
        return {}
    return {
        "garbage: mean return": statistics.fmean(part.reward for part in parts),
        "garbage: mean turns": statistics.fmean(len(part.trajectory.record) for part in parts),
        "seconds per episode": seconds / len(played),
    }
