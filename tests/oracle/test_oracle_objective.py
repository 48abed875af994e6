"""What is around the policy loss: aggregations, KL and entropy terms, and log-probabilities from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import liger_reference as liger
import pytest
import rl_libraries_reference as libraries
import torch
import trl_reference as trl
import verl_reference as verl
from algorithm_samples import same_cases
from conformance import Row
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import (
    LIGER_WIDE,
    MAX_RESPONSE,
    MODES,
    WIDE,
    Batch,
    HeadCase,
    any_batch,
    batches,
    head_cases,
    heads,
    loss_and_gradient,
    loss_and_head_gradients,
    sequences,
)

from roll_like.config.algorithm import KLConfig


def verl_aggregated(batch: Batch, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    loss = verl.core_algos.agg_loss(
        -logprobs_BT * batch.advantages_BT, batch.mask_BT, MODES[how], loss_scale_factor=MAX_RESPONSE
    )
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def aggregation_row(how: str, reference: str, theirs: Callable[[Any], Any], cases: Any = any_batch) -> Row:
    head = reference.startswith("liger")
    ours: Any = loss_and_head_gradients if head else loss_and_gradient
    name, settings = ("gpg", {}) if reference.startswith("verl") else ("ppo", {**WIDE, "dual_clip": None})
    return Row("aggregation", how, reference, partial(ours, name, how=how, **settings), theirs, cases, gradient=True)


def trl_aggregation(how: str, loss_type: str, cases: Any = sequences) -> Row:
    theirs = partial(trl.grpo_loss, loss_type=loss_type, max_response=MAX_RESPONSE, **WIDE)
    return aggregation_row(how, f"TRL {loss_type}", theirs, cases)


def liger_aggregation(how: str, loss_type: str) -> Row:
    settings = {**LIGER_WIDE, "max_completion_length": MAX_RESPONSE}
    return aggregation_row(
        how, f"liger-kernel {loss_type}", lambda case: liger.grpo_loss(case, loss_type, **settings), heads
    )


def torchrl_aggregation(how: str, aggregation: str, cases: Any = sequences) -> Row:
    theirs = partial(libraries.torchrl_grpo_loss, clip=(0.2, 0.28), aggregation=aggregation)
    return aggregation_row(how, f"torchrl {aggregation}", theirs, cases)


AGGREGATION_ROWS = [
    *(aggregation_row(how, f"verl {MODES[how]}", partial(verl_aggregated, how=how)) for how in MODES),
    trl_aggregation("token_mean", "dapo", any_batch),
    trl_aggregation("token_mean", "bnpo", any_batch),
    trl_aggregation("seq_mean_token_mean", "grpo"),
    trl_aggregation("token_sum_norm", "dr_grpo"),
    torchrl_aggregation("token_mean", "token_mean", any_batch),
    torchrl_aggregation("seq_mean_token_mean", "prompt_mean"),
    liger_aggregation("token_mean", "dapo"),
    liger_aggregation("token_mean", "bnpo"),
    liger_aggregation("seq_mean_token_mean", "grpo"),
    liger_aggregation("token_sum_norm", "dr_grpo"),
]


def objective_rows() -> list[Row]:
    """The terms beside the policy loss."""
    kl = KLConfig(estimator="k3", coefficient=0.1)
    near = batches(distances=(0.02, 0.3))  # beyond 10 ours is bounded
    ppo = {**WIDE, "dual_clip": None}
    return [
        Row(
            "kl",
            "k3",
            "TRL dapo with a KL term",
            partial(loss_and_gradient, "ppo", kl=kl, **ppo),
            partial(trl.grpo_loss, loss_type="dapo", beta=0.1, **WIDE),
            near,
            gradient=True,
        ),
        Row(
            "kl",
            "k3",
            "TRL dapo with a weighted KL term",
            partial(loss_and_gradient, "ppo", kl=kl.model_copy(update={"importance_weight": True}), **ppo),
            partial(trl.grpo_loss, loss_type="dapo", beta=0.1, weighted_kl=True, **WIDE),
            near,
            gradient=True,
        ),
        Row(
            "kl",
            "k3",
            "liger-kernel dapo with a KL term",
            partial(loss_and_head_gradients, "ppo", kl=kl, **ppo),
            lambda case: liger.grpo_loss(case, "dapo", beta=0.1, **LIGER_WIDE),
            head_cases(distances=(0.02, 0.3)),
            gradient=True,
        ),
        Row(
            "entropy",
            "entropy_coefficient",
            "TRL dapo with an entropy bonus",
            lambda batch: loss_and_gradient("ppo", batch, entropy_coefficient=0.05, **ppo)[0],
            lambda batch: trl.grpo_loss(batch, "dapo", entropy_coefficient=0.05, **WIDE)[0],
            any_batch,
        ),
    ]


OBJECTIVE_ROWS = objective_rows()


def logprobs_and_gradients(case: HeadCase) -> tuple[Any, ...]:
    """Log-probabilities of tokens, summed with weights so that every one of them has a gradient of its own."""
    return loss_and_head_gradients("gpg", case)


def torch_logprobs(case: HeadCase) -> tuple[Any, ...]:
    """PyTorch's own, from whole logits."""
    hidden_BTD, weight_VD = (array.double().requires_grad_() for array in (case.hidden_BTD, case.weight_VD))
    logits_BTV = hidden_BTD @ weight_VD.T / case.temperature
    logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(-1, case.ids_BT[..., None])[..., 0]
    loss = -(logprobs_BT * case.batch.advantages_BT * case.batch.mask_BT).sum() / case.batch.mask_BT.sum()
    return loss, *torch.autograd.grad(loss, [hidden_BTD, weight_VD])


LOGPROB_ROWS = [
    Row("logprobs", "token_logprobs", "torch log_softmax", logprobs_and_gradients, torch_logprobs, heads, gradient=True)
]


@pytest.mark.parametrize("row", [*AGGREGATION_ROWS, *OBJECTIVE_ROWS, *LOGPROB_ROWS], ids=str)
@given(data=st.data())
@same_cases
def test_values_and_gradients(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))
