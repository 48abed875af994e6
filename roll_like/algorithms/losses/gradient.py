"""Policy gradient losses: weighted log-probabilities, without clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from roll_like.algorithms.kl import MAX_LOG_RATIO
from roll_like.algorithms.lazy import torch
from roll_like.algorithms.losses.base import LossInputs, PolicyLoss, TokenLosses, policy_ratio
from roll_like.config.base import PluginConfig, PositiveFloat
from roll_like.registry import LOSSES
from roll_like.types import PolicySample

if TYPE_CHECKING:
    from torch import Tensor


@LOSSES.register("reinforce")
class ReinforceLoss(PolicyLoss):
    """`reinforce`: −A·log π (Williams 1992), or −sg(ρ)·A·log π with `importance_weight`."""

    ratio_settings = ("importance_weight",)

    class Config(PluginConfig):
        type: Literal["reinforce"] = "reinforce"
        importance_weight: bool = Field(
            default=False, description="Multiply by π/π_old, which is 1 in the first update on a sample."
        )

    @classmethod
    def uses_old_policy(cls, config: Config) -> bool:
        return config.importance_weight

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        losses_N = -inputs.advantages_N * inputs.logprobs_N
        if not self.config.importance_weight:
            return TokenLosses(losses_N, {})
        ratio_N = policy_ratio(inputs.logprobs_N.detach(), inputs.old_logprobs_N)
        return TokenLosses(ratio_N * losses_N, {"train/ratio": ratio_N})


@LOSSES.register("gpg")
class GPGLoss(PolicyLoss):
    """`gpg`: −A·log π (Chu et al. 2025, arXiv:2504.02546); goes with `advantage: gpg`."""

    class Config(PluginConfig):
        type: Literal["gpg"] = "gpg"

    @classmethod
    def uses_old_policy(cls, config: Config) -> bool:  # noqa: ARG003
        return False

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(-inputs.advantages_N * inputs.logprobs_N, {})


@LOSSES.register("dro")
class DROLoss(PolicyLoss):
    """`dro`: −A·log π + (β/2)·(log π − log π_old)², token by token.

    The policy's part of direct reward optimisation (Richemond et al. 2024, arXiv:2405.19107): a quadratic penalty on
    the log-ratio in place of clipping. The log-ratio is not bounded: at any distance the penalty pulls back to π_old.
    """

    zero_advantage_moves = True
    ratio_settings = ("beta",)

    class Config(PluginConfig):
        type: Literal["dro"] = "dro"
        beta: PositiveFloat = Field(default=0.05, description="Weight of the penalty.")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        penalty_N = 0.5 * self.config.beta * (inputs.logprobs_N - inputs.old_logprobs_N).square()
        losses_N = -inputs.advantages_N * inputs.logprobs_N + penalty_N
        return TokenLosses(losses_N, {"train/ratio": policy_ratio(inputs.logprobs_N.detach(), inputs.old_logprobs_N)})


@LOSSES.register("kimi")
class KimiLoss(PolicyLoss):
    """`kimi`: −A·log π + (τ/2)·(log π(y) − log π_old(y))² of the whole sequence y.

    Online mirror descent as in Kimi k1.5 (Kimi Team 2025, arXiv:2501.12599, equation 3). Each token carries an equal
    share of its sequence's penalty, so `aggregation: seq_mean_token_sum` gives the paper's objective. The log-ratio is
    not bounded: at any distance the penalty pulls back to π_old.
    """

    zero_advantage_moves = True
    ratio_settings = ("tau",)

    class Config(PluginConfig):
        type: Literal["kimi"] = "kimi"
        tau: PositiveFloat = Field(default=0.05, description="Weight of the penalty.")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        log_ratio_N = inputs.sequence_sum(inputs.logprobs_N - inputs.old_logprobs_N)
        length_N = inputs.sequence_sum(torch.ones_like(inputs.weights_N))
        penalty_N = 0.5 * self.config.tau * log_ratio_N.square() / length_N
        losses_N = -inputs.advantages_N * inputs.logprobs_N + penalty_N
        return TokenLosses(losses_N, {"train/ratio": policy_ratio(inputs.logprobs_N.detach(), inputs.old_logprobs_N)})


@LOSSES.register("topr")
class TOPRLoss(PolicyLoss):
    """`topr`: −w·A·log π with w = 1 for good sequences and min(π(y)/π_old(y), cap) for bad ones.

    Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv:2503.14286): answers with A ≥ 0 are always reinforced, bad
    ones are pushed down less the less likely they have become. For the paper's μ, set `old_logprobs: behaviour`.
    """

    needs_ratio = True

    class Config(PluginConfig):
        type: Literal["topr"] = "topr"
        negative_cap: PositiveFloat = Field(default=1.0, description="Largest weight of a token with A < 0.")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        ratio_N = sequence_log_ratio(inputs).exp()
        negative_N = inputs.advantages_N < 0
        weight_N = ratio_N.clamp(max=self.config.negative_cap).where(negative_N, ratio_N.new_ones(()))
        metrics = {
            "train/ratio": ratio_N,
            "train/clip_fraction_high": negative_N & (ratio_N > self.config.negative_cap),
        }
        return TokenLosses(-weight_N * inputs.advantages_N * inputs.logprobs_N, metrics)


@LOSSES.register("vespo")
class VESPOLoss(PolicyLoss):
    """`vespo`: −φ(W)·A·log π with φ(W) = W^k·exp(λ·(1 − W)), W = π(y)/π_old(y) of the whole sequence.

    Variational sequence-level soft policy optimisation (arXiv:2602.10693; as in github.com/FloyedShen/VESPO and TRL).
    φ has no gradient. It is 1 on policy, has its maximum at W = k/λ, and fades on both sides: slowly where k and λ are
    small. k and λ are `k_positive` and `lam_positive` where A ≥ 0, else the other two. The product of a sequence's
    ratios is taken as it is, without a root of its length. For the paper's μ, set `old_logprobs: behaviour`.
    """

    needs_ratio = True

    class Config(PluginConfig):
        type: Literal["vespo"] = "vespo"
        k_positive: float = Field(default=2.0, ge=0, description="Exponent of W where A ≥ 0.")
        lam_positive: float = Field(default=3.0, ge=0, description="Decay of large W where A ≥ 0.")
        k_negative: float = Field(default=3.0, ge=0, description="Exponent of W where A < 0.")
        lam_negative: float = Field(default=2.0, ge=0, description="Decay of large W where A < 0.")

        @model_validator(mode="after")
        def _large_ratios_are_bounded(self) -> Self:
            for sign in ("positive", "negative"):
                k, lam = getattr(self, f"k_{sign}"), getattr(self, f"lam_{sign}")
                if k > 0 and lam == 0:
                    raise ValueError(
                        f"with lam_{sign}: 0 the weight W^{k:g} grows without a bound; set lam_{sign} above 0, or "
                        f"k_{sign}: 0 as well"
                    )
            return self

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        config, log_ratio_N = self.config, sequence_log_ratio(inputs)
        negative_N = inputs.advantages_N < 0

        def by_sign(negative: float, positive: float) -> Tensor:
            return torch.where(negative_N, log_ratio_N.new_tensor(negative), log_ratio_N.new_tensor(positive))

        k_N, lam_N = by_sign(config.k_negative, config.k_positive), by_sign(config.lam_negative, config.lam_positive)
        weight_N = (k_N * log_ratio_N - lam_N * torch.expm1(log_ratio_N)).exp()
        losses_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
        return TokenLosses(losses_N, {"train/ratio": log_ratio_N.exp(), "train/loss_weight": weight_N})


def sequence_log_ratio(inputs: LossInputs) -> Tensor:
    """Return log π(y) − log π_old(y) of each token's sequence y, without gradient, within ±20, shape [N]."""
    log_ratio_N = inputs.sequence_sum(inputs.logprobs_N.detach() - inputs.old_logprobs_N)
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@LOSSES.register("raft")
class RAFTLoss(PolicyLoss):
    """`raft`: −log π of samples with a large advantage; the others are left out (Dong et al. 2023, arXiv:2304.06767).

    Selected samples have equal weight and the others are not pushed down (Xiong et al. 2025, arXiv:2504.11343).
    Denominators are over the selected samples.
    """

    zero_advantage_moves = True
    ignores_advantages = True

    class Config(PluginConfig):
        type: Literal["raft"] = "raft"
        min_advantage: float = Field(
            default=0.0, description="Train on samples whose mean advantage is above this; the others are left out."
        )

    @classmethod
    def uses_old_policy(cls, config: Config) -> bool:  # noqa: ARG003
        return False

    def selects(self, sample: PolicySample) -> bool:
        if not sample.loss_mask.any():
            return False
        return bool(sample.advantages[sample.loss_mask].mean() > self.config.min_advantage)

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(-inputs.logprobs_N, {})
