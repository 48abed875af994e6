"""Policy losses, aggregations and the loss from hidden states against other libraries: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
    MODES,
    WIDE,
    Batch,
    HeadCase,
    any_batch,
    as_turns,
    batches,
    figures,
    heads,
    loss_and_gradient,
    loss_and_head_gradients,
    sequences,
)

from roll_like.config.algorithm import CorrectionConfig, RejectConfig


def of_verl(
    name: str,
    theirs: str,
    config: dict[str, Any],
    cases: Any = any_batch,
    how: str = "token_mean",
    label: str = "",
    **settings: Any,
) -> Row:
    return Row(
        "loss",
        name,
        f"verl {label or theirs}",
        partial(loss_and_gradient, name, how=how, **settings),
        lambda batch: verl.policy_loss(theirs, batch, verl.actor_config(**config), how=MODES[how]),
        cases,
        gradient=True,
    )


def of_trl(
    name: str, label: str, theirs: Callable[[Batch], Any], cases: Any = sequences, how: str = "token_mean", **ours: Any
) -> Row:
    return Row(
        "loss", name, f"TRL {label}", partial(loss_and_gradient, name, how=how, **ours), theirs, cases, gradient=True
    )


def of_liger(
    name: str, loss_type: str, settings: dict[str, Any], how: str = "token_mean", label: str = "", **ours: Any
) -> Row:
    return Row(
        "loss",
        name,
        f"liger-kernel {label or loss_type}",
        partial(loss_and_head_gradients, name, how=how, **ours),
        lambda case: liger.grpo_loss(case, loss_type, **settings),
        heads,
        gradient=True,
    )


def verl_reinforce(batch: Batch, *, weighted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's REINFORCE takes the importance weights of a correction; given π/π_old, they are ours."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    loss, _ = verl.core_algos.compute_policy_loss_reinforce(
        rollout_log_prob=batch.old_BT,
        log_prob=logprobs_BT,
        advantages=batch.advantages_BT,
        response_mask=batch.mask_BT,
        loss_agg_mode="token-mean",
        config=verl.actor_config(),
        rollout_is_weights=(batch.logprobs_BT - batch.old_BT).exp() if weighted else None,
    )
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def without_value(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Only the gradient: surrogates with the same gradient differ in value."""
    return torch.zeros(()), *found[1:]


def on_policy(batch: Batch) -> Batch:
    return replace(batch, old_BT=batch.logprobs_BT)


def behaviour_is_old(batch: Batch) -> Batch:
    """As with `old_logprobs: behaviour`."""
    return replace(batch, behaviour_BT=batch.old_BT)


def negative_log_likelihood(case: HeadCase) -> tuple[Any, ...]:
    """PyTorch's own, from whole logits."""
    hidden_BTD, weight_VD = (array.double().requires_grad_() for array in (case.hidden_BTD, case.weight_VD))
    logits_NV = (hidden_BTD @ weight_VD.T / case.temperature)[case.batch.sampled]
    loss = torch.nn.functional.cross_entropy(logits_NV, case.ids_BT[case.batch.sampled])
    return loss, *torch.autograd.grad(loss, [hidden_BTD, weight_VD])


