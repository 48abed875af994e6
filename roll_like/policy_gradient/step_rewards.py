"""From scores of steps, which end at characters, to rewards of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from roll_like.data.chat import Renderer
from roll_like.data.steps import last_tokens
from roll_like.types import Group, Scored


def with_step_rewards(groups: Sequence[Group[Scored]], renderer: Callable[[], Renderer]) -> Sequence[Group[Scored]]:
    """Return groups whose samples have `step_rewards`, where rewards gave scores of steps.

    Args:
        renderer: Returns that of the policy; asked only where there are scores.
    """
    if not any(sample.step_scores for group in groups for sample in (*group.samples, *group.baselines)):
        return groups
    known = renderer()
    place = partial(_placed, spell=cache(known.token_bytes), special=known.special_ids)
    return [
        replace(group, samples=tuple(map(place, group.samples)), baselines=tuple(map(place, group.baselines)))
        for group in groups
    ]


def _placed(sample: Scored, *, spell: Callable[[int], bytes], special: Collection[int]) -> Scored:
    """Return a sample with the rewards of its steps at tokens; in an episode steps are of the last turn."""
    trajectory = sample.trajectory
    sampled = np.flatnonzero(trajectory.sampled)
    if not sample.step_scores or not len(sampled):
        return sample
    text = trajectory.record[-1].text if trajectory.record else trajectory.text
    of_actions = trajectory.turns[sampled]
    last_turn = np.flatnonzero(of_actions == of_actions.max())
    tokens = trajectory.token_ids[sampled[last_turn]]
    found: dict[int, float] = {}
    for name, steps in sample.step_scores.items():
        ends = last_tokens(tokens, text, [step.end for step in steps], spell=spell, special=special)
        for at, step in zip(last_turn[ends].tolist(), steps, strict=True):
            found[at] = found.get(at, 0.0) + sample.weights[name] * step.value
    return replace(sample, step_rewards=tuple(sorted(found.items())))
