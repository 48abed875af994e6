"""The loss of a reward model against TRL's: values, gradients and figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import trl_reward_reference as trl
from algorithm_samples import same_cases
from conformance import Row
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll_like.algorithms.reward_model import ScoredPairs, reward_model_objective
from roll_like.values import reduce


@dataclass(frozen=True)
class Scores:
    """Scores [2·P] of chosen, then of rejected responses, and a margin of each pair [P], in float64."""

    scores_B: Tensor
    margins_P: Tensor


@st.composite
def scores(draw: st.DrawFn) -> Scores:
    """One to six pairs; of nearly equal scores, and of scores that are far apart."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, spread = draw(st.integers(1, 6)), draw(st.sampled_from([0.01, 1.0, 20.0]))
    scores_B = torch.from_numpy(random.normal(0.5, spread, 2 * count))
    return Scores(scores_B, torch.from_numpy(random.choice([0.0, 1 / 3, 1.0], count)))


def of(case: Scores, scores_B: Tensor, *, center: float, margins: bool) -> Any:
    chosen_P, rejected_P = scores_B.chunk(2)
    pairs = ScoredPairs(
        chosen_P=chosen_P,
        rejected_P=rejected_P,
        margins_P=case.margins_P if margins else torch.zeros_like(case.margins_P),
        weights_P=torch.full_like(case.margins_P, 1 / len(case.margins_P)),
    )
    return reward_model_objective(pairs, label_smoothing=0.0, center_coefficient=center)


def loss_and_gradient(case: Scores, *, center: float = 0.0, margins: bool = False) -> tuple[Tensor, Tensor]:
    scores_B = case.scores_B.clone().requires_grad_()
    loss, _ = of(case, scores_B, center=center, margins=margins)
    return loss, torch.autograd.grad(loss, scores_B)[0]


def figure(name: str, case: Scores) -> list[float]:
    return [reduce(of(case, case.scores_B, center=0.0, margins=False)[1])[name]]


def figure_of_trl(name: str, case: Scores) -> list[float]:
    return [trl.reward_figures(case)[name]]


def row(label: str, **settings: Any) -> Row:
    return Row(
        "reward model",
        "bradley_terry",
        f"TRL RewardTrainer{label}",
        partial(loss_and_gradient, **settings),
        partial(trl.reward_loss, **settings),
        scores(),
        gradient=True,
    )


ROWS = [
    row(""),
    row(", margin", margins=True),
    row(", center_rewards_coefficient", center=0.3),
    Row(
        "figure",
        "preference/accuracy",
        "TRL RewardTrainer accuracy",
        partial(figure, "preference/accuracy"),
        partial(figure_of_trl, "accuracy"),
        scores(),
    ),
    Row(
        "figure",
        "preference/margin",
        "TRL RewardTrainer margin",
        partial(figure, "preference/margin"),
        partial(figure_of_trl, "margin"),
        scores(),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
@given(data=st.data())
@same_cases
def test_values_gradients_and_figures(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))
