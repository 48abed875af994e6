"""Advantage estimators: from a step's scored groups to samples that can be trained on.

The formulas are pure functions over NumPy arrays; an estimator is a small class that applies one of
them to the groups of a step. A user's own comes in through the same registry:

    @ADVANTAGES.register("best_of_group")
    class BestOfGroup(GroupEstimator):
        class Config(PluginConfig):
            type: Literal["best_of_group"] = "best_of_group"
            bonus: float = 1.0

        def of_group(self, rewards: Rewards) -> Rewards:
            return np.where(rewards == rewards.max(), self.config.bonus, 0.0)

With `import: [my_package.my_estimators]` in YAML, `algorithm.advantage: {type: best_of_group}` uses it.
An estimator that gives every token an advantage of its own derives from `AdvantageEstimator` and
writes `advantages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from roll_like.config.base import PluginConfig
from roll_like.config.sections import Fraction
from roll_like.errors import EngineError, RewardError
from roll_like.registry import ADVANTAGES
from roll_like.types import FloatArray, Group, PolicySample, Scored

#: Rewards of one group, or figures of one sample's tokens; formulas run in float64.
Rewards: TypeAlias = npt.NDArray[np.float64]

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8
#: Two rewards this close are one reward: sums of weighted rewards differ in their last digits.
RELATIVE_NOISE = 1e-6
ABSOLUTE_NOISE = 1e-9


def has_signal(rewards: npt.ArrayLike) -> bool:
    """Return whether rewards differ by more than the noise of floating-point sums.

    >>> has_signal([0.1 + 0.2, 0.3]), has_signal([0.0, 1.0]), has_signal([1.0])
    (False, True, False)
    """
    values = np.asarray(rewards, np.float64)
    if values.size < 2:
        return False
    return bool(np.ptp(values) > max(RELATIVE_NOISE * float(np.abs(values).max()), ABSOLUTE_NOISE))


def dr_grpo_advantages(rewards: Rewards) -> Rewards:
    """Return reward minus the group's mean, shape [G] (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783).

    >>> dr_grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    return centred


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


def rloo_advantages(rewards: Rewards) -> Rewards:
    """Return reward minus the mean of the group's other rewards, shape [G].

    Ahmadian et al. 2024, arXiv:2402.14740. A group of one has nothing to compare with: 0.

    >>> rloo_advantages(np.array([1.0, 0.0, 0.0])).tolist()
    [1.0, -0.5, -0.5]
    """
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    others: Rewards = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


def discounted_returns(rewards: Sequence[Rewards], gamma: float) -> list[Rewards]:
    """Return Σ_{k≥t} γ^(k−t)·r_k for each sequence of per-action rewards.

    Args:
        rewards: One array a sequence, of its length.
        gamma: Discount of one action.

    >>> [returns.tolist() for returns in discounted_returns([np.array([0.0, 0.0, 1.0])], 0.5)]
    [[0.25, 0.5, 1.0]]
    """
    longest = max((len(row) for row in rewards), default=0)
    # time-major and zero-padded: one vector operation a time step, for all sequences
    returns_TS = np.zeros((longest, len(rewards)))
    for index, row in enumerate(rewards):
        returns_TS[: len(row), index] = row
    for t in range(longest - 2, -1, -1):
        returns_TS[t] += gamma * returns_TS[t + 1]
    return [returns_TS[: len(row), index].copy() for index, row in enumerate(rewards)]


def whiten(values: Sequence[Rewards]) -> list[Rewards]:
    """Return the values of all sequences with the mean and unbiased variance of all: (x − μ)/√(σ² + 1e-8).

    Values that are all equal become 0.
    """
    if not values:
        return []
    together = np.concatenate(values)
    if not has_signal(together):
        return [np.zeros_like(row) for row in values]
    mean, scale = together.mean(), 1.0 / np.sqrt(together.var(ddof=1) + WHITEN_EPSILON)
    return [(row - mean) * scale for row in values]


def reinforce_plus_plus_advantages(rewards: Sequence[Rewards], gamma: float) -> list[Rewards]:
    """Return the return-to-go of every token, whitened over the global batch (Hu 2025, arXiv:2501.03262).

    Args:
        rewards: Reward of each sampled token, one array a sample. Tokens that the policy did not
            sample are no actions: they are left out here, so a return passes through them
            undiscounted.
        gamma: Discount of one sampled token.
    """
    return whiten(discounted_returns(rewards, gamma))


