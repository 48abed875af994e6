"""The loss of a reward model, from the scores of chosen and rejected responses.

In the model of Bradley and Terry (1952), the response with score a is preferred to that with score b with probability
σ(a − b). A reward model is trained on the likelihood of the preferences that people had (Ouyang et al. 2022,
arXiv:2203.02155, equation 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from roll_like.algorithms.base import item_metrics, refuse_bad_values
from roll_like.algorithms.preference.base import widened
from roll_like.algorithms.preference.objective import share_above
from roll_like.values import Metric


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
    fix = "lower training.optimizer.lr, or set model.dtype: bfloat16 where it is float16"
    refuse_bad_values(
        "pair",
        {"scores of chosen responses": (pairs.chosen_P, fix), "scores of rejected responses": (pairs.rejected_P, fix)},
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
