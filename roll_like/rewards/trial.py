"""One call of a reward outside of a run: each answer's outcome and time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from roll_like.errors import RewardError
from roll_like.rewards.base import Completion, Reward, RewardResult
from roll_like.rewards.call import RewardCaller


@dataclass(frozen=True, slots=True)
class Trial:
    """What a reward made of an answer, and how long it took. Seconds."""

    outcome: RewardResult | RewardError
    seconds: float


async def judge_once(reward: Reward, completions: Sequence[Completion], *, timeout_seconds: float) -> list[Trial]:
    """Return a trial for each completion: judged alone where a result depends on nothing else, else as a group."""
    groups = [[item] for item in completions] if reward.per_sample else [list(completions)]
    trials: list[Trial] = []
    caller = RewardCaller(reward, timeout_seconds)
    for group in groups:
        began = time.perf_counter()
        outcomes, _ = await caller.call(group)
        seconds = time.perf_counter() - began
        trials += [Trial(outcome, seconds) for outcome in outcomes]
    return trials
