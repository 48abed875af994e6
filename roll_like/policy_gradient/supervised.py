"""Demonstrations that a step learns by a supervised loss beside its policy gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.types import Group, PolicySample, Scored, Task, Trajectory


def supervised_samples(
    groups: Sequence[Group[Scored]], demonstrations: Callable[[Task], Sequence[Trajectory]]
) -> list[PolicySample]:
    """Return the demonstrations of a step's tasks as samples whose tokens are supervised alone.

    They are no samples of the policy: without advantages, and in no denominator of its loss. Their `group_id` is that
    of the group, so that they are in its optimizer step and share the computation of its prompt.
    """
    given = [
        replace(group, samples=tuple(map(_unscored, demonstrations(group.task))), off_policy=()) for group in groups
    ]
    return [
        replace(
            sample,
            supervised=sample.loss_mask,
            loss_mask=np.zeros_like(sample.loss_mask),
            turns=np.full_like(sample.turns, -1),
            trajectory=None,
        )
        for sample in policy_samples(given)
    ]


def _unscored(trajectory: Trajectory) -> Scored:
    """Return a trajectory whose reward nothing reads."""
    return Scored(trajectory=trajectory, reward=0.0, rewards={}, details={}, weights={})
