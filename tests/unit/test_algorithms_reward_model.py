"""The loss of a reward model against numbers computed by hand, and its figures."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch

from roll_like.algorithms import reward_model
from roll_like.algorithms.reward_model import ScoredPairs, bradley_terry_loss, reward_model_objective
from roll_like.errors import EngineError
from roll_like.values import merge, reduce


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pairs(
    chosen: list[float],
    rejected: list[float],
    *,
    margins: list[float] | None = None,
    weights: list[float] | None = None,
) -> ScoredPairs:
    """Pairs with weights of a mean, and no margin, where none are given."""
    count = len(chosen)
    return ScoredPairs(
        chosen_P=tensor(chosen).requires_grad_(),
        rejected_P=tensor(rejected).requires_grad_(),
        margins_P=tensor(margins or [0.0] * count),
        weights_P=tensor(weights or [1 / count] * count),
    )


def objective(found: ScoredPairs, **settings: float) -> tuple[torch.Tensor, dict[str, Any]]:
    return reward_model_objective(found, **{"label_smoothing": 0.0, "center_coefficient": 0.0, **settings})


# −log σ(x) = log(1 + e^−x): log(1 + e^−1) = 0.3132616875, log(1 + e) = 1.3132616875, log(1 + e^−3) = 0.0485873516
@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "smoothing", "expected"),
    [
        (2.0, 1.0, 0.0, 0.0, 0.3132616875),
        (1.0, 2.0, 0.0, 0.0, 1.3132616875),
        (0.5, 0.5, 0.0, 0.0, 0.6931471806),
        (3.0, 1.0, 1.0, 0.0, 0.3132616875),  # what is above the margin counts
        (2.0, 1.0, 0.0, 0.25, 0.75 * 0.3132616875 + 0.25 * 1.3132616875),
        # the label that is the wrong way round asks for the same margin: −log σ(−1 − 2) = log(1 + e^3)
        (2.0, 1.0, 2.0, 0.25, 0.75 * 1.3132616875 + 0.25 * 3.0485873516),
    ],
)
def test_hand_computed_losses(chosen: float, rejected: float, margin: float, smoothing: float, expected: float) -> None:
    loss_P = bradley_terry_loss(tensor([chosen]), tensor([rejected]), tensor([margin]), label_smoothing=smoothing)
    assert loss_P.tolist() == pytest.approx([expected], abs=1e-9)


def test_the_objective_and_its_gradient_by_hand() -> None:
    found = pairs([2.0, 1.0], [1.0, 2.0])
    loss, metrics = objective(found, center_coefficient=0.1)
    # the pair's added scores are 3 each: 0.1 · 9
    assert loss.item() == pytest.approx((0.3132616875 + 1.3132616875) / 2 + 0.9, abs=1e-9)
    chosen_P, rejected_P = torch.autograd.grad(loss, [found.chosen_P, found.rejected_P])
    # d/da of −log σ(a − b) is −σ(b − a): σ(−1) = 0.2689414214; of 0.1·(a + b)² it is 0.2·3; halved by the mean
    assert chosen_P.tolist() == pytest.approx([(-0.2689414214 + 0.6) / 2, (-0.7310585786 + 0.6) / 2], abs=1e-9)
    assert rejected_P.tolist() == pytest.approx([(0.2689414214 + 0.6) / 2, (0.7310585786 + 0.6) / 2], abs=1e-9)
    figures = reduce(metrics)
    assert figures["train/center_loss"] == pytest.approx(0.9)
    assert figures["train/preference_loss"] + 0.9 == pytest.approx(figures["train/loss"])


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"center_coefficient": 0.3}])
def test_gradients_are_those_of_finite_differences(settings: dict[str, float]) -> None:
    margins, weights = tensor([0.0, 0.5, 1.0]), tensor([0.2, 0.5, 0.3])

    def of(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        made = ScoredPairs(chosen_P=chosen_P, rejected_P=rejected_P, margins_P=margins, weights_P=weights)
        return objective(made, **settings)[0]

    given = (tensor([0.3, -2.0, 4.0]).requires_grad_(), tensor([1.0, -2.5, 3.0]).requires_grad_())
    assert torch.autograd.gradcheck(of, given)


def test_figures_count_ties_half_and_leave_fillers_out() -> None:
    _, metrics = objective(pairs([2.0, 1.0, 0.0, 9.0], [1.0, 1.0, 3.0, 0.0], weights=[1 / 3, 1 / 3, 1 / 3, 0.0]))
    figures = reduce(metrics)
    assert figures["preference/accuracy"] == pytest.approx(0.5)  # right, tied, wrong
    assert figures["preference/margin"] == pytest.approx((1 + 0 - 3) / 3)
    assert figures["preference/score_chosen"] == pytest.approx(1.0)
    assert figures["preference/score_rejected"] == pytest.approx(5 / 3)
    assert figures["preference/pairs"] == 3
    assert "train/center_loss" not in figures


def test_micro_batches_add_up_to_the_whole() -> None:
    settings = {"label_smoothing": 0.1, "center_coefficient": 0.01}
    chosen, rejected, margins = [1.0, 2.0, -0.5], [0.0, 2.5, -1.0], [0.0, 1.0, 0.5]
    whole, figures = objective(pairs(chosen, rejected, margins=margins), **settings)
    parts = [
        objective(pairs(chosen[at], rejected[at], margins=margins[at], weights=[1 / 3] * len(chosen[at])), **settings)
        for at in (slice(0, 1), slice(1, 3))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    assert reduce(merge(metrics for _, metrics in parts)) == pytest.approx(reduce(figures))


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(EngineError, match=r"scores of rejected responses hold nan at pair 1 \(of 2"):
        objective(pairs([1.0, 2.0], [0.0, float("nan")]))


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(reward_model, extraglobs={"torch": torch}) == doctest.TestResults(0, 1)
