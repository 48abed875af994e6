"""Correction for the difference between the policy that sampled and the one that is trained.

Inference and training engines compute the same weights with different kernels and precisions, and
asynchronous rollouts come from older weights. Tokens are drawn from the behaviour policy μ; the
gradient wants them from the trainer's old policy π. Importance weights π/μ make up for it.

A correction maps the tokens of a micro-batch to a weight each, without gradient, and the weights
multiply the policy loss (never the KL or entropy term). `loss_inputs.sequence_N` says which sequence
a token belongs to, for corrections over whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from roll_like.algorithms.kl import divergence

if TYPE_CHECKING:
    from roll_like.algorithms.losses import LossInputs
    from roll_like.config.rlvr import CorrectionConfig


@dataclass(frozen=True, slots=True)
class Corrected:
    """What a correction decided.

    Attributes:
        weights_N: Factor of each token's policy loss, detached, shape [N].
        capped_N: Where the correction changed the plain importance weight, shape [N], bool.
    """

    weights_N: Tensor
    capped_N: Tensor


Correction: TypeAlias = Callable[["LossInputs"], Corrected]


def no_correction(inputs: LossInputs) -> Corrected:
    """Weigh every token 1."""
    return Corrected(torch.ones_like(inputs.old_logprobs_N), torch.zeros_like(inputs.old_logprobs_N, dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class TruncatedIS:
    """Token-level truncated importance sampling: min(π_old/μ, cap).

    Ionides 2008, Truncated Importance Sampling; for engine mismatch Yao et al. 2025, "Your efficient
    RL framework secretly brings you off-policy RL training". Where the old policy is the behaviour
    policy (`old_logprobs: behaviour`), the weight is 1 and the loss's own ratio does the work.
    """

    cap: float

    def __call__(self, inputs: LossInputs) -> Corrected:
        """Return the weights of one micro-batch."""
        log_ratio = (inputs.old_logprobs_N - inputs.behaviour_logprobs_N).detach()
        ratio = log_ratio.exp()
        return Corrected(ratio.clamp(max=self.cap), ratio > self.cap)


def correction_from(config: CorrectionConfig) -> Correction:
    """Return the correction that `algorithm.correction` names."""
    corrections: dict[str, Correction] = {"none": no_correction, "truncated_is": TruncatedIS(config.cap)}
    return corrections[config.type]


def trainer_logprobs(inputs: LossInputs) -> Tensor:
    """Return the trainer's side of the mismatch with the behaviour policy, detached, shape [N].

    It is the old policy's; where the old policy is taken from the inference engine
    (`old_logprobs: behaviour`) that would compare it with itself, so it is the current policy's.
    """
    old = inputs.old_logprobs_N.detach()
    return inputs.logprobs_N.detach() if torch.equal(old, inputs.behaviour_logprobs_N) else old


def mismatch(inputs: LossInputs) -> dict[str, Tensor]:
    """Return what separates the trainer's log-probabilities from the behaviour's, per token, shape [N].

    `mismatch/kl` is k3 and `mismatch/kl_k1` is k1 of KL(μ‖π), because μ sampled the tokens;
    `mismatch/logprob_difference` is |log π − log μ| in nats.
    """
    trainer, behaviour = trainer_logprobs(inputs), inputs.behaviour_logprobs_N
    return {
        "mismatch/kl": divergence(behaviour, trainer, "k3"),
        "mismatch/kl_k1": divergence(behaviour, trainer, "k1"),
        "mismatch/logprob_difference": (trainer - behaviour).abs(),
    }


def effective_sample_size(weights_N: Tensor) -> Tensor:
    """Return (Σw)²/(n·Σw²), a scalar in (0, 1]: 1 where all weights are equal (Kong 1992).

    Args:
        weights_N: At least one importance weight.
    """
    return weights_N.sum().square() / (len(weights_N) * weights_N.square().sum())