def policy_samples(
    groups: Sequence[Group[Scored]], advantages: Sequence[FloatArray] | None = None
) -> list[PolicySample]:
    """Return the groups' samples in order, each with its advantages.

    Two groups of the same task in one step keep apart: `group_id` is the task's id and the
    group's occurrence (`gsm8k/17#0`, `gsm8k/17#1`).

    Args:
        groups: A step's groups.
        advantages: One array [T] for each sample, in the order of the groups and of their samples;
            0 for every token when left out, for a pass that needs no advantages.

    Raises:
        EngineError: An advantage is not finite, or the arrays do not fit the samples.
    """
    samples = flatten(groups)
    if advantages is None:
        advantages = [np.zeros(len(sample.trajectory.token_ids), np.float32) for sample in samples]
    _check_arrays("advantages", advantages, samples)
    seen: Counter[str] = Counter()
    identities = []
    for group in groups:
        identities += [f"{group.task.task_id}#{seen[group.task.task_id]}"] * len(group.samples)
        seen[group.task.task_id] += 1
    return [
        PolicySample(
            group_id=identity,
            token_ids=sample.trajectory.token_ids,
            prompt_length=len(sample.trajectory.task.prompt_ids),
            sampled=sample.trajectory.sampled,
            behaviour_logprobs=sample.trajectory.logprobs,
            advantages=np.where(sample.trajectory.sampled, advantages_T, 0).astype(np.float32),
            reward=sample.reward,
            policy_version=sample.trajectory.policy_version,
        )
        for identity, sample, advantages_T in zip(identities, samples, advantages, strict=True)
    ]


def flatten(groups: Sequence[Group[Scored]]) -> list[Scored]:
    """Return the samples of all groups, in the order that penalties and advantages are in."""
    return [sample for group in groups for sample in group.samples]


class AdvantageEstimator(ABC):
    """Base of estimators: give every sampled token of a step an advantage.

    Args:
        config: This estimator's own settings, an instance of its `Config`.
    """

    Config: ClassVar[type[PluginConfig]] = PluginConfig
    #: Fewer samples of a prompt leave nothing to compare with; refused before a run starts.
    minimum_samples_per_prompt: ClassVar[int] = 1

    def __init__(self, config: Any) -> None:
        self.config = config

    def assign(
        self, groups: Sequence[Group[Scored]], token_penalties: Sequence[FloatArray] | None = None
    ) -> list[PolicySample]:
        """Return the groups' samples in order, with advantages.

        Args:
            groups: All groups of a step; batch statistics are over them.
            token_penalties: What to subtract from the reward of each sampled token, one array [T]
                a sample in the order of `flatten(groups)`: `kl.token_penalties` for a KL penalty
                that is part of the reward.

        Raises:
            RewardError: A reward is not finite; names the task and the sample.
            EngineError: A penalty or advantage is not finite or does not fit its sample.
        """
        samples = flatten(groups)
        for sample in samples:
            if not np.isfinite(sample.reward):
                raise RewardError(
                    f"the reward of {describe(sample)} is {sample.reward}; rewards are finite numbers "
                    f"(its parts: {dict(sample.rewards)})",
                    fix="correct the reward that returned it, or let it raise so that the sample is left out",
                )
        if token_penalties is None:
            token_penalties = [np.zeros(len(sample.trajectory.token_ids), np.float32) for sample in samples]
        _check_arrays("token penalties", token_penalties, samples)
        return policy_samples(groups, self.advantages(groups, token_penalties))

    @abstractmethod
    def advantages(
        self, groups: Sequence[Group[Scored]], token_penalties: Sequence[FloatArray]
    ) -> Sequence[FloatArray]:
        """Return one array [T] for each sample, in the order of `flatten(groups)`."""


