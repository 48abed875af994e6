"""The critic's loss, reward shaping and the whitening of advantages against other libraries."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import rl_libraries_reference as libraries
import torch
import trl_reference as trl
import verl_reference as verl
from advantage_cases import Step, advantages, padded, steps
from algorithm_samples import make_policy_sample, same_cases
from conformance import Row
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import Batch, batches
from torch import Tensor

from roll_like.algorithms.advantages.base import flatten
from roll_like.algorithms.shaping import RewardShaping, overlong_penalties, shape_advantages
from roll_like.algorithms.value_loss import explained_variance, value_loss
from roll_like.config.algorithm import AdvantageShapingConfig, NormaliseConfig, RewardShapingConfig

CLIP = 0.3


def clipped_value_loss(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Ours over all tokens; values, old values and returns are the batch's log-probabilities, which serve as well."""
    values_BT = batch.logprobs_BT.clone().requires_grad_()
    losses_N, clipped_N = value_loss(
        values_BT[batch.sampled], batch.old_BT[batch.sampled], batch.reference_BT[batch.sampled], CLIP
    )
    (gradient_BT,) = torch.autograd.grad(losses_N.mean(), values_BT)
    return losses_N.mean(), gradient_BT, clipped_N.double().mean()


def verl_value_loss(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    values_BT = batch.logprobs_BT.clone().requires_grad_()
    loss, clipped = verl.core_algos.compute_value_loss(
        values_BT, batch.reference_BT, batch.old_BT, batch.mask_BT, CLIP, "token-mean"
    )
    return loss, torch.autograd.grad(loss, values_BT)[0], clipped


def flat(batch: Batch) -> tuple[Any, Any]:
    return batch.old_BT[batch.sampled].numpy(), batch.reference_BT[batch.sampled].numpy()


def whitened(batch: Batch) -> Tensor:
    samples = [
        replace(make_policy_sample(mask), advantages=row.float().numpy())
        for mask, row in zip(batch.mask_BT.int().tolist(), batch.advantages_BT, strict=True)
    ]
    shaped, _ = shape_advantages(samples, AdvantageShapingConfig(whiten=True))
    return padded([sample.advantages for sample in shaped])


def normalised(step: Step, *, mean: Any, std: Any) -> list[float]:
    shaping = RewardShaping(RewardShapingConfig(normalise=NormaliseConfig(mean=mean, std=std)), max_response_tokens=8)
    groups, _ = shaping.apply(step.groups)
    return [sample.reward for sample in flatten(groups)]


def trl_scaled(step: Step, *, scale: str) -> Tensor:
    """TRL's advantages with our ε: (r − mean)/(std + 1e-6) from (r − mean)/(std + 1e-4)."""
    rewards_GN = torch.tensor(step.rewards, dtype=torch.float64).reshape(-1, step.group_size)
    theirs_B = trl.grpo_advantages(
        rewards_GN.reshape(-1, 1), torch.ones(1), step.group_size, scale=scale, order="sum_then_normalize"
    )
    std = {"group": rewards_GN.std(1, keepdim=True).expand_as(rewards_GN).flatten(), "batch": rewards_GN.std()}
    return theirs_B * (std[scale] + 1e-4) / (std[scale] + 1e-6) if scale in std else theirs_B


def trl_weighted(step: Step) -> tuple[Tensor, Tensor]:
    rewards_BK = torch.tensor([list(parts.values()) for parts in step.parts], dtype=torch.float64)
    return rewards_BK, torch.tensor(list(step.weights.values()), dtype=torch.float64)


def trl_centred(step: Step) -> Tensor:
    """Without std TRL has no ε; several weighted rewards."""
    theirs_B = trl.grpo_advantages(*trl_weighted(step), step.group_size, scale="none", order="sum_then_normalize")
    return theirs_B[:, None] * step.mask_BT


def trl_leave_one_out(step: Step) -> Tensor:
    return trl.rloo_advantages(*trl_weighted(step), step.group_size)[:, None] * step.mask_BT


def trl_decoupled(step: Step) -> Tensor:
    """GDPO in TRL, over samples: with variance 1 instead of its std + 1e-4."""
    theirs_B = trl.grpo_advantages(*trl_weighted(step), step.group_size, scale="group", order="normalize_then_sum")
    std = theirs_B.std()
    return (theirs_B / std if std > 0 else theirs_B)[:, None] * step.mask_BT


def large(step: Step) -> Step:
    """One token a response, so that samples and tokens are the same; rewards that make any ε vanish."""
    return replace(
        step,
        masks=[[1]] * len(step.masks),
        penalties=[np.zeros(1)] * len(step.masks),
        values=[np.zeros(1)] * len(step.masks),
        parts=[{name: value * 2.0**20 for name, value in parts.items()} for parts in step.parts],
    )


square = steps(equal_groups=True, penalised=False)
square_weighted = steps(equal_groups=True, penalised=False, rewards=("a", "b", "c"))
LIMIT, BUFFER = 40, 16

ROWS = [
    Row(
        "value", "value_loss", "verl compute_value_loss", clipped_value_loss, verl_value_loss, batches(), gradient=True
    ),
    Row(
        "value",
        "value_loss",
        "torchrl _clip_value_loss, halved",
        lambda batch: clipped_value_loss(batch)[:2],
        partial(libraries.torchrl_value_loss, clip=CLIP),
        batches(),
        gradient=True,
    ),
    Row(
        "value",
        "explained_variance",
        "stable-baselines3 explained_variance",
        lambda batch: [explained_variance(*flat(batch))],
        lambda batch: [libraries.explained_variance(*flat(batch))],
        batches(smallest_response=2),
    ),
    Row(
        "advantage",
        "grpo",
        "TRL scale_rewards=group, with our ε",
        partial(advantages, "grpo"),
        lambda step: trl_scaled(step, scale="group")[:, None] * step.mask_BT,
        square,
    ),
    Row("advantage", "dr_grpo", "TRL scale_rewards=none", partial(advantages, "dr_grpo"), trl_centred, square_weighted),
    Row("advantage", "rloo", "TRL RLOOTrainer", partial(advantages, "rloo"), trl_leave_one_out, square_weighted),
    Row(
        "advantage",
        "gdpo",
        "TRL normalize_then_sum, one token a response, any ε",
        partial(advantages, "gdpo"),
        trl_decoupled,
        square_weighted.map(large),
    ),
    Row(
        "shaping",
        "normalise group/group",
        "TRL scale_rewards=group, with our ε",
        partial(normalised, mean="group", std="group"),
        partial(trl_scaled, scale="group"),
        square,
    ),
    Row(
        "shaping",
        "normalise group/batch",
        "TRL scale_rewards=batch, with our ε",
        partial(normalised, mean="group", std="batch"),
        partial(trl_scaled, scale="batch"),
        square,
    ),
    Row(
        "shaping",
        "normalise group/none",
        "TRL scale_rewards=none",
        partial(normalised, mean="group", std="none"),
        partial(trl_scaled, scale="none"),
        square,
    ),
    Row(
        "shaping",
        "whiten",
        "verl masked_whiten",
        whitened,
        lambda batch: verl.whiten(batch.advantages_BT, batch.mask_BT),
        batches(smallest_response=2, zeros=False),
    ),
    Row(
        "shaping",
        "overlong",
        "TRL get_soft_overlong_punishment",
        lambda lengths: -overlong_penalties(np.array(lengths, np.float64), limit=LIMIT, buffer=BUFFER, penalty=1.0),
        lambda lengths: trl.get_soft_overlong_punishment(LIMIT, BUFFER)([[0] * length for length in lengths]),
        st.lists(st.integers(1, LIMIT), min_size=1, max_size=8),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
@given(data=st.data())
@same_cases
def test_shaping(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))
