"""The objective of preference training: weighted losses, and the negative log-likelihood of chosen responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_like.algorithms.base import item_metrics, refuse_bad_values
from roll_like.algorithms.lazy import torch
from roll_like.algorithms.preference.base import (
    PairedLoss,
    PairInputs,
    PreferenceLoss,
    UnpairedInputs,
    UnpairedLoss,
    widened,
)
from roll_like.errors import EngineError
from roll_like.values import Metric

if TYPE_CHECKING:
    from torch import Tensor


def preference_objective(inputs: PairInputs | UnpairedInputs, loss: PreferenceLoss) -> tuple[Tensor, dict[str, Metric]]:
    """Return Σ_i w_i·ℓ_i, plus the negative log-likelihood of chosen responses, and its metrics.

    The sum form lets micro-batches and ranks add up: gradients are summed, never averaged.

    Args:
        inputs: One micro-batch: pairs where the loss is `paired`, else samples.
        loss: Of one optimizer step: what `of_batch` returned where it `needs_batch`.

    Returns:
        The scalar to run `backward` on, and metrics whose reductions hold over micro-batches and ranks.
        `train/loss` and its parts are Sums: merge and reduce them once an optimizer step.

    Raises:
        EngineError: An input is infinite or NaN, a response has no token, a reference is missing, or pairs come to a
            loss of samples or the other way round.
    """
    if isinstance(inputs, PairInputs):
        if isinstance(loss, PairedLoss):
            return _of_pairs(inputs, loss)
        raise EngineError(f"{type(loss).__name__} takes single samples, found pairs", fix="choose a loss on pairs: dpo")
    if isinstance(loss, UnpairedLoss):
        return _of_samples(inputs, loss)
    raise EngineError(f"{type(loss).__name__} takes pairs, found single samples", fix="choose a loss on samples: kto")


def _of_pairs(inputs: PairInputs, loss: PairedLoss) -> tuple[Tensor, dict[str, Metric]]:
    refuse_bad_values(
        "pair",
        {
            "the policy's log-probabilities of chosen responses": (inputs.chosen_logprobs_P, _DIVERGED),
            "the policy's log-probabilities of rejected responses": (inputs.rejected_logprobs_P, _DIVERGED),
            "the reference's log-probabilities of chosen responses": (inputs.reference_chosen_logprobs_P, _REFERENCE),
            "the reference's log-probabilities of rejected responses": (
                inputs.reference_rejected_logprobs_P,
                _REFERENCE,
            ),
            "the weights": (inputs.weights_P, None),
            "the weights of tokens": (inputs.token_weights_P, None),
        },
        {"chosen response": inputs.chosen_tokens_P, "rejected response": inputs.rejected_tokens_P},
    )
    found = loss(inputs)
    preference = (inputs.weights_P * found.losses_P).sum()
    objective = preference
    sums = {"train/preference_loss": preference}
    if loss.config.nll_coefficient:
        sums["train/nll_loss"] = loss.config.nll_coefficient * _negative_log_likelihood(inputs, loss)
        objective = objective + sums["train/nll_loss"]
    counted_P = inputs.weights_P != 0
    chosen_P, rejected_P = found.chosen_rewards_P.detach(), found.rejected_rewards_P.detach()
    figures = {
        "preference/reward_chosen": chosen_P,
        "preference/reward_rejected": rejected_P,
        "preference/reward_margin": chosen_P - rejected_P,
        "preference/accuracy": share_above(chosen_P, rejected_P),
        "preference/logprob_chosen": inputs.chosen_logprobs_P,
        "preference/logprob_rejected": inputs.rejected_logprobs_P,
        "preference/length_chosen": inputs.chosen_tokens_P,
        "preference/length_rejected": inputs.rejected_tokens_P,
    }
    of_pairs = {name: (figure_P, counted_P) for name, figure_P in figures.items()}
    return objective, item_metrics({"train/loss": objective, **sums}, of_pairs, {"preference/pairs": counted_P})


def share_above(values: Tensor, others: Tensor) -> Tensor:
    """Return 1 where a value is above the other, ½ where they are equal: a model without a preference is at chance."""
    return (values > others).double() + 0.5 * (values == others).double()


def _negative_log_likelihood(inputs: PairInputs, loss: PairedLoss) -> Tensor:
    weights_P = {
        "token_mean": inputs.token_weights_P,
        "seq_mean_token_mean": inputs.weights_P / inputs.chosen_tokens_P,
        "seq_mean_token_sum": inputs.weights_P,
    }[loss.config.nll_aggregation]
    return -(weights_P * widened(inputs.chosen_logprobs_P)).sum()


def _of_samples(inputs: UnpairedInputs, loss: UnpairedLoss) -> tuple[Tensor, dict[str, Metric]]:
    refuse_bad_values(
        "sample",
        {
            "the policy's log-probabilities": (inputs.logprobs_S, _DIVERGED),
            "the reference's log-probabilities": (inputs.reference_logprobs_S, _REFERENCE),
            "the weights": (inputs.weights_S, None),
        },
        {"response": inputs.tokens_S},
    )
    found = loss(inputs)
    objective = (inputs.weights_S * found.losses_S).sum()
    counted_S = inputs.weights_S != 0
    chosen_S, rejected_S = counted_S & inputs.desirable_S, counted_S & ~inputs.desirable_S
    rewards_S, baseline = found.rewards_S.detach(), found.baseline.detach()
    above_S = share_above(rewards_S, baseline)
    figures = {
        "preference/reward_chosen": (rewards_S, chosen_S),
        "preference/reward_rejected": (rewards_S, rejected_S),
        "preference/accuracy": (torch.where(inputs.desirable_S, above_S, 1 - above_S), counted_S),
        "preference/logprob_chosen": (inputs.logprobs_S, chosen_S),
        "preference/logprob_rejected": (inputs.logprobs_S, rejected_S),
        "preference/length_chosen": (inputs.tokens_S, chosen_S),
        "preference/length_rejected": (inputs.tokens_S, rejected_S),
        "preference/baseline": (baseline.expand_as(rewards_S), counted_S),
    }
    sums = {"train/loss": objective, "train/preference_loss": objective}
    return objective, item_metrics(sums, figures, {"preference/samples": counted_S})


_DIVERGED = "lower training.optimizer.lr, or set model.dtype: bfloat16 where it is float16"
_REFERENCE = "check reference.path"
