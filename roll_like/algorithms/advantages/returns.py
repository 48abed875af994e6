"""Estimators that use returns-to-go of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from roll_like.algorithms.advantages.base import (
    AdvantageEstimator,
    Groups,
    Rewards,
    TokenValues,
    ValueFunction,
    action_rewards,
    describe_sample,
    flatten,
    joined,
    placed_rewards,
    policy_samples,
    split,
    spread_over_tokens,
    whiten,
)
from roll_like.config.base import Fraction, PluginConfig, PositiveFloat
from roll_like.errors import EngineError
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Group, PolicySample, Scored
from roll_like.values import Metrics


def discounted_returns(rewards: Sequence[Rewards], gamma: float | npt.NDArray[np.float64]) -> list[Rewards]:
    """Return Σ_{k≥t} γ^(k−t)·r_k for each sequence of per-action rewards.

    Args:
        rewards: One array a sequence, of its length.
        gamma: Discount of one action, for all sequences or for each, shape [S].

    >>> [returns.tolist() for returns in discounted_returns([np.array([0.0, 0.0, 1.0])], 0.5)]
    [[0.25, 0.5, 1.0]]
    """
    longest = max((len(row) for row in rewards), default=0)
    # time-major and zero-padded: one vector operation for each time step of all sequences
    returns_TS = np.zeros((longest, len(rewards)))
    for index, row in enumerate(rewards):
        returns_TS[: len(row), index] = row
    for t in range(longest - 2, -1, -1):
        returns_TS[t] += gamma * returns_TS[t + 1]
    return [returns_TS[: len(row), index].copy() for index, row in enumerate(rewards)]


class ReturnConfig(PluginConfig):
    """What estimators with returns have in common."""

    gamma: Fraction = Field(default=1.0, description="Discount of one sampled token; 1 is none.")


@ADVANTAGES.register("reinforce")
class Reinforce(AdvantageEstimator):
    """`reinforce`: each token's return-to-go, without a baseline and without groups (Williams 1992)."""

    uses_steps = True
    takes_off_policy = True

    class Config(ReturnConfig):
        type: Literal["reinforce"] = "reinforce"

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        samples = flatten(groups)
        returns = discounted_returns(action_rewards(samples, token_penalties), self.config.gamma)
        return spread_over_tokens(samples, self.compared(groups, returns))

    def compared(self, groups: Groups, returns: list[Rewards]) -> list[Rewards]:  # noqa: ARG002  (for subclasses)
        return returns


@ADVANTAGES.register("reinforce_plus_plus")
class ReinforcePlusPlus(Reinforce):
    """`reinforce_plus_plus`: each token's return-to-go, whitened over the step's tokens, without groups.

    Hu 2025, REINFORCE++, arXiv:2501.03262.
    """

    class Config(ReturnConfig):
        type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"

    def compared(self, groups: Groups, returns: list[Rewards]) -> list[Rewards]:  # noqa: ARG002
        return whiten(returns)


@ADVANTAGES.register("remax")
class ReMax(Reinforce):
    """`remax`: each token's return-to-go minus the reward of a greedy answer to the same task.

    Li et al. 2024, arXiv:2310.10505. The greedy answer is in `Group.baselines` and is not trained on.
    """

    greedy_baseline = True

    class Config(ReturnConfig):
        type: Literal["remax"] = "remax"

    def compared(self, groups: Groups, returns: list[Rewards]) -> list[Rewards]:
        baselines = [_greedy_reward(group) for group in groups for _ in group.samples]
        return [values - baseline for values, baseline in zip(returns, baselines, strict=True)]


def _greedy_reward(group: Group[Scored]) -> float:
    if not group.baselines:
        raise EngineError(
            f"the group of task {group.task.task_id!r} has no greedy sample to compare with; "
            "ReMax needs one from the rollout source"
        )
    # all that its tokens earn, as of the samples that are compared with it
    rewards = [sum((*placed.values(), rest)) for placed, rest in map(placed_rewards, group.baselines)]
    if not np.isfinite(rewards).all():
        raise EngineError(
            f"the greedy {describe_sample(group.baselines[0])} has the reward {rewards[0]}; expected a number"
        )
    return float(np.mean(rewards))


