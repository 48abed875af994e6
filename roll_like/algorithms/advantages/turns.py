"""Estimators that give each turn of an episode its own advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from roll_like.algorithms.advantages.base import (
    AdvantageEstimator,
    GroupEstimator,
    Groups,
    Rewards,
    TokenValues,
    flatten,
    penalised_rewards,
    spread_over_tokens,
    whiten,
)
from roll_like.algorithms.advantages.groups import dr_grpo_advantages, grpo_advantages
from roll_like.algorithms.advantages.returns import discounted_returns
from roll_like.config.base import Fraction, PluginConfig
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Scored


def turn_returns(sample: Scored, gamma: float, penalties_T: FloatArray) -> Rewards:
    """Return Σ_{k≥t} γ^(k−t)·r_k for each turn t of an episode.

    Args:
        sample: An episode. What the rewards of turns leave of its reward is added to the last turn: all of it if turns
            have none.
        gamma: Discount of one turn.
        penalties_T: Subtracted for each sampled token, shape [T], from the reward of its turn.
    """
    trajectory = sample.trajectory
    turns = int(trajectory.turns.max(initial=-1)) + 1
    rewards = np.zeros(turns)
    rewards[: len(sample.turn_rewards)] = sample.turn_rewards[:turns]
    if turns:
        rewards[-1] += sample.reward - rewards.sum()
        sampled = trajectory.sampled
        rewards -= np.bincount(trajectory.turns[sampled], weights=penalties_T[sampled], minlength=turns)
    return discounted_returns([rewards], gamma)[0]


@ADVANTAGES.register("turn_returns")
class TurnReturns(AdvantageEstimator):
    """`turn_returns`: each token gets its turn's discounted return, whitened over the step's turns.

    This project's own combination: REINFORCE (Williams 1992) with a whole turn as the action, and the whitening of
    REINFORCE++ (Hu 2025, arXiv:2501.03262). The discount counts turns, so a long answer is not worth less than a
    short one.
    """

    takes_off_policy = True

    class Config(PluginConfig):
        type: Literal["turn_returns"] = "turn_returns"
        gamma: Fraction = Field(default=0.95, description="Discount of one turn; 1 is none.")

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        samples = flatten(groups)
        returns = [
            turn_returns(sample, self.config.gamma, penalties_T)
            for sample, penalties_T in zip(samples, token_penalties, strict=True)
        ]
        return over_turns(samples, whiten(returns))


@ADVANTAGES.register("gigpo")
class GiGPO(GroupEstimator):
    """`gigpo`: the episode's advantage in its group, plus each turn's advantage among turns in the same state.

    Feng et al. 2025, arXiv:2505.10978. A = A_episode + ω·A_turn: A_episode compares the group's episodes, A_turn the
    discounted returns of all turns of the group that start in the same ("anchor") state. A state that occurs once has
    A_turn = 0.
    """

    compares_with = "the group's mean"
    takes_off_policy = True

    class Config(PluginConfig):
        type: Literal["gigpo"] = "gigpo"
        gamma: Fraction = Field(default=0.95, description="Discount of one turn; 1 is none.")
        turn_weight: float = Field(default=1.0, ge=0, description="ω, the weight of a turn's advantage.")
        divide_by_std: bool = Field(default=True, description="Divide both advantages by their standard deviation.")

    def of_group(self, rewards: Rewards) -> Rewards:
        return grpo_advantages(rewards) if self.config.divide_by_std else dr_grpo_advantages(rewards)

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        values: list[Rewards] = []
        penalties = iter(token_penalties)
        for group, rewards in penalised_rewards(groups, token_penalties):
            episodes = self.of_group(rewards)
            returns = [turn_returns(sample, self.config.gamma, next(penalties)) for sample in group.samples]
            of_turns = self._among_anchors(group.samples, returns)
            values += [
                episode + self.config.turn_weight * turns for episode, turns in zip(episodes, of_turns, strict=True)
            ]
        return over_turns(flatten(groups), values)

    def _among_anchors(self, samples: Sequence[Scored], returns: Sequence[Rewards]) -> list[Rewards]:
        """Return each turn's advantage among the group's turns in the same state."""
        anchors: dict[str, list[tuple[int, int]]] = {}
        for index, sample in enumerate(samples):
            for turn, state in enumerate(sample.turn_states[: len(returns[index])]):
                anchors.setdefault(state, []).append((index, turn))
        advantages = [np.zeros_like(values) for values in returns]
        for places in anchors.values():
            compared = self.of_group(np.array([returns[index][turn] for index, turn in places]))
            for (index, turn), value in zip(places, compared, strict=True):
                advantages[index][turn] = value
        return advantages


def over_turns(samples: Sequence[Scored], values: Sequence[Rewards]) -> list[FloatArray]:
    """Return one value a turn as one array [T] a sample: a turn's value at each of its sampled tokens, 0 elsewhere."""
    actions = [
        turn_values[sample.trajectory.turns[sample.trajectory.sampled]]
        for sample, turn_values in zip(samples, values, strict=True)
    ]
    return spread_over_tokens(samples, actions)
