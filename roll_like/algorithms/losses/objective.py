"""The objective: policy loss, off-policy correction, KL penalty and entropy bonus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from roll_like.algorithms.base import item_metrics, refuse_bad_values
from roll_like.algorithms.correction import correct, mismatch, trainer_logprobs
from roll_like.algorithms.kl import divergence
from roll_like.algorithms.lazy import no_grad, torch
from roll_like.algorithms.losses.base import LossInputs, PolicyLoss, policy_ratio
from roll_like.errors import EngineError
from roll_like.values import (
    LOG_BIN_WIDTH,
    LOG_BINS,
    Correlation,
    EffectiveShare,
    LogQuantile,
    Max,
    Metric,
)

if TYPE_CHECKING:
    from torch import Tensor

    from roll_like.config.algorithm import CorrectionConfig, KLConfig

QUANTILES = {"mismatch/ratio_p01": 0.01, "mismatch/ratio_p50": 0.5, "mismatch/ratio_p99": 0.99}


def policy_objective(
    inputs: LossInputs,
    loss: PolicyLoss,
    kl: KLConfig | None,
    entropy_coefficient: float,
    correction: CorrectionConfig,
) -> tuple[Tensor, dict[str, Metric]]:
    """Return Σ_t w_t·(ℓ_t·c_t + β·k_t − η·H_t) and its metrics.

    The sum form lets micro-batches and ranks add up: gradients are summed, never averaged.

    Args:
        loss: Policy loss, ℓ.
        kl: KL penalty, β·k; None for none. `train/kl` is logged whenever there are reference log-probabilities.
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
    found = correct(inputs, correction)
    policy_term = (inputs.weights_N * token_losses.losses_N * found.weights_N).sum()
    objective = policy_term
    sums = {"train/policy_loss": policy_term}
    figures: dict[str, Tensor] = {"train/entropy": inputs.entropy_N, **token_losses.metrics, **mismatch(inputs)}
    figures["train/old_kl"] = divergence(inputs.old_logprobs_N, inputs.logprobs_N.detach(), "k3")
    figures["correction/weight"] = found.weights_N
    figures["correction/capped_fraction"] = found.capped_N
    figures["correction/rejected_fraction"] = found.rejected_N
    if inputs.reference_logprobs_N is not None:
        estimator = kl.estimator if kl is not None else "k3"
        through = kl is not None and kl.straight_through
        divergence_N = divergence(inputs.logprobs_N, inputs.reference_logprobs_N, estimator, straight_through=through)
        figures["train/kl"] = divergence_N
        if kl is not None:
            if kl.importance_weight:
                divergence_N = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N) * divergence_N
            sums["train/kl_loss"] = kl.coefficient * (inputs.weights_N * divergence_N).sum()
            objective = objective + sums["train/kl_loss"]
    elif kl is not None:
        raise EngineError(
            "a KL penalty needs the reference model's log-probabilities, and this batch has none",
            fix="add a `reference` section, or set algorithm.kl.use: none",
        )
    if entropy_coefficient:
        objective = objective - entropy_coefficient * (inputs.weights_N * inputs.entropy_N).sum()
    return objective, _metrics({"train/loss": objective, **sums}, figures, inputs, found.weights_N)


@no_grad
def _metrics(
    sums: Mapping[str, Tensor], figures: Mapping[str, Tensor], inputs: LossInputs, correction_N: Tensor
) -> dict[str, Metric]:
    counted = inputs.weights_N != 0
    fresh, shown = counted, {name: (figure, counted) for name, figure in figures.items()}
    if inputs.replayed_N is not None:
        fresh = counted & ~inputs.replayed_N
        shown |= {name: (figures[name], fresh) for name in figures if name.startswith("mismatch/")}
        ratio_N = policy_ratio(trainer_logprobs(inputs), inputs.behaviour_logprobs_N)
        shown["replay/ratio"] = ratio_N, counted & inputs.replayed_N
    metrics = item_metrics(sums, shown, {"train/tokens": counted})
    if not (count := metrics["train/tokens"].value):
        return metrics
    weights = correction_N[counted].double()
    trainer, behaviour = trainer_logprobs(inputs)[fresh].double(), inputs.behaviour_logprobs_N[fresh].double()
    if "mismatch/kl" not in metrics:  # all of it was replayed
        weight, squares = torch.stack([weights.sum(), weights.square().sum()]).tolist()
        return {**metrics, "correction/ess": EffectiveShare(count, weight, squares)}
    differences = figures["mismatch/logprob_difference"][fresh].double()
    totals = torch.stack([differences.max(), weights.sum(), weights.square().sum()])
    parts = [totals, _moments(trainer, behaviour), _log_histogram(trainer - behaviour)]
    largest, weight, squares, *values = torch.cat(parts).tolist()
    metrics["correction/ess"] = EffectiveShare(count, weight, squares)
    metrics["mismatch/logprob_difference_max"] = Max(largest)
    metrics["mismatch/logprob_pearson"] = Correlation(float(len(trainer)), *values[:5])
    histogram = np.array(values[5:])
    return metrics | {name: LogQuantile(quantile, histogram) for name, quantile in QUANTILES.items()}


def _moments(x_N: Tensor, y_N: Tensor) -> Tensor:
    """Return means, sums of squared deviations and the sum of their products, shape [5]."""
    mean_x, mean_y = x_N.mean(), y_N.mean()
    dx_N, dy_N = x_N - mean_x, y_N - mean_y
    return torch.stack([mean_x, mean_y, dx_N.square().sum(), dy_N.square().sum(), (dx_N * dy_N).sum()])


def _log_histogram(log_ratio_N: Tensor) -> Tensor:
    """Return how many log-ratios fall into each bin of `LogQuantile`, shape [LOG_BINS]."""
    bins_N = (log_ratio_N / LOG_BIN_WIDTH).round().clamp(-(LOG_BINS // 2), LOG_BINS // 2).long() + LOG_BINS // 2
    return torch.bincount(bins_N, minlength=LOG_BINS).double()


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

    def place(token: int) -> str:
        sequence = int(inputs.sequence_N[token])
        before = int((inputs.sequence_N[:token] == sequence).sum())
        return f"trained token {before} of sequence {sequence} (of {inputs.sequences}"

    refuse_bad_values("token", arrays, place=place)
