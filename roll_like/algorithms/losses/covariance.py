"""Losses that slow the collapse of entropy, which few tokens cause (Cui et al. 2025, arXiv:2505.22617).

A token lowers the entropy in proportion to (A − mean(A))·(log π − mean(log π)), its term in the covariance of advantage
and log-probability, with means over the whole optimizer batch. The few tokens of large covariance are left out of the
loss (`clip_cov`) or penalised for moving (`kl_cov`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from roll_like.algorithms.lazy import torch
from roll_like.algorithms.losses.base import BatchTokens, LossInputs, PolicyLoss, TokenLosses, policy_ratio
from roll_like.algorithms.losses.clipped import clip_metrics, clipped_surrogate
from roll_like.config.base import PluginConfig, PositiveFloat
from roll_like.errors import EngineError
from roll_like.registry import LOSSES

if TYPE_CHECKING:
    from torch import Tensor


class CovarianceLoss(PolicyLoss):
    """What both losses have in common: they need the whole batch, tokens of advantage 0 included.

    Args:
        batch: The optimizer batch whose statistics it has; None before `of_batch`.
    """

    needs_batch = True
    zero_advantage_moves = True

    def __init__(self, config: Any, batch: BatchTokens | None = None) -> None:
        super().__init__(config)
        self._means: tuple[Tensor, Tensor] | None = None
        if batch is not None:
            self._means = batch.advantages_N.double().mean(), batch.logprobs_N.double().mean()
            self.limit = self.limit_of(batch)

    def of_batch(self, batch: BatchTokens) -> Self:
        """Return the loss with the statistics of a whole optimizer batch."""
        return type(self)(self.config, batch)

    @abstractmethod
    def limit_of(self, batch: BatchTokens) -> float:
        """Return what picks tokens of a batch."""

    def covariance(self, logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
        """Return each token's term in the covariance of advantage and log-probability, shape [N]."""
        if self._means is None:
            raise EngineError(
                f"{type(self).__name__} was called with {len(logprobs_N)} tokens before `of_batch` gave it the "
                "statistics of their whole batch"
            )
        advantage, logprob = self._means
        return (advantages_N.double() - advantage) * (logprobs_N.detach().double() - logprob)


@LOSSES.register("clip_cov")
class ClipCovLoss(CovarianceLoss):
    """`clip_cov`: PPO's clipped surrogate without some tokens of large covariance (Cui et al. 2025, arXiv:2505.22617).

    Tokens are drawn at random from those with `low` < covariance < `high`; they have no gradient.
    """

    ratio_settings = ("clip_low", "clip_high")

    class Config(PluginConfig):
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

    def limit_of(self, batch: BatchTokens) -> float:
        """Return the last draw: tokens in the band whose draw is at most this are left out."""
        candidates_N = self.candidates(batch.logprobs_N, batch.old_logprobs_N, batch.advantages_N)
        count = max(int(self.config.fraction * len(batch.draws_N)), 1)
        drawn = torch.sort(batch.draws_N[candidates_N]).values[:count]
        return float(drawn[-1]) if len(drawn) else -1.0

    def candidates(self, logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
        """Return which tokens lie in the band and are not clipped by the ratio, shape [N]."""
        covariance_N = self.covariance(logprobs_N, advantages_N)
        ratio_N = policy_ratio(logprobs_N.detach(), old_logprobs_N)
        clipped_N = (
            ratio_N.clamp(1 - self.config.clip_low, 1 + self.config.clip_high) * advantages_N < ratio_N * advantages_N
        )
        low, high = float(self.config.low), float(self.config.high)
        return (covariance_N > low) & (covariance_N < high) & ~clipped_N

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        left_out_N = self.candidates(inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N)
        left_out_N &= inputs.draws_N <= self.limit
        ratio_N = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        objective_N = clipped_surrogate(ratio_N, inputs.advantages_N, low, high)
        metrics = clip_metrics(ratio_N, inputs.advantages_N, low, high)
        return TokenLosses(-objective_N * ~left_out_N, {**metrics, "train/covariance_fraction": left_out_N})


@LOSSES.register("kl_cov")
class KLCovLoss(CovarianceLoss):
    """`kl_cov`: −ρ·A, plus `coefficient`·|log ρ| for the tokens of largest covariance.

    Cui et al. 2025, arXiv:2505.22617. If tokens tie for the last place none of them is penalised; with equal advantages
    no token is.
    """

    ratio_settings = ("fraction", "coefficient")

    class Config(PluginConfig):
        type: Literal["kl_cov"] = "kl_cov"
        fraction: float = Field(
            default=2e-4, gt=0, le=1, description="Share of the batch's tokens to hold back; at least one token."
        )
        coefficient: PositiveFloat = Field(default=1.0, description="Weight of the penalty on these tokens.")

    def limit_of(self, batch: BatchTokens) -> float:
        """Return the threshold: tokens of larger covariance are penalised."""
        covariance_N = self.covariance(batch.logprobs_N, batch.advantages_N)
        count = max(int(self.config.fraction * len(covariance_N)), 1)
        largest = torch.topk(covariance_N, min(count + 1, len(covariance_N))).values
        # halfway to the next one: the log-probabilities of the update may differ in their last digits
        return float(largest[count - 1 :].mean()) if len(largest) > count else -math.inf

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        held_N = self.covariance(inputs.logprobs_N, inputs.advantages_N) > self.limit
        ratio_N = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        distance_N = (inputs.logprobs_N - inputs.old_logprobs_N).abs()
        losses_N = -ratio_N * inputs.advantages_N + self.config.coefficient * distance_N * held_N
        return TokenLosses(losses_N, {"train/ratio": ratio_N.detach(), "train/covariance_fraction": held_N})
