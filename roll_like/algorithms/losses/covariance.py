"""Losses that slow the collapse of entropy, which few tokens cause (Cui et al. 2025, arXiv:2505.22617).

A token lowers the entropy in proportion to (A − mean(A))·(log π − mean(log π)), its term in the covariance of advantage
and log-probability, with means over the whole optimizer batch. The few tokens of large covariance are left out of the
loss (`clip_cov`) or penalised for moving (`kl_cov`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from roll_like.algorithms.lazy import torch
from roll_like.algorithms.losses.base import BatchTokens, LossInputs, PolicyLoss, TokenLosses, policy_ratio
from roll_like.algorithms.losses.clipped import clip_metrics, clipped_surrogate
from roll_like.config.base import PluginConfig, PositiveFloat
from roll_like.errors import EngineError
from roll_like.registry import LOSSES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Centre:
    """Means over a batch, for the covariances of its tokens."""

    advantage: Tensor
    logprob: Tensor

    @classmethod
    def of(cls, batch: BatchTokens) -> Self:
        """Return the means of a whole optimizer batch."""
        return cls(batch.advantages_N.double().mean(), batch.logprobs_N.double().mean())

    def covariance(self, logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
        """Return each token's term in the covariance of advantage and log-probability, shape [N]."""
        return (advantages_N.double() - self.advantage) * (logprobs_N.detach().double() - self.logprob)


class CovarianceLoss(PolicyLoss):
    """What both losses have in common: they need the whole batch, tokens of advantage 0 included."""

    needs_batch = True
    zero_advantage_moves = True

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Raise: `of_batch` returns the loss."""
        raise EngineError(
            f"{type(self).__name__} was called with {len(inputs.logprobs_N)} tokens before `of_batch` gave it the "
            "statistics of their whole batch"
        )


@LOSSES.register("clip_cov")
class ClipCovLoss(CovarianceLoss):
    """`clip_cov`: PPO's clipped surrogate without some tokens of large covariance (Cui et al. 2025, arXiv:2505.22617).

    Tokens are drawn at random from those with `low` < covariance < `high`; they have no gradient.
    """

    ratio_settings = ("clip_low", "clip_high")

    class Config(PluginConfig):
        """Clip-Cov: tokens drawn from a band of large covariance are left out."""

        type: Literal["clip_cov"] = "clip_cov"
        clip_low: float = Field(default=0.2, ge=0, lt=1, description="The ratio is clipped below at 1 − this.")
        clip_high: float = Field(default=0.2, ge=0, description="The ratio is clipped above at 1 + this.")
        fraction: float = Field(
            default=2e-4, gt=0, le=1, description="Share of the batch's tokens to leave out; at least one token."
        )
        low: float = Field(default=1.0, description="Only tokens of larger covariance are drawn.")
        high: float = Field(default=5.0, description="Only tokens of smaller covariance are drawn.")

        @model_validator(mode="after")
        def _band_is_ordered(self) -> Self:
            if self.low >= self.high:
                raise ValueError(f"the band is empty: low is {self.low:g}, high is {self.high:g}; set low below high")
            return self

    def of_batch(self, batch: BatchTokens) -> PolicyLoss:
        """Return the loss with the tokens to leave out."""
        bound = BoundClipCov(self.config, Centre.of(batch), -1.0)
        candidates = bound.candidates(batch.logprobs_N, batch.old_logprobs_N, batch.advantages_N)
        count = max(int(self.config.fraction * len(batch.draws_N)), 1)
        drawn = torch.sort(batch.draws_N[candidates]).values[:count]
        return BoundClipCov(self.config, bound.centre, float(drawn[-1]) if len(drawn) else -1.0)


class BoundClipCov(PolicyLoss):
    """Clip-Cov of one batch.

    Args:
        config: The loss's settings.
        centre: Means of the batch.
        last_draw: Tokens in the band whose draw is at most this are left out.
    """

    config: ClipCovLoss.Config

    def __init__(self, config: ClipCovLoss.Config, centre: Centre, last_draw: float) -> None:
        super().__init__(config)
        self.centre = centre
        self._last_draw = last_draw
        self._low, self._high = 1 - config.clip_low, 1 + config.clip_high

    def candidates(self, logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
        """Return which tokens lie in the band and are not clipped by the ratio, shape [N]."""
        covariance_N = self.centre.covariance(logprobs_N, advantages_N)
        ratio_N = policy_ratio(logprobs_N.detach(), old_logprobs_N)
        clipped_N = ratio_N.clamp(self._low, self._high) * advantages_N < ratio_N * advantages_N
        low, high = float(self.config.low), float(self.config.high)
        return (covariance_N > low) & (covariance_N < high) & ~clipped_N

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Return the clipped surrogate of each token, 0 for the drawn ones."""
        advantages_N = inputs.advantages_N
        left_out_N = self.candidates(inputs.logprobs_N, inputs.old_logprobs_N, advantages_N)
        left_out_N &= inputs.draws_N <= self._last_draw
        ratio_N = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        objective_N = clipped_surrogate(ratio_N, advantages_N, self._low, self._high)
        metrics = clip_metrics(ratio_N, advantages_N, self._low, self._high)
        return TokenLosses(-objective_N * ~left_out_N, {**metrics, "train/covariance_fraction": left_out_N})


@LOSSES.register("kl_cov")
class KLCovLoss(CovarianceLoss):
    """`kl_cov`: −ρ·A, plus `coefficient`·|log ρ| for the tokens of largest covariance.

    Cui et al. 2025, arXiv:2505.22617. If tokens tie for the last place none of them is penalised; with equal advantages
    no token is.
    """

    ratio_settings = ("fraction", "coefficient")

    class Config(PluginConfig):
        """KL-Cov: the tokens of largest covariance are held near the old policy; nothing is clipped."""

        type: Literal["kl_cov"] = "kl_cov"
        fraction: float = Field(
            default=2e-4, gt=0, le=1, description="Share of the batch's tokens to hold back; at least one token."
        )
        coefficient: PositiveFloat = Field(default=1.0, description="Weight of the penalty on these tokens.")

    def of_batch(self, batch: BatchTokens) -> PolicyLoss:
        """Return the loss with the covariance above which tokens are penalised."""
        centre = Centre.of(batch)
        covariance_N = centre.covariance(batch.logprobs_N, batch.advantages_N)
        count = max(int(self.config.fraction * len(covariance_N)), 1)
        largest = torch.topk(covariance_N, min(count + 1, len(covariance_N))).values
        # halfway to the next one: the log-probabilities of the update may differ in their last digits
        threshold = float(largest[count - 1 :].mean()) if len(largest) > count else -math.inf
        return BoundKLCov(self.config, centre, threshold)


class BoundKLCov(PolicyLoss):
    """KL-Cov of one batch.

    Args:
        config: The loss's settings.
        centre: Means of the batch.
        threshold: Tokens of larger covariance are penalised.
    """

    config: KLCovLoss.Config

    def __init__(self, config: KLCovLoss.Config, centre: Centre, threshold: float) -> None:
        super().__init__(config)
        self._centre = centre
        self._threshold = threshold

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Return the surrogate of each token, with its penalty if it has one."""
        held_N = self._centre.covariance(inputs.logprobs_N, inputs.advantages_N) > self._threshold
        ratio_N = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        distance_N = (inputs.logprobs_N - inputs.old_logprobs_N).abs()
        losses_N = -ratio_N * inputs.advantages_N + self.config.coefficient * distance_N * held_N
        return TokenLosses(losses_N, {"train/ratio": ratio_N.detach(), "train/covariance_fraction": held_N})
