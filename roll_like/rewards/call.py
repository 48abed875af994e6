"""One call of a reward: in a thread or as a coroutine, within its time, its answer read with suspicion."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import numpy as np

from roll_like.errors import RewardError, describe_error
from roll_like.rewards.base import Completion, Outcome, Reward, RewardResult, failure
from roll_like.types import StepScore

T = TypeVar("T")
ResultOrError: TypeAlias = RewardResult | RewardError


class RewardCaller:
    """Calls a reward; whatever goes wrong becomes a `RewardError` in the place of a result.

    A synchronous reward scores one group at a time, because it need not be thread-safe; an `async` one as many as
    its `side_by_side` says. The time of a call begins with its turn.
    """

    def __init__(self, reward: Reward, timeout_seconds: float) -> None:
        self._reward = reward
        self._is_async = asyncio.iscoroutinefunction(reward.score)
        groups = reward.side_by_side if self._is_async else 1
        self._turns = contextlib.nullcontext() if groups is None else asyncio.Semaphore(groups)
        self._timeout = timeout_seconds
        self._threads = _Threads()

    @property
    def hung(self) -> int:
        """Threads that still run past their time-out. They end with the process only."""
        return self._threads.late + self._reward.hung

    async def call(self, completions: list[Completion]) -> tuple[list[ResultOrError], bool]:
        """Return an outcome for each completion of a group, and whether another call is pointless."""
        try:
            return read_outcomes(await self._raw(completions), completions), False
        except _HungError as error:
            return [RewardError(str(error))] * len(completions), True
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything; its samples become Failures
            lost = error if isinstance(error, RewardError) else failure(error)
            return [lost] * len(completions), False

    async def _raw(self, completions: list[Completion]) -> Any:
        score: Callable[[Sequence[Completion]], Any] = self._reward.score
        async with self._turns:
            if self._is_async:
                return await self._bounded(score(completions))
            raw = await self._threads.run(lambda: score(completions), timeout=self._timeout)
        if isinstance(raw, Awaitable):
            raw = await self._bounded(raw)
        return raw

    async def _bounded(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(_without_exit(work))
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
        raise RewardError(f"no result within {self._timeout:g} s", fix="raise rewards.timeout_seconds")


async def _without_exit(work: Awaitable[T]) -> T:
    """Return what `work` does; `sys.exit()` in a task would end the loop."""
    try:
        return await work
    except SystemExit as error:
        raise failure(error) from error


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
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: no task waits
                loop.call_soon_threadsafe(finished.set)

        thread = threading.Thread(target=work, name="reward", daemon=True)
        thread.start()
        try:
            await asyncio.wait_for(finished.wait(), timeout)
        except TimeoutError:
            if not results and not errors:  # else it ended while this process had no time to notice
                self._late.append(thread)
                raise _HungError(
                    f"no result within {timeout:g} s, and a thread cannot be stopped",
                    fix="raise rewards.timeout_seconds, or bound the reward's own waiting",
                ) from None
        if errors:
            error = errors[0]
            raise error if isinstance(error, Exception) else RewardError(describe_error(error))
        return results[0]


def read_outcomes(raw: Any, completions: Sequence[Completion], *, method: str = "score") -> list[ResultOrError]:
    """Return what a reward's method has returned; a `RewardError` in the place of what is no finite number."""
    expected = len(completions)
    if not isinstance(raw, Sequence | np.ndarray) or isinstance(raw, str | bytes):
        error = RewardError(f"`{method}` should return a list of {expected} results, found {type(raw).__name__}")
        return [error] * expected
    if len(raw) != expected:
        return [RewardError(f"`{method}` returned {len(raw)} results for {expected} completions")] * expected
    return [_read_outcome(outcome, completion) for outcome, completion in zip(raw, completions, strict=True)]


def _read_outcome(outcome: Outcome, completion: Completion) -> ResultOrError:
    if isinstance(outcome, RewardError):
        return outcome
    reward_result = outcome if isinstance(outcome, RewardResult) else RewardResult(outcome)
    steps: Any = reward_result.steps
    for step in steps if isinstance(steps, Sequence) else (steps,):
        if not isinstance(step, StepScore) or not isinstance(step.end, int | np.integer):
            return RewardError(f"steps should be a list of StepScore(value, end), found {step!r} among them")
    for what, value in (
        ("result", reward_result.value),
        *((f"detail {key!r}", v) for key, v in reward_result.details.items()),
        *((f"verdict {key!r}", v) for key, v in reward_result.verdicts.items()),
        *((f"score of step {at}", step.value) for at, step in enumerate(reward_result.steps)),
    ):
        if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
            return RewardError(f"the {what} should be a finite number, found {value!r} ({type(value).__name__})")
    if reward_result.answer is not None and not isinstance(reward_result.answer, str):
        return RewardError(f"the answer should be a text or None, found {reward_result.answer!r}")
    ends = [step.end for step in reward_result.steps]
    length = len(completion.full_text)
    if any(end <= before for before, end in pairwise(ends)) or any(not 0 <= end <= length for end in ends):
        return RewardError(
            f"the ends of steps should go up, to at most {length} (the characters of `full_text`), found {ends}"
        )
    return RewardResult(
        float(reward_result.value),
        {str(key): float(value) for key, value in reward_result.details.items()},
        reward_result.answer,
        {str(key): float(value) for key, value in reward_result.verdicts.items()},
        tuple(StepScore(float(step.value), int(step.end)) for step in reward_result.steps),
    )


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # its time has passed; without this asyncio reports it as never retrieved