class GroupEstimator(AdvantageEstimator):
    """Base of estimators that give all tokens of a sample one advantage, from its group's rewards.

    A sample's penalties are summed and subtracted from its reward before the group is compared.
    """

    minimum_samples_per_prompt = 2

    @abstractmethod
    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the advantage of each sample of one group, shape [G]; G may be 1 after failures."""

    def advantages(
        self, groups: Sequence[Group[Scored]], token_penalties: Sequence[FloatArray]
    ) -> Sequence[FloatArray]:
        """Return one array [T] for each sample, constant over its tokens."""
        penalties = iter(token_penalties)
        spread: list[FloatArray] = []
        for group in groups:
            if not group.samples:
                continue
            rewards = np.array([sample.reward - _total(sample, next(penalties)) for sample in group.samples])
            values = self.of_group(rewards)
            if np.shape(values) != rewards.shape:
                raise EngineError(
                    f"{type(self).__name__}.of_group returned shape {np.shape(values)} for a group of {len(rewards)}; "
                    "one advantage a sample was expected"
                )
            spread += [
                np.full(len(sample.trajectory.token_ids), value, np.float32)
                for sample, value in zip(group.samples, values, strict=True)
            ]
        return spread


@ADVANTAGES.register("grpo")
class GRPO(GroupEstimator):
    """`grpo`: rewards standardised within the group."""

    class Config(PluginConfig):
        """GRPO: reward minus the group's mean, divided by its standard deviation."""

        type: Literal["grpo"] = "grpo"

    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the group's advantages, shape [G]."""
        return grpo_advantages(rewards)


@ADVANTAGES.register("dr_grpo")
class DrGRPO(GroupEstimator):
    """`dr_grpo`: rewards centred within the group; goes with `aggregation: token_sum_norm`."""

    class Config(PluginConfig):
        """Dr. GRPO: reward minus the group's mean, not divided by anything."""

        type: Literal["dr_grpo"] = "dr_grpo"

    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the group's advantages, shape [G]."""
        return dr_grpo_advantages(rewards)


@ADVANTAGES.register("rloo")
class RLOO(GroupEstimator):
    """`rloo`: every sample against the mean of the others."""

    class Config(PluginConfig):
        """RLOO: reward minus the mean reward of the group's other samples."""

        type: Literal["rloo"] = "rloo"

    def of_group(self, rewards: Rewards) -> Rewards:
        """Return the group's advantages, shape [G]."""
        return rloo_advantages(rewards)


@ADVANTAGES.register("reinforce_plus_plus")
class ReinforcePlusPlus(AdvantageEstimator):
    """`reinforce_plus_plus`: every token's return-to-go, whitened over the step's tokens; groups play no part."""

    class Config(PluginConfig):
        """REINFORCE++: discounted return-to-go of every token, whitened over the step."""

        type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
        gamma: Fraction = Field(default=1.0, description="Discount of one sampled token; 1 is none.")

    def advantages(
        self, groups: Sequence[Group[Scored]], token_penalties: Sequence[FloatArray]
    ) -> Sequence[FloatArray]:
        """Return one array [T] for each sample."""
        samples = flatten(groups)
        rewards = []
        for sample, penalties_T in zip(samples, token_penalties, strict=True):
            per_action = -penalties_T[sample.trajectory.sampled].astype(np.float64)
            if per_action.size:
                per_action[-1] += sample.reward
            rewards.append(per_action)
        spread = [np.zeros(len(sample.trajectory.token_ids), np.float32) for sample in samples]
        values = reinforce_plus_plus_advantages(rewards, self.config.gamma)
        for sample, advantages_T, value in zip(samples, spread, values, strict=True):
            advantages_T[sample.trajectory.sampled] = value
        return spread


def describe(sample: Scored) -> str:
    """Name a sample in a message: task, row and place in its group."""
    task = sample.trajectory.task
    return f"sample {sample.trajectory.sample_index} of task {task.task_id!r} ({task.origin})"


def _total(sample: Scored, penalties_T: FloatArray) -> float:
    return float(penalties_T[sample.trajectory.sampled].sum(dtype=np.float64))


def _check_arrays(what: str, arrays: Sequence[FloatArray], samples: Sequence[Scored]) -> None:
    if len(arrays) != len(samples):
        raise EngineError(f"{len(arrays)} arrays of {what} came for {len(samples)} samples; one a sample was expected")
    for array, sample in zip(arrays, samples, strict=True):
        expected = sample.trajectory.token_ids.shape
        if array.shape != expected:
            raise EngineError(
                f"the {what} of {describe(sample)} have shape {array.shape}; {expected} was expected, one a token"
            )
        if not np.isfinite(array[sample.trajectory.sampled]).all():
            raise EngineError(f"the {what} of {describe(sample)} hold infinities or NaN; finite numbers were expected")
