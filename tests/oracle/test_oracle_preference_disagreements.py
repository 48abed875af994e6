"""Where preference losses differ between references, papers and us: what each does, and that ours is what we say."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
import trl_preference_reference as trl
from preference_cases import Responses, figures, loss_and_gradient
from torch import Tensor


def pairs(
    chosen: list[list[float]], rejected: list[list[float]], reference: list[list[float]] | None = None
) -> Responses:
    """Token log-probabilities of each response; the reference's are the policy's where they are not given."""
    rows = chosen + rejected
    mask_BT, logprobs_BT = _padded([[1.0] * len(row) for row in rows]), _padded(rows)
    reference_BT = logprobs_BT if reference is None else _padded(reference)
    desirable_B = torch.arange(len(rows)) < len(chosen)
    return Responses(mask_BT, logprobs_BT, reference_BT, desirable_B, mask_BT, logprobs_BT, reference_BT)


def _padded(rows: list[list[float]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def rows_of(case: Responses, rows: list[int]) -> Responses:
    return Responses(**{field.name: getattr(case, field.name)[rows] for field in fields(case)})


def test_alpha_is_that_of_the_paper() -> None:
    # log-ratios 1 and −1: f' is (1 − t^(−α))/α in table 1 of arXiv:2309.16240
    case = pairs([[-1.0]], [[-3.0]], [[-2.0], [-2.0]])
    margin = ((1 - math.exp(-0.2)) - (1 - math.exp(0.2))) / 0.2
    expected = math.log1p(math.exp(-margin))
    ours = loss_and_gradient("dpo", case, beta=1.0, divergence="alpha", alpha=0.2)[0].item()
    assert ours == pytest.approx(expected)
    for coefficient, agrees in ((0.8, True), (0.2, False)):
        divergence = ("alpha_divergence", coefficient)
        theirs = trl.dpo_loss(case, "sigmoid", divergence=divergence, dtype=torch.float32, beta=1.0)[0].item()
        assert (theirs == pytest.approx(expected, abs=1e-6)) is agrees


def test_a_response_that_was_abandoned_keeps_its_gradient() -> None:
    case = pairs([[-200.0]], [[-1.0]], [[-1.0], [-1.0]])
    forward = trl.dpo_loss(case, "sigmoid", divergence=("forward_kl", 0.0), dtype=torch.float32, beta=0.1)
    assert math.isinf(forward[0].item())
    alpha = trl.dpo_loss(case, "sigmoid", divergence=("alpha_divergence", 0.1), dtype=torch.float32, beta=0.1)
    assert alpha[1][0, 0] == 0  # clamped: nothing draws it back
    for settings in ({"divergence": "forward_kl"}, {"divergence": "alpha", "alpha": 0.9}):
        loss, gradient_BT = loss_and_gradient("dpo", case, beta=0.1, **settings)
        assert loss.isfinite()
        assert -1e12 < gradient_BT[0, 0] < -1


def test_a_mean_log_ratio_is_what_the_divergence_is_of() -> None:
    # chosen: log-ratio 2 over two tokens; rejected: 0
    case = pairs([[-1.0, -1.0]], [[-1.0]], [[-2.0, -2.0], [-1.0]])

    def loss(score: float) -> Any:
        return pytest.approx(math.log1p(math.exp(-score)))

    ours = loss_and_gradient("dpo", case, beta=1.0, divergence="forward_kl", length_normalised=True)[0].item()
    assert ours == loss(1 - math.exp(-1.0))
    theirs = trl.dpo_loss(case, "sigmoid_norm", divergence=("forward_kl", 0.0), beta=1.0)[0].item()
    assert theirs == loss((1 - math.exp(-2.0)) / 2)  # the score of the sum, over two tokens


def test_ties_are_half_right() -> None:
    case = pairs([[-1.0], [-2.0]], [[-3.0], [-1.0]])
    assert trl.dpo_figures(case, "sigmoid", beta=0.1)["rewards/accuracies"] == 0.0
    assert figures("dpo", case)["preference/accuracy"] == 0.5


def test_rewards_are_what_the_loss_compares() -> None:
    case = pairs([[-1.0, -1.0]], [[-1.0]], [[-2.0, -2.0], [-1.0]])
    assert trl.dpo_figures(case, "ipo", beta=0.5)["rewards/chosen"] == 1.0  # of the sum, whatever the loss
    assert figures("ipo", case, beta=0.5)["preference/reward_chosen"] == 0.5
    assert figures("ipo", case, beta=0.5, length_normalised=False)["preference/reward_chosen"] == 1.0
    found = figures("dpo", case, beta=0.5, divergence="forward_kl")["preference/reward_chosen"]
    assert found == pytest.approx(0.5 * (1 - math.exp(-2.0)))


def test_a_certain_response_has_finite_odds() -> None:
    case = pairs([[-1.0]], [[0.0]])
    theirs, gradient_BT = trl.orpo_loss(case, beta=0.1)
    assert not theirs.isfinite()
    loss, gradient_BT = loss_and_gradient("orpo", case, beta=0.1)
    assert loss.isfinite()
    assert gradient_BT.isfinite().all()
    assert gradient_BT[1, 0] > 0


def test_the_likelihood_is_of_responses_only() -> None:
    case = pairs([[-1.0, -2.0]], [[-4.0]])
    ours = loss_and_gradient("orpo", case)[0].item()
    assert trl.orpo_loss(case, beta=0.1)[0].item() == pytest.approx(ours, abs=1e-6)
    # ORPOTrainer counts a token of the prompt at −9 like those of the response
    with_prompt = trl.orpo_loss(case, prompt_logprob=-9.0, beta=0.1)[0].item()
    assert with_prompt - ours == pytest.approx((9 + 1 + 2) / 3 - (1 + 2) / 2, abs=1e-6)


def test_the_likelihood_of_cpo_is_a_mean_over_tokens_or_that_of_the_paper() -> None:
    case = pairs([[-1.0, -1.0, -1.0], [-3.0]], [[-1.0], [-1.0]])
    plain = loss_and_gradient("cpo", case, nll_coefficient=0.0)[0].item()
    assert trl.cpo_loss(case, "sigmoid", beta=0.1, nll=1.0)[0].item() - plain == pytest.approx((3 + 3) / 4)
    for how, expected in (("token_mean", 6 / 4), ("seq_mean_token_mean", (1 + 3) / 2), ("seq_mean_token_sum", 6 / 2)):
        assert loss_and_gradient("cpo", case, nll_aggregation=how)[0].item() - plain == pytest.approx(expected)


def test_the_baseline_and_the_likelihood_are_of_the_whole_step() -> None:
    # mismatched log-ratios 2 and −3: −0.5 on average, so 0; of micro-batches of one sample 2 and 0
    case = pairs([[-1.0, -1.0]], [[-4.0]], [[-2.0, -2.0], [-1.0]])
    settings = {"beta": 1.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    whole = trl.kto_loss(case, **settings)[0].item()
    assert loss_and_gradient("kto", case, **settings)[0].item() == pytest.approx(whole)
    parts = [trl.kto_loss(rows_of(case, [row]), **settings)[0].item() for row in (0, 1)]
    assert sum(parts) / 2 != pytest.approx(whole, abs=0.1)
    # tokens of chosen responses: three at −1 and one at −3
    case = pairs([[-1.0, -1.0, -1.0], [-3.0]], [[-1.0], [-1.0]])
    halves = [rows_of(case, [row, row + 2]) for row in (0, 1)]
    likelihoods = [trl.dpo_loss(half, "sft", beta=0.1)[0].item() for half in halves]
    assert sum(likelihoods) / 2 == pytest.approx(2.0)
    both = figures("dpo", case, nll_coefficient=1.0)
    assert both["train/nll_loss"] == pytest.approx(6 / 4)
    assert trl.dpo_loss(case, "sft", beta=0.1)[0].item() == pytest.approx(6 / 4)
