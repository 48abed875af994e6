"""Environments in processes of their own, and the driver's end of them.

An environment's methods block, may crash and may hang. They run in threads of an `EnvWorker`, which is
an actor: what crashes is reported, and what hangs is ended with its process. Others in that process
did nothing wrong; their episodes are played again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import gymnasium
from gymnasium.envs.registration import EnvSpec

from roll_like.agents.env_manager import EnvironmentLost
from roll_like.agents.episode import EnvironmentSpec, Started, Stepped
from roll_like.cluster import Cluster, WorkerDied
from roll_like.config.load import import_plugins
from roll_like.envs import make, system_prompt_of, tools_of
from roll_like.errors import EnvError
from roll_like.rewards.base import describe_error

THREADS = 64
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Crashed:
    """An environment raised; says how."""

    error: str


class EnvWorker:
    """Hosts environments; made to be an actor, usable without one.

    Args:
        imports: Modules to import first; they register environments.
        specs: Environments to register that no module can be imported for (see `notebook_environments`).
    """

    def __init__(self, imports: tuple[str, ...] = (), specs: Sequence[EnvSpec] = ()) -> None:
        import_plugins(imports)
        gymnasium.registry.update({spec.id: spec for spec in specs})
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment")
        self._environments: dict[str, HostedEnvironment] = {}

    async def reset(self, episode: str, spec: EnvironmentSpec, seed: int) -> Started | Crashed:
        """Make an environment and begin its episode."""
        return await self._guarded(self._begin, episode, spec, seed)

    async def step(self, episode: str, text: str) -> Stepped | Crashed:
        """Take a turn in an episode that has begun."""
        return await self._guarded(self._environments[episode].step, text)

    async def close(self, episode: str) -> None:
        """Let go of an episode's environment; nothing happens where there is none."""
        hosted = self._environments.pop(episode, None)
        if hosted is not None:
            await self._guarded(hosted.close)

    async def shut_down(self) -> None:
        """Let go of every environment."""
        for episode in list(self._environments):
            await self.close(episode)

    async def hosted(self) -> int:
        """Return how many environments live here."""
        return len(self._environments)

    def _begin(self, episode: str, spec: EnvironmentSpec, seed: int) -> Started:
        hosted = HostedEnvironment(spec)
        self._environments[episode] = hosted
        return hosted.reset(seed)

    async def _guarded(self, work: Callable[..., T], *arguments: Any) -> T | Crashed:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except Exception as error:  # noqa: BLE001 - an environment may raise anything; it becomes a failure
            return Crashed(error.message if isinstance(error, EnvError) else describe_error(error))


def notebook_environments(ids: Iterable[str]) -> list[EnvSpec]:
    """Return the environments among `ids` that are defined in `__main__`: other processes cannot import them.

    They can be sent to an `EnvWorker` as `specs`, because cloudpickle (as Ray uses it) sends what `__main__` defines by
    value.
    """
    known = [gymnasium.registry[env_id] for env_id in dict.fromkeys(ids) if env_id in gymnasium.registry]
    return [spec for spec in known if getattr(spec.entry_point, "__module__", None) == "__main__"]


class HostedEnvironment:
    """A Gymnasium environment, as episodes use it."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._env = make(spec.env_id, **dict(spec.kwargs))

    def reset(self, seed: int) -> Started:
        """Begin an episode."""
        observation, info = self._env.reset(seed=seed)
        prompt = system_prompt_of(self._env)
        system = [{"role": "system", "content": prompt}] if prompt else []
        messages = [*system, *_messages(observation, info)]
        return Started(messages=messages, tools=tools_of(self._env), state=_state(observation, info))

    def step(self, text: str) -> Stepped:
        """Take the policy's turn."""
        observation, reward, terminated, truncated, info = self._env.step(text)
        success = info.get("success")
        fresh = bool(info.get("fresh", False))
        prompt = system_prompt_of(self._env) if fresh else None
        system = [{"role": "system", "content": prompt}] if prompt else []
        return Stepped(
            messages=[*system, *_messages(observation, info)],
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=None if success is None else bool(success),
            state=_state(observation, info),
            fresh=fresh,
            tool_calls=tuple(dict(call) for call in info.get("tool_calls", ())),
            invalid=bool(info.get("invalid_action", False)),
        )

    def close(self) -> None:
        """Let go of the environment."""
        self._env.close()


def _messages(observation: Any, info: Mapping[str, Any]) -> list[dict[str, Any]]:
    shown = info.get("messages")
    return [dict(one) for one in shown] if shown else [{"role": "user", "content": str(observation)}]


def _state(observation: Any, info: Mapping[str, Any]) -> str:
    return str(info.get("state", observation))


