"""Estimators with a baseline for each token of a group's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from roll_like.algorithms.advantages.base import (
    AdvantageEstimator,
    Groups,
    Rewards,
    ScoreEnergies,
    TokenValues,
    action_rewards,
    flatten,
    joined,
    policy_samples,
    spread_over_tokens,
)
from roll_like.algorithms.advantages.returns import ReturnConfig, discounted_returns
from roll_like.errors import EngineError
from roll_like.registry import ADVANTAGES
from roll_like.values import reward_noise


def token_baseline_advantages(
    returns: Sequence[Rewards], energies: Sequence[Rewards], *, tail_returns: bool = False
) -> list[Rewards]:
    """Return G_t − B_t of each action of a group's samples, B_t = Σ_i W_it·G_it / Σ_i W_it, W_it = Σ_{j≤t} w_ij.

    The optimal token baseline (arXiv:2602.07078; as in verl): of all numbers that could be subtracted at the t-th
    action, B_t makes the variance of the gradient least, if the squared norm of the gradient up to there is W. Sums are
    over the samples that have a t-th action. Where their returns are equal, or there is one, the advantage is 0; where
    no gradient reaches anything (W = 0) B_t is the mean.

        returns 1, 1 and 0, energies 1, 3 and 1  →  W = 1, 4 and 1, B = ½ and 1  →  ½, 0 and −½

    Args:
        returns: Return-to-go of each action, one array a sample.
        energies: w, the squared norm of ∇ log π of each action in the logits, at least 0.
        tail_returns: Whether the advantage is the return where one of several samples is left.
    """
    longest = max((len(row) for row in returns), default=0)
    there_GT, returns_GT, weights_GT = (np.zeros((len(returns), longest)) for _ in range(3))
    for index, (row, energy) in enumerate(zip(returns, energies, strict=True)):
        there_GT[index, : len(row)] = 1
        returns_GT[index, : len(row)], weights_GT[index, : len(row)] = row, np.cumsum(energy)
    weights_GT += there_GT * (weights_GT.sum(0) <= 0)
    baselines_T = (weights_GT * returns_GT).sum(0) / np.maximum(weights_GT.sum(0), np.finfo(np.float64).tiny)
    low_T, high_T = (
        pick(np.where(there_GT > 0, returns_GT, other), axis=0) if longest else np.zeros(0)
        for pick, other in ((np.min, np.inf), (np.max, -np.inf))
    )
    differs_T = high_T - low_T > np.array([reward_noise(np.array(pair)) for pair in zip(low_T, high_T, strict=True)])
    if tail_returns and len(returns) > 1:
        alone_T = there_GT.sum(0) == 1
        baselines_T, differs_T = np.where(alone_T, 0.0, baselines_T), differs_T | alone_T
    return [(row - baselines_T[: len(row)]) * differs_T[: len(row)] for row in returns]


@ADVANTAGES.register("optimal_token_baseline")
class OptimalTokenBaseline(AdvantageEstimator):
    """`optimal_token_baseline`: return-to-go minus the group's mean weighted by gradient energy, at each token.

    arXiv:2602.07078, as in verl. The energy of a token y is 1 − 2π(y) + Σ_v π(v)², from the policy before the update,
    and a sample's weight at a token the sum of its energies up to there. Tokens that the policy did not sample are
    skipped. It costs two forward passes of the policy.
    """

    minimum_samples_per_prompt = 2
    needs_policy = True
    uses_steps = True

    class Config(ReturnConfig):
        type: Literal["optimal_token_baseline"] = "optimal_token_baseline"
        tail_returns: bool = Field(
            default=False,
            description="Beyond the group's second longest sample, where there is nothing to compare with, the "
            "advantage is the return (verl's `handle_zero_tail`); by default it is 0.",
        )

    _policy: ScoreEnergies | None = None

    def observe(self, policy: ScoreEnergies) -> None:
        self._policy = policy

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        if self._policy is None:
            raise EngineError("the optimal token baseline has no policy to ask", fix="call `observe` first")
        samples = flatten(groups)
        energies = joined(samples, self._policy.score_energies(policy_samples(groups)))
        returns = discounted_returns(action_rewards(samples, token_penalties), self.config.gamma)
        values: list[Rewards] = []
        for group in groups:
            own = slice(len(values), len(values) + len(group.samples))
            of_actions = [
                energies_T[sample.trajectory.sampled].astype(np.float64)
                for sample, energies_T in zip(samples[own], energies[own], strict=True)
            ]
            values += token_baseline_advantages(returns[own], of_actions, tail_returns=self.config.tail_returns)
        return spread_over_tokens(samples, values)
