"""Estimators that compare a sample with the other samples of its group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from roll_like.algorithms.advantages.base import (
    STD_EPSILON,
    GroupEstimator,
    Groups,
    Rewards,
    TokenValues,
    describe_sample,
    flatten,
    penalised_rewards,
    spread_over_tokens,
    whiten,
)
from roll_like.config.base import PluginConfig
from roll_like.errors import RewardError
from roll_like.registry import ADVANTAGES
from roll_like.types import Scored
from roll_like.values import has_signal


def grpo_advantages(rewards: Rewards) -> Rewards:
    """Return (reward − mean) / (unbiased std + 1e-6), shape [G] (Shao et al. 2024, GRPO, arXiv:2402.03300).

    A group of one, or of equal rewards, has advantage 0.

    >>> grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0])).round(4).tolist()
    [1.5, -0.5, -0.5, -0.5]
    """
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    standardised: Rewards = (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_EPSILON)
    return standardised


@ADVANTAGES.register("grpo")
class GRPO(GroupEstimator):
    """`grpo`: (reward − mean)/std within the group (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300)."""

    compares_with = "the group's mean"
    takes_off_policy = True

    class Config(PluginConfig):
        type: Literal["grpo"] = "grpo"

    of_group = staticmethod(grpo_advantages)


def dr_grpo_advantages(rewards: Rewards) -> Rewards:
    """Return reward minus the group's mean, shape [G] (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783).

    >>> dr_grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    return centred


@ADVANTAGES.register("dr_grpo")
class DrGRPO(GroupEstimator):
    """`dr_grpo`: reward − mean within the group (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783).

    The paper's loss also needs `aggregation: token_sum_norm`.
    """

    compares_with = "the group's mean"
    takes_off_policy = True

    class Config(PluginConfig):
        type: Literal["dr_grpo"] = "dr_grpo"

    of_group = staticmethod(dr_grpo_advantages)


def rloo_advantages(rewards: Rewards) -> Rewards:
    """Return reward minus the mean of the group's other rewards, shape [G].

    REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740). A group of one has advantage 0.

    >>> rloo_advantages(np.array([1.0, 0.0, 0.0])).tolist()
    [1.0, -0.5, -0.5]
    """
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    others: Rewards = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


def scaled_rloo_advantages(rewards: Rewards) -> Rewards:
    """Return (reward − mean of the others) / (unbiased std of the others + 1e-6), shape [G].

    As NeMo-RL computes `use_leave_one_out_baseline` with `normalize_rewards` (its `nemo_rl/algorithms/utils.py`). Where
    the others have equal rewards, the difference is not divided. A group of one has advantage 0.

    >>> scaled_rloo_advantages(np.array([1.0, 0.0, 0.0, 0.0])).round(4).tolist()
    [1.0, -0.5773, -0.5773, -0.5773]
    """
    advantages = rloo_advantages(rewards)
    for index in range(len(rewards)):
        others = np.delete(rewards, index)
        if has_signal(others):
            advantages[index] /= others.std(ddof=1) + STD_EPSILON
    return advantages


@ADVANTAGES.register("rloo")
class RLOO(GroupEstimator):
    """`rloo`: reward minus the mean reward of the group's other samples (Ahmadian et al. 2024, arXiv:2402.14740).

    With `divide_by_std` divided by the other samples' standard deviation, as NeMo-RL does.
    """

    compares_with = "the other samples' mean"
    takes_off_policy = True

    class Config(PluginConfig):
        type: Literal["rloo"] = "rloo"
        divide_by_std: bool = Field(
            default=False,
            description="Divide by the standard deviation of the other samples; where these have equal rewards, not.",
        )

    def of_group(self, rewards: Rewards) -> Rewards:
        return scaled_rloo_advantages(rewards) if self.config.divide_by_std else rloo_advantages(rewards)