VERL_WIDE = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
BAND = {"low": 0.1, "high": 1.0}
VERL_BAND = {**VERL_WIDE, "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}}
NARROW = {"clip_low": 0.02, "clip_high": 0.05}

LOSS_ROWS = [
    of_verl("ppo", "vanilla", {**VERL_WIDE, "clip_ratio_c": 3.0}, **WIDE, dual_clip=3.0),
    of_trl("ppo", "dapo", partial(trl.grpo_loss, loss_type="dapo", **WIDE), any_batch, **WIDE, dual_clip=None),
    of_trl(
        "ppo",
        "dapo, two-sided",
        partial(trl.grpo_loss, loss_type="dapo", **WIDE, delta=3.0),
        any_batch,
        **WIDE,
        dual_clip=3.0,
    ),
    of_liger("ppo", "dapo", LIGER_WIDE, **WIDE, dual_clip=None),
    Row(
        "loss",
        "ppo",
        "torchrl GRPOLoss",
        partial(loss_and_gradient, "ppo", **WIDE, dual_clip=None),
        partial(libraries.torchrl_grpo_loss, clip=(0.2, 0.28), aggregation="token_mean"),
        any_batch,
        gradient=True,
    ),
    of_liger("ppo", "dapo", {**LIGER_WIDE, "delta": 3.0}, **WIDE, dual_clip=3.0, label="dapo, two-sided"),
    Row(
        "loss",
        "reinforce",
        "verl reinforce",
        partial(loss_and_gradient, "reinforce"),
        partial(verl_reinforce, weighted=False),
        any_batch,
        gradient=True,
    ),
    Row(
        "loss",
        "reinforce",
        "verl reinforce, weighted",
        partial(loss_and_gradient, "reinforce", importance_weight=True),
        partial(verl_reinforce, weighted=True),
        any_batch,
        gradient=True,
    ),
    # a bound that is never reached leaves CISPO's π/π_old·A·log π
    of_trl(
        "reinforce",
        "cispo without bound",
        partial(trl.grpo_loss, loss_type="cispo", clip_high=1e9),
        any_batch,
        importance_weight=True,
    ),
    Row(
        "loss",
        "reinforce",
        "TRL RLOOTrainer, on policy",
        lambda batch: without_value(loss_and_gradient("reinforce", batch, how="seq_mean_token_sum")),
        lambda batch: without_value(trl.rloo_loss(batch, clip_low=0.2, clip_high=0.2)),
        sequences.map(on_policy),
        gradient=True,
    ),
    Row(
        "loss",
        "raft",
        "torch cross_entropy, of what it selects",
        partial(loss_and_head_gradients, "raft"),
        negative_log_likelihood,
        heads,
        gradient=True,
    ),
    of_verl("gspo", "gspo", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05}, **NARROW),
    of_verl(
        "gspo",
        "gspo",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05},
        any_batch.map(as_turns),
        label="gspo, rows as turns",
        **NARROW,
        unit="turn",
    ),
    of_trl(
        "gspo",
        "grpo of sequences",
        partial(trl.grpo_loss, loss_type="grpo", level="sequence", **NARROW),
        how="seq_mean_token_mean",
        **NARROW,
    ),
    of_liger(
        "gspo",
        "grpo",
        {"epsilon_low": 0.02, "epsilon_high": 0.05, "importance_sampling_level": "sequence"},
        how="seq_mean_token_mean",
        label="grpo of sequences",
        **NARROW,
    ),
    of_trl(
        "gspo",
        "luspo",
        partial(trl.grpo_loss, loss_type="luspo", level="sequence", **NARROW),
        how="seq_mean_token_sum",
        **NARROW,
    ),
    of_liger(
        "gspo",
        "luspo",
        {"epsilon_low": 0.02, "epsilon_high": 0.05, "importance_sampling_level": "sequence"},
        how="seq_mean_token_sum",
        **NARROW,
    ),
    of_verl("cispo", "cispo", VERL_WIDE, **WIDE),
    # above only, and theirs is the bound itself
    of_trl(
        "cispo",
        "cispo, same bound",
        partial(trl.grpo_loss, loss_type="cispo", clip_high=1.28),
        any_batch,
        clip_low=1.0,
        clip_high=0.28,
    ),
    of_liger("cispo", "cispo", {"epsilon_high": 1.28}, label="cispo, same bound", clip_low=1.0, clip_high=0.28),
    of_verl("sapo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, how="seq_mean_token_mean"),
    of_trl("sapo", "sapo", partial(trl.grpo_loss, loss_type="sapo"), how="seq_mean_token_mean"),
    of_liger("sapo", "sapo", {}, how="seq_mean_token_mean"),
    of_verl(
        "gmpo",
        "geo_mean",
        {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4},
        sequences,
        how="seq_mean_token_mean",
        clip_low=0.3,
        clip_high=0.4,
    ),
    of_verl(
        "dppo_tv",
        "dppo_tv",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 2.0},
        clip_low=0.1,
        clip_high=0.15,
        ratio_cap=2.0,
    ),
    of_verl(
        "dppo_kl",
        "dppo_kl",
        {"clip_ratio_low": 0.03, "clip_ratio_high": 0.05, "clip_ratio_c": 2.0},
        clip_low=0.03,
        clip_high=0.05,
        ratio_cap=2.0,
    ),
    # every token of the band is drawn: which ones are, out of too many, is chance in verl
    of_verl(
        "clip_cov",
        "clip_cov",
        VERL_BAND,
        **WIDE,
        **BAND,
        fraction=1.0,
    ),
    # without ties (two tokens always tie), of which verl takes any and ours takes none
    of_verl(
        "kl_cov",
        "kl_cov",
        {"policy_loss": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}},
        batches(zeros=False, smallest_response=3),
        fraction=0.3,
        coefficient=0.7,
    ),
    of_trl(
        "vespo",
        "vespo",
        partial(trl.grpo_loss, loss_type="vespo", vespo=(1.5, 2.5, 3.0, 1.2)),
        k_positive=1.5,
        lam_positive=2.5,
        k_negative=3.0,
        lam_negative=1.2,
    ),
    of_liger("vespo", "vespo", {}),
    of_trl(
        "ppo",
        "dapo, off-policy mask",
        partial(trl.grpo_loss, loss_type="dapo", mask_threshold=0.3, **WIDE),
        sequences.map(behaviour_is_old),
        **WIDE,
        dual_clip=None,
        correction=CorrectionConfig(
            type="none", reject=RejectConfig(level="sequence_mean", low=math.exp(-0.3), advantages="negative")
        ),
    ),
    of_verl("gpg", "gpg", {}),
    of_verl("dro", "dro", {"policy_loss": {"dro_beta": 0.3}}, beta=0.3),
]


def clip_fractions(batch: Batch) -> list[float]:
    found = figures("ppo", batch, **WIDE, dual_clip=3.0)
    sides = found["train/clip_fraction_high"] + found["train/clip_fraction_low"]
    return [sides, found["train/clip_fraction_dual"]]


FIGURE_ROWS = [
    Row(
        "figure",
        "train/clip_fraction",
        "verl vanilla",
        clip_fractions,
        lambda batch: verl.figures(
            "vanilla",
            batch,
            verl.actor_config(**VERL_WIDE, clip_ratio_c=3.0),
            ["pg_clipfrac", "pg_clipfrac_lower"],
        ),
        any_batch,
    ),
    # how many tokens are drawn; which ones is chance in verl
    Row(
        "figure",
        "train/covariance_fraction",
        "verl clip_cov",
        lambda batch: [figures("clip_cov", batch, **WIDE, **BAND, fraction=0.1)["train/covariance_fraction"]],
        lambda batch: verl.figures(
            "clip_cov",
            batch,
            verl.actor_config(**{**VERL_BAND, "policy_loss": {**VERL_BAND["policy_loss"], "clip_cov_ratio": 0.1}}),
            ["pg_clipfrac"],
        ),
        any_batch,
    ),
]


@pytest.mark.parametrize("row", [*LOSS_ROWS, *FIGURE_ROWS], ids=str)
@given(data=st.data())
@same_cases
def test_values_and_gradients(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))
