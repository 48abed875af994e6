"""Estimators that compare a sample with the other samples of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from roll_like.algorithms.advantages.base import (
    GroupEstimator,
    Groups,
    TokenValues,
    flatten,
    penalised_rewards,
    spread_over_tokens,
)
from roll_like.algorithms.advantages.formulas import (
    Rewards,
    best_of_k_advantages,
    dr_grpo_advantages,
    gpg_scale,
    grpo_advantages,
    opo_advantages,
    rloo_advantages,
    whiten,
)
from roll_like.config.base import PluginConfig
from roll_like.errors import RewardError
from roll_like.registry import ADVANTAGES
from roll_like.types import Scored


@ADVANTAGES.register("grpo")
class GRPO(GroupEstimator):
    """`grpo`: (reward − mean)/std within the group (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300)."""

    compares_with = "the group's mean"

    class Config(PluginConfig):
        """GRPO: reward minus the group's mean, divided by its standard deviation."""

        type: Literal["grpo"] = "grpo"

    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the group's advantages, shape [G]."""
        return grpo_advantages(rewards)


@ADVANTAGES.register("dr_grpo")
class DrGRPO(GroupEstimator):
    """`dr_grpo`: reward − mean within the group (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783).

    The paper's loss also needs `aggregation: token_sum_norm`.
    """

    compares_with = "the group's mean"

    class Config(PluginConfig):
        """Dr. GRPO: reward minus the group's mean, not divided by anything."""

        type: Literal["dr_grpo"] = "dr_grpo"

    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the group's advantages, shape [G]."""
        return dr_grpo_advantages(rewards)


@ADVANTAGES.register("rloo")
class RLOO(GroupEstimator):
    """`rloo`: reward minus the mean reward of the group's other samples (Ahmadian et al. 2024, arXiv:2402.14740)."""

    compares_with = "the other samples' mean"

    class Config(PluginConfig):
        """RLOO: reward minus the mean reward of the group's other samples."""

        type: Literal["rloo"] = "rloo"

    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the group's advantages, shape [G]."""
        return rloo_advantages(rewards)


@ADVANTAGES.register("opo")
class OPO(GroupEstimator):
    """`opo`: reward minus the group's mean reward weighted by response length (Hao et al. 2025, arXiv:2505.23585)."""

    compares_with = "the group's length-weighted mean"

    class Config(PluginConfig):
        """OPO: reward minus the group's mean reward weighted by response length."""

        type: Literal["opo"] = "opo"

    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the advantages of responses of equal length, shape [G]."""
        return opo_advantages(rewards, np.ones(len(rewards), np.int64))

    def of_samples(self, samples: Sequence[Scored], rewards: Rewards) -> Rewards:
        """Return the group's advantages, shape [G]."""
        return opo_advantages(rewards, np.array([sample.trajectory.response_length for sample in samples]))


@ADVANTAGES.register("gpg")
class GPG(DrGRPO):
    """`gpg`: reward − mean within the group, scaled for groups of zero variance (Chu et al. 2025, arXiv:2504.02546).

    The scale is samples / samples in groups whose rewards differ (section 3.2 there); goes with `loss: gpg`.
    """

    class Config(PluginConfig):
        """GPG: reward minus the group's mean, times samples / samples in groups of non-zero reward variance."""

        type: Literal["gpg"] = "gpg"

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        """Return one array [T] for each sample, constant over its tokens."""
        scale = gpg_scale([rewards for _, rewards in penalised_rewards(groups, token_penalties)])
        return [np.float32(scale) * advantages_T for advantages_T in super().advantages(groups, token_penalties)]


@ADVANTAGES.register("grpo_passk")
class GRPOPassK(GroupEstimator):
    """`grpo_passk`: best − second best reward for the group's best sample, 0 for the others (Tang et al. 2025).

    The leave-one-out advantage of the group's maximum, arXiv:2503.19595; with `divide_by_std` divided as in GRPO.
    """

    compares_with = "the group's second best"

    class Config(PluginConfig):
        """Pass@k: the best sample of a group gets its distance to the second best; the others get 0."""

        type: Literal["grpo_passk"] = "grpo_passk"
        divide_by_std: bool = Field(default=True, description="Divide by the group's standard deviation, as GRPO does.")

    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the group's advantages, shape [G]."""
        return best_of_k_advantages(rewards, divide_by_std=self.config.divide_by_std)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline(DrGRPO):
    """`reinforce_plus_plus_baseline`: reward − mean within the group, then whitened over the step's tokens.

    Hu 2025, REINFORCE++, arXiv:2501.03262, section 3.3.
    """

    class Config(PluginConfig):
        """REINFORCE++ with the group's mean as baseline, whitened over the step."""

        type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        """Return one array [T] for each sample, constant over its tokens."""
        return whitened(groups, super().advantages(groups, token_penalties))


@ADVANTAGES.register("gdpo")
class GDPO(GRPO):
    """`gdpo`: each reward standardised within the group, their weighted sum whitened over the step's tokens.

    Liu et al. 2026, arXiv:2601.05242: if rewards are summed first, one of large range dominates the others.
    """

    class Config(PluginConfig):
        """GDPO: each reward standardised within the group, then their weighted sum whitened over the step."""

        type: Literal["gdpo"] = "gdpo"

    def of_samples(self, samples: Sequence[Scored], rewards: Rewards) -> Rewards:
        """Return the group's advantages before whitening, shape [G]."""
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
        """Return one array [T] for each sample, constant over its tokens."""
        return whitened(groups, super().advantages(groups, token_penalties))


def whitened(groups: Groups, advantages: TokenValues) -> TokenValues:
    """Return the advantages whitened over all sampled tokens of the step: mean 0, variance 1."""
    samples = flatten(groups)
    actions = [
        advantages_T[sample.trajectory.sampled].astype(np.float64)
        for sample, advantages_T in zip(samples, advantages, strict=True)
    ]
    return spread_over_tokens(samples, whiten(actions))
