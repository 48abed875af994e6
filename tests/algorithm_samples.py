"""Groups, samples and micro-batches of a few numbers, for tests of the algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import settings

from roll_like.algorithms.losses import LossInputs
from roll_like.config.algorithm import CorrectionConfig
from roll_like.types import Group, Part, PolicySample, Scored, Segment, StopReason, Task, Trajectory

#: The same cases in every run, however slow the machine; nothing is written beside the tests.
same_cases = settings(deadline=None, derandomize=True, database=None)
NO_CORRECTION = CorrectionConfig(type="none")


def make_task(task_id: str = "toy/0", prompt: Sequence[int] = (1, 2)) -> Task:
    return Task(
        task_id=task_id,
        source="toy",
        domain="toy",
        messages=({"role": "user", "content": "?"},),
        prompt_ids=np.array(prompt, np.int32),
        answer=None,
        metadata={},
        origin="toy.jsonl:1",
    )


def make_scored(
    task: Task, index: int, reward: float, response: Sequence[int], stop: StopReason = StopReason.STOP
) -> Scored:
    """One scored sample; `response` says which of its tokens were sampled."""
    sampled = np.array([False] * len(task.prompt_ids) + [bool(bit) for bit in response])
    trajectory = Trajectory(
        task=task,
        sample_index=index,
        token_ids=np.arange(len(sampled), dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        turns=np.where(sampled, 0, -1).astype(np.int32),
        parts=(Part(start=0, end=len(sampled), prompt_length=len(task.prompt_ids)),),
        segments=(Segment(start=len(task.prompt_ids), end=len(sampled), policy_version=3),),
        text="",
        stop_reason=stop,
    )
    return Scored(trajectory=trajectory, reward=reward, rewards={"toy": reward}, details={}, weights={"toy": 1.0})


def make_group(
    rewards: Sequence[float],
    masks: Sequence[Sequence[int]] | None = None,
    *,
    stops: Sequence[StopReason] | None = None,
    baseline: float | None = None,
    **task: Any,
) -> Group[Scored]:
    """A group with one sample a reward; `masks` says which response tokens were sampled, all of two by default.

    With `baseline` there is one more, greedy sample with that reward.
    """
    made = make_task(**task)
    samples = [
        make_scored(
            made,
            index,
            reward,
            [1, 1] if masks is None else masks[index],
            StopReason.STOP if stops is None else stops[index],
        )
        for index, reward in enumerate(rewards)
    ]
    greedy = () if baseline is None else (make_scored(made, len(rewards), baseline, [1, 1]),)
    return Group(task=made, samples=tuple(samples), failures=(), baselines=greedy)


def make_policy_sample(mask: Sequence[int], logprobs: Sequence[float] | None = None) -> PolicySample:
    loss_mask = np.array(mask, bool)
    return PolicySample(
        group_id="toy/0#0",
        token_ids=np.arange(len(loss_mask), dtype=np.int32),
        prompt_length=0,
        loss_mask=loss_mask,
        turns=np.where(loss_mask, 0, -1).astype(np.int32),
        behaviour_logprobs=np.array(np.zeros(len(loss_mask)) if logprobs is None else logprobs, np.float32),
        advantages=np.zeros(len(loss_mask), np.float32),
        reward=0.0,
        policy_version=0,
    )


def make_inputs(logprobs: Sequence[float], **overrides: Any) -> LossInputs:
    """One sequence in float64; what is not given equals the policy, with advantage and weight 1."""
    count = len(logprobs)
    given = {
        name: torch.tensor(value, dtype=torch.float64) if isinstance(value, (list, tuple)) else value
        for name, value in overrides.items()
    }
    policy = torch.tensor(logprobs, dtype=torch.float64)
    ones = torch.ones(count, dtype=torch.float64)
    values: dict[str, Any] = {
        "logprobs_N": policy.clone().requires_grad_(),
        "old_logprobs_N": policy,
        "behaviour_logprobs_N": given.get("old_logprobs_N", policy),
        "advantages_N": ones,
        "weights_N": ones,
        "sequence_N": torch.zeros(count, dtype=torch.int64),
        "sequences": 1,
        # one turn a sequence
        "turn_N": given.get("sequence_N", torch.zeros(count, dtype=torch.int64)),
        "turns": given.get("sequences", 1),
        "entropy_N": ones.clone().requires_grad_(),
        "draws_N": torch.arange(count, dtype=torch.float64) / max(count, 1),
    }
    return LossInputs(**values | given)


def differences(function: Any, values: list[float], step: float = 1e-6) -> list[float]:
    """Central differences of a scalar function."""
    slopes = []
    for index in range(len(values)):
        moved = [[*values[:index], values[index] + sign * step, *values[index + 1 :]] for sign in (1, -1)]
        slopes.append((function(moved[0]) - function(moved[1])) / (2 * step))
    return slopes
