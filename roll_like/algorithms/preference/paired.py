"""Losses on pairs that compare the policy with a reference model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from roll_like.algorithms.kl import MAX_LOG_RATIO
from roll_like.algorithms.lazy import logsigmoid, torch
from roll_like.algorithms.preference.base import (
    PairConfig,
    PairedLoss,
    PairInputs,
    PairLosses,
    bounded_exp,
    logistic,
)
from roll_like.config.base import PositiveFloat
from roll_like.registry import PREFERENCE_LOSSES

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]


class _ReferenceConfig(PairConfig):
    beta: PositiveFloat = Field(default=0.1, description="β: how strongly the policy is held to the reference.")
    length_normalised: bool = Field(
        default=False, description="Whether log-ratios are means over a response's tokens, in place of sums."
    )


def _rewards(config: _ReferenceConfig, inputs: PairInputs) -> tuple[Tensor, Tensor]:
    """Return β·log(π/π_ref) of chosen and rejected responses, shape [P] each."""
    chosen_P, rejected_P = inputs.log_ratios(length_normalised=config.length_normalised)
    return config.beta * chosen_P, config.beta * rejected_P


@PREFERENCE_LOSSES.register("dpo")
class DPOLoss(PairedLoss):
    """`dpo`: direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

    ℓ = −(1 − ε)·log σ(m) − ε·log σ(−m), m = β·(s(chosen) − s(rejected)), s = log(π/π_ref). ε > 0 is conservative DPO
    (Mitchell 2023): a share ε of labels is taken to be the wrong way round. With another `divergence` than
    `reverse_kl`, s is f'(π/π_ref) (f-DPO, Wang et al. 2023, arXiv:2309.16240, table 1).
    """

    class Config(_ReferenceConfig):
        type: Literal["dpo"] = "dpo"
        label_smoothing: float = Field(
            default=0.0, ge=0, le=0.5, description="ε: share of labels taken to be the wrong way round."
        )
        divergence: Divergence = Field(
            default="reverse_kl", description="Divergence from the reference that the policy is regularised by."
        )
        alpha: float | None = Field(
            default=None,
            gt=0,
            lt=1,
            description="α of `divergence: alpha`; towards 0 it is the reverse KL, towards 1 the forward KL.",
        )

        @model_validator(mode="after")
        def _alpha_has_its_divergence(self) -> Self:
            if self.divergence == "alpha" and self.alpha is None:
                raise ValueError("divergence is alpha, and alpha is not given; set alpha to a number between 0 and 1")
            if self.divergence != "alpha" and self.alpha is not None:
                raise ValueError(
                    f"alpha is {self.alpha}, and divergence is {self.divergence}, which has none; "
                    "set divergence: alpha, or leave alpha out"
                )
            return self

    def __call__(self, inputs: PairInputs) -> PairLosses:
        log_ratios = inputs.log_ratios(length_normalised=self.config.length_normalised)
        chosen_P, rejected_P = (self.config.beta * self._score(log_ratio_P) for log_ratio_P in log_ratios)
        return PairLosses(logistic(chosen_P - rejected_P, self.config.label_smoothing), chosen_P, rejected_P)

    def _score(self, log_ratio_P: Tensor) -> Tensor:
        """Return f'(t) for log t, shape [P], but for constants that a margin does not see."""
        match self.config.divergence:
            case "forward_kl":
                return 1 - bounded_exp(-log_ratio_P)
            case "js":
                return math.log(2) + logsigmoid(log_ratio_P)
            case "alpha":
                return _alpha_score(log_ratio_P, self.config.alpha)
        return log_ratio_P


def _alpha_score(log_ratio_P: Tensor, alpha: float) -> Tensor:
    """Return (1 − t^(−α))/α for log t; beyond t^(−α) = e²⁰ its tangent."""
    exponent_P = -alpha * log_ratio_P
    inside_P = exponent_P.clamp(max=MAX_LOG_RATIO)
    # expm1 keeps it exact where α or the log-ratio is small
    return -(torch.expm1(inside_P) + inside_P.exp() * (exponent_P - inside_P)) / alpha


@PREFERENCE_LOSSES.register("ipo")
class IPOLoss(PairedLoss):
    """`ipo`: (h − 1/(2β))², h the difference of log-ratios (Azar et al. 2023, arXiv:2310.12036, equation 17).

    The margin h is regressed to 1/(2β), so it does not grow without bound. Log-ratios are means over tokens, as in the
    authors' experiments; with `length_normalised: false` they are sums, as in the paper.
    """

    class Config(_ReferenceConfig):
        type: Literal["ipo"] = "ipo"
        length_normalised: bool = Field(
            default=True, description="Whether log-ratios are means over a response's tokens, in place of sums."
        )

    def __call__(self, inputs: PairInputs) -> PairLosses:
        beta = self.config.beta
        chosen_P, rejected_P = inputs.log_ratios(length_normalised=self.config.length_normalised)
        losses_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
        return PairLosses(losses_P, beta * chosen_P, beta * rejected_P)


