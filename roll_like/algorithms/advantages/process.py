"""Estimators that supervise the process: every step of an answer has a score."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from roll_like.algorithms.advantages.base import (
    AdvantageEstimator,
    Groups,
    Rewards,
    TokenValues,
    flatten,
    placed_rewards,
    spread_over_tokens,
)
from roll_like.algorithms.advantages.groups import dr_grpo_advantages, grpo_advantages
from roll_like.algorithms.advantages.returns import discounted_returns
from roll_like.config.base import PluginConfig
from roll_like.errors import RewardError
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Scored


def step_values(sample: Scored, penalties_T: FloatArray) -> tuple[list[int], Rewards, float]:
    """Return the sampled tokens at which steps end, the rewards of these steps, and what belongs to no step.

    The tokens of a step are those after the step before; those behind the last step belong to it.

    Args:
        sample: Its steps, or its turns where these have rewards.
        penalties_T: Subtracted for each sampled token, shape [T], from its step's reward.
    """
    placed, rest = placed_rewards(sample)
    penalties_A = penalties_T[sample.trajectory.sampled].astype(np.float64)
    if not placed or not len(penalties_A):
        return [], np.zeros(0), rest - float(penalties_A.sum())
    ends = sorted(placed)
    begins = [0, *(end + 1 for end in ends[:-1])]
    return ends, np.array([placed[end] for end in ends]) - np.add.reduceat(penalties_A, begins), rest


@ADVANTAGES.register("grpo_process")
class GRPOProcess(AdvantageEstimator):
    """`grpo_process`: Σ of (step's reward − mean)/std over the steps that end at or after the token (Shao et al. 2024).

    GRPO with process supervision, DeepSeekMath, arXiv:2402.03300, section 4.1.3: mean and standard deviation are over
    the steps of all answers in the group. Rewards without scores of steps are compared as in `grpo` and added. In an
    episode whose turns have rewards the turns are steps.
    """

    minimum_samples_per_prompt = 2
    uses_steps = True
    takes_off_policy = True
    compares_with = "the steps of the group's samples"

    class Config(PluginConfig):
        type: Literal["grpo_process"] = "grpo_process"
        outcome_weight: float = Field(
            default=1.0, ge=0, description="Weight of the advantage by rewards that give no scores of steps."
        )
        divide_by_std: bool = Field(default=True, description="Divide both advantages by their standard deviation.")

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        standardised = grpo_advantages if self.config.divide_by_std else dr_grpo_advantages
        penalties = iter(token_penalties)
        values: list[Rewards] = []
        steps = 0
        for group in groups:
            found = [step_values(sample, next(penalties)) for sample in group.samples]
            if not found:
                continue
            together = standardised(np.concatenate([rewards for _, rewards, _ in found]))
            outcomes = self.config.outcome_weight * standardised(np.array([rest for _, _, rest in found]))
            steps += len(together)
            for sample, (ends, rewards, _), outcome in zip(group.samples, found, outcomes, strict=True):
                own, together = together[: len(rewards)], together[len(rewards) :]
                per_action = np.zeros(sample.trajectory.response_length)
                per_action[ends] = own
                values += [discounted_returns([per_action], 1.0)[0] + outcome]
        samples = flatten(groups)
        if samples and not steps:
            raise RewardError(
                "advantage: grpo_process compares scores of steps, and no reward gave any for the samples of this step",
                fix="use a reward that does (reward_model with a process reward model, or one of your own: "
                "docs/rewards.md), or algorithm.advantage: grpo",
            )
        return spread_over_tokens(samples, values)
