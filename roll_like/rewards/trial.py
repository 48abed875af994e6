"""Tries a reward on a task before a run: with its reference answer, and with an empty one."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass

from roll_like.cluster.driver_loop import DriverLoop
from roll_like.errors import RefusedAnswerError, RewardError
from roll_like.rewards.base import SIGNATURE, Reward, given_completion
from roll_like.rewards.call import RewardCaller
from roll_like.types import Task

#: How long a reward may take to be tried. Seconds.
TRIAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Attributes:
        failures: What the reward raised or returned in the place of a number, by the answer that it was given.
        tried: The answers that it was given.
        late: The answer that it did not score in time, if there was one; it was given no other then.
    """

    failures: dict[str, str]
    tried: tuple[str, ...]
    late: str | None = None


def is_cheap(reward: Reward) -> bool:
    """Return whether a reward needs nothing started: no model, no sandbox, no server that it would wait for."""
    return type(reward).start is Reward.start and not asyncio.iscoroutinefunction(reward.score)


def try_reward(reward: Reward, task: Task) -> Trial:
    """Call a cheap reward on a task's reference answer, where it has one, and on an empty answer."""
    answers = {"the reference answer": task.answer, "an empty answer": ""}
    tried = {name: text for name, text in answers.items() if text is not None}
    caller = RewardCaller(reward, TRIAL_SECONDS)
    failures: dict[str, str] = {}
    with DriverLoop() as loop:
        for name, text in tried.items():
            completion = given_completion(text, messages=task.messages, answer=task.answer, metadata=task.metadata)
            (outcome,), hung = loop.run(caller.call([completion]))
            if hung:
                return Trial(failures, tuple(tried), late=name)
            if isinstance(outcome, RewardError) and not isinstance(outcome, RefusedAnswerError):
                failures[name] = _explained(outcome, task)
    return Trial(failures, tuple(tried))


def _explained(error: RewardError, task: Task) -> str:
    """Return what went wrong in one sentence: the user's own line, and what there would have been."""
    cause = error.__cause__
    if cause is None:
        return error.message
    what = error.message
    if isinstance(cause, KeyError):
        return f"{what}; completion.metadata has {_names(task)}, and the reference answer is completion.answer"
    if isinstance(cause, TypeError | AttributeError) and task.answer is None and "'NoneType'" in what:
        return f"{what}; the row has no reference answer, so completion.answer is None: set answer_field of its source"
    if isinstance(cause, TypeError | AttributeError) and _is_of_another_library(cause):
        return f"{what}; {SIGNATURE}"
    return what


def _names(task: Task) -> str:
    return ", ".join(repr(name) for name in sorted(task.metadata)) or "no columns"


def _is_of_another_library(error: BaseException) -> bool:
    """Return whether the function that raised calls its argument by a name that stands for many."""
    at = error.__traceback__
    while at is not None:
        names = inspect.getargs(at.tb_frame.f_code).args
        if names and names[0] in ("completions", "prompts", "responses", "data_source", "solution_str"):
            return True
        at = at.tb_next
    return False