@PREFERENCE_LOSSES.register("hinge")
class HingeLoss(PairedLoss):
    """`hinge`: max(0, 1 − m), m the margin of `dpo` (SLiC, Zhao et al. 2023, arXiv:2305.10425; RSO, arXiv:2309.06657).

    A pair whose margin is above 1 has no gradient.
    """

    class Config(_ReferenceConfig):
        type: Literal["hinge"] = "hinge"

    def __call__(self, inputs: PairInputs) -> PairLosses:
        chosen_P, rejected_P = _rewards(self.config, inputs)
        return PairLosses(torch.relu(1 - (chosen_P - rejected_P)), chosen_P, rejected_P)


@PREFERENCE_LOSSES.register("robust")
class RobustLoss(PairedLoss):
    """`robust`: DPO, unbiased under flipped labels (Chowdhury et al. 2024, arXiv:2403.00409).

    ℓ = (−(1 − ε)·log σ(m) + ε·log σ(−m))/(1 − 2ε), m the margin of `dpo`. If a share ε of labels is flipped, its
    expectation is DPO's loss under the correct labels. It may be negative.
    """

    class Config(_ReferenceConfig):
        type: Literal["robust"] = "robust"
        label_smoothing: float = Field(default=0.1, ge=0, lt=0.5, description="ε: share of labels that are flipped.")

    def __call__(self, inputs: PairInputs) -> PairLosses:
        flipped = self.config.label_smoothing
        chosen_P, rejected_P = _rewards(self.config, inputs)
        margins_P = chosen_P - rejected_P
        losses_P = ((1 - flipped) * logistic(margins_P) - flipped * logistic(-margins_P)) / (1 - 2 * flipped)
        return PairLosses(losses_P, chosen_P, rejected_P)


@PREFERENCE_LOSSES.register("sppo")
class SPPOLoss(PairedLoss):
    """`sppo`: self-play with hard preferences (Wu et al. 2024, arXiv:2405.00675, equation 4.7).

    ℓ = (r(chosen) − 1/(2β))² + (r(rejected) + 1/(2β))², r = log(π/π_ref); the paper's η is 1/β. The preference is taken
    to be certain (1 and 0), where the paper estimates its probability.
    """

    class Config(PairConfig):
        type: Literal["sppo"] = "sppo"
        beta: PositiveFloat = Field(default=0.001, description="β: log-ratios are drawn towards ±1/(2β).")

    def __call__(self, inputs: PairInputs) -> PairLosses:
        beta = self.config.beta
        chosen_P, rejected_P = inputs.log_ratios()
        losses_P = (chosen_P - 0.5 / beta).square() + (rejected_P + 0.5 / beta).square()
        return PairLosses(losses_P, beta * chosen_P, beta * rejected_P)


@PREFERENCE_LOSSES.register("apo_zero")
class APOZeroLoss(PairedLoss):
    """`apo_zero`: 1 − σ(r(chosen)) + σ(r(rejected)), r = β·log(π/π_ref) (D'Oosterlinck et al. 2024, arXiv:2408.06266).

    Equation 7: chosen responses become more likely and rejected ones less likely, independently of each other. For
    chosen responses that are better than the policy's own. The constant 1 keeps the loss at 0 or above.
    """

    class Config(_ReferenceConfig):
        type: Literal["apo_zero"] = "apo_zero"

    def __call__(self, inputs: PairInputs) -> PairLosses:
        chosen_P, rejected_P = _rewards(self.config, inputs)
        return PairLosses(torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P), chosen_P, rejected_P)


@PREFERENCE_LOSSES.register("apo_down")
class APODownLoss(PairedLoss):
    """`apo_down`: σ(r(chosen)) + 1 − σ(r(chosen) − r(rejected)), r = β·log(π/π_ref).

    D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8: both responses become less likely, the rejected one more
    so. For chosen responses that are worse than the policy's own.
    """

    class Config(_ReferenceConfig):
        type: Literal["apo_down"] = "apo_down"

    def __call__(self, inputs: PairInputs) -> PairLosses:
        chosen_P, rejected_P = _rewards(self.config, inputs)
        return PairLosses(torch.sigmoid(chosen_P) + torch.sigmoid(rejected_P - chosen_P), chosen_P, rejected_P)
