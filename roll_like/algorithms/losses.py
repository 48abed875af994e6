"""Policy losses, and the objective that puts loss, correction, KL and entropy together.

Everything is flat: [N] holds the trained tokens of one micro-batch, whatever packing or padding the
engine used for its forward pass. A user's own loss comes in through the registry:

    @LOSSES.register("reinforce")
    class Reinforce(PolicyLoss):
        class Config(PluginConfig):
            type: Literal["reinforce"] = "reinforce"

        def __call__(self, inputs: LossInputs) -> TokenLosses:
            return TokenLosses(-inputs.advantages_N * inputs.logprobs_N, {})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from roll_like.algorithms.correction import Correction, effective_sample_size, mismatch
from roll_like.algorithms.kl import MAX_LOG_RATIO, KLEstimator, divergence
from roll_like.config.base import PluginConfig
from roll_like.errors import EngineError
from roll_like.registry import LOSSES
from roll_like.values import Max, Mean, Metric, Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The trained tokens of one micro-batch, shape [N] each.

    A sequence is whole within its micro-batch, so that a loss may reduce over `sequence_N`.

    Attributes:
        logprobs_N: Of the policy being trained, with gradient.
        old_logprobs_N: Of the policy that ratios compare with, without gradient.
        behaviour_logprobs_N: Reported by the inference engine when it sampled the tokens.
        advantages_N: From the advantage estimator.
        weights_N: Of each token in the sum, from `token_weights`. 0 marks a token that only fills
            up a rank's work; it changes neither gradient nor metrics.
        sequence_N: Index of each token's sequence, 0 ≤ index < `sequences`, int64.
        sequences: How many sequences the micro-batch holds.
        entropy_N: Of the policy's distribution at each token, in nats.
        reference_logprobs_N: Of the reference model; None where there is none.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    behaviour_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    sequence_N: Tensor
    sequences: int
    entropy_N: Tensor
    reference_logprobs_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What a policy loss returns.

    Attributes:
        losses_N: Loss of each token, with gradient.
        metrics: Figures of each token, shape [N], numbers or booleans; reported as means over tokens.
    """

    losses_N: Tensor
    metrics: Mapping[str, Tensor]


class PolicyLoss(ABC):
    """Base of policy losses: tokens in, a loss for each token out.

    Args:
        config: This loss's own settings, an instance of its `Config`.
    """

    Config: ClassVar[type[PluginConfig]] = PluginConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Return the loss of each token, before weights and correction."""


def policy_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """Return π/π_old with gradient, shape [N]; the log-ratio is bounded by ±20 so that it stays finite."""
    return (logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@LOSSES.register("ppo")
class PPOLoss(PolicyLoss):
    """`ppo`: clipped surrogate (Schulman et al. 2017, arXiv:1707.06347).

    ℓ = −min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A), with the two bounds apart (clip-higher,
    DAPO, arXiv:2503.14476). Where A < 0 the loss is at most −dual_clip·A (dual clip, Ye et al. 2020,
    arXiv:1912.09729), or unbounded in ρ with `dual_clip: null`.
    """

    class Config(PluginConfig):
        """PPO: the ratio of new to old policy, clipped."""

        type: Literal["ppo"] = "ppo"
        clip_low: float = Field(default=0.2, ge=0, lt=1, description="The ratio is clipped below at 1 − this.")
        clip_high: float = Field(
            default=0.28, ge=0, description="The ratio is clipped above at 1 + this; more than clip_low is clip-higher."
        )
        dual_clip: float | None = Field(
            default=3.0, gt=1, description="Bound of the ratio where the advantage is negative; null: none."
        )

        @model_validator(mode="after")
        def _bounds_are_ordered(self) -> Self:
            if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
                raise ValueError(
                    f"dual_clip is {self.dual_clip}, inside the clip range that ends at {1 + self.clip_high:g}; "
                    "set it above 1 + clip_high (3.0 is usual) or to null"
                )
            return self

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Return the clipped surrogate of each token."""
        low, high, dual = 1 - self.config.clip_low, 1 + self.config.clip_high, self.config.dual_clip
        advantages = inputs.advantages_N
        ratio = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        positive, negative = advantages > 0, advantages < 0
        seen = ratio.detach()
        metrics = {
            "train/ratio": seen,
            "train/clip_fraction_high": positive & (seen > high),
            "train/clip_fraction_low": negative & (seen < low),
        }
        if dual is not None:
            objective = torch.where(negative, torch.maximum(objective, dual * advantages), objective)
            metrics["train/clip_fraction_dual"] = negative & (seen > dual)
        return TokenLosses(-objective, metrics)


@dataclass(frozen=True, slots=True)
class KLTerm:
    """A KL penalty in the loss: coefficient · KL estimate per token."""

    estimator: KLEstimator
    coefficient: float


