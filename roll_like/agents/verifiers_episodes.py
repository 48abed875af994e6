"""Plays episodes in verifiers environments: one server process each, whose requests the policy answers.

    episode ──play──▶ VerifiersProcess ──▶ verifiers: taskset, harness, tools, users, scoring
                                              │ chat requests, each agent's with its trace's id
                         Proxy ◀──────────────┘ records tokens: one sequence or more for each agent

verifiers says what the episode was worth. What it calls an error is an `EnvError` here: counted, never trained on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from roll_like.agents.episode import EpisodeLimits, EpisodeSettings, VerifiersLost, VerifiersSpec
from roll_like.agents.proxy import Proxy, new_key
from roll_like.agents.proxy_episode import ProxyEpisode
from roll_like.agents.verifiers_process import VerifiersProcess, VerifiersRefusal
from roll_like.cluster.worker_restarts import RestartCallback, WorkerRestarts, to_stderr
from roll_like.errors import EnvError
from roll_like.inference.interface import derived_seed
from roll_like.types import EVALUATION_SEED, Scored, StopReason

#: What verifiers calls the errors of an agent that was refused a turn: the refusal's, and that of a program that ends
#: because of it.
_OF_REFUSED_TURNS = {"ProviderError", "HarnessError"}
#: Stages without which there is no reward: verifiers counts it 0 where their time is over.
_UNSCORED = {"setup_timeout", "finalize_timeout", "scoring_timeout"}


class VerifiersEnvironments:
    """The servers of a run's verifiers environments.

    Args:
        proxy: Started; answers the requests of their agents.
        limits: Where an episode ends at the latest; verifiers ends an agent that has no limit of its own after so many
            turns.
        report: Told about servers that were replaced.
    """

    def __init__(self, proxy: Proxy, limits: EpisodeLimits, report: RestartCallback = to_stderr) -> None:
        self._make = partial(_Server, proxy=proxy, limits=limits, report=report)
        self._servers: dict[str, _Server] = {}

    async def play(self, spec: VerifiersSpec, settings: EpisodeSettings) -> list[Scored]:
        """Play one episode to its end; return what each trainable agent did, and what it earned.

        Raises:
            EnvError: The environment, its harness or its server failed.
            SampleLost: An answer could not be sampled.
            GenerationError: No replica is left.
        """
        return await self._server(spec).play(settings)

    async def start(self, specs: Iterable[VerifiersSpec]) -> None:
        """Start the servers of environments, so that what does not start ends the run before it begins.

        Raises:
            EnvError: One does not start.
        """
        await asyncio.gather(*(self._server(spec).running() for spec in specs))

    def _server(self, spec: VerifiersSpec) -> _Server:
        if spec.name not in self._servers:
            self._servers[spec.name] = self._make(spec)
        return self._servers[spec.name]

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))


class _Server:
    """The server of one environment, and another in its place when it is lost."""

    def __init__(self, spec: VerifiersSpec, proxy: Proxy, limits: EpisodeLimits, report: RestartCallback) -> None:
        self._spec = spec
        self._proxy = proxy
        self._limits = limits
        self._restarts = WorkerRestarts("environments", "its episodes are played again", report)
        self._key = new_key()
        self._room = asyncio.Semaphore(spec.max_episodes)
        self._starting = asyncio.Lock()
        self._process: VerifiersProcess | None = None
        self._several = False
        self._count: int | None = None

    async def play(self, settings: EpisodeSettings) -> list[Scored]:
        async with self._room:
            process = await self.running()
            position = await self._place(process, settings.seed)
            episodes: dict[str, ProxyEpisode] = {}

            def announced(note: Mapping[str, Any]) -> None:
                own = of_agent(settings, len(episodes))
                episodes[note["trace"]] = self._proxy.open(own, session=(self._key, note["trace"]))

            try:
                async with asyncio.timeout(self._spec.timeout_seconds):
                    outcome = await self._played(process, position, settings, announced, episodes)
            except TimeoutError as error:
                raise EnvError(
                    f"an episode of {self._spec.name!r} did not end within {self._spec.timeout_seconds:g} s",
                    fix="raise `verifiers.timeout_seconds`, or set verifiers' own timeouts to end it sooner",
                ) from error
            finally:
                for episode in episodes.values():
                    await episode.close()
            return self._scored(outcome, episodes)

    async def _played(
        self,
        process: VerifiersProcess,
        position: int,
        settings: EpisodeSettings,
        announced: Callable[[Mapping[str, Any]], None],
        episodes: Mapping[str, ProxyEpisode],
    ) -> dict[str, Any]:
        """Have the server play; stop it when the policy cannot answer."""
        sampling = {"temperature": settings.sampling.temperature, "max_tokens": settings.sampling.max_tokens}
        try:
            outcome: dict[str, Any] = await process.ask(
                "play",
                announced,
                select=dict(self._spec.select),
                position=position,
                base_url=self._proxy.base_url,
                model="policy",
                sampling=sampling,
            )
            return outcome
        except VerifiersRefusal as error:
            raise next((one.error for one in episodes.values() if one.error is not None), error) from error

    def _scored(self, outcome: Mapping[str, Any], episodes: Mapping[str, ProxyEpisode]) -> list[Scored]:
        """Return the trained agents' parts of an episode."""
        for episode in episodes.values():
            if episode.error is not None:
                raise episode.error
        if not outcome["ok"] and not self._cut(outcome, episodes):
            raise EnvError(f"an episode of {self._spec.name!r} failed: {_why(outcome)}")
        parts = [
            self._part(trace, episodes.get(trace["id"]), ok=outcome["ok"])
            for trace in outcome["traces"]
            if trace["trainable"]
        ]
        if not parts:
            raise EnvError(f"an episode of {self._spec.name!r} has no trainable agent")
        return parts

    def _cut(self, outcome: Mapping[str, Any], episodes: Mapping[str, ProxyEpisode]) -> bool:
        """Return whether the run's own limit ended an episode, nothing else failed, and such episodes have a reward."""
        refused = any(episode.truncated for episode in episodes.values())
        return self._spec.limit_reward is not None and refused and only_refused(outcome)

    def _part(self, trace: Mapping[str, Any], episode: ProxyEpisode | None, *, ok: bool) -> Scored:
        name, who = trace["agent"], f"{trace['agent']!r} of {self._spec.name!r}"
        if episode is None or not episode.turns:
            raise EnvError(
                f"{who} never asked the policy, and is to be trained",
                fix="remove its own `model` or `client` from the configuration, or name another `verifiers.harness`",
            )
        if ok and trace["unmeasured"]:
            raise EnvError(f"NeMo Gym could not score {who}: {trace['unmeasured']}")
        if ok and trace["stop"] in _UNSCORED:
            raise EnvError(
                f"{who} has no reward: verifiers' {trace['stop'].removesuffix('_timeout')} ran out of time",
                fix="raise its `timeout` in `verifiers.options`",
            )
        if ok and (missing := [name for name, value in trace["rewards"].items() if value is None]):
            raise EnvError(f"verifiers did not compute {', '.join(map(repr, missing))} of {who}")
        reward = trace["reward"] if ok else self._spec.limit_reward
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EnvError(f"verifiers gave {who} the reward {reward}; expected a finite number")
        episode.add_reward(reward, None)
        sample = episode.scored()
        cut = trace["truncated"] or trace["timeout"] or not ok
        figures = {**trace["metrics"], **trace["rewards"]}
        stated = {f"verifiers/{key}": float(each) for key, each in figures.items() if isinstance(each, (int, float))}
        return replace(
            sample,
            trajectory=replace(sample.trajectory, stop_reason=StopReason.LENGTH) if cut else sample.trajectory,
            details={**sample.details, **stated},
            agent=name if self._several else "",
        )

    async def running(self) -> VerifiersProcess:
        """Return a server that runs; start one, or another, where there is none.

        Raises:
            EnvError: It does not start, or was lost too often.
        """
        async with self._starting:
            if self._process is None:
                await self._start()
            elif (lost := self._process).lost:
                await lost.close()
                who = f"the verifiers server of {self._spec.name!r}"
                await self._restarts.replace_async(who, VerifiersLost(lost.why), self._start)
            assert self._process is not None
            return self._process

    async def _start(self) -> None:
        self._proxy.share(self._key, max_tokens=self._limits.tokens)
        process = VerifiersProcess(self._spec, self._key)
        about = await process.start(max_turns=self._limits.turns)
        self._process, self._several = process, len(about["agents"]) > 1

    async def _place(self, process: VerifiersProcess, seed: int) -> int:
        """Return the place of a seed's task in the selection.

        Raises:
            EnvError: There is none for it.
        """
        spec = self._spec
        if self._count is None:
            self._count = (await process.read("count"))["count"]
        return place_of(seed, self._count, spec)

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()


