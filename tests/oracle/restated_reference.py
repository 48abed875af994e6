"""OpenRLHF, slime, SkyRL, ROLL and NeMo RL, which are not installed: what they compute, restated from their formulas.

Read in openrlhf/trainer/ppo_utils/experience_maker.py (89308a0b), slime/utils/ppo_utils.py (06787cf5),
skyrl/backends/skyrl_train/utils/ppo_utils.py (ec609595), roll/pipeline/rlvr/actor_pg_worker.py (97447137) and
nemo_rl/algorithms/utils.py (00439539). One response is an array [T]; its mask is 1 for tokens that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from advantage_cases import Floats
from torch import Tensor

from roll_like.algorithms.kl import KLEstimator


def openrlhf_whitened(values: Sequence[float]) -> Floats:
    """(x − μ)/√max(σ², 1e-8), with the variance of a population: over N values, not N − 1."""
    array = np.asarray(values, np.float64)
    return (array - array.mean()) / np.sqrt(max(np.mean((array - array.mean()) ** 2), 1e-8))


def response_returns(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """Σ_{k≥t} γ^(k−t)·r_k over all tokens of the response, whoever wrote them: OpenRLHF and slime."""
    return [sum(gamma**k * reward for k, reward in enumerate(rewards_T[t:])) for t in range(len(rewards_T))]


def skyrl_returns(rewards_T: Sequence[float], mask_T: Sequence[int], gamma: float) -> list[float]:
    """Σ_{k≥t} γ^(k−t)·r_k·Π_{t<j≤k} m_j: what comes after a token outside of the mask counts for nothing before it."""
    return [
        sum(gamma**k * reward * np.prod(mask_T[t + 1 : t + 1 + k]) for k, reward in enumerate(rewards_T[t:]))
        for t in range(len(rewards_T))
    ]


def roll_topr_gradient(log_ratio_T: Tensor, advantage: float, reward: float) -> Tensor:
    """For log π: −A of a positive reward; else −min(ρ_t, 1)·A, each token with a ratio of its own."""
    weight_T = torch.ones_like(log_ratio_T) if reward > 0 else torch.minimum(log_ratio_T.exp(), torch.tensor(1.0))
    return -weight_T * advantage


def roll_kimi_gradient(log_ratio_T: Tensor, advantage: float, tau: float) -> Tensor:
    """For log π, of −A·log π + (τ/2)·(log ρ_t)²: each token is penalised for its own log-ratio."""
    return -advantage + tau * log_ratio_T


def nemo_rl_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    estimator: KLEstimator,
    *,
    largest_log_ratio: float | None = 20.0,
    largest: float | None = 10.0,
) -> Tensor:
    """k1, k2 or k3 of a bounded log-ratio, all three bounded on both sides; None is no bound."""
    r = reference_logprobs - logprobs
    if largest_log_ratio is not None:
        r = r.clip(-largest_log_ratio, largest_log_ratio)
    estimate = {"k1": -r, "k2": r**2 / 2, "k3": r.exp() - r - 1}[estimator]
    return estimate if largest is None else estimate.clip(-largest, largest)
