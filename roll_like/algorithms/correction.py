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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from roll_like.algorithms.kl import MAX_LOG_RATIO, divergence
from roll_like.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from roll_like.algorithms.losses.base import LossInputs
    from roll_like.config.algorithm import CorrectionConfig


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


Correction: TypeAlias = Callable[["LossInputs"], Corrected]


def no_correction(inputs: LossInputs) -> Corrected:
    """Give every token weight 1."""
    nowhere_N = torch.zeros_like(inputs.old_logprobs_N, dtype=torch.bool)
    return Corrected(torch.ones_like(inputs.old_logprobs_N), nowhere_N, nowhere_N)


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """Importance weights π_old/μ, bounded.

    Ionides 2008, Truncated Importance Sampling; for engine mismatch Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training". With `old_logprobs: behaviour` the weight is 1, and the ratio of the
    loss itself corrects.

    Attributes:
        level: Whose ratio it is: of the `token`; of the whole `sequence`, Π_t ρ_t; or `geometric`, the
            sequence's geometric mean (Π_t ρ_t)^(1/n); `turn` and `turn_geometric` are these two of each turn.
        cap: Largest weight.
        floor: Smallest weight that counts, where `masked`.
        masked: Whether a weight outside of [floor, cap] becomes 0 (IcePop, Ling Team 2025,
            arXiv:2510.18855), or is truncated to the cap.
    """

    level: Literal["token", "turn", "turn_geometric", "sequence", "geometric"] = "token"
    cap: float = 2.0
    floor: float = 0.0
    masked: bool = False

    def __call__(self, inputs: LossInputs) -> Corrected:
        """Return the weights of one micro-batch."""
        log_ratio_N = (inputs.old_logprobs_N - inputs.behaviour_logprobs_N).detach()
        if self.level != "token":
            log_ratio_N = {
                "turn": inputs.turn_sum,
                "turn_geometric": inputs.turn_mean,
                "sequence": inputs.sequence_sum,
                "geometric": inputs.sequence_mean,
            }[self.level](log_ratio_N)
        ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside_N = ratio_N > self.cap
        if self.masked:
            outside_N = outside_N | (ratio_N < self.floor)
            weights_N = ratio_N.masked_fill(outside_N, 0.0)
        else:
            weights_N = ratio_N.clamp(max=self.cap)
        return Corrected(weights_N, outside_N, torch.zeros_like(outside_N))


@dataclass(frozen=True, slots=True)
class Rejection:
    """Gives weight 0 to tokens at which the trainer's policy π differs too much from the behaviour policy μ.

    With ρ = π/μ of a token that μ sampled, the divergence KL(μ‖π) is estimated by k1 = −log ρ, k2 = (log ρ)²/2 or
    k3 = ρ − 1 − log ρ. k2 and k3 have an upper bound; k1 has a sign, so the bounds are those of ρ: low ≤ ρ ≤ high.

    Attributes:
        estimator: k1, k2 or k3.
        level: `token` rejects single tokens; `sequence_mean` and `sequence_max` reject whole sequences by the mean or
            the largest value of their tokens; `turn_mean` and `turn_max` reject turns likewise.
        high: Largest ρ (k1), or largest divergence in nats (k2, k3).
        low: Smallest ρ; for k1 only.
    """

    estimator: Literal["k1", "k2", "k3"]
    level: Literal["token", "turn_mean", "turn_max", "sequence_mean", "sequence_max"]
    high: float
    low: float | None = None

    def __call__(self, inputs: LossInputs) -> Tensor:
        """Return which tokens to leave out, bool, shape [N]."""
        log_ratio_N = (trainer_logprobs(inputs) - inputs.behaviour_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.estimator == "k1":
            rejected_N = self._reduced(inputs, log_ratio_N) > math.log(self.high)
            if self.low:
                rejected_N |= self._reduced(inputs, -log_ratio_N) > -math.log(self.low)
            return rejected_N
        estimates = {"k2": 0.5 * log_ratio_N.square(), "k3": torch.expm1(log_ratio_N) - log_ratio_N}
        return self._reduced(inputs, estimates[self.estimator]) > self.high

    def _reduced(self, inputs: LossInputs, values_N: Tensor) -> Tensor:
        return values_N if self.level == "token" else getattr(inputs, self.level)(values_N)


@dataclass(frozen=True, slots=True)
class RejectingCorrection:
    """A correction, and a rejection on top of it."""

    correction: Correction
    rejection: Rejection

    def __call__(self, inputs: LossInputs) -> Corrected:
        """Return the correction's weights, 0 for rejected tokens."""
        corrected, rejected_N = self.correction(inputs), self.rejection(inputs)
        return Corrected(corrected.weights_N.masked_fill(rejected_N, 0.0), corrected.capped_N, rejected_N)


def correction_from(config: CorrectionConfig) -> Correction:
    """Return the correction that `algorithm.correction` describes."""
    correction: Correction = no_correction
    if config.type != "none":
        correction = ImportanceWeight(
            level=config.level, cap=config.cap, floor=config.floor or 0.0, masked=config.type == "masked"
        )
    if config.reject is None:
        return correction
    reject = config.reject
    return RejectingCorrection(
        correction, Rejection(estimator=reject.estimator, level=reject.level, high=reject.high, low=reject.low)
    )


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
