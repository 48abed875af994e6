"""Losses that limit how far one update moves a token's probability: by clipping, gates or masks."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from roll_like.algorithms.kl import MAX_LOG_RATIO
from roll_like.algorithms.lazy import no_grad, torch
from roll_like.algorithms.losses.base import (
    LossInputs,
    PolicyLoss,
    TokenLosses,
    bounded_log_ratio,
    policy_ratio,
)
from roll_like.config.base import PluginConfig, PositiveFloat
from roll_like.registry import LOSSES

if TYPE_CHECKING:
    from torch import Tensor

#: Keeps the probability of all other tokens away from 0.
REST_EPSILON = 1e-8


def clip_metrics(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Return the ratio (or log-ratio), and which tokens are clipped above and below, shape [N] each."""
    seen_N = ratio_N.detach()
    return {
        "train/ratio": seen_N,
        "train/clip_fraction_high": (advantages_N > 0) & (seen_N > high),
        "train/clip_fraction_low": (advantages_N < 0) & (seen_N < low),
    }


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """Return min(ρ·A, clip(ρ, low, high)·A), shape [N]."""
    return torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)


@LOSSES.register("ppo")
class PPOLoss(PolicyLoss):
    """`ppo`: clipped surrogate (Schulman et al. 2017, arXiv:1707.06347).

    ℓ = −min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A). The two bounds may differ (clip-higher, DAPO,
    arXiv:2503.14476). Where A < 0 the loss is at most −dual_clip·A (dual clip, Ye et al. 2020, arXiv:1912.09729);
    with `dual_clip: null` it grows with ρ without a bound.
    """

    ratio_settings = ("clip_low", "clip_high", "dual_clip")

    class Config(PluginConfig):
        type: Literal["ppo"] = "ppo"
        clip_low: float = Field(default=0.2, ge=0, lt=1, description="The ratio is clipped below at 1 − this.")
        clip_high: float = Field(
            default=0.28, ge=0, description="The ratio is clipped above at 1 + this; more than clip_low is clip-higher."
        )
        dual_clip: float | None = Field(
            default=3.0, gt=1, description="Upper bound of the ratio if the advantage is negative; null: none."
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
        low, high, dual = 1 - self.config.clip_low, 1 + self.config.clip_high, self.config.dual_clip
        advantages_N = inputs.advantages_N
        ratio_N = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        objective_N = clipped_surrogate(ratio_N, advantages_N, low, high)
        metrics = clip_metrics(ratio_N, advantages_N, low, high)
        if dual is not None:
            negative_N = advantages_N < 0
            objective_N = torch.where(negative_N, torch.maximum(objective_N, dual * advantages_N), objective_N)
            metrics["train/clip_fraction_dual"] = negative_N & (ratio_N.detach() > dual)
        return TokenLosses(-objective_N, metrics)


@LOSSES.register("gspo")
class GSPOLoss(PolicyLoss):
    """`gspo`: the clipped surrogate of whole sequences (Zheng et al. 2025, arXiv:2507.18071), or of turns.

    The ratio is that of the sequence, to the power 1/length: s = exp(mean_t(log π − log π_old)). The token form
    s_t = sg(s)·π_t/sg(π_t) (section 4.3 there) has the same gradient and lets tokens have different advantages.

    With `unit: turn` the mean is over the token's turn (turn-level importance sampling, Li et al. 2025,
    arXiv:2511.20718, equation 4; ROLL calls it the "segment" ratio): a turn that moved far is clipped, the turns before
    and after it are not. For a sequence of one turn both are the same.
    """

    ratio_settings = ("clip_low", "clip_high", "unit")

    class Config(PluginConfig):
        type: Literal["gspo"] = "gspo"
        unit: Literal["sequence", "turn"] = Field(
            default="sequence",
            description="Whose ratio it is: of the whole sequence, or of each turn of an episode on its own.",
        )
        clip_low: float = Field(default=3e-4, ge=0, lt=1, description="The ratio is clipped below at 1 − this.")
        clip_high: float = Field(default=4e-4, ge=0, description="The ratio is clipped above at 1 + this.")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        logprobs_N = inputs.logprobs_N
        mean_of = inputs.turn_mean if self.config.unit == "turn" else inputs.sequence_mean
        mean_N = mean_of(logprobs_N - inputs.old_logprobs_N).detach()
        ratio_N = (logprobs_N - logprobs_N.detach() + mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
        objective_N = clipped_surrogate(ratio_N, inputs.advantages_N, low, high)
        return TokenLosses(-objective_N, clip_metrics(ratio_N, inputs.advantages_N, low, high))


@LOSSES.register("cispo")
class CISPOLoss(PolicyLoss):
    """`cispo`: −sg(clip(ρ, 1 − clip_low, 1 + clip_high))·A·log π (MiniMax-M1, arXiv:2506.13585).

    The importance weight is clipped, not the objective: every token keeps its gradient.
    """

    ratio_settings = ("clip_low", "clip_high")

    class Config(PluginConfig):
        type: Literal["cispo"] = "cispo"
        clip_low: float = Field(default=0.2, ge=0, le=1, description="Weights are at least 1 − this; 1 is no bound.")
        clip_high: float = Field(default=0.28, ge=0, description="Weights are at most 1 + this.")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        ratio_N = policy_ratio(inputs.logprobs_N.detach(), inputs.old_logprobs_N)
        losses_N = -ratio_N.clamp(low, high) * inputs.advantages_N * inputs.logprobs_N
        metrics = {
            "train/ratio": ratio_N,
            "train/clip_fraction_high": ratio_N > high,
            "train/clip_fraction_low": ratio_N < low,
        }
        return TokenLosses(losses_N, metrics)


@LOSSES.register("sapo")
class SAPOLoss(PolicyLoss):
    """`sapo`: a soft gate in place of clipping (Gao et al. 2025, arXiv:2511.20347).

    ℓ = −(4/τ)·σ(τ·(ρ − 1))·A, with one τ for positive and one for other advantages. The gradient is that of ρ·A at
    ρ = 1 and vanishes smoothly for ρ far from 1, on both sides.
    """

    ratio_settings = ("tau_positive", "tau_negative")

    class Config(PluginConfig):
        type: Literal["sapo"] = "sapo"
        tau_positive: PositiveFloat = Field(default=1.0, description="τ where the advantage is positive.")
        tau_negative: PositiveFloat = Field(default=1.05, description="τ elsewhere.")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        advantages_N = inputs.advantages_N
        ratio_N = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        positive, negative = (
            ratio_N.new_full((), value) for value in (self.config.tau_positive, self.config.tau_negative)
        )
        tau_N = torch.where(advantages_N > 0, positive, negative)
        gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
        return TokenLosses(-gate_N * advantages_N, {"train/ratio": ratio_N.detach()})


@LOSSES.register("gmpo")
class GMPOLoss(PolicyLoss):
    """`gmpo`: geometric mean of the tokens' clipped ratios (Zhao et al. 2025, arXiv:2507.20673).

    A sequence's loss is −A·exp(mean_t(clipped log ρ_t)), A its mean advantage; as in PPO, log-ratios are clipped only
    in the direction of the advantage. Each token has the loss of its sequence, so `aggregation: seq_mean_token_mean`
    gives the paper's mean over sequences.
    """

    ratio_settings = ("clip_low", "clip_high")

    class Config(PluginConfig):
        type: Literal["gmpo"] = "gmpo"
        clip_low: PositiveFloat = Field(default=0.4, description="Log-ratios are clipped below at −this.")
        clip_high: PositiveFloat = Field(default=0.4, description="Log-ratios are clipped above at this.")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        low, high = -self.config.clip_low, self.config.clip_high
        sign_N = inputs.advantages_N.sign()
        log_ratio_N = bounded_log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        # min(s·x, s·clip(x)) bounds x above where A > 0 and below where A < 0
        clipped_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * log_ratio_N.clamp(low, high))
        ratio_N = inputs.sequence_mean(clipped_N).exp()
        losses_N = -inputs.sequence_mean(inputs.advantages_N) * ratio_N
        metrics = clip_metrics(log_ratio_N, inputs.advantages_N, low, high)
        return TokenLosses(losses_N, {**metrics, "train/ratio": ratio_N.detach()})


class DPPOLoss(PolicyLoss):
    """Divergence PPO (Qi et al. 2026, arXiv:2602.04879): tokens whose probability moved too far are masked.

    ℓ = −sg(min(ρ, ratio_cap))·A·log π, and 0 for tokens that have moved in the direction of their advantage by more
    than a bound on the divergence. The divergence is binary: between "this token" and "any other token".
    """

    ratio_settings = ("clip_low", "clip_high", "ratio_cap")

    @abstractmethod
    def divergence(self, logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
        """Return how far each token's probability moved, at least 0, shape [N]."""

    @no_grad
    def _moved_too_far(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Return which tokens are beyond their upper and their lower bound, shape [N] each."""
        moved_N = self.divergence(inputs.logprobs_N, inputs.old_logprobs_N)
        rose_N = inputs.logprobs_N > inputs.old_logprobs_N
        positive_N = inputs.advantages_N > 0
        too_high_N = positive_N & rose_N & (moved_N > self.config.clip_high)
        too_low_N = ~positive_N & ~rose_N & (moved_N > self.config.clip_low)
        return too_high_N, too_low_N

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        too_high_N, too_low_N = self._moved_too_far(inputs)
        ratio_N = policy_ratio(inputs.logprobs_N.detach(), inputs.old_logprobs_N)
        kept_N = ~(too_high_N | too_low_N)
        losses_N = -ratio_N.clamp(max=self.config.ratio_cap) * inputs.advantages_N * inputs.logprobs_N * kept_N
        metrics = {
            "train/ratio": ratio_N,
            "train/clip_fraction_high": too_high_N,
            "train/clip_fraction_low": too_low_N,
            "train/clip_fraction_dual": kept_N & (ratio_N > self.config.ratio_cap),
        }
        return TokenLosses(losses_N, metrics)


@LOSSES.register("dppo_tv")
class DPPOTVLoss(DPPOLoss):
    """`dppo_tv`: DPPO with a bound on the binary total variation |π − π_old| (Qi et al. 2026, arXiv:2602.04879)."""

    class Config(PluginConfig):
        type: Literal["dppo_tv"] = "dppo_tv"
        clip_low: PositiveFloat = Field(default=0.2, description="How far a probability may fall, A ≤ 0.")
        clip_high: PositiveFloat = Field(default=0.2, description="How far a probability may rise, A > 0.")
        ratio_cap: PositiveFloat = Field(default=20.0, description="Largest importance weight.")

    def divergence(self, logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
        return (logprobs_N.exp() - old_logprobs_N.exp()).abs()  # |π − π_old|


@LOSSES.register("dppo_kl")
class DPPOKLLoss(DPPOLoss):
    """`dppo_kl`: DPPO with a bound on the binary divergence KL(π_old‖π) (Qi et al. 2026, arXiv:2602.04879)."""

    class Config(PluginConfig):
        type: Literal["dppo_kl"] = "dppo_kl"
        clip_low: PositiveFloat = Field(default=0.05, description="Largest divergence where A ≤ 0, in nats.")
        clip_high: PositiveFloat = Field(default=0.05, description="Largest divergence where A > 0, in nats.")
        ratio_cap: PositiveFloat = Field(default=20.0, description="Largest importance weight.")

    def divergence(self, logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
        """Return π_old·log(π_old/π) + (1 − π_old)·log((1 − π_old)/(1 − π)), shape [N]."""
        new_N, old_N = logprobs_N.exp(), old_logprobs_N.exp()
        # at probability 1 both terms would be log 0
        rest = torch.log((1 - old_N + REST_EPSILON) / (1 - new_N + REST_EPSILON))
        return old_N * (old_logprobs_N - logprobs_N) + (1 - old_N) * rest
