"""Losses on single samples that are desirable or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from roll_like.algorithms.lazy import no_grad, torch
from roll_like.algorithms.preference.base import (
    MismatchedResponses,
    UnpairedInputs,
    UnpairedLoss,
    UnpairedLosses,
    widened,
)
from roll_like.config.base import PluginConfig, PositiveFloat
from roll_like.errors import EngineError
from roll_like.registry import PREFERENCE_LOSSES

if TYPE_CHECKING:
    from torch import Tensor


@PREFERENCE_LOSSES.register("kto")
class KTOLoss(UnpairedLoss):
    """`kto`: Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306).

    ℓ = λ_D·(1 − σ(β·(r − z))) for desirable samples and λ_U·(1 − σ(β·(z − r))) for the others, r = log(π/π_ref). The
    baseline z = max(0, mean of log(π/π_ref) over mismatched prompts and responses) estimates KL(π‖π_ref); it has no
    gradient and is one number for the whole optimizer step, computed in `of_batch`.
    """

    needs_batch: ClassVar[bool] = True

    class Config(PluginConfig):
        type: Literal["kto"] = "kto"
        beta: PositiveFloat = Field(default=0.1, description="β: how strongly the policy is held to the reference.")
        desirable_weight: PositiveFloat = Field(default=1.0, description="λ_D: weight of desirable samples.")
        undesirable_weight: PositiveFloat = Field(
            default=1.0,
            description="λ_U: weight of the others. Shares times weights should be within 1 to 4/3 of each other.",
        )
        length_normalised: bool = Field(
            default=False, description="Whether log-ratios are means over a response's tokens, in place of sums."
        )

    def __init__(self, config: Any, baseline: Tensor | None = None) -> None:
        super().__init__(config)
        self._baseline = baseline

    @no_grad
    def of_batch(self, batch: MismatchedResponses) -> KTOLoss:
        """Return the loss with the baseline of a whole optimizer step.

        Raises:
            EngineError: There is no mismatched response, or one is infinite or NaN.
        """
        log_ratios_M = widened(batch.logprobs_M) - widened(batch.reference_logprobs_M)
        if self.config.length_normalised:
            log_ratios_M = log_ratios_M / batch.tokens_M
        baseline = log_ratios_M.mean()
        if not baseline.isfinite():
            raise EngineError(
                f"the KL baseline of {len(log_ratios_M)} mismatched responses is {float(baseline)}; "
                "at least one response, and finite log-probabilities, were expected",
                fix="a step needs 2 samples or more; lower training.optimizer.lr if the policy diverged",
            )
        return KTOLoss(self.config, baseline.clamp(min=0))

    def __call__(self, inputs: UnpairedInputs) -> UnpairedLosses:
        if self._baseline is None:
            raise EngineError("kto needs the KL baseline of its whole optimizer step: call of_batch first")
        beta = self.config.beta
        log_ratios_S = inputs.log_ratios(length_normalised=self.config.length_normalised)
        gain_S = torch.where(inputs.desirable_S, 1.0, -1.0) * (log_ratios_S - self._baseline)
        # of the inputs' type: as plain numbers both would be float32
        desirable = gain_S.new_tensor(self.config.desirable_weight)
        undesirable = gain_S.new_tensor(self.config.undesirable_weight)
        weights_S = torch.where(inputs.desirable_S, desirable, undesirable)
        losses_S = weights_S * torch.sigmoid(-beta * gain_S)
        return UnpairedLosses(losses_S, beta * log_ratios_S, beta * self._baseline)