class EnvPool:
    """Gives each episode to the worker with the fewest; replaces workers in which an environment hangs.

    Args:
        cluster: The workers.
        deadline_seconds: Limit of one `reset` or `step`.
    """

    def __init__(self, cluster: Cluster[EnvWorker], *, deadline_seconds: float) -> None:
        self.cluster = cluster
        self._deadline = deadline_seconds
        self._load = [0] * len(cluster)
        self._generation = [0] * len(cluster)
        self._answered = [0] * len(cluster)
        self._opened = 0
        self.restarts = 0

    def open(self, spec: EnvironmentSpec) -> RemoteEnvironment:
        """Return an environment on the worker with the fewest."""
        rank = min(range(len(self._load)), key=lambda index: self._load[index])
        self._load[rank] += 1
        self._opened += 1
        return RemoteEnvironment(self, spec, rank, self._generation[rank], f"{spec.name}-{self._opened}")

    def released(self, rank: int) -> None:
        """One episode of a worker has ended."""
        self._load[rank] -= 1

    def current(self, rank: int, generation: int) -> bool:
        """Return whether a worker is still the one that an episode began on."""
        return self._generation[rank] == generation

    def starting(self, rank: int) -> bool:
        """Return whether a worker took another's place and has not answered yet."""
        return self._answered[rank] < self._generation[rank]

    def answered(self, rank: int, generation: int) -> None:
        """A worker has answered."""
        self._answered[rank] = max(self._answered[rank], generation)

    def replace(self, rank: int, generation: int) -> None:
        """Restart a worker, unless another episode that lost it has done so already."""
        if self.current(rank, generation):
            self._generation[rank] += 1
            self.restarts += 1
            self.cluster.restart(rank)

    @property
    def deadline_seconds(self) -> float:
        """Limit of one `reset` or `step`."""
        return self._deadline


class RemoteEnvironment:
    """One episode's environment on a worker; see `Environment`."""

    def __init__(self, pool: EnvPool, spec: EnvironmentSpec, rank: int, generation: int, episode: str) -> None:
        self._pool = pool
        self._spec = spec
        self._rank = rank
        self._generation = generation
        self._episode = episode

    async def reset(self, seed: int) -> Started:
        """Begin the episode; a worker that is only starting is waited for, at no cost of the environment's time."""
        if self._pool.starting(self._rank):
            await self._within(self._ask(EnvWorker.hosted), "the process", starting=True)
            self._pool.answered(self._rank, self._generation)
        asked = self._ask(EnvWorker.reset, self._episode, self._spec, seed)
        return self._value(await self._within(asked, "reset"), "reset")

    async def step(self, text: str) -> Stepped:
        """Take the policy's turn."""
        return self._value(await self._within(self._ask(EnvWorker.step, self._episode, text), "step"), "step")

    async def close(self) -> None:
        """Let go of the environment; where its worker is gone, so is it."""
        self._pool.released(self._rank)
        try:
            await asyncio.wait_for(self._ask(EnvWorker.close, self._episode), self._pool.deadline_seconds)
        except EnvironmentLost:
            return
        except (WorkerDied, TimeoutError):
            self._pool.replace(self._rank, self._generation)

    async def _ask(
        self,
        method: Callable[Concatenate[EnvWorker, P], Coroutine[Any, Any, T]],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        """Ask the worker that the episode began on, and no other that has taken its place by the time of the call."""
        if not self._pool.current(self._rank, self._generation):
            raise self._lost("another environment took it down")
        return await self._pool.cluster.ask(self._rank, method, *arguments, **options)

    async def _within(self, work: Awaitable[T], what: str, *, starting: bool = False) -> T:
        seconds = self._pool.cluster.start_timeout_seconds if starting else self._pool.deadline_seconds
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError:
            if not self._pool.current(self._rank, self._generation):
                raise self._lost("another environment hung there") from None
            self._pool.replace(self._rank, self._generation)
            raise EnvError(
                f"{what} of {self._spec.env_id} did not return within {seconds:g} s",
                fix=f"raise {'resources.start_timeout_seconds' if starting else 'env_workers.deadline_seconds'}, or "
                "correct the environment",
            ) from None
        except WorkerDied as error:
            if not self._pool.current(self._rank, self._generation):
                raise self._lost(str(error)) from error
            self._pool.replace(self._rank, self._generation)
            raise EnvError(f"the process of {self._spec.env_id} died in {what}: {error}") from error

    def _value(self, answer: T | Crashed, what: str) -> T:
        if isinstance(answer, Crashed):
            raise EnvError(f"{what} of {self._spec.env_id} failed: {answer.error}")
        return answer

    def _lost(self, why: str) -> EnvironmentLost:
        return EnvironmentLost(f"the worker of {self._spec.env_id} was replaced: {why}")
