"""Estimators that use returns-to-go of tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from roll_like.algorithms.advantages.base import (
    AdvantageEstimator,
    Groups,
    TokenValues,
    ValueFunction,
    action_rewards,
    describe_sample,
    flatten,
    joined,
    policy_samples,
    split,
    spread_over_tokens,
)
from roll_like.algorithms.advantages.formulas import Rewards, discounted_returns, gae, whiten
from roll_like.config.base import Fraction, PluginConfig
from roll_like.errors import EngineError
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Group, PolicySample, Scored
from roll_like.values import Metrics


class ReturnConfig(PluginConfig):
    """What estimators with returns have in common."""

    gamma: Fraction = Field(default=1.0, description="Discount of one sampled token; 1 is none.")


@ADVANTAGES.register("reinforce")
class Reinforce(AdvantageEstimator):
    """`reinforce`: each token's return-to-go, without a baseline and without groups (Williams 1992)."""

    class Config(ReturnConfig):
        """REINFORCE: discounted return-to-go of every token, without a baseline."""

        type: Literal["reinforce"] = "reinforce"

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        """Return one array [T] for each sample."""
        samples = flatten(groups)
        returns = discounted_returns(action_rewards(samples, token_penalties), self.config.gamma)
        return spread_over_tokens(samples, self.compared(groups, returns))

    def compared(self, groups: Groups, returns: list[Rewards]) -> list[Rewards]:  # noqa: ARG002  (for subclasses)
        """Return the advantage of each sampled token from its return-to-go; here they are the same."""
        return returns


@ADVANTAGES.register("reinforce_plus_plus")
class ReinforcePlusPlus(Reinforce):
    """`reinforce_plus_plus`: each token's return-to-go, whitened over the step's tokens, without groups.

    Hu 2025, REINFORCE++, arXiv:2501.03262.
    """

    class Config(ReturnConfig):
        """REINFORCE++: discounted return-to-go of every token, whitened over the step."""

        type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"

    def compared(self, groups: Groups, returns: list[Rewards]) -> list[Rewards]:  # noqa: ARG002
        """Return the whitened returns."""
        return whiten(returns)


@ADVANTAGES.register("remax")
class ReMax(Reinforce):
    """`remax`: each token's return-to-go minus the reward of a greedy answer to the same task.

    Li et al. 2024, arXiv:2310.10505. The greedy answer is in `Group.baselines` and is not trained on.
    """

    greedy_baseline = True

    class Config(ReturnConfig):
        """ReMax: return-to-go of every token minus the reward of one greedy sample of the prompt."""

        type: Literal["remax"] = "remax"

    def compared(self, groups: Groups, returns: list[Rewards]) -> list[Rewards]:
        """Return the returns minus the greedy rewards."""
        baselines = [_greedy_reward(group) for group in groups for _ in group.samples]
        return [values - baseline for values, baseline in zip(returns, baselines, strict=True)]


def _greedy_reward(group: Group[Scored]) -> float:
    if not group.baselines:
        raise EngineError(
            f"the group of task {group.task.task_id!r} has no greedy sample to compare with; "
            "ReMax needs one from the rollout source"
        )
    rewards = [sample.reward for sample in group.baselines]
    if not np.isfinite(rewards).all():
        raise EngineError(
            f"the greedy {describe_sample(group.baselines[0])} has the reward {rewards[0]}; expected a number"
        )
    return float(np.mean(rewards))


@ADVANTAGES.register("gae")
class GAE(AdvantageEstimator):
    """`gae`: generalised advantage estimation with a learned value function, as in PPO.

    Schulman et al. 2016, arXiv:1506.02438. Tokens that the policy did not sample are skipped: the next value and
    advantage are those of the next sampled token. The critic is a separate model (section `critic`): `assign` gets
    values from it, `learn` trains it towards advantage + value.
    """

    needs_critic = True

    class Config(ReturnConfig):
        """GAE: advantages from a critic's values."""

        type: Literal["gae"] = "gae"
        lam: Fraction = Field(
            default=1.0, description="λ: 0 trusts the critic, 1 trusts the returns; 0.95 is usual in long episodes."
        )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._critic: ValueFunction | None = None
        self._batch: tuple[list[PolicySample], list[FloatArray], list[FloatArray]] | None = None

    def use(self, critic: ValueFunction) -> None:
        """Set the critic."""
        self._critic = critic

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        """Return one array [T] for each sample."""
        if self._critic is None:
            raise EngineError("GAE has no critic", fix="add a `critic` section")
        samples = flatten(groups)
        unassigned = policy_samples(groups)
        values = self._critic.values(unassigned)
        actions = [
            values_T[sample.trajectory.sampled].astype(np.float64)
            for sample, values_T in zip(samples, joined(samples, values), strict=True)
        ]
        estimates = gae(action_rewards(samples, token_penalties), actions, gamma=self.config.gamma, lam=self.config.lam)
        returns = [estimate + action for estimate, action in zip(estimates, actions, strict=True)]
        self._batch = unassigned, values, split(samples, spread_over_tokens(samples, returns))
        return spread_over_tokens(samples, estimates)

    def learn(self) -> Metrics:
        """Train the critic on the returns of the last `assign`; return its metrics."""
        if self._critic is None or self._batch is None:
            raise EngineError("there is nothing to learn before `assign`")
        metrics = self._critic.learn(*self._batch)
        self._batch = None
        return metrics