def maxrl_advantages(rewards: Rewards) -> Rewards:
    """Return (reward − mean) / mean, shape [G] (MaxRL, arXiv:2602.02710).

    With rewards of 0 and 1 its mean over groups of G is the gradient of −Σ_{k<G} (1 − p)^k/k, p the pass rate: of log p
    to order G − 1. (A group without a right answer has no advantage, which takes away order G.) A group of one, or of
    equal rewards, has advantage 0.

    >>> maxrl_advantages(np.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    relative: Rewards = rewards / rewards.mean() - 1
    return relative


@ADVANTAGES.register("maxrl")
class MaxRL(GroupEstimator):
    """`maxrl`: (reward − mean)/mean within the group: maximum likelihood of right answers (MaxRL, arXiv:2602.02710).

    Hard tasks weigh more: the rarer the right answer, the larger its advantage. Rewards must be at least 0, because
    they stand for probabilities of being right. As in the authors' code (github.com/tajwarfahim/maxrl), without its ε.
    """

    compares_with = "the group's mean"
    nonnegative_rewards = True

    class Config(PluginConfig):
        type: Literal["maxrl"] = "maxrl"

    of_group = staticmethod(maxrl_advantages)

    def of_samples(self, samples: Sequence[Scored], rewards: Rewards) -> Rewards:
        for sample, reward in zip(samples, rewards.tolist(), strict=True):
            if reward < 0:
                raise RewardError(
                    f"the reward of {describe_sample(sample)} is {reward:g}; maxrl divides by the group's mean reward, "
                    f"and expects rewards of at least 0 (its parts: {dict(sample.rewards)})",
                    fix="use rewards of at least 0 (such as 0 and 1), or algorithm.advantage: grpo",
                )
        return self.of_group(rewards)


def opo_advantages(rewards: Rewards, lengths: npt.NDArray[np.int64]) -> Rewards:
    """Return reward minus the length-weighted mean Σ n_i·r_i / Σ n_i, shape [G].

    Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585, equation 6: the baseline of least
    variance if the squared gradient norm of a sample is proportional to its length.

    >>> opo_advantages(np.array([1.0, 0.0]), np.array([1, 3])).tolist()
    [0.75, -0.25]
    """
    if not has_signal(rewards) or lengths.sum() == 0:
        return np.zeros_like(rewards)
    baseline = float((rewards * lengths).sum() / lengths.sum())
    return rewards - baseline


@ADVANTAGES.register("opo")
class OPO(GroupEstimator):
    """`opo`: reward minus the group's mean reward weighted by response length (Hao et al. 2025, arXiv:2505.23585)."""

    compares_with = "the group's length-weighted mean"

    class Config(PluginConfig):
        type: Literal["opo"] = "opo"

    def of_group(self, rewards: Rewards) -> Rewards:
        return opo_advantages(rewards, np.ones(len(rewards), np.int64))

    def of_samples(self, samples: Sequence[Scored], rewards: Rewards) -> Rewards:
        return opo_advantages(rewards, np.array([sample.trajectory.response_length for sample in samples]))


def gpg_scale(groups: Sequence[Rewards]) -> float:
    """Return B/(B − M), by which GPG multiplies advantages (Chu et al. 2025, arXiv:2504.02546, section 3.2).

    B is the number of samples, M the number in groups of equal rewards, whose gradient is zero: the size of the step
    does not depend on how many such groups it has. 1 if rewards differ in no group.

    >>> gpg_scale([np.array([1.0, 0.0]), np.array([1.0, 1.0])])
    2.0
    """
    total = sum(len(rewards) for rewards in groups)
    moving = sum(len(rewards) for rewards in groups if has_signal(rewards))
    return total / moving if moving else 1.0


@ADVANTAGES.register("gpg")
class GPG(DrGRPO):
    """`gpg`: reward − mean within the group, scaled for groups of zero variance (Chu et al. 2025, arXiv:2504.02546).

    The scale is samples / samples in groups whose rewards differ (section 3.2 there); goes with `loss: gpg`.
    """

    class Config(PluginConfig):
        type: Literal["gpg"] = "gpg"

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        scale = gpg_scale([rewards for _, rewards in penalised_rewards(groups, token_penalties)])
        return [np.float32(scale) * advantages_T for advantages_T in super().advantages(groups, token_penalties)]


def best_of_k_advantages(rewards: Rewards, *, divide_by_std: bool) -> Rewards:
    """Return (best − second best) for the best sample of the group and 0 for the others, shape [G].

    The leave-one-out advantage of pass@k (Tang et al. 2025, arXiv:2503.19595): without a sample that is not the best,
    the maximum is the same. If several samples are best, all advantages are 0.

    >>> best_of_k_advantages(np.array([0.2, 1.0, 0.5]), divide_by_std=False).tolist()
    [0.0, 0.5, 0.0]
    """
    advantages = np.zeros_like(rewards)
    if not has_signal(rewards):
        return advantages
    best = int(rewards.argmax())
    second = float(np.delete(rewards, best).max())
    gain = float(rewards[best]) - second if has_signal([rewards[best], second]) else 0.0
    advantages[best] = gain / (float(rewards.std(ddof=1)) + STD_EPSILON) if divide_by_std else gain
    return advantages


