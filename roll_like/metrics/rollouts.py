"""Rollouts as rows, for the files of a run and for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from roll_like.types import Group, Scored


def rollout_rows(groups: Iterable[Group[Scored]]) -> list[dict[str, Any]]:
    """Return one row per scored sample: prompt, answer, rewards, and what sampled it."""
    return [_row(sample) for group in groups for sample in group.samples]


def _row(sample: Scored) -> dict[str, Any]:
    trajectory = sample.trajectory
    task = trajectory.task
    return {
        "task_id": task.task_id,
        "sample_index": trajectory.sample_index,
        "prompt": prompt_text(task.messages),
        "text": trajectory.text,
        "reward": float(sample.reward),
        "rewards": {name: float(value) for name, value in sample.rewards.items()},
        "details": {name: float(value) for name, value in sample.details.items()},
        "answer": task.answer,
        "response_tokens": trajectory.response_length,
        "stop_reason": str(trajectory.stop_reason),
        "policy_version": trajectory.policy_version,
    }


def prompt_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return a prompt for people: a lone user message as it is, several with their roles.

    >>> prompt_text([{"role": "user", "content": "Hello"}])
    'Hello'
    """
    shown = list(messages)
    if len(shown) == 1:
        return str(shown[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in shown)
