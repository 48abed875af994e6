"""Off-policy corrections and their figures, and KL estimates and controllers, against other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import rl_libraries_reference as libraries
import torch
import trl_reference as trl
import verl_reference as verl
from algorithm_samples import same_cases
from conformance import Row
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import Batch, any_batch, as_turns, batches, far_apart, figures
from torch import Tensor

from roll_like.algorithms.correction import correct
from roll_like.algorithms.kl import KLController, divergence
from roll_like.config.algorithm import AdaptiveKLConfig, CorrectionConfig, KLConfig, RejectConfig

turns_of_one = any_batch.map(as_turns)
answered = batches(smallest_response=1)


def weights(batch: Batch, **config: Any) -> Tensor:
    """Ours, [B, T]; 0 where not sampled."""
    corrected = correct(batch.inputs(batch.logprobs_BT, "token_mean"), CorrectionConfig(**config))
    return torch.zeros_like(batch.mask_BT).masked_scatter(batch.sampled, corrected.weights_N)


def kept(batch: Batch, **reject: Any) -> Tensor:
    """1 where ours does not reject a sampled token, [B, T]."""
    return weights(batch, type="none", reject=RejectConfig(**reject))


def verl_weights(batch: Batch, level: str, threshold: float | str) -> Tensor:
    log_ratio_BT = (batch.old_BT - batch.behaviour_BT) * batch.mask_BT
    return verl.rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio_BT, batch.mask_BT, rollout_is=level, rollout_is_threshold=threshold
    )[0]


def verl_kept(batch: Batch, option: str, threshold: float | str) -> Tensor:
    return verl.rollout_corr_helper.compute_rollout_rejection_mask(
        batch.old_BT - batch.behaviour_BT, batch.mask_BT, option, threshold
    )[0]


def trl_weights(batch: Batch, mode: str, low: float | None, high: float) -> Tensor:
    return trl.importance_ratio(batch, mode, low=low, high=high) * batch.mask_BT


def weight_row(name: str, reference: str, theirs: Callable[[Batch], Any], cases: Any = any_batch, **config: Any) -> Row:
    ours = partial(weights, **config)
    # verl divides by zero for a figure where every weight is 0
    cases = cases.filter(lambda batch: bool(ours(batch).any())) if reference.startswith("verl") else cases
    return Row("correction", name, reference, ours, theirs, cases)


def reject_row(estimator: str, level: str, option: str, threshold: float | str, **bounds: Any) -> Row:
    of_turns = level.startswith("turn")
    ours = partial(kept, estimator=estimator, level=level, **bounds)
    theirs = partial(verl_kept, option=option, threshold=threshold)
    reference = f"verl {option}" + ROWS_AS_TURNS * of_turns
    cases = turns_of_one if of_turns else any_batch
    return Row("correction", f"reject {level} {estimator}", reference, ours, theirs, cases)


#: No library knows turns: theirs takes for sequences what ours takes for turns of one episode.
ROWS_AS_TURNS = ", rows as turns"

#: verl bounds 1/ρ; these are ours, which bound ρ, turned round.
LOW, HIGH = 0.7, 1.2
TURNED = f"{1 / HIGH}_{1 / LOW}"

WEIGHT_ROWS = [
    weight_row("truncated token", "verl token", partial(verl_weights, level="token", threshold=1.1), cap=1.1),
    weight_row(
        "truncated sequence",
        "verl sequence",
        partial(verl_weights, level="sequence", threshold=1.1),
        cap=1.1,
        level="sequence",
    ),
    weight_row(
        "masked token",
        "verl token, band",
        partial(verl_weights, level="token", threshold="0.8_1.3"),
        type="masked",
        floor=0.8,
        cap=1.3,
    ),
    weight_row(
        "masked sequence",
        "verl sequence, band",
        partial(verl_weights, level="sequence", threshold="0.8_1.3"),
        type="masked",
        floor=0.8,
        cap=1.3,
        level="sequence",
    ),
    weight_row(
        "truncated turn",
        "verl sequence" + ROWS_AS_TURNS,
        partial(verl_weights, level="sequence", threshold=1.1),
        turns_of_one,
        cap=1.1,
        level="turn",
    ),
    weight_row(
        "masked turn",
        "verl sequence, band" + ROWS_AS_TURNS,
        partial(verl_weights, level="sequence", threshold="0.8_1.3"),
        turns_of_one,
        type="masked",
        floor=0.8,
        cap=1.3,
        level="turn",
    ),
    weight_row(
        "truncated token",
        "TRL token_truncate",
        partial(trl_weights, mode="token_truncate", low=None, high=1.1),
        cap=1.1,
    ),
    weight_row(
        "truncated sequence",
        "TRL sequence_truncate",
        partial(trl_weights, mode="sequence_truncate", low=None, high=1.1),
        cap=1.1,
        level="sequence",
    ),
    weight_row(
        "masked token",
        "TRL token_mask",
        partial(trl_weights, mode="token_mask", low=0.8, high=1.3),
        type="masked",
        floor=0.8,
        cap=1.3,
    ),
    weight_row(
        "masked sequence",
        "TRL sequence_mask",
        partial(trl_weights, mode="sequence_mask", low=0.8, high=1.3),
        type="masked",
        floor=0.8,
        cap=1.3,
        level="sequence",
    ),
]

REJECT_ROWS = [
    reject_row("k1", "token", "token_k1", TURNED, low=LOW, high=HIGH),
    reject_row("k2", "token", "token_k2", 0.05, high=0.05),
    reject_row("k3", "token", "token_k3", 0.05, high=0.05),
    reject_row("k1", "sequence_mean", "seq_mean_k1", TURNED, low=LOW, high=HIGH),
    reject_row("k2", "sequence_mean", "seq_mean_k2", 0.05, high=0.05),
    reject_row("k3", "sequence_mean", "seq_mean_k3", 0.05, high=0.05),
    reject_row("k2", "sequence_max", "seq_max_k2", 0.1, high=0.1),
    reject_row("k3", "sequence_max", "seq_max_k3", 0.1, high=0.1),
    reject_row("k1", "turn_mean", "seq_mean_k1", TURNED, low=LOW, high=HIGH),
    reject_row("k2", "turn_mean", "seq_mean_k2", 0.05, high=0.05),
    reject_row("k3", "turn_mean", "seq_mean_k3", 0.05, high=0.05),
    reject_row("k2", "turn_max", "seq_max_k2", 0.1, high=0.1),
    reject_row("k3", "turn_max", "seq_max_k3", 0.1, high=0.1),
]


def verl_token_k1_of_sequences(batch: Batch) -> Tensor:
    """Sequences without a token that verl rejects by k1: what its seq_max_k1 would be, which it does not have."""
    kept_BT = verl_kept(batch, "token_k1", TURNED)
    whole_B1 = (kept_BT == batch.mask_BT).all(-1, keepdim=True)
    return batch.mask_BT * whole_B1


def geometric_kept(batch: Batch, level: str) -> Tensor:
    """1 where ours does not mask a sampled token, [B, T]."""
    return weights(batch, type="masked", level=level, floor=LOW, cap=HIGH) > 0


REJECT_ROWS += [
    Row(
        "correction",
        "masked geometric",
        "verl seq_mean_k1, which are 0",
        partial(geometric_kept, level="geometric"),
        partial(verl_kept, option="seq_mean_k1", threshold=TURNED),
        any_batch,
    ),
    Row(
        "correction",
        "masked turn_geometric",
        "verl seq_mean_k1, which are 0" + ROWS_AS_TURNS,
        partial(geometric_kept, level="turn_geometric"),
        partial(verl_kept, option="seq_mean_k1", threshold=TURNED),
        turns_of_one,
    ),
    Row(
        "correction",
        "reject sequence_max k1",
        "verl token_k1, all of a sequence",
        partial(kept, estimator="k1", level="sequence_max", low=LOW, high=HIGH),
        verl_token_k1_of_sequences,
        any_batch,
    ),
    Row(
        "correction",
        "reject turn_max k1",
        "verl token_k1, all of a sequence" + ROWS_AS_TURNS,
        partial(kept, estimator="k1", level="turn_max", low=LOW, high=HIGH),
        verl_token_k1_of_sequences,
        turns_of_one,
    ),
]


def geometric_perplexities(batch: Batch, level: str) -> float:
    """Mean over rows of 1/(geometric mean of ratios): the ratio of both policies' perplexities."""
    weights_BT = weights(batch, level=level, cap=1e9)
    return float((1 / weights_BT.max(-1).values).mean())