def policy_objective(
    inputs: LossInputs, loss: PolicyLoss, kl: KLTerm | None, entropy_coefficient: float, correction: Correction
) -> tuple[Tensor, dict[str, Metric]]:
    """Return Σ_t w_t·(ℓ_t·c_t + β·k_t − η·H_t) and its metrics.

    The sum form lets micro-batches and ranks add up: gradients are summed, never averaged.

    Args:
        inputs: One micro-batch.
        loss: Policy loss, ℓ.
        kl: KL penalty, β·k; None for none. The metric `train/kl` is there whenever there are
            reference log-probabilities.
        entropy_coefficient: η.
        correction: Off-policy correction, c.

    Returns:
        The scalar to run `backward` on, and metrics whose reductions hold over micro-batches and
        ranks. `train/loss` and its parts are Sums: merge and reduce them once an optimizer step.

    Raises:
        EngineError: An input is infinite or NaN, or a KL penalty has no reference.
    """
    _refuse_non_finite(inputs)
    token_losses = loss(inputs)
    corrected = correction(inputs)
    policy_term = (inputs.weights_N * token_losses.losses_N * corrected.weights_N).sum()
    objective = policy_term
    sums = {"train/policy_loss": policy_term}
    figures: dict[str, Tensor] = {"train/entropy": inputs.entropy_N, **token_losses.metrics, **mismatch(inputs)}
    figures["train/old_kl"] = divergence(inputs.old_logprobs_N, inputs.logprobs_N.detach(), "k3")
    figures["correction/weight"] = corrected.weights_N
    figures["correction/capped_fraction"] = corrected.capped_N
    if inputs.reference_logprobs_N is not None:
        estimator = kl.estimator if kl is not None else "k3"
        divergence_N = divergence(inputs.logprobs_N, inputs.reference_logprobs_N, estimator)
        figures["train/kl"] = divergence_N
        if kl is not None:
            sums["train/kl_loss"] = kl.coefficient * (inputs.weights_N * divergence_N).sum()
            objective = objective + sums["train/kl_loss"]
    elif kl is not None:
        raise EngineError(
            "a KL penalty needs the reference model's log-probabilities, and this batch has none",
            fix="add a `reference` section, or set algorithm.kl.use: none",
        )
    if entropy_coefficient:
        objective = objective - entropy_coefficient * (inputs.weights_N * inputs.entropy_N).sum()
    return objective, _metrics({"train/loss": objective, **sums}, figures, inputs.weights_N, corrected.weights_N)


@torch.no_grad()
def _metrics(
    sums: Mapping[str, Tensor], figures: Mapping[str, Tensor], weights_N: Tensor, correction_N: Tensor
) -> dict[str, Metric]:
    """Reduce to plain numbers with one transfer from the device."""
    counted = weights_N != 0
    tokens = counted.sum()
    means = torch.stack([figure.detach()[counted].double().mean() for figure in figures.values()])
    totals = torch.stack([total.detach().double() for total in sums.values()])
    figure = figures["mismatch/logprob_difference"][counted]
    largest = torch.cat([figure.double(), figure.new_zeros(1, dtype=torch.float64)]).max()
    sample_size = effective_sample_size(correction_N[counted].double())
    rest = torch.stack([tokens.double(), largest, sample_size])
    count, maximum, ess, *values = torch.cat([rest, totals, means]).tolist()
    metrics: dict[str, Metric] = {name: Sum(value) for name, value in zip(sums, values, strict=False)}
    metrics["train/tokens"] = Sum(count)
    if count:
        metrics |= {name: Mean(value, count) for name, value in zip(figures, values[len(sums) :], strict=True)}
        metrics["correction/ess"] = Mean(ess, count)
        metrics["mismatch/logprob_difference_max"] = Max(maximum)
    return metrics


def _refuse_non_finite(inputs: LossInputs) -> None:
    diverged = "lower training.optimizer.lr, or set model.dtype: bfloat16 where it is float16"
    engine = "look for a broken replica, or a rollout.temperature, top_p or top_k that excludes sampled tokens"
    arrays = {
        "the policy's log-probabilities": (inputs.logprobs_N, diverged),
        "the policy's entropies": (inputs.entropy_N, diverged),
        "the old policy's log-probabilities": (inputs.old_logprobs_N, diverged),
        "the inference engine's log-probabilities": (inputs.behaviour_logprobs_N, engine),
        "the reference model's log-probabilities": (inputs.reference_logprobs_N, "check reference.path"),
        "the advantages": (inputs.advantages_N, "check what algorithm.advantage returns"),
        "the weights": (inputs.weights_N, None),
    }
    present = [(name, array.detach(), fix) for name, (array, fix) in arrays.items() if array is not None]
    if torch.stack([array.isfinite().all() for _, array, _ in present]).all():
        return
    for name, array, fix in present:
        bad = (~array.isfinite()).nonzero().flatten()
        if len(bad):
            first = int(bad[0])
            sequence = int(inputs.sequence_N[first])
            token = int((inputs.sequence_N[:first] == sequence).sum())
            raise EngineError(
                f"{name} hold {float(array[first])} at trained token {token} of sequence {sequence} "
                f"(of {inputs.sequences} in this micro-batch; {len(bad)} such tokens in all); "
                "finite numbers were expected",
                fix=fix,
            )
