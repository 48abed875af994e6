"""What tests of rewards share: completions and rows of a few words."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from roll_like import Completion, Outcome, Reward, RewardResult
from roll_like.types import Message, StopReason, Task


def completion(text: str, answer: str | None = None, *, prompt: str = "Say it.", **metadata: Any) -> Completion:
    """A finished response; a word counts as a token."""
    return Completion(
        text=text,
        messages=(Message(role="user", content=prompt),),
        answer=answer,
        metadata=metadata,
        stop_reason=StopReason.STOP,
        response_tokens=len(text.split()),
    )


def row(answer: str | None = None, **metadata: Any) -> Task:
    """A row as `check_row` sees it."""
    return Task(
        task_id="t",
        source="s",
        domain="s",
        messages=(),
        prompt_ids=np.zeros(1, np.int32),
        answer=answer,
        metadata=metadata,
        origin="data.jsonl:7",
    )


def outcomes(reward: Reward, completions: Sequence[Completion]) -> list[Outcome]:
    """What `score` gives, awaited if it has to be."""
    found = reward.score(completions)
    if not inspect.isawaitable(found):
        return list(found)

    async def wait() -> list[Outcome]:
        return list(await found)

    return asyncio.run(wait())


def value(reward: Reward, *args: Any, **metadata: Any) -> float:
    """The value of one response."""
    (outcome,) = outcomes(reward, [completion(*args, **metadata)])
    assert isinstance(outcome, RewardResult), outcome
    return outcome.value
