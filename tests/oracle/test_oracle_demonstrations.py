"""Losses of demonstrations, and the schedule of their weight, against the papers' code restated on padded batches."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from algorithm_samples import same_cases
from conformance import Row
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import Batch, batches

from roll_like.algorithms.demonstrations import off_policy_objective, sft_coefficient, supervised_objective
from roll_like.config.demonstrations import SFTTermConfig


def ours_off_policy(batch: Batch, gamma: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    weights_N = torch.full((int(batch.sampled.sum()),), 1 / float(batch.mask_BT.sum()), dtype=torch.float64)
    advantages_N = batch.advantages_BT[batch.sampled]
    loss, _ = off_policy_objective(logprobs_BT[batch.sampled], advantages_N, weights_N, gamma)
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def luffy_off_policy(batch: Batch, gamma: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio is π, reshaped to p/(p + γ), and weighs −A; a mean over the mask (mix_core_alg.py, 'p_div_p_0.1')."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    ratio_BT = torch.exp(logprobs_BT)
    if gamma is not None:
        ratio_BT = ratio_BT / (ratio_BT + gamma)
    loss = (-batch.advantages_BT * ratio_BT * batch.mask_BT).sum() / batch.mask_BT.sum()
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def ours_supervised(batch: Batch, *, phi: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    weights_N = torch.full((int(batch.sampled.sum()),), 1 / float(batch.mask_BT.sum()), dtype=torch.float64)
    loss, _ = supervised_objective(logprobs_BT[batch.sampled], weights_N, phi=phi)
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def chord_supervised(batch: Batch, *, phi: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean negative log-likelihood over the mask, weighed by p(1 − p) without gradient (chord_policy_loss.py)."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    losses_BT = torch.nn.functional.nll_loss(logprobs_BT.reshape(-1, 1), torch.zeros(logprobs_BT.numel()).long(),
                                             reduction="none").view_as(logprobs_BT)  # fmt: skip
    if phi:
        probability_BT = logprobs_BT.detach().exp()
        losses_BT = losses_BT * (probability_BT - probability_BT.square())
    loss = (losses_BT * batch.mask_BT).sum() / batch.mask_BT.sum()
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


Schedule = tuple[float, float, int, int]


def ours_coefficients(case: Schedule) -> list[float]:
    peak, valley, warmup, decay = case
    config = SFTTermConfig(coefficient=peak, final_coefficient=valley, warmup_steps=warmup, decay_steps=decay)
    return [sft_coefficient(config, step) for step in range(warmup + decay + 3)]


def chord_coefficients(case: Schedule) -> list[float]:
    """The amplitude of half a cosine wave above the valley, after a straight line."""
    peak, valley, warmup, decay = case
    line = [peak * step / warmup for step in range(warmup)]
    wave = [(peak + valley) / 2 + (peak - valley) / 2 * math.cos(math.pi * step / decay) for step in range(decay)]
    return [*line, *wave, valley, valley, valley]


DEMONSTRATION_ROWS = [
    *(
        Row(
            "demonstrations",
            "off_policy",
            f"torch as in LUFFY, {'without shaping' if gamma is None else f'γ {gamma:g}'}",
            partial(ours_off_policy, gamma=gamma),
            partial(luffy_off_policy, gamma=gamma),
            batches(),
            gradient=True,
        )
        for gamma in (None, 0.1, 0.5)
    ),
    *(
        Row(
            "demonstrations",
            "sft",
            f"torch nll_loss{', φ as in CHORD' * phi}",
            partial(ours_supervised, phi=phi),
            partial(chord_supervised, phi=phi),
            batches(),
            gradient=True,
        )
        for phi in (False, True)
    ),
    Row(
        "demonstrations",
        "sft schedule",
        "torch cosine as in CHORD",
        ours_coefficients,
        chord_coefficients,
        st.tuples(st.floats(0.5, 1.0), st.floats(0.0, 0.4), st.integers(0, 5), st.integers(1, 9)),
    ),
]


@pytest.mark.parametrize("row", DEMONSTRATION_ROWS, ids=str)
@given(data=st.data())
@same_cases
def test_demonstrations(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))