def of_agent(settings: EpisodeSettings, index: int) -> EpisodeSettings:
    """Return how the agent with this place in an episode plays it: its requests have names and seeds of their own.

    Else two agents of one policy that are asked the same would say the same.
    """
    if index == 0:
        return settings
    return replace(
        settings, name=f"{settings.name}.{index}", sampling_seed=derived_seed(settings.sampling_seed, index, 1)
    )


def place_of(seed: int, count: int | None, spec: VerifiersSpec) -> int:
    """Return which task of a selection a seed plays: evaluations have the first ones, if some are held out for them.

    Args:
        seed: From `EVALUATION_SEED` on it is one of an evaluation.
        count: How many tasks the selection has; None: no end.

    Raises:
        EnvError: There is none.

    >>> from types import SimpleNamespace
    >>> spec = SimpleNamespace(name="add", held_out=2)
    >>> [place_of(seed, 5, spec) for seed in (0, 1, 2, 3, EVALUATION_SEED, EVALUATION_SEED + 1)]
    [2, 3, 4, 2, 0, 1]
    """
    for_evaluation = seed >= EVALUATION_SEED
    first = 0 if for_evaluation else spec.held_out
    last = spec.held_out if for_evaluation and spec.held_out else count
    if count == 0:
        raise EnvError(
            f"{spec.name!r} has no tasks", fix="correct `verifiers.taskset`, or have `verifiers.select` take some"
        )
    if last is not None and last <= first:
        raise EnvError(
            f"{spec.name!r} has {count} tasks, and {spec.held_out} of them are held out for evaluations",
            fix="lower `verifiers.held_out`, or have `verifiers.select` take more tasks",
        )
    place = seed - EVALUATION_SEED if for_evaluation else seed
    return first + (place if last is None else place % (last - first))


def only_refused(outcome: Mapping[str, Any]) -> bool:
    """Return whether nothing failed in an episode but agents that were refused a turn.

    >>> refused = {"errors": [{"type": "HarnessError"}]}
    >>> only_refused({"errors": [], "traces": [refused, {"errors": []}]})
    True
    >>> only_refused({"errors": [], "traces": [refused, {"errors": [{"type": "SandboxError"}]}]})
    False
    """
    return {error["type"] for error in _errors(outcome)} <= _OF_REFUSED_TURNS


def _errors(outcome: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """Return the errors of an episode and of its agents."""
    return [*outcome["errors"], *(error for trace in outcome["traces"] for error in trace["errors"])]


def _why(outcome: Mapping[str, Any]) -> str:
    """Return the last error of an episode in verifiers' words."""
    errors = _errors(outcome)
    return "; ".join(f"{error['type']}: {error['message']}" for error in errors[-1:]) or "verifiers gives no reason"
