"""The losses of a reward model, from the scores of chosen and rejected responses, of single answers, or of steps.

In the model of Bradley and Terry (1952), the response with score a is preferred to that with score b with probability
σ(a − b). A reward model is trained on the likelihood of the preferences that people had (Ouyang et al. 2022,
arXiv:2203.02155, equation 1). A verifier, or outcome reward model, learns from single answers whether they are right
(Cobbe et al. 2021, arXiv:2110.14168): σ(a) is the probability that the answer with score a is. A process reward model
learns the same of each step of an answer (Lightman et al. 2023, arXiv:2305.20050; with soft labels Wang et al. 2023,
Math-Shepherd, arXiv:2312.08935, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll_like.algorithms.base import item_metrics, refuse_bad_values
from roll_like.algorithms.preference.base import widened
from roll_like.algorithms.preference.objective import share_above
from roll_like.types import FloatArray
from roll_like.values import Metric

_DIVERGED = "lower training.optimizer.lr, or set model.dtype: bfloat16 where it is float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPairs:
    """The pairs of one micro-batch, shape [P] each. Both responses of a pair are in one micro-batch.

    Attributes:
        chosen_P: Score of the preferred response, with gradient.
        rejected_P: Score of the other.
        margins_P: By how much the chosen score should exceed the rejected one, at least 0.
        weights_P: Weight of each pair in the sum: 1/(pairs of the optimizer step, over all micro-batches and ranks). 0
            marks filler, which gives each rank the same number of micro-batches; it changes neither gradient nor
            metrics.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    margins_P: Tensor
    weights_P: Tensor


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor, *, label_smoothing: float = 0.0
) -> Tensor:
    """Return −(1 − ε)·log σ(d − μ) − ε·log σ(−d − μ) with d = r(chosen) − r(rejected), shape [P].

    μ is the margin of Llama 2 (Touvron et al. 2023, arXiv:2307.09288, equation 2); a share ε of labels is taken to be
    the wrong way round, with the same margin.

    >>> bradley_terry_loss(torch.tensor([2.0]), torch.tensor([2.0]), torch.zeros(1)).tolist()
    [0.6931471824645996]

    Args:
        chosen_P: Scores of preferred responses.
        rejected_P: Scores of the others.
        margins_P: μ of each pair.
        label_smoothing: ε.
    """
    difference_P = chosen_P - rejected_P
    right_P = -(1 - label_smoothing) * logsigmoid(difference_P - margins_P)
    return right_P - label_smoothing * logsigmoid(-difference_P - margins_P) if label_smoothing else right_P


def reward_model_objective(
    pairs: ScoredPairs, *, label_smoothing: float, center_coefficient: float
) -> tuple[Tensor, dict[str, Metric]]:
    """Return Σ_i w_i·(ℓ_i + c·(r_i(chosen) + r_i(rejected))²), and its metrics.

    The second term keeps scores around 0, which the first leaves open (Eisenstein et al. 2023, arXiv:2312.09244).
    The sum form lets micro-batches and ranks add up: gradients are summed, never averaged.

    Args:
        label_smoothing: ε of the loss.
        center_coefficient: c.

    Returns:
        The scalar to run `backward` on, and metrics whose reductions hold over micro-batches and ranks.
        `train/loss` and its parts are Sums: merge and reduce them once an optimizer step.

    Raises:
        EngineError: A score is infinite or NaN.
    """
    refuse_bad_values(
        "pair",
        {
            "scores of chosen responses": (pairs.chosen_P, _DIVERGED),
            "scores of rejected responses": (pairs.rejected_P, _DIVERGED),
        },
    )
    chosen_P, rejected_P = widened(pairs.chosen_P), widened(pairs.rejected_P)
    losses_P = bradley_terry_loss(chosen_P, rejected_P, pairs.margins_P, label_smoothing=label_smoothing)
    objective = preference = (pairs.weights_P * losses_P).sum()
    sums = {"train/preference_loss": preference}
    if center_coefficient:
        sums["train/center_loss"] = center_coefficient * (pairs.weights_P * (chosen_P + rejected_P).square()).sum()
        objective = objective + sums["train/center_loss"]
    counted_P = pairs.weights_P != 0
    figures = {
        "preference/accuracy": share_above(chosen_P, rejected_P),
        "preference/margin": chosen_P - rejected_P,
        "preference/score_chosen": chosen_P,
        "preference/score_rejected": rejected_P,
    }
    of_pairs = {name: (figure_P, counted_P) for name, figure_P in figures.items()}
    return objective, item_metrics({"train/loss": objective, **sums}, of_pairs, {"preference/pairs": counted_P})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswers:
    """The answers of one micro-batch, shape [S] each.

    Attributes:
        scores_S: Score of each answer by the model, with gradient.
        labels_S: The score that it was given; of `bce` from 0 to 1.
        weights_S: Weight of each answer in the sum: 1/(answers of the optimizer step, over all micro-batches and
            ranks). 0 marks filler, as in `ScoredPairs`.
    """

    scores_S: Tensor
    labels_S: Tensor
    weights_S: Tensor


def bce_loss(scores_S: Tensor, labels_S: Tensor) -> Tensor:
    """Return −y·log σ(s) − (1 − y)·log σ(−s), shape [S]; y is a share of answers that are right, or 0 or 1.

    >>> bce_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.25])).tolist()
    [0.6931471824645996, 0.6931471824645996]

    Args:
        scores_S: s, the model's scores.
        labels_S: y.
    """
    return -labels_S * logsigmoid(scores_S) - (1 - labels_S) * logsigmoid(-scores_S)


