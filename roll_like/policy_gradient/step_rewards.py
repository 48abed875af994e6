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
    if not any(sample.step_scores for group in groups for sample in _members(group)):
        return groups
    known = renderer()
    find = partial(last_tokens, spell=cache(known.token_bytes), special=known.special_ids)
    placed = []
    for group in groups:
        given = {(member.agent, name) for member in _members(group) for name in member.step_scores}
        place = partial(_placed, given=given, find=find)
        samples, baselines = tuple(map(place, group.samples)), tuple(map(place, group.baselines))
        off_policy = tuple(map(place, group.off_policy))
        placed.append(replace(group, samples=samples, baselines=baselines, off_policy=off_policy))
    return placed


def _members(group: Group[Scored]) -> tuple[Scored, ...]:
    return (*group.samples, *group.baselines, *group.off_policy)


def _placed(sample: Scored, *, given: Collection[tuple[str, str]], find: Callable[..., list[int]]) -> Scored:
    """Return a sample with the rewards of its steps at tokens; in an episode steps are of the last turn."""
    trajectory = sample.trajectory
    sampled = np.flatnonzero(trajectory.sampled)
    scores = {name: sample.steps_of(name) for name in sample.rewards if (sample.agent, name) in given}
    if not any(scores.values()) or not len(sampled):
        return sample
    of_actions = trajectory.turns[sampled]
    last_turn = np.flatnonzero(of_actions == of_actions.max())
    tokens = trajectory.token_ids[sampled[last_turn]]
    found: dict[int, float] = {}
    value = 0.0
    for name, steps in scores.items():
        ends = find(tokens, trajectory.last_text, [step.end for step in steps])
        value += sample.weights[name] * sample.rewards[name] if steps else 0.0
        for at, step in zip(last_turn[ends].tolist(), steps, strict=True):
            found[at] = found.get(at, 0.0) + sample.weights[name] * step.value
    return replace(sample, step_rewards=tuple(sorted(found.items())), step_value=value)