def verl_figures(batch: Batch, names: list[str], **settings: Any) -> list[float]:
    found = verl.rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        batch.old_BT, batch.behaviour_BT, batch.mask_BT, **settings
    )[2]
    return [found[f"rollout_corr/{name}"] for name in names]


def verl_pearson(batch: Batch) -> float:
    return verl.pearson_correlation_coefficient(batch.old_BT, batch.behaviour_BT, batch.sampled)


def figure_row(name: str, reference: str, ours: str, theirs: Callable[[Batch], Any], cases: Any, **config: Any) -> Row:
    correction = CorrectionConfig(**config)
    return Row(
        "figure", name, reference, lambda batch: [figures("ppo", batch, correction=correction)[ours]], theirs, cases
    )


near = batches(distances=(0.02, 0.3))
FIGURE_ROWS = [
    Row(
        "correction",
        "truncated geometric",
        "verl ppl_ratio, without cap",
        lambda batch: [geometric_perplexities(batch, "geometric")],
        partial(verl_figures, names=["ppl_ratio"]),
        answered,
    ),
    Row(
        "correction",
        "truncated turn_geometric",
        "verl ppl_ratio, without cap" + ROWS_AS_TURNS,
        lambda batch: [geometric_perplexities(batch, "turn_geometric")],
        partial(verl_figures, names=["ppl_ratio"]),
        answered.map(as_turns),
    ),
    figure_row(
        "correction/ess",
        "verl rollout_is_eff_sample_size",
        "correction/ess",
        partial(verl_figures, names=["rollout_is_eff_sample_size"], rollout_is="token", rollout_is_threshold=1.1),
        any_batch,
        cap=1.1,
    ),
    figure_row(
        "correction/ess",
        "torchrl GRPOLoss.ESS, without cap",
        "correction/ess",
        lambda batch: [libraries.torchrl_effective_sample_size(batch)],
        any_batch,
        cap=1e9,
    ),
    figure_row(
        "correction/capped_fraction",
        "verl rollout_is_ratio_fraction_high",
        "correction/capped_fraction",
        partial(verl_figures, names=["rollout_is_ratio_fraction_high"], rollout_is="token", rollout_is_threshold=1.1),
        any_batch,
        cap=1.1,
    ),
    figure_row(
        "correction/rejected_fraction",
        "verl rollout_rs_masked_fraction",
        "correction/rejected_fraction",
        partial(
            verl_figures, names=["rollout_rs_masked_fraction"], rollout_rs="seq_mean_k3", rollout_rs_threshold=0.05
        ),
        any_batch,
        reject=RejectConfig(estimator="k3", level="sequence_mean", high=0.05),
    ),
    figure_row("mismatch/kl", "verl k3_kl", "mismatch/kl", partial(verl_figures, names=["k3_kl"]), near),
    figure_row("mismatch/kl_k1", "verl kl", "mismatch/kl_k1", partial(verl_figures, names=["kl"]), any_batch),
    figure_row(
        "mismatch/logprob_pearson",
        "verl pearson_correlation_coefficient",
        "mismatch/logprob_pearson",
        lambda batch: [verl_pearson(batch)],
        batches(smallest_response=2),
    ),
]


