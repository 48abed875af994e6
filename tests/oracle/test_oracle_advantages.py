"""Advantage estimators against other libraries, on random steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import rl_libraries_reference as libraries
import torch
import verl_reference as verl
from advantage_cases import Step, advantages, steps
from algorithm_samples import same_cases
from conformance import Row
from hypothesis import given
from hypothesis import strategies as st

from roll_like.algorithms.advantages.base import whiten
from roll_like.values import has_signal


def group_row(name: str, reference: str, theirs: Callable[[Step], Any], cases: Any = None, **settings: Any) -> Row:
    return Row(
        "advantage", name, reference, partial(advantages, name, **settings), theirs, steps() if cases is None else cases
    )


def return_row(
    name: str, reference: str, theirs: Callable[[Step], Any], *, lam: bool = False, cases: Any = None
) -> Row:
    def ours(step: Step) -> torch.Tensor:
        return advantages(name, step, gamma=step.gamma, **({"lam": step.lam} if lam else {}))

    # without groups, one sample of a prompt will do
    return Row("advantage", name, reference, ours, theirs, steps(smallest_group=1) if cases is None else cases)


def verl_gae(step: Step) -> torch.Tensor:
    """verl whitens GAE's advantages; before that they are its returns minus the values."""
    return (verl.returns("gae", step) - step.values_BT) * step.mask_BT


def verl_gpg(step: Step) -> torch.Tensor:
    """With the paper's scale, samples / samples in groups of non-zero reward variance; verl counts non-zero rewards."""
    rewards = step.rewards_BT.sum(-1)
    moving = sum(
        int((step.index_B == group).sum())
        for group in set(step.index_B)
        if has_signal(rewards[step.index_B == group].numpy())
    )
    theirs = len(rewards) / max(1, int(torch.count_nonzero(rewards)))
    ours = len(rewards) / moving if moving else 1.0
    return verl.advantages("gpg", step, f_norm=theirs / ours)


def whitened_gae(step: Step) -> torch.Tensor:
    raw_BT = advantages("gae", step, gamma=step.gamma, lam=step.lam)
    of_actions = [row[mask > 0].double().numpy() for row, mask in zip(raw_BT, step.mask_BT, strict=True)]
    return step.spread(whiten(of_actions))


def sampled(name: str) -> Callable[[Step], torch.Tensor]:
    """verl leaves figures at tokens that were not sampled, where no loss reads them."""
    return lambda step: verl.advantages(name, step) * step.mask_BT


def varied(step: Step) -> bool:
    """Whether returns differ; verl's mean is off by 1e-8, which whitening makes large where they do not."""
    returns_BT = verl.returns("reinforce_plus_plus", step)
    return bool(np.ptp(returns_BT[step.mask_BT > 0].numpy()) > 1e-3)


def verl_token_baseline(step: Step) -> torch.Tensor:
    """Given an old policy of probability ½, verl's energy 1 − 2π + Σπ² is the Σπ² that it is told."""
    half_BT = torch.full_like(step.values_BT, 0.5).log()
    told = {"old_log_probs": half_BT, "sum_pi_squared": step.values_BT**2}
    return verl.advantages("tir_optimal_token_baseline", step, handle_zero_tail=True, **told)


def energetic(step: Step) -> bool:
    """Whether every sampled token has some energy: verl adds 1e-8 to the sum of weights."""
    return bool((step.values_BT.abs()[step.mask_BT > 0] > 0.05).all())


several_rewards = steps(rewards=("a", "b", "c"), penalised=False, smallest_response=1)
answered = steps(smallest_response=1)

ROWS = [
    group_row("grpo", "verl grpo", partial(verl.advantages, "grpo")),
    group_row("grpo", "verl grpo_vectorized", partial(verl.advantages, "grpo_vectorized")),
    group_row("dr_grpo", "verl grpo without std", partial(verl.advantages, "grpo", norm_adv_by_std_in_grpo=False)),
    group_row("rloo", "verl rloo", partial(verl.advantages, "rloo")),
    group_row("rloo", "verl rloo_vectorized", partial(verl.advantages, "rloo_vectorized")),
    group_row("opo", "verl opo", partial(verl.advantages, "opo"), answered),
    group_row("gpg", "verl gpg, scaled as in the paper", verl_gpg),
    group_row("gdpo", "verl gdpo", partial(verl.advantages, "gdpo"), several_rewards),
    group_row("grpo_passk", "verl grpo_passk", partial(verl.advantages, "grpo_passk")),
    group_row(
        "grpo_passk",
        "verl grpo_passk without std",
        partial(verl.advantages, "grpo_passk", norm_adv_by_std_in_grpo=False),
        divide_by_std=False,
    ),
    group_row(
        "reinforce_plus_plus_baseline",
        "verl reinforce_plus_plus_baseline",
        partial(verl.advantages, "reinforce_plus_plus_baseline"),
        answered,
    ),
    return_row(
        "reinforce_plus_plus",
        "verl reinforce_plus_plus",
        partial(verl.advantages, "reinforce_plus_plus"),
        cases=steps(smallest_group=1).filter(varied),
    ),
    return_row("reinforce", "verl reinforce_plus_plus, its returns", partial(verl.returns, "reinforce_plus_plus")),
    return_row("reinforce", "torchrl reward2go", libraries.torchrl_reward_to_go),
    group_row(
        "optimal_token_baseline",
        "verl tir_optimal_token_baseline",
        verl_token_baseline,
        steps(smallest_response=1).filter(energetic),
        tail_returns=True,
    ),
    return_row("gae", "verl gae, before whitening", verl_gae, lam=True),
    return_row("gae", "torchrl generalized_advantage_estimate", libraries.torchrl_gae, lam=True),
    return_row("gae", "torchrl td_lambda_advantage_estimate", libraries.torchrl_td_lambda_minus_value, lam=True),
    return_row("gae", "stable-baselines3 RolloutBuffer", libraries.stable_baselines3_gae, lam=True),
    Row("advantage", "gae", "verl gae, whitened", whitened_gae, sampled("gae"), steps().filter(varied)),
    # without a discount: verl's ReMax has none
    group_row("remax", "verl remax", sampled("remax"), steps(smallest_group=1)),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
@given(data=st.data())
@same_cases
def test_advantages(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))
