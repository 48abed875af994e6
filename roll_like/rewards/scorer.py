"""Scores groups: every reward that applies, in order to one weighted sum, failures kept apart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from roll_like.errors import ConfigError, RewardError
from roll_like.registry import REWARDS
from roll_like.rewards.base import Completion, Outcome, Reward, RewardConfig, Verdict, describe_error
from roll_like.types import Failure, Group, Scored, Task, Trajectory

T = TypeVar("T")
Judged = Verdict | RewardError

_log = logging.getLogger(__name__)


def reward_name(config: RewardConfig) -> str:
    """Return the name under which a reward is reported."""
    return config.name or config.type


class Scorer:
    """Judges groups by the configured rewards.

    A reward that raises, times out or returns anything but finite numbers is tried again, and then
    the samples that it left unjudged move to the group's failures: never a reward of 0.

    Args:
        configs: The `rewards.use` section.
        timeout_seconds: Limit of one attempt of one reward at a group.
        retries: Further attempts after a failure. A synchronous reward that ran out of time is not
            tried again: its thread still runs.
        domains: Names of the rewards of each domain that names its own; the others are judged by every
            reward whose `sources` fit.

    Raises:
        ConfigError: Two rewards have the same name.
        RewardError: A reward cannot be built.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        timeout_seconds: float,
        retries: int,
        domains: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._domains = domains or {}
        self._timeout = timeout_seconds
        self._retries = retries
        self._threads = _Threads()
        self._rewards: list[_Entry] = []
        for config in configs:
            name = reward_name(config)
            if any(entry.name == name for entry in self._rewards):
                raise ConfigError(
                    f"two rewards are called {name!r}", fix="give each a `name` of its own in rewards.use"
                )
            self._rewards.append(_Entry(name, config, _build(name, config), asyncio.Lock()))

    @property
    def hung(self) -> int:
        """Threads of synchronous rewards that still run past their time-out. They end with the process only."""
        return self._threads.late + sum(entry.reward.hung for entry in self._rewards)

    async def judge(self, names: Sequence[str], completions: Sequence[Completion]) -> dict[str, list[Judged]]:
        """Return the verdicts of the named rewards on a group, whatever its source; an error where one failed."""
        entries = [entry for entry in self._rewards if entry.name in names]
        judged = await asyncio.gather(*(self._judge(entry, completions) for entry in entries))
        return {entry.name: verdicts for entry, verdicts in zip(entries, judged, strict=True)}

    async def score_group(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with its verdicts; samples that could not be judged are in its failures.

        Raises:
            ConfigError: No reward is for this group's source.
        """
        rewards = [entry for entry in self._rewards if judges(entry.config, group.task, self._domains)]
        if not rewards:
            raise _unjudged(group.task.source)
        completions = [to_completion(trajectory) for trajectory in group.samples]
        if not completions:
            return Group(task=group.task, samples=(), failures=group.failures)
        judged = await asyncio.gather(*(self._judge(entry, completions) for entry in rewards))
        samples: list[Scored] = []
        failures = list(group.failures)
        for index, trajectory in enumerate(group.samples):
            verdicts = {entry.name: verdicts[index] for entry, verdicts in zip(rewards, judged, strict=True)}
            result = _combine(trajectory, rewards, verdicts)
            if isinstance(result, Scored):
                samples.append(result)
            else:
                failures.append(result)
        return Group(task=group.task, samples=tuple(samples), failures=tuple(failures))

    def close(self) -> None:
        """Free what the rewards hold.

        Raises:
            RewardError: A reward's `close` raised; the others are closed all the same.
        """
        errors = []
        for entry in self._rewards:
            try:
                entry.reward.close()
            except Exception as error:  # noqa: BLE001 - a plugin may raise anything; raised below
                errors.append(f"closing the reward {entry.name!r} failed: {describe_error(error)}")
        if errors:
            raise RewardError("\n".join(errors))

    async def _judge(self, entry: _Entry, completions: Sequence[Completion]) -> list[Judged]:
        """Return a verdict or an error for each completion, after all attempts."""
        judged: list[Judged] = []
        asked = list(range(len(completions)))
        for attempt in range(self._retries + 1):
            outcome, final = await self._attempt(entry, [completions[index] for index in asked])
            if not judged:
                judged = list(outcome)
            for index, verdict in zip(asked, outcome, strict=True):
                # a verdict that stands is kept when the whole group has to be asked again
                if isinstance(judged[index], RewardError):
                    judged[index] = verdict
            failed = [index for index, verdict in enumerate(judged) if isinstance(verdict, RewardError)]
            if not failed or final:
                break
            asked = failed if entry.reward.per_sample else asked
            _log.warning(
                "reward %r failed on %d of %d samples (attempt %d of %d): %s",
                *(entry.name, len(failed), len(completions), attempt + 1, self._retries + 1, judged[failed[0]]),
            )
        return judged

    async def _attempt(self, entry: _Entry, completions: list[Completion]) -> tuple[list[Judged], bool]:
        """Return what one call gives, and whether another call is pointless."""
        try:
            return _read_outcomes(await self._call(entry, completions), len(completions)), False
        except _HungError as error:
            return [RewardError(str(error))] * len(completions), True
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything; its samples become Failures
            failure = error if isinstance(error, RewardError) else RewardError(describe_error(error))
            return [failure] * len(completions), False

    async def _call(self, entry: _Entry, completions: list[Completion]) -> Any:
        score = entry.reward.score
        if asyncio.iscoroutinefunction(score):
            return await self._bounded(score(completions))
        async with entry.lock:  # a synchronous reward need not be thread-safe
            raw = await self._threads.run(lambda: score(completions), timeout=self._timeout)
        if isinstance(raw, Awaitable):
            raw = await self._bounded(raw)
        return raw

    async def _bounded(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return task.result()
        # not awaited: a coroutine that swallows its cancellation would hold the group for ever
        task.add_done_callback(_retrieve)
        task.cancel()
        raise RewardError(f"no verdict within {self._timeout:g} s", fix="raise rewards.timeout_seconds")


@dataclass(frozen=True)
class _Entry:
    name: str
    config: RewardConfig
    reward: Reward
    lock: asyncio.Lock


class _HungError(RewardError):
    """A synchronous reward ran out of time; its thread cannot be stopped."""


class _Threads:
    """Runs functions in daemon threads, which never keep the process from ending."""

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []

    @property
    def late(self) -> int:
        """Threads that still run past their time-out."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return len(self._late)

    async def run(self, function: Callable[[], T], *, timeout: float) -> T:
        """Return what `function` returns.

        Raises:
            _HungError: It did not return within `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - also exit(): handed to the waiting side
                errors.append(error)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                loop.call_soon_threadsafe(finished.set)

        thread = threading.Thread(target=work, name="reward", daemon=True)
        thread.start()
        try:
            await asyncio.wait_for(finished.wait(), timeout)
        except TimeoutError:
            self._late.append(thread)
            raise _HungError(
                f"no verdict within {timeout:g} s, and a thread cannot be stopped",
                fix="raise rewards.timeout_seconds, or bound the reward's own waiting",
            ) from None
        if errors:
            error = errors[0]
            raise error if isinstance(error, Exception) else RewardError(describe_error(error))
        return results[0]


def to_completion(trajectory: Trajectory) -> Completion:
    """Return a trajectory as rewards see it."""
    return Completion(
        text=trajectory.text,
        messages=trajectory.task.messages,
        answer=trajectory.task.answer,
        metadata=trajectory.task.metadata,
        stop_reason=trajectory.stop_reason,
        response_tokens=trajectory.response_length,
    )


def _build(name: str, config: RewardConfig) -> Reward:
    plugin = REWARDS.get(config.type)
    try:
        reward: Reward = plugin(config)
        reward.start()
    except Exception as error:
        raise RewardError(f"the reward {name!r} cannot start: {describe_error(error)}") from error
    return reward


def judges(config: RewardConfig, task: Task, domains: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a reward judges a task: its domain names it, or names none and the reward's `sources` fit."""
    if task.domain in domains:
        return reward_name(config) in domains[task.domain]
    return config.sources is None or task.source in config.sources


def _unjudged(source: str) -> ConfigError:
    return ConfigError(
        f"no reward judges the data source {source!r}", fix=f"add {source!r} to the `sources` of one in rewards.use"
    )


def _combine(trajectory: Trajectory, rewards: Sequence[_Entry], verdicts: Mapping[str, Judged]) -> Scored | Failure:
    """Return the weighted sum, or the first reward's failure."""
    values: dict[str, float] = {}
    details: dict[str, float] = {}
    total = 0.0
    for entry in rewards:
        verdict = verdicts[entry.name]
        if isinstance(verdict, RewardError):
            return Failure(stage="reward", name=entry.name, error=str(verdict), origin=trajectory.task.origin)
        values[entry.name] = verdict.value
        details |= {f"{entry.name}/{key}": value for key, value in verdict.details.items()}
        total += entry.config.weight * verdict.value
    weights = {entry.name: entry.config.weight for entry in rewards}
    return Scored(trajectory=trajectory, reward=total, rewards=values, details=details, weights=weights)


def _read_outcomes(raw: Any, expected: int) -> list[Judged]:
    if not isinstance(raw, Sequence | np.ndarray) or isinstance(raw, str | bytes):
        error = RewardError(f"`score` should return a list of {expected} verdicts, found {type(raw).__name__}")
        return [error] * expected
    if len(raw) != expected:
        return [RewardError(f"`score` returned {len(raw)} verdicts for {expected} completions")] * expected
    return [_read_outcome(outcome) for outcome in raw]


def _read_outcome(outcome: Outcome) -> Judged:
    if isinstance(outcome, RewardError):
        return outcome
    verdict = outcome if isinstance(outcome, Verdict) else Verdict(outcome)
    for what, value in (("verdict", verdict.value), *((f"detail {key!r}", v) for key, v in verdict.details.items())):
        if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
            return RewardError(f"the {what} should be a finite number, found {value!r} ({type(value).__name__})")
    return Verdict(float(verdict.value), {str(key): float(value) for key, value in verdict.details.items()})


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # its time has passed; without this asyncio reports it as never retrieved
