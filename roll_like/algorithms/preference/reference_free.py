"""Losses on pairs that need no reference model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from roll_like.algorithms.lazy import logsigmoid, torch
from roll_like.algorithms.preference.base import PairConfig, PairedLoss, PairInputs, PairLosses, logistic
from roll_like.config.base import PositiveFloat
from roll_like.registry import PREFERENCE_LOSSES

if TYPE_CHECKING:
    from torch import Tensor

#: Mean log-probabilities are at most −this where odds are computed: at probability 1 odds are infinite.
CERTAIN = 1e-6


@PREFERENCE_LOSSES.register("cpo")
class CPOLoss(PairedLoss):
    """`cpo`: contrastive preference optimization (Xu et al. 2024, arXiv:2401.08417).

    `dpo` with a uniform reference, m = β·(log π(chosen) − log π(rejected)), plus the negative log-likelihood of chosen
    responses, which regularises the policy in place of a reference.
    """

    needs_reference = False

    class Config(PairConfig):
        type: Literal["cpo"] = "cpo"
        beta: PositiveFloat = Field(default=0.1, description="β: scale of the margin.")
        label_smoothing: float = Field(
            default=0.0, ge=0, le=0.5, description="ε: share of labels taken to be the wrong way round."
        )
        length_normalised: bool = Field(
            default=False, description="Whether log-probabilities are means over a response's tokens."
        )
        nll_coefficient: float = Field(
            default=1.0, ge=0, description="Weight of the chosen responses' negative log-likelihood."
        )

    def __call__(self, inputs: PairInputs) -> PairLosses:
        logprobs = inputs.policy_logprobs(length_normalised=self.config.length_normalised)
        chosen_P, rejected_P = (self.config.beta * logprobs_P for logprobs_P in logprobs)
        return PairLosses(logistic(chosen_P - rejected_P, self.config.label_smoothing), chosen_P, rejected_P)


@PREFERENCE_LOSSES.register("simpo")
class SimPOLoss(PairedLoss):
    """`simpo`: −log σ(β·(log π(chosen)/n_c − log π(rejected)/n_r) − γ) (Meng et al. 2024, arXiv:2405.14734).

    n is a response's number of tokens, γ the target margin.
    """

    needs_reference = False

    class Config(PairConfig):
        type: Literal["simpo"] = "simpo"
        beta: PositiveFloat = Field(default=2.0, description="β: scale of mean log-probabilities.")
        gamma: float = Field(default=1.0, ge=0, description="γ: margin that a pair's rewards should reach.")
        label_smoothing: float = Field(
            default=0.0, ge=0, le=0.5, description="ε: share of labels taken to be the wrong way round."
        )

    def __call__(self, inputs: PairInputs) -> PairLosses:
        chosen_P, rejected_P = (
            self.config.beta * logprobs_P for logprobs_P in inputs.policy_logprobs(length_normalised=True)
        )
        margins_P = chosen_P - rejected_P - self.config.gamma
        return PairLosses(logistic(margins_P, self.config.label_smoothing), chosen_P, rejected_P)


@PREFERENCE_LOSSES.register("orpo")
class ORPOLoss(PairedLoss):
    """`orpo`: supervised training with an odds-ratio penalty (Hong et al. 2024, arXiv:2403.07691).

    ℓ = −β·log σ(log(odds(chosen)/odds(rejected))), odds = p/(1 − p), p the geometric mean of a response's token
    probabilities; plus the negative log-likelihood of chosen responses. β is the paper's λ.
    """

    needs_reference = False

    class Config(PairConfig):
        type: Literal["orpo"] = "orpo"
        beta: PositiveFloat = Field(default=0.1, description="Weight of the odds-ratio term, the paper's λ.")
        nll_coefficient: float = Field(
            default=1.0, ge=0, description="Weight of the chosen responses' negative log-likelihood."
        )

    def __call__(self, inputs: PairInputs) -> PairLosses:
        beta = self.config.beta
        chosen_P, rejected_P = inputs.policy_logprobs(length_normalised=True)
        log_odds_ratio_P = chosen_P - rejected_P - (_log_of_rest(chosen_P) - _log_of_rest(rejected_P))
        return PairLosses(-beta * logsigmoid(log_odds_ratio_P), beta * chosen_P, beta * rejected_P)


def _log_of_rest(logprobs_P: Tensor) -> Tensor:
    """Return log(1 − p) for log p, shape [P], exact at both ends (Mächler 2012)."""
    bounded_P = logprobs_P.clamp(max=-CERTAIN)
    near_one_P = torch.log(-torch.expm1(bounded_P))
    return torch.where(bounded_P > -math.log(2), near_one_P, torch.log1p(-bounded_P.exp()))