def gae(
    rewards: Sequence[Rewards], values: Sequence[Rewards], *, gamma: float, lam: float | Sequence[float]
) -> list[Rewards]:
    """Return the generalised advantage of every action of each sequence.

    Schulman et al. 2016, arXiv:1506.02438: δ_t = r_t + γ·V_{t+1} − V_t, A_t = Σ_k (γλ)^k·δ_{t+k}, with
    value 0 after the last action.

    Args:
        rewards: Reward of each action, one array a sequence.
        values: Value of the state before each action.
        gamma: Discount of one action.
        lam: λ; 0 is one-step differences, 1 is returns minus values. One for all sequences, or one for each.

    >>> gae([np.array([0.0, 1.0])], [np.array([0.5, 0.5])], gamma=1.0, lam=1.0)[0].tolist()
    [0.5, 0.5]
    """
    differences = [
        row + gamma * np.append(value[1:], np.zeros(min(len(value), 1))) - value
        for row, value in zip(rewards, values, strict=True)
    ]
    return discounted_returns(differences, gamma * np.asarray(lam))


def length_adaptive_lam(actions: int, alpha: float) -> float:
    """Return λ = 1 − 1/(α·n) for a sequence of n actions, at least 0.

    VAPO, arXiv:2504.05118: with a fixed λ below 1 the reward at the end of a long response never reaches its start.
    Here the weights (1 to λ^n) add up to about α·n whatever the length.

    >>> length_adaptive_lam(400, 0.05)
    0.95
    """
    return max(1 - 1 / (alpha * actions), 0.0) if actions else 0.0


@ADVANTAGES.register("gae")
class GAE(AdvantageEstimator):
    """`gae`: generalised advantage estimation with a learned value function, as in PPO.

    Schulman et al. 2016, arXiv:1506.02438. Tokens that the policy did not sample are skipped: the next value and
    advantage are those of the next sampled token. The critic is a separate model (section `critic`): `assign` gets
    values from it, `learn` trains it towards advantage + value.

    VAPO (arXiv:2504.05118) has two λ: one near 1 for what the critic learns (`critic_lam`), so that a reward at the end
    reaches the start, and for advantages one that follows the response's length (`length_adaptive`).
    """

    needs_critic = True
    uses_steps = True

    class Config(ReturnConfig):
        type: Literal["gae"] = "gae"
        lam: Fraction = Field(
            default=1.0, description="λ: 0 trusts the critic, 1 trusts the returns; 0.95 is usual in long episodes."
        )
        critic_lam: Fraction | None = Field(
            default=None, description="λ of the returns that the critic learns; `lam` by default. VAPO: 1."
        )
        length_adaptive: PositiveFloat | None = Field(
            default=None,
            description="α: λ of a sample's advantages is 1 − 1/(α·n), n its sampled tokens, in place of `lam`. VAPO: "
            "0.05, for thousands of tokens. Not by default.",
        )

        @model_validator(mode="after")
        def _each_lam_is_read(self) -> Self:
            if self.length_adaptive is not None and self.changed("lam"):
                raise ValueError(
                    f"length_adaptive computes λ from a sample's length, so lam ({self.lam:g}) has no effect; remove "
                    "lam (critic_lam sets the λ of what the critic learns), or remove length_adaptive"
                )
            return self

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._critic: ValueFunction | None = None
        self._batch: tuple[list[PolicySample], list[FloatArray], list[FloatArray]] | None = None

    def use(self, critic: ValueFunction) -> None:
        self._critic = critic

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        if self._critic is None:
            raise EngineError("GAE has no critic", fix="add a `critic` section")
        samples = flatten(groups)
        unassigned = policy_samples(groups)
        values = self._critic.values(unassigned)
        actions = [
            values_T[sample.trajectory.sampled].astype(np.float64)
            for sample, values_T in zip(samples, joined(samples, values), strict=True)
        ]
        rewards, config = action_rewards(samples, token_penalties), self.config
        alpha = config.length_adaptive
        lam = config.lam if alpha is None else [length_adaptive_lam(len(row), alpha) for row in rewards]
        estimates = gae(rewards, actions, gamma=config.gamma, lam=lam)
        critic_lam = config.lam if config.critic_lam is None else config.critic_lam
        learned = estimates if critic_lam == lam else gae(rewards, actions, gamma=config.gamma, lam=critic_lam)
        returns = [estimate + action for estimate, action in zip(learned, actions, strict=True)]
        self._batch = unassigned, values, split(samples, spread_over_tokens(samples, returns))
        return spread_over_tokens(samples, estimates)

    def learn(self) -> Metrics:
        """Train the critic on the returns of the last `assign`; return its metrics."""
        if self._critic is None or self._batch is None:
            raise EngineError("there is nothing to learn before `assign`")
        metrics = self._critic.learn(*self._batch)
        self._batch = None
        return metrics
