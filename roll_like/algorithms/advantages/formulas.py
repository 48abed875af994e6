"""Formulas of advantages: pure functions over NumPy arrays in float64, each with its source.

A group is the samples of one task, [G] its number of samples. Where a formula works on tokens, it takes one array for
each sample with the values of its sampled tokens; callers remove the other tokens before and set them to 0 after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from roll_like.values import has_signal

#: Rewards of one group, or values of one sample's sampled tokens.
Rewards: TypeAlias = npt.NDArray[np.float64]

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


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

    REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740). A group of one has advantage 0.

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
    # time-major and zero-padded: one vector operation for each time step of all sequences
    returns_TS = np.zeros((longest, len(rewards)))
    for index, row in enumerate(rewards):
        returns_TS[: len(row), index] = row
    for t in range(longest - 2, -1, -1):
        returns_TS[t] += gamma * returns_TS[t + 1]
    return [returns_TS[: len(row), index].copy() for index, row in enumerate(rewards)]


def whiten(values: Sequence[Rewards]) -> list[Rewards]:
    """Return (x − μ)/√(σ² + 1e-8), with mean and unbiased variance over the values of all sequences.

    If all values are equal they become 0.
    """
    if not values:
        return []
    together = np.concatenate(values)
    if not has_signal(together):
        return [np.zeros_like(row) for row in values]
    mean, scale = together.mean(), 1.0 / np.sqrt(together.var(ddof=1) + WHITEN_EPSILON)
    return [(row - mean) * scale for row in values]


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


def gae(rewards: Sequence[Rewards], values: Sequence[Rewards], *, gamma: float, lam: float) -> list[Rewards]:
    """Return the generalised advantage of every action of each sequence.

    Schulman et al. 2016, arXiv:1506.02438: δ_t = r_t + γ·V_{t+1} − V_t, A_t = Σ_k (γλ)^k·δ_{t+k}, with
    value 0 after the last action.

    Args:
        rewards: Reward of each action, one array a sequence.
        values: Value of the state before each action.
        gamma: Discount of one action.
        lam: λ; 0 is one-step differences, 1 is returns minus values.

    >>> gae([np.array([0.0, 1.0])], [np.array([0.5, 0.5])], gamma=1.0, lam=1.0)[0].tolist()
    [0.5, 0.5]
    """
    differences = [
        row + gamma * np.append(value[1:], np.zeros(min(len(value), 1))) - value
        for row, value in zip(rewards, values, strict=True)
    ]
    return discounted_returns(differences, gamma * lam)