def mse_loss(scores_S: Tensor, labels_S: Tensor) -> Tensor:
    """Return (s − y)², shape [S]; the arguments are those of `bce_loss`, and y any number."""
    return (scores_S - labels_S).square()


def scored_answers_objective(
    answers: ScoredAnswers, *, loss: str, counted: str = "samples"
) -> tuple[Tensor, dict[str, Metric]]:
    """Return Σ_i w_i·ℓ_i, and its metrics; what is said of `reward_model_objective` holds here too.

    Args:
        answers: Single answers, or the steps of answers.
        loss: `bce` or `mse`.
        counted: What they are called in the metric that counts them.

    Raises:
        EngineError: A score is infinite or NaN.
    """
    refuse_bad_values("answer", {"scores": (answers.scores_S, _DIVERGED)})
    scores_S, labels_S = widened(answers.scores_S), answers.labels_S
    losses_S = (bce_loss if loss == "bce" else mse_loss)(scores_S, labels_S)
    objective = (answers.weights_S * losses_S).sum()
    counted_S = answers.weights_S != 0
    predicted_S = scores_S.sigmoid() if loss == "bce" else scores_S
    figures = {
        "preference/error": ((predicted_S - labels_S).abs(), counted_S),
        "preference/score": (scores_S, counted_S),
    }
    if loss == "bce":
        right_S, wrong_S = counted_S & (labels_S > 0.5), counted_S & (labels_S < 0.5)
        above_S = share_above(scores_S, torch.zeros_like(scores_S))
        figures |= {
            "preference/accuracy": (torch.where(labels_S > 0.5, above_S, 1 - above_S), right_S | wrong_S),
            "preference/score_chosen": (scores_S, right_S),
            "preference/score_rejected": (scores_S, wrong_S),
            "preference/positive": ((labels_S > 0.5).float(), counted_S),
        }
    sums = {"train/loss": objective, "train/preference_loss": objective}
    return objective, item_metrics(sums, figures, {f"preference/{counted}": counted_S})


def area_under_curve(scores_S: FloatArray, labels_S: FloatArray) -> float | None:
    """Return the probability that an answer labelled above ½ scores higher than one labelled below; ties count half.

    This is the area under the ROC curve. Answers labelled ½ are left out. None where one of both kinds is missing.

    >>> area_under_curve(np.array([0.1, 0.4, 0.4, 0.9]), np.array([0, 0, 1, 1]))
    0.875
    """
    ranks_S, right_S = _ranks(scores_S[labels_S != 0.5]), labels_S[labels_S != 0.5] > 0.5
    right, wrong = int(right_S.sum()), int((~right_S).sum())
    if not right or not wrong:
        return None
    return float((ranks_S[right_S].sum() - right * (right + 1) / 2) / (right * wrong))


def first_wrong(values_K: FloatArray, threshold: float) -> int:
    """Return the index of the first step below a threshold, or −1 where there is none.

    >>> first_wrong(np.array([0.9, 0.2, 0.1]), 0.5)
    1
    """
    below = np.flatnonzero(values_K < threshold)
    return int(below[0]) if len(below) else -1


def first_wrong_shares(
    scores: Sequence[FloatArray], labels: Sequence[FloatArray], threshold: float
) -> tuple[float | None, float | None]:
    """Return how often the first wrong step is found, and how often an answer without one is passed.

    ProcessBench (Zheng et al. 2024, arXiv:2412.06559): a step is wrong if its label is below ½, and found wrong if its
    score is below the threshold. The shares are of answers with a wrong step, and of answers without; None where there
    is no such answer. `harmonic_mean` of both is the benchmark's F1.

    Args:
        scores: Of the steps of each answer, one array [K] an answer.
        labels: Of the same steps.
    """
    found: dict[bool, list[bool]] = {True: [], False: []}
    for scores_K, labels_K in zip(scores, labels, strict=True):
        place = first_wrong(labels_K, 0.5)
        found[place >= 0].append(first_wrong(scores_K, threshold) == place)
    wrong, right = (float(np.mean(found[kind])) if found[kind] else None for kind in (True, False))
    return wrong, right


def harmonic_mean(one: float, other: float) -> float:
    """Return 2ab/(a + b), 0 where both are 0.

    >>> harmonic_mean(1.0, 0.5)
    0.6666666666666666
    """
    return 2 * one * other / (one + other) if one + other else 0.0


def rank_correlation(scores_S: FloatArray, labels_S: FloatArray) -> float | None:
    """Return Spearman's rank correlation of scores and labels; None where all scores, or all labels, are equal.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0]))
    0.5
    """
    both = [ranks - ranks.mean() for ranks in map(_ranks, (scores_S, labels_S))]
    spread = float(np.sqrt(np.square(both[0]).sum() * np.square(both[1]).sum()))
    return float(both[0] @ both[1]) / spread if spread else None


def _ranks(values_S: FloatArray) -> npt.NDArray[np.float64]:
    """Return the place of each value in their order, counted from 1; equal values share the mean of their places."""
    _, place_S, counts = np.unique(values_S, return_inverse=True, return_counts=True)
    ranks_S: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place_S]
    return ranks_S
