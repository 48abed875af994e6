"""What tests of rewards share: completions and rows of a few words."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from roll_like import Completion, Outcome, Reward, RewardResult
from roll_like.types import Failure, Group, Message, Part, Segment, StopReason, Task, Trajectory


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


def make_group(
    *texts: str, source: str = "chat", answer: str = "42", failures: tuple[Failure, ...] = ()
) -> Group[Trajectory]:
    """Finished answers to one task, each of two tokens."""
    task = Task(
        task_id="chat:1",
        source=source,
        domain=source,
        messages=({"role": "user", "content": "Say it."},),
        prompt_ids=np.array([1, 2], np.int32),
        answer=answer,
        metadata={"level": 3},
        origin="data.jsonl:1",
    )
    samples = tuple(
        Trajectory(
            task=task,
            sample_index=index,
            token_ids=np.array([1, 2, 3, 4], np.int32),
            sampled=np.array([False, False, True, True]),
            logprobs=np.zeros(4, np.float32),
            turns=np.array([-1, -1, 0, 0], np.int32),
            parts=(Part(start=0, end=4, prompt_length=2),),
            segments=(Segment(start=2, end=4, policy_version=0),),
            text=text,
            stop_reason=StopReason.STOP,
        )
        for index, text in enumerate(texts)
    )
    return Group(task=task, samples=samples, failures=failures)
