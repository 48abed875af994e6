"""Correction for the difference between the policy that sampled and the one that is trained.

Inference and training engines evaluate the same weights with different kernels and precisions, and asynchronous
rollouts come from older weights. Tokens are sampled from the behaviour policy μ; the policy gradient assumes the
trainer's old policy π_old. Importance weights π_old/μ correct for the difference.

A correction gives each token of a micro-batch a weight, without gradient. The weights multiply the policy loss (never
the KL or entropy term). Denominators stay those of the whole batch: a token of weight 0 counts in them.

Two ways of using it (`algorithm.old_logprobs`): decoupled, with three policies, μ → π_old by the correction and
π_old → π by the loss's ratio (Hilton et al. 2022, arXiv:2110.00641); or bypassed, with the log-probabilities of μ in
place of π_old's, so that the ratio covers both and weights are 1. Rejection works in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_like.algorithms.kl import MAX_LOG_RATIO, divergence
from roll_like.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from roll_like.algorithms.losses.base import LossInputs
    from roll_like.config.algorithm import CorrectionConfig, RejectConfig


@dataclass(frozen=True, slots=True)
class Corrected:
    """What a correction decided.

    Attributes:
        weights_N: Factor of each token's policy loss, detached, shape [N].
        capped_N: Where the plain importance weight lay out of bounds, shape [N], bool.
        rejected_N: Where a divergence was out of bounds, shape [N], bool; the weight is 0 there.
    """

    weights_N: Tensor
    capped_N: Tensor
    rejected_N: Tensor


def correct(inputs: LossInputs, config: CorrectionConfig) -> Corrected:
    """Return what `algorithm.correction` makes of one micro-batch: importance weights, and 0 for rejected tokens."""
    weights_N = torch.ones_like(inputs.old_logprobs_N)
    capped_N = torch.zeros_like(weights_N, dtype=torch.bool)
    if config.type != "none":
        weights_N, capped_N = importance_weights(inputs, config)
    if config.reject is None:
        return Corrected(weights_N, capped_N, torch.zeros_like(capped_N))
    rejected_N = rejected_tokens(inputs, config.reject)
    return Corrected(weights_N.masked_fill(rejected_N, 0.0), capped_N, rejected_N)


def importance_weights(inputs: LossInputs, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Return importance weights π_old/μ, bounded, and where they lay out of bounds, shape [N] each.

    Ionides 2008, Truncated Importance Sampling; for engine mismatch Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training". With `old_logprobs: behaviour` the weight is 1, and the ratio of the
    loss itself corrects.

    `level` says whose ratio it is: of the `token`; of the whole `sequence`, Π_t ρ_t; or `geometric`, the sequence's
    geometric mean (Π_t ρ_t)^(1/n); `turn` and `turn_geometric` are these two of each turn. A weight above `cap` is
    truncated to it; with `type: masked` (IcePop, Ling Team 2025, arXiv:2510.18855) what is outside of [`floor`, `cap`]
    becomes 0.
    """
    log_ratio_N = (inputs.old_logprobs_N - inputs.behaviour_logprobs_N).detach()
    if config.level != "token":
        log_ratio_N = {
            "turn": inputs.turn_sum,
            "turn_geometric": inputs.turn_mean,
            "sequence": inputs.sequence_sum,
            "geometric": inputs.sequence_mean,
        }[config.level](log_ratio_N)
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.type != "masked":
        return ratio_N.clamp(max=config.cap), ratio_N > config.cap
    outside_N = (ratio_N > config.cap) | (ratio_N < (config.floor or 0.0))
    return ratio_N.masked_fill(outside_N, 0.0), outside_N


def rejected_tokens(inputs: LossInputs, config: RejectConfig) -> Tensor:
    """Return at which tokens the trainer's policy π differs too much from the behaviour policy μ, bool, shape [N].

    With ρ = π/μ of a token that μ sampled, the divergence KL(μ‖π) is estimated by k1 = −log ρ, k2 = (log ρ)²/2 or
    k3 = ρ − 1 − log ρ. k2 and k3 have an upper bound, `high`; k1 has a sign, so the bounds are those of ρ: `low` ≤ ρ ≤
    `high`. Single tokens are rejected, or whole sequences or turns by the mean or the largest value of their tokens.

    With `advantages: negative` only tokens of negative advantage are; sequences and turns, whose tokens may have
    advantages of both signs, go by the mean advantage. DeepSeek-V3.2 (arXiv:2512.02556, equation 9; as in TRL) masks
    sequences of negative advantage with mean log(μ/π) > δ: k1 of `sequence_mean` with `low` e^−δ.
    """
    rejected_N = _out_of_bounds(inputs, config)
    if config.advantages == "all":
        return rejected_N
    mean = {"sequence": inputs.sequence_mean, "turn": inputs.turn_mean}.get(config.level.partition("_")[0])
    advantages_N = inputs.advantages_N if mean is None else mean(inputs.advantages_N)
    return rejected_N & (advantages_N < 0)


def _out_of_bounds(inputs: LossInputs, config: RejectConfig) -> Tensor:

    def reduced(values_N: Tensor) -> Tensor:
        return values_N if config.level == "token" else getattr(inputs, config.level)(values_N)

    log_ratio_N = (trainer_logprobs(inputs) - inputs.behaviour_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    high, low = config.high or math.inf, config.low or 0.0
    if config.estimator == "k1":
        above_N = reduced(log_ratio_N) > math.log(high)
        return above_N | (reduced(-log_ratio_N) > -math.log(low)) if low else above_N
    estimates = {"k2": 0.5 * log_ratio_N.square(), "k3": torch.expm1(log_ratio_N) - log_ratio_N}
    return reduced(estimates[config.estimator]) > high


def trainer_logprobs(inputs: LossInputs) -> Tensor:
    """Return the trainer's log-probabilities to compare with the behaviour policy's, detached, shape [N].

    They are the old policy's; with `old_logprobs: behaviour` these are the behaviour policy's own, so the current
    policy's are used.
    """
    old = inputs.old_logprobs_N.detach()
    return inputs.logprobs_N.detach() if torch.equal(old, inputs.behaviour_logprobs_N) else old


def mismatch(inputs: LossInputs) -> dict[str, Tensor]:
    """Return how far the trainer's and the behaviour policy's log-probabilities are apart, per token, shape [N].

    `mismatch/kl` is k3 and `mismatch/kl_k1` is k1 of KL(μ‖π), because μ sampled the tokens;
    `mismatch/logprob_difference` is |log π − log μ| in nats.
    """
    trainer, behaviour = trainer_logprobs(inputs), inputs.behaviour_logprobs_N
    return {
        "mismatch/kl": divergence(behaviour, trainer, "k3"),
        "mismatch/kl_k1": divergence(behaviour, trainer, "k1"),
        "mismatch/logprob_difference": (trainer - behaviour).abs(),
    }
