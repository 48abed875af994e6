"""Losses of demonstrations: answers that are given, so that nobody knows with which probability they were sampled.

Two losses, which may be used together:

- off-policy: a demonstration is a sample of its group. Its advantage weighs f(π) of its tokens in the place of a ratio
  (LUFFY, Yan et al. 2025, arXiv:2504.14945).
- supervised: the likelihood of its tokens is maximised beside the policy's loss, whatever its reward (CHORD, Zhang et
  al. 2025, arXiv:2508.11408; with a constant weight, GRPO with an SFT term).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from roll_like.algorithms.base import item_metrics, refuse_bad_values
from roll_like.algorithms.lazy import torch
from roll_like.types import FloatArray, PolicySample
from roll_like.values import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from roll_like.config.demonstrations import SFTTermConfig


def shaped_probabilities(logprobs_N: Tensor, gamma: float | None) -> Tensor:
    """Return f(π) = π/(π + γ) of each token, or π itself without γ, with gradient, shape [N].

    LUFFY's policy shaping (arXiv:2504.14945, section 3.3). The ratio is π/π_φ with π_φ = 1. The gradient in log π is
    γ·π/(π + γ)², which is largest at π = γ: unlikely tokens learn faster than with π itself, and likely ones slower.
    """
    # p/(p + γ) = σ(log p − log γ), which is exact where p is 0 in float32
    return logprobs_N.exp() if gamma is None else torch.sigmoid(logprobs_N - math.log(gamma))


def off_policy_objective(
    logprobs_N: Tensor, advantages_N: Tensor, weights_N: Tensor, gamma: float | None
) -> tuple[Tensor, dict[str, Metric]]:
    """Return Σ_t w_t·(−A_t·f(π_t)) over tokens of demonstrations, and its metrics.

    Args:
        logprobs_N: Of the policy being trained, with gradient.
        advantages_N: From the advantage estimator.
        weights_N: From `token_weights`; 0 marks filler.
        gamma: γ of `shaped_probabilities`.

    Raises:
        EngineError: An input is infinite or NaN.
    """
    refuse_bad_values(
        "demonstrated token",
        {
            "the policy's log-probabilities": (logprobs_N, "lower training.optimizer.lr"),
            "the advantages": (advantages_N, "check what algorithm.advantage returns"),
        },
    )
    term = -(weights_N * advantages_N * shaped_probabilities(logprobs_N, gamma)).sum()
    counted_N = weights_N != 0
    return term, item_metrics(
        {"train/off_policy_loss": term},
        {"demonstrations/probability": (logprobs_N.detach().exp(), counted_N)},
        {"demonstrations/tokens": counted_N},
    )


def supervised_objective(logprobs_N: Tensor, weights_N: Tensor, *, phi: bool) -> tuple[Tensor, dict[str, Metric]]:
    """Return Σ_t w_t·φ_t·(−log π_t) over tokens of demonstrations, and its metrics.

    φ is 1, or π·(1 − π) without gradient (CHORD-φ, arXiv:2508.11408, section 3.3): tokens that the policy finds certain
    or impossible count less.

    Args:
        logprobs_N: Of the policy being trained, with gradient.
        weights_N: From `supervised_weights`; 0 marks filler.
    """
    refuse_bad_values(
        "demonstrated token", {"the policy's log-probabilities": (logprobs_N, "lower training.optimizer.lr")}
    )
    probability_N = logprobs_N.detach().exp()
    losses_N = -logprobs_N
    if phi:
        losses_N = losses_N * probability_N * (1 - probability_N)
    term = (weights_N * losses_N).sum()
    counted_N = weights_N != 0
    return term, item_metrics(
        {"train/sft_loss": term},
        {
            "demonstrations/cross_entropy": (-logprobs_N.detach(), counted_N),
            "demonstrations/sft_probability": (probability_N, counted_N),
        },
        {"demonstrations/sft_tokens": counted_N},
    )


def supervised_weights(samples: Sequence[PolicySample]) -> list[FloatArray]:
    """Return 1/M at each supervised token, one array [T] a sample; M is how many there are.

    Args:
        samples: The whole batch of one optimizer step, of all ranks.
    """
    count = sum(int(sample.supervised.sum()) for sample in samples if sample.supervised is not None)
    weight = np.float32(1 / max(count, 1))
    return [
        np.zeros(len(sample), np.float32) if sample.supervised is None else sample.supervised * weight
        for sample in samples
    ]


def sft_coefficient(config: SFTTermConfig, step: int) -> float:
    """Return μ of a step, counted from 0: linear warm-up from 0, then constant, or a cosine to `final_coefficient`.

    CHORD-μ (arXiv:2508.11408, section 3.2; as in Trinity-RFT): with a warm-up of w steps and a decay of d steps
    μ = peak·s/w for s < w, then valley + (peak − valley)·(1 + cos(π·(s − w)/d))/2, and valley from s = w + d on.
    """
    if step < config.warmup_steps:
        return config.coefficient * step / config.warmup_steps
    if config.final_coefficient is None or config.decay_steps is None:
        return config.coefficient
    passed = min((step - config.warmup_steps) / config.decay_steps, 1.0)
    share = 0.5 * (1 + math.cos(math.pi * passed))
    return config.final_coefficient + (config.coefficient - config.final_coefficient) * share
