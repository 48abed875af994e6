"""Environments in processes of their own, and the driver's side of them.

An environment's methods block, may crash and may hang. They run in an `EnvWorker`, which is an actor: an exception
is reported, and a hanging environment is killed with its process. The other episodes in that process are played
again. Each episode has a thread of its own: a browser or a connection to SQLite serves only the thread that opened it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import gymnasium
from gymnasium.envs.registration import EnvSpec

from roll_like.agents.env_manager import EnvironmentLost
from roll_like.agents.episode import EnvironmentSpec, Started, Stepped
from roll_like.cluster import Cluster, WorkerDied
from roll_like.cluster.worker_restarts import PoolRestarts, RestartCallback, to_stderr
from roll_like.config.load import import_plugins
from roll_like.content.unicode import whole_text, whole_texts
from roll_like.envs import TaskRows, make_env, system_prompt_of, tools_of
from roll_like.envs.returns import (
    RESET,
    STEP,
    Seats,
    info_flag,
    info_rewards,
    info_tool_calls,
    returned,
    shown_messages,
    state_of,
    turn_flag,
    turn_reward,
)
from roll_like.errors import FOREIGN_ERRORS, EnvError, describe_error, whole_call

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Crashed:
    """An environment raised this error."""

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
        self._threads: dict[str, ThreadPoolExecutor] = {}
        #: The latest call of each thread, and what waits for it.
        self._calls: dict[str, tuple[Future[Any], asyncio.Future[Any]]] = {}
        self._environments: dict[str, HostedEnvironment] = {}
        self._ending: set[Future[Any]] = set()

    async def reset(self, episode: str, spec: EnvironmentSpec, seed: int) -> Started | Crashed:
        """Make an environment and begin its episode."""
        self._threads[episode] = ThreadPoolExecutor(1, thread_name_prefix=f"environment-{episode}")
        return await self._answer(episode, self._begin, episode, spec, seed)

    async def step(self, episode: str, text: str) -> Stepped | Crashed:
        """Take a turn in an episode that has begun."""
        return await self._answer(episode, self._environments[episode].step, text)

    async def close(self, episode: str) -> None:
        """Close an episode's environment, if there is one; behind a call that is still running, without waiting.

        Nor does that call wait any longer: a process takes a limited number of calls at a time.
        """
        if episode not in self._threads:
            return
        call, waiting = self._calls.pop(episode)
        idle = call.done()
        ending = self._end(episode)
        if idle:
            await asyncio.wrap_future(ending)
        else:
            waiting.cancel()

    async def shut_down(self) -> None:
        """Close every environment, each behind the call that is still running in it."""
        for episode in list(self._threads):
            self._end(episode)
        await asyncio.gather(*map(asyncio.wrap_future, list(self._ending)))

    async def hosted(self) -> int:
        """Return how many environments are open here."""
        return len(self._environments)

    def _begin(self, episode: str, spec: EnvironmentSpec, seed: int) -> Started:
        hosted = HostedEnvironment(spec)
        self._environments[episode] = hosted
        return hosted.reset(seed)

    def _end(self, episode: str) -> Future[Crashed | None]:
        """Have an episode's thread close the environment, and end."""
        thread = self._threads.pop(episode)
        ending = thread.submit(_result_of, self._close, episode)
        thread.shutdown(wait=False)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    def _close(self, episode: str) -> None:
        if (hosted := self._environments.pop(episode, None)) is not None:
            hosted.close()

    async def _answer(self, episode: str, work: Callable[..., T], *arguments: Any) -> T | Crashed:
        call = self._threads[episode].submit(_result_of, work, *arguments)
        waiting = asyncio.wrap_future(call)
        self._calls[episode] = call, waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Crashed("its episode was closed")