@ADVANTAGES.register("grpo_passk")
class GRPOPassK(GroupEstimator):
    """`grpo_passk`: best − second best reward for the group's best sample, 0 for the others (Tang et al. 2025).

    The leave-one-out advantage of the group's maximum, arXiv:2503.19595; with `divide_by_std` divided as in GRPO.
    """

    compares_with = "the group's second best"

    class Config(PluginConfig):
        type: Literal["grpo_passk"] = "grpo_passk"
        divide_by_std: bool = Field(default=True, description="Divide by the group's standard deviation, as GRPO does.")

    def of_group(self, rewards: Rewards) -> Rewards:
        return best_of_k_advantages(rewards, divide_by_std=self.config.divide_by_std)


def pkpo_advantages(rewards: Rewards, k: int) -> Rewards:
    """Return G times the leave-one-out transformed rewards of max@k, shape [G].

    Walder and Karkhanis 2025, Pass@K Policy Optimization, arXiv:2505.15201, the estimator s^(loo−1): the sum over the
    sets J of k − 1 other samples of max(J ∪ {i}) − max(J), divided by the number of sets of k samples. Its mean over a
    group is the gradient of the expected best reward of k answers, of pass@k where rewards are 0 and 1. The sets whose
    best is the m-th smallest reward (from 0) are C(m, k − 2). In a group of fewer than k samples, k is their number.
    Equal rewards have advantage 0.

    >>> pkpo_advantages(np.array([1.0, 0.0, 0.0, 1.0]), k=2).round(4).tolist()
    [1.3333, 0.0, 0.0, 1.3333]
    """
    size = len(rewards)
    k = min(k, size)
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    ascending = np.sort(rewards)
    # integers are divided exactly: of large groups they are beyond floats
    all_sets = math.comb(size, k)
    sets = np.array([math.comb(rank, k - 2) / all_sets for rank in range(size)])
    gains = np.maximum(rewards[:, None] - ascending[None, :], 0.0)  # over each reward that is lower
    advantages: Rewards = gains @ sets * size
    return advantages


@ADVANTAGES.register("pkpo")
class PKPO(GroupEstimator):
    """`pkpo`: how much a sample adds to the best of `k`, on average over the group (Walder and Karkhanis 2025).

    Pass@K Policy Optimization, arXiv:2505.15201: optimises pass@k in place of pass@1.
    """

    compares_with = "the best of other samples"

    class Config(PluginConfig):
        type: Literal["pkpo"] = "pkpo"
        k: Annotated[int, Field(ge=2)] = Field(
            default=4, description="Answers of which the best counts; at most the samples of a group."
        )

    @classmethod
    def least_samples(cls, config: Any) -> int:
        return int(config.k)

    def of_group(self, rewards: Rewards) -> Rewards:
        return pkpo_advantages(rewards, self.config.k)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline(DrGRPO):
    """`reinforce_plus_plus_baseline`: reward − mean within the group, then whitened over the step's tokens.

    Hu 2025, REINFORCE++, arXiv:2501.03262, section 3.3.
    """

    class Config(PluginConfig):
        type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        return whitened(groups, super().advantages(groups, token_penalties))


@ADVANTAGES.register("gdpo")
class GDPO(GRPO):
    """`gdpo`: each reward standardised within the group, their weighted sum whitened over the step's tokens.

    Liu et al. 2026, arXiv:2601.05242: if rewards are summed first, one of large range dominates the others.
    """

    class Config(PluginConfig):
        type: Literal["gdpo"] = "gdpo"

    def of_samples(self, samples: Sequence[Scored], rewards: Rewards) -> Rewards:
        names = {tuple(sorted(sample.rewards)) for sample in samples}
        if len(names) != 1:
            raise RewardError(
                f"the samples of task {samples[0].trajectory.task.task_id!r} have different rewards: "
                f"{', '.join(map(str, sorted(names)))}; GDPO compares each reward within the group"
            )
        total = np.zeros_like(rewards)
        for name in names.pop():
            of_one = np.array([sample.rewards[name] for sample in samples], np.float64)
            total += samples[0].weights[name] * grpo_advantages(of_one)
        return total

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        return whitened(groups, super().advantages(groups, token_penalties))


def whitened(groups: Groups, advantages: TokenValues) -> TokenValues:
    """Return the advantages whitened over all sampled tokens of the step: mean 0, variance 1."""
    samples = flatten(groups)
    actions = [
        advantages_T[sample.trajectory.sampled].astype(np.float64)
        for sample, advantages_T in zip(samples, advantages, strict=True)
    ]
    return spread_over_tokens(samples, whiten(actions))
