"""Rewards of episodes beside their environments' own: finished groups are scored as groups of answers are."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from roll_like.config.rewards import RETURN
from roll_like.rollout.reward_pools import RewardPools, summed
from roll_like.types import Group, Scored, by_agent


class EpisodeRewards:
    """Adds the results of reward workers to what environments gave.

    Args:
        scorer: The reward workers.
        environment_weight: Factor of an environment's return in the sum.
    """

    def __init__(self, scorer: RewardPools, *, environment_weight: float) -> None:
        self._scorer = scorer
        self._weight = environment_weight

    async def add(self, group: Group[Scored]) -> Group[Scored]:
        """Return a group with the sums; episodes that a reward could not score are in its failures.

        Waits for the reward workers, where a reward scores the group's task. Each agent's samples are scored as a group
        of their own.
        """
        parts = await asyncio.gather(*map(self._add, by_agent([group])))
        return replace(
            group,
            samples=tuple(sample for part in parts for sample in part.samples),
            failures=tuple(failure for part in parts for failure in part.failures),
        )

    async def _add(self, group: Group[Scored]) -> Group[Scored]:
        if not group.samples:
            return group
        if not self._scorer.scores(group.task):
            return replace(group, samples=tuple(with_rewards(one, None, self._weight) for one in group.samples))
        # numbered anew: an agent may have several samples of an episode
        trajectories = tuple(replace(one.trajectory, sample_index=at) for at, one in enumerate(group.samples))
        scored = await self._scorer.score(Group(task=group.task, samples=trajectories, failures=group.failures))
        found = {one.trajectory.sample_index: one for one in scored.samples}
        samples = tuple(
            with_rewards(one, found[at], self._weight) for at, one in enumerate(group.samples) if at in found
        )
        return replace(group, samples=samples, failures=scored.failures)


def with_rewards(episode: Scored, added: Scored | None, environment_weight: float) -> Scored:
    """Return an episode whose reward is environment_weight × return + Σ weight × reward.

    The rewards see the whole episode, so what they give belongs to its last turn; scores of steps are placed later.

    Args:
        episode: With its environment's rewards.
        added: What the reward workers gave; None where no reward scores its task.
        environment_weight: Factor of the environment's rewards.
    """
    more = 0.0 if added is None else added.outcome
    turns = [environment_weight * reward for reward in episode.turn_rewards]
    if turns:
        turns[-1] += more
    weighed = replace(
        episode,
        reward=environment_weight * episode.rewards[RETURN],
        weights={RETURN: environment_weight},
        turn_rewards=tuple(turns),
    )
    return weighed if added is None else summed([weighed, added])
