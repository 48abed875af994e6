"""What preference losses have in common: from log-probabilities of whole responses to a loss for each item.

An item is a pair [P] (a chosen and a rejected response to one prompt) or, in unpaired losses, a sample [S] that is
desirable or not. Log-probabilities are sums over a response's tokens, as `sequence_logprobs` computes them. All is
computed in float32, or in float64 where inputs are. A user's own loss comes in through the registry:

    @PREFERENCE_LOSSES.register("exponential")
    class Exponential(PairedLoss):
        class Config(PairConfig):
            type: Literal["exponential"] = "exponential"

        def __call__(self, inputs: PairInputs) -> PairLosses:
            chosen_P, rejected_P = inputs.log_ratios()
            return PairLosses(bounded_exp(rejected_P - chosen_P), chosen_P, rejected_P)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from roll_like.algorithms.base import Algorithm
from roll_like.algorithms.kl import MAX_LOG_RATIO
from roll_like.algorithms.lazy import logsigmoid, torch
from roll_like.config.base import PluginConfig
from roll_like.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

NLLAggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInputs:
    """The pairs of one micro-batch, shape [P] each. Both responses of a pair are in one micro-batch.

    Attributes:
        chosen_logprobs_P: Of the policy, in nats, summed over the chosen response's tokens, with gradient.
        rejected_logprobs_P: The same of the rejected response.
        chosen_tokens_P: How many tokens the chosen response has, at least 1.
        rejected_tokens_P: The same of the rejected response.
        weights_P: Weight of each pair in the sum: 1/(pairs of the optimizer step, over all micro-batches and ranks). 0
            marks filler, which gives each rank the same number of micro-batches; it changes neither gradient nor
            metrics.
        token_weights_P: Of each token of a pair's chosen response in the negative log-likelihood: 1/(tokens of all
            chosen responses of the optimizer step), 0 where `weights_P` is.
        reference_chosen_logprobs_P: Of the reference model, summed like the policy's; None where there is none.
        reference_rejected_logprobs_P: The same of the rejected response.
    """

    chosen_logprobs_P: Tensor
    rejected_logprobs_P: Tensor
    chosen_tokens_P: Tensor
    rejected_tokens_P: Tensor
    weights_P: Tensor
    token_weights_P: Tensor
    reference_chosen_logprobs_P: Tensor | None = None
    reference_rejected_logprobs_P: Tensor | None = None

    def policy_logprobs(self, *, length_normalised: bool = False) -> tuple[Tensor, Tensor]:
        """Return log π of chosen and rejected responses, shape [P] each: sums over tokens, or means."""
        chosen_P, rejected_P = widened(self.chosen_logprobs_P), widened(self.rejected_logprobs_P)
        return self._averaged(chosen_P, rejected_P) if length_normalised else (chosen_P, rejected_P)

    def log_ratios(self, *, length_normalised: bool = False) -> tuple[Tensor, Tensor]:
        """Return log π − log π_ref of chosen and rejected responses, shape [P] each: sums over tokens, or means.

        Raises:
            EngineError: There is no reference.
        """
        if self.reference_chosen_logprobs_P is None or self.reference_rejected_logprobs_P is None:
            raise without_reference("pairs")
        chosen_P = widened(self.chosen_logprobs_P) - widened(self.reference_chosen_logprobs_P)
        rejected_P = widened(self.rejected_logprobs_P) - widened(self.reference_rejected_logprobs_P)
        return self._averaged(chosen_P, rejected_P) if length_normalised else (chosen_P, rejected_P)

    def _averaged(self, chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, Tensor]:
        return chosen_P / self.chosen_tokens_P, rejected_P / self.rejected_tokens_P


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedInputs:
    """The samples of one micro-batch, shape [S] each.

    Attributes:
        logprobs_S: Of the policy, in nats, summed over the response's tokens, with gradient.
        tokens_S: How many tokens the response has, at least 1.
        desirable_S: Whether the response is desirable, bool.
        weights_S: Weight of each sample in the sum: 1/(samples of the optimizer step, over all micro-batches and
            ranks). 0 marks filler, as in `PairInputs`.
        reference_logprobs_S: Of the reference model, summed like the policy's; None where there is none.
    """

    logprobs_S: Tensor
    tokens_S: Tensor
    desirable_S: Tensor
    weights_S: Tensor
    reference_logprobs_S: Tensor | None = None

    def log_ratios(self, *, length_normalised: bool = False) -> Tensor:
        """Return log π − log π_ref of each response, shape [S]: sums over tokens, or means.

        Raises:
            EngineError: There is no reference.
        """
        if self.reference_logprobs_S is None:
            raise without_reference("samples")
        log_ratios_S = widened(self.logprobs_S) - widened(self.reference_logprobs_S)
        return log_ratios_S / self.tokens_S if length_normalised else log_ratios_S


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedResponses:
    """Responses scored after prompts of other samples, of one whole optimizer step, without gradient, shape [M] each.

    Attributes:
        logprobs_M: Of the policy, summed over the response's tokens.
        reference_logprobs_M: Of the reference model.
        tokens_M: How many tokens each response has, at least 1.
    """

    logprobs_M: Tensor
    reference_logprobs_M: Tensor
    tokens_M: Tensor


@dataclass(frozen=True, slots=True)
class PairLosses:
    """What a paired loss returns, shape [P] each.

    Attributes:
        losses_P: Loss of each pair, with gradient, before weights and without the negative log-likelihood.
        chosen_rewards_P: Implicit reward of the chosen response, scaled by β.
        rejected_rewards_P: The same of the rejected response.
    """

    losses_P: Tensor
    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor


@dataclass(frozen=True, slots=True)
class UnpairedLosses:
    """What an unpaired loss returns.

    Attributes:
        losses_S: Loss of each sample, with gradient, before weights, shape [S].
        rewards_S: Implicit reward of each sample, scaled by β, shape [S].
        baseline: What rewards are compared with, scaled like them, without gradient; a scalar.
    """

    losses_S: Tensor
    rewards_S: Tensor
    baseline: Tensor


class PairConfig(PluginConfig):
    """What every paired loss can add: the negative log-likelihood of chosen responses."""

    nll_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the chosen responses' negative log-likelihood, added to the loss (α of RPO).",
    )
    nll_aggregation: NLLAggregation = Field(
        default="token_mean",
        description="What that likelihood is a mean over: the step's chosen tokens; pairs, of means over tokens; "
        "or pairs, of sums over tokens.",
    )


class PreferenceLoss(Algorithm):
    """Base of preference losses."""

    #: Whether it needs log-probabilities of a reference model.
    needs_reference: ClassVar[bool] = True
    #: Whether its items are pairs (`PairInputs`) or single samples (`UnpairedInputs`).
    paired: ClassVar[bool] = True
    #: Whether it needs statistics of the whole optimizer step (`of_batch`); costs one more forward pass.
    needs_batch: ClassVar[bool] = False


class PairedLoss(PreferenceLoss, ABC):
    """Base of losses on pairs; its `Config` derives from `PairConfig`."""

    Config: ClassVar[type[PluginConfig]] = PairConfig

    @abstractmethod
    def __call__(self, inputs: PairInputs) -> PairLosses:
        """Return the loss of each pair, before weights.

        Raises:
            EngineError: `needs_reference`, and there is none.
        """


class UnpairedLoss(PreferenceLoss, ABC):
    """Base of losses on single samples."""

    paired: ClassVar[bool] = False

    def of_batch(self, batch: MismatchedResponses) -> UnpairedLoss:
        """Return the loss for one optimizer step, with the statistics of its whole batch.

        Called if `needs_batch`, on every rank with the same responses in any order.
        """
        raise EngineError(f"{type(self).__name__} has needs_batch, but no of_batch for {len(batch.logprobs_M)} items")

    @abstractmethod
    def __call__(self, inputs: UnpairedInputs) -> UnpairedLosses:
        """Return the loss of each sample, before weights.

        Raises:
            EngineError: `needs_reference`, and there is none.
        """


def sequence_logprobs(logprobs_N: Tensor, response_N: Tensor, responses: int) -> tuple[Tensor, Tensor]:
    """Return the sum of token log-probabilities of each response, and its number of tokens, shape [R] each.

    >>> logprobs, tokens = sequence_logprobs(torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([1, 0, 1]), 2)
    >>> logprobs.tolist(), tokens.tolist()
    ([-2.0, -5.0], [1, 2])

    Args:
        logprobs_N: Of the responses' tokens, of whole responses.
        response_N: Index of each token's response, 0 ≤ index < `responses`, int64.
        responses: How many there are, R.
    """
    wide_N = widened(logprobs_N)
    logprobs_R = wide_N.new_zeros(responses).index_add(0, response_N, wide_N)
    return logprobs_R, torch.bincount(response_N, minlength=responses)


def widened(values: Tensor) -> Tensor:
    """Return values in float32 (float64 stays): sums over responses would lose precision in 16 bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def logistic(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return −(1 − ε)·log σ(m) − ε·log σ(−m): the logistic loss where a share ε of labels is the wrong way round."""
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x), and its tangent at 20 beyond: finite, with a gradient that does not vanish."""
    inside = x.clamp(max=MAX_LOG_RATIO)
    return inside.exp() * (1 + (x - inside))


def without_reference(items: str) -> EngineError:
    """Return the error of a loss that needs a reference where there is none."""
    return EngineError(
        f"this preference loss compares with a reference model, and these {items} have none of its log-probabilities",
        fix="add a `reference` section, or choose a loss without one: cpo, orpo or simpo",
    )