def _result_of(work: Callable[..., T], *arguments: Any) -> T | Crashed:
    try:
        return whole_call(work, *arguments)
    except FOREIGN_ERRORS as error:  # it becomes a failure
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
        self._env = make_env(spec.env_id, **dict(spec.kwargs))
        self._seats = Seats()

    @property
    def rows(self) -> TaskRows | None:
        """The rows that it sets tasks from, if it does."""
        rows = getattr(self._env.unwrapped, "rows", None)
        return rows if isinstance(rows, TaskRows) else None

    def reset(self, seed: int) -> Started:
        """Begin an episode."""
        observation, info = returned("reset", self._env.reset(seed=seed), RESET)
        messages = self._messages(observation, info, begins=True)
        self._seats.reset(self._env, info)
        return Started(
            messages=messages, tools=tools_of(self._env), state=_state(observation, info), agent=self._seats.agent
        )

    def step(self, text: str) -> Stepped:
        """Take the policy's turn."""
        observation, reward, terminated, truncated, info = returned("step", self._env.step(text), STEP)
        rewards = info_rewards(info, self._seats.agents, self._seats.agent)
        fresh = self._seats.step(info) or bool(info_flag(info, "fresh"))
        return Stepped(
            messages=self._messages(observation, info, begins=fresh),
            reward=turn_reward(reward),
            terminated=turn_flag("terminated", terminated),
            truncated=turn_flag("truncated", truncated),
            success=info_flag(info, "success"),
            state=_state(observation, info),
            fresh=fresh,
            tool_calls=tuple(map(whole_texts, info_tool_calls(info))),
            invalid=bool(info_flag(info, "invalid_action")),
            agent=self._seats.agent,
            rewards=rewards,
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _messages(self, observation: Any, info: Mapping[str, Any], *, begins: bool) -> list[dict[str, Any]]:
        """Return an observation as messages, after the system prompt if they begin a conversation.

        Their texts are such that tokenizers and files take them, whatever a policy made the environment say.
        """
        prompt = system_prompt_of(self._env) if begins else None
        shown = [whole_texts(one) for one in shown_messages(observation, info)]
        if not prompt:
            return shown
        prompt = whole_text(prompt)
        if shown[0].get("role") == "system":  # of the task; templates take one
            begun = shown.pop(0)["content"]
            if isinstance(begun, list):
                return [{"role": "system", "content": [*begun, {"type": "text", "text": f"\n\n{prompt}"}]}, *shown]
            prompt = f"{begun}\n\n{prompt}"
        return [{"role": "system", "content": prompt}, *shown]


def _state(observation: Any, info: Mapping[str, Any]) -> str:
    return whole_text(state_of(observation, info))


@dataclass(slots=True)
class _Worker:
    """A worker of a pool.

    Attributes:
        rank: Its rank in the cluster.
        load: Episodes that were opened on it and are not closed.
        answered: Latest generation that has answered.
    """

    rank: int
    load: int = 0
    answered: int = 0


class EnvPool:
    """Gives each episode to the worker with the fewest; replaces workers in which an environment hangs.

    Args:
        deadline_seconds: Limit of one `reset` or `step`.
        report: Told about workers that were replaced.
    """

    def __init__(
        self, cluster: Cluster[EnvWorker], *, deadline_seconds: float, report: RestartCallback = to_stderr
    ) -> None:
        self.cluster = cluster
        self.worker_restarts = PoolRestarts(cluster, EnvWorker.hosted, "its episodes are played again", report)
        self.deadline_seconds = deadline_seconds
        self._workers = [_Worker(rank) for rank in range(len(cluster))]
        self._opened = 0

    def open(self, spec: EnvironmentSpec) -> RemoteEnvironment:
        """Return an environment on the worker with the fewest."""
        worker = min(self._workers, key=lambda one: (self.worker_restarts.pausing(one.rank), one.load))
        worker.load += 1
        self._opened += 1
        return RemoteEnvironment(self, spec, worker, f"{spec.name}-{self._opened}")


class RemoteEnvironment:
    """One episode's environment on a worker; see `Environment`."""

    def __init__(self, pool: EnvPool, spec: EnvironmentSpec, worker: _Worker, episode: str) -> None:
        self._pool = pool
        self._spec = spec
        self._worker = worker
        self._generation = pool.worker_restarts.generations[worker.rank]
        self._episode = episode

    async def reset(self, seed: int) -> Started:
        """Begin the episode; the time in which its worker starts does not count for the deadline."""
        if self._worker.answered < self._generation:
            await self._pool.worker_restarts.started(self._worker.rank)
            await self._within(self._ask(EnvWorker.hosted), "the process", starting=True)
            self._worker.answered = max(self._worker.answered, self._generation)
        return await self._within(self._ask(EnvWorker.reset, self._episode, self._spec, seed), "reset")

    async def step(self, text: str) -> Stepped:
        """Take the policy's turn."""
        return await self._within(self._ask(EnvWorker.step, self._episode, text), "step")

    async def close(self) -> None:
        """Close the environment, unless its worker is gone."""
        self._worker.load -= 1
        try:
            await asyncio.wait_for(self._ask(EnvWorker.close, self._episode), self._pool.deadline_seconds)
        except EnvironmentLost:
            return
        except (WorkerDied, TimeoutError) as error:
            died = isinstance(error, WorkerDied)
            self._replace(str(error) if died else f"close of {self._spec.env_id} did not return in time", counted=died)

    @property
    def _replaced(self) -> bool:
        """Whether the worker that the episode began on was replaced, because another episode lost it."""
        return self._pool.worker_restarts.generations[self._worker.rank] != self._generation

    def _replace(self, why: str, *, counted: bool = True) -> None:
        """Have the worker replaced that the episode began on; not counted if one environment is known to be the reason.

        Raises:
            WorkerDied: It was lost too often.
        """
        self._pool.worker_restarts.replace(self._worker.rank, self._generation, why, counted=counted)

    async def _ask(
        self,
        method: Callable[Concatenate[EnvWorker, P], Coroutine[Any, Any, T]],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call the worker that the episode began on, and never one that replaced it before the call is sent."""
        if self._replaced:
            raise self._lost("another environment took it down")
        return await self._pool.cluster.ask(self._worker.rank, method, *arguments, **options)

    async def _within(self, work: Awaitable[T | Crashed], what: str, *, starting: bool = False) -> T:
        seconds = self._pool.cluster.start_timeout_seconds if starting else self._pool.deadline_seconds
        try:
            answer = await asyncio.wait_for(work, seconds)
        except TimeoutError:
            if self._replaced:
                raise self._lost("another environment hung there") from None
            late = f"{what} of {self._spec.env_id} did not return within {seconds:g} s"
            self._replace(late, counted=starting)
            raise EnvError(
                late,
                fix=f"raise {'resources.start_timeout_seconds' if starting else 'env_workers.deadline_seconds'}, or "
                "correct the environment",
            ) from None
        except WorkerDied as error:
            if self._replaced:
                raise self._lost(str(error)) from error
            self._replace(str(error))
            raise EnvError(f"the process of {self._spec.env_id} died in {what}: {error}") from error
        if isinstance(answer, Crashed):
            raise EnvError(f"{what} of {self._spec.env_id} failed: {answer.error}")
        if not starting:
            self._pool.worker_restarts.worked(self._worker.rank)
        return answer

    def _lost(self, why: str) -> EnvironmentLost:
        return EnvironmentLost(f"the worker of {self._spec.env_id} was replaced: {why}")