@pytest.mark.parametrize("row", [*WEIGHT_ROWS, *REJECT_ROWS, *FIGURE_ROWS], ids=str)
@given(data=st.data())
@same_cases
def test_corrections(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))


@given(batch=batches(smallest_response=4))
@same_cases
def test_quantiles_are_those_of_the_ratios(batch: Batch) -> None:
    # numpy's inverted distribution function, and ours in bins of 1 % of the ratio
    ratios = (batch.old_BT - batch.behaviour_BT)[batch.sampled].exp().numpy()
    found = figures("ppo", batch)
    for name, quantile in {"p01": 0.01, "p50": 0.5, "p99": 0.99}.items():
        expected = np.quantile(ratios, quantile, method="inverted_cdf")
        assert math.log(found[f"mismatch/ratio_{name}"]) == pytest.approx(math.log(expected), abs=0.0051)


def kl_and_gradient(batch: Batch, estimator: Any, *, straight_through: bool) -> tuple[Tensor, Tensor]:
    logprobs_N = batch.logprobs_BT[batch.sampled].requires_grad_()
    values = divergence(logprobs_N, batch.reference_BT[batch.sampled], estimator, straight_through=straight_through)
    return values, torch.autograd.grad(values.sum(), logprobs_N)[0]


def verl_kl(batch: Batch, penalty: str) -> tuple[Tensor, Tensor]:
    logprobs_N = batch.logprobs_BT[batch.sampled].requires_grad_()
    values = verl.core_algos.kl_penalty(logprobs_N, batch.reference_BT[batch.sampled], penalty)
    return values, torch.autograd.grad(values.sum(), logprobs_N)[0]


KL_ROWS = [
    Row(
        "kl",
        estimator,
        f"verl {estimator}{'+' * through}",
        partial(kl_and_gradient, estimator=estimator, straight_through=through),
        partial(verl_kl, penalty=estimator + "+" * through),
        batches().map(far_apart),
        gradient=True,
    )
    for estimator in ("k1", "abs", "k2", "k3")
    for through in (False, True)
]


@pytest.mark.parametrize("row", KL_ROWS, ids=str)
@given(data=st.data())
@same_cases
def test_kl(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))


Measured = list[tuple[float, int]]


def coefficients(steps: Measured) -> list[float]:
    config = KLConfig(use="reward", coefficient=0.2, adaptive=AdaptiveKLConfig(target=0.1, horizon=1000))
    controller, found = KLController(config), []
    for measured, samples in steps:
        controller.update(measured, samples)
        found.append(controller.coefficient)
    return found


def verl_coefficients(steps: Measured) -> list[float]:
    controller, found = verl.core_algos.AdaptiveKLController(0.2, 0.1, 1000), []
    for measured, samples in steps:
        controller.update(measured, samples)
        found.append(float(controller.value))
    return found


CONTROLLER_ROW = Row(
    "kl",
    "adaptive",
    "verl AdaptiveKLController",
    coefficients,
    verl_coefficients,
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 512)), min_size=1, max_size=8),
)


@given(steps=CONTROLLER_ROW.cases)
@same_cases
def test_adaptive_controller(steps: Measured) -> None:
    CONTROLLER_ROW.check(steps)
