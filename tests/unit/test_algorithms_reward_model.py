"""The losses of a reward model against numbers computed by hand and PyTorch's own, and their figures."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.functional import mse_loss as torch_mse_loss

from roll_like.algorithms import reward_model
from roll_like.algorithms.reward_model import (
    ScoredAnswers,
    ScoredPairs,
    area_under_curve,
    bradley_terry_loss,
    rank_correlation,
    reward_model_objective,
    scored_answers_objective,
)
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


def answers(scores: list[float], labels: list[float], weights: list[float] | None = None) -> ScoredAnswers:
    count = len(scores)
    return ScoredAnswers(
        scores_S=tensor(scores).requires_grad_(),
        labels_S=tensor(labels),
        weights_S=tensor(weights or [1 / count] * count),
    )


SCORES, SOFT = [0.0, 2.0, -1.5, 40.0, -300.0], [1.0, 0.0, 0.25, 1.0, 0.5]


@pytest.mark.parametrize(("loss", "theirs"), [("bce", binary_cross_entropy_with_logits), ("mse", torch_mse_loss)])
def test_losses_of_single_answers_and_their_gradients_are_those_of_pytorch(loss: str, theirs: Any) -> None:
    found = answers(SCORES, SOFT)
    value, metrics = scored_answers_objective(found, loss=loss)
    scores_S = tensor(SCORES).requires_grad_()
    expected = theirs(scores_S, tensor(SOFT))
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    (ours,), (wanted,) = torch.autograd.grad(value, [found.scores_S]), torch.autograd.grad(expected, [scores_S])
    assert torch.allclose(ours, wanted, rtol=1e-12, atol=1e-15)
    figures = reduce(metrics)
    assert figures["train/loss"] == figures["train/preference_loss"] == pytest.approx(expected.item())


def test_losses_of_single_answers_by_hand() -> None:
    # y = ¾ at s = 1: ¾·log(1 + e^−1) + ¼·log(1 + e), and its derivative σ(1) − ¾
    found = answers([1.0], [0.75])
    value, _ = scored_answers_objective(found, loss="bce")
    assert value.item() == pytest.approx(0.75 * 0.3132616875 + 0.25 * 1.3132616875, abs=1e-9)
    assert torch.autograd.grad(value, [found.scores_S])[0].tolist() == pytest.approx([0.7310585786 - 0.75], abs=1e-9)
    found = answers([3.0, 1.0], [5.0, 2.0])
    value, _ = scored_answers_objective(found, loss="mse")
    assert value.item() == pytest.approx((4 + 1) / 2)
    assert torch.autograd.grad(value, [found.scores_S])[0].tolist() == pytest.approx([-2.0, -1.0])


def test_figures_of_single_answers_leave_fillers_out() -> None:
    third = 1 / 3
    labels, weights = [1.0, 0.75, 0.0, 0.0], [third, third, third, 0.0]
    figures = reduce(scored_answers_objective(answers([2.0, 0.0, 1.0, 9.0], labels, weights), loss="bce")[1])
    # σ(2) = 0.8807970780, σ(0) = ½, σ(1) = 0.7310585786
    assert figures["preference/error"] == pytest.approx((1 - 0.8807970780 + 0.25 + 0.7310585786) / 3)
    assert figures["preference/accuracy"] == pytest.approx(0.5)  # right, at ½, wrong
    assert figures["preference/score"] == pytest.approx(1.0)
    assert figures["preference/score_chosen"] == pytest.approx(1.0)
    assert figures["preference/score_rejected"] == pytest.approx(1.0)
    assert figures["preference/samples"] == 3
    ratings = reduce(scored_answers_objective(answers([2.0, 9.0], [5.0, 0.0], [1.0, 0.0]), loss="mse")[1])
    assert (ratings["preference/error"], ratings["preference/score"]) == (3.0, 2.0)
    assert "preference/accuracy" not in ratings


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_micro_batches_of_single_answers_add_up_to_the_whole(loss: str) -> None:
    whole, figures = scored_answers_objective(answers(SCORES, SOFT), loss=loss)
    parts = [
        scored_answers_objective(answers(SCORES[at], SOFT[at], [0.2] * len(SCORES[at])), loss=loss)
        for at in (slice(0, 2), slice(2, 5))
    ]
    filler = scored_answers_objective(answers([7.0], [1.0], [0.0]), loss=loss)
    assert filler[0].item() == 0
    assert sum(value.item() for value, _ in parts) == pytest.approx(whole.item(), rel=1e-12)
    assert reduce(merge(metrics for _, metrics in [*parts, filler])) == pytest.approx(reduce(figures))


def test_a_score_of_an_answer_that_is_not_finite_is_refused() -> None:
    with pytest.raises(EngineError, match=r"scores hold inf at answer 1 \(of 2"):
        scored_answers_objective(answers([1.0, float("inf")], [1.0, 0.0]), loss="bce")


def test_the_order_of_scores_is_measured_pair_by_pair() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        scores = random.integers(0, 6, 12).astype(np.float32)  # with ties
        labels = random.choice([0.0, 0.2, 0.5, 0.9, 1.0], 12).astype(np.float32)
        right, wrong = scores[labels > 0.5], scores[labels < 0.5]
        above = [float(one > other) + 0.5 * float(one == other) for one in right for other in wrong]
        assert area_under_curve(scores, labels) == pytest.approx(sum(above) / len(above))
        # Spearman's correlation is Pearson's of ranks: places among all, of equal ones the middle place
        ranks = [[float((each < one).sum() + (each == one).sum() / 2) for one in each] for each in (scores, labels)]
        assert rank_correlation(scores, labels) == pytest.approx(float(np.corrcoef(ranks)[0, 1]))


def test_an_order_of_one_kind_is_none() -> None:
    scores = np.array([0.1, 0.2], np.float32)
    assert area_under_curve(scores, np.array([1.0, 1.0], np.float32)) is None
    assert area_under_curve(scores, np.array([0.5, 0.5], np.float32)) is None
    assert rank_correlation(scores, np.array([3.0, 3.0], np.float32)) is None


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(reward_model, extraglobs={"torch": torch}) == doctest.TestResults(0, 6)
