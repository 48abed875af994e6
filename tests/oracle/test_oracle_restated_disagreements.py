"""Where libraries differ from us that are not installed: their formulas restated, ours as it runs, in numbers."""

from __future__ import annotations

import numpy as np
import pytest
import restated_reference as restated
import torch
from advantage_cases import advantages, step
from loss_cases import loss_and_gradient, tokens

from roll_like.algorithms.kl import KLEstimator, divergence

#: A turn of two tokens, a tool's answer of three, a turn of one token.
TOOL = [1, 1, 0, 0, 0, 1]


def test_whitening_takes_the_unbiased_variance() -> None:
    two = step([1.0, 0.0], masks=[[1], [1]])
    assert advantages("reinforce_plus_plus", two)[:, 0].tolist() == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)])
    assert restated.openrlhf_whitened([1.0, 0.0]).tolist() == pytest.approx([1.0, -1.0])
    # of many tokens it makes no difference
    many = step([1.0, 0.0], masks=[[1] * 500, [1] * 500])
    assert advantages("reinforce_plus_plus", many)[0, 0] == pytest.approx(0.9995, abs=1e-5)


def test_tokens_of_a_tool_do_not_discount() -> None:
    ours = advantages("reinforce", step([1.0], masks=[TOOL]), gamma=0.5)[0]
    assert ours.tolist() == [0.25, 0.5, 0.0, 0.0, 0.0, 1.0]
    theirs = restated.response_returns([0, 0, 0, 0, 0, 1.0], gamma=0.5)
    assert np.multiply(theirs, TOOL).tolist() == [0.5**5, 0.5**4, 0.0, 0.0, 0.0, 1.0]
    # without a tool both are the same
    assert advantages("reinforce", step([1.0], masks=[[1, 1, 1]]), gamma=0.5)[0].tolist() == [0.25, 0.5, 1.0]
    assert restated.response_returns([0, 0, 1.0], gamma=0.5) == [0.25, 0.5, 1.0]


def test_turns_before_a_tool_answer_for_what_comes_after_it() -> None:
    assert advantages("reinforce", step([1.0], masks=[TOOL]))[0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    rewards = [0, 0, 0, 0, 0, 1.0]
    of_sampled = restated.skyrl_returns(rewards, TOOL, gamma=1.0)
    assert np.multiply(of_sampled, TOOL).tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    # the mask that SkyRL's trainer passes is 1 for the whole response: then a tool's tokens discount
    of_response = restated.skyrl_returns(rewards, [1] * 6, gamma=0.5)
    assert of_response == restated.response_returns(rewards, gamma=0.5)


def test_topr_tapers_by_the_ratio_of_the_sequence() -> None:
    # half as likely as before, twice
    batch = tokens([[-2.0, -2.0]], old_BT=[[-2.0 + np.log(2)] * 2], advantages_BT=[[-1.0, -1.0]])
    ours = loss_and_gradient("topr", batch, how="seq_mean_token_sum")[1]
    assert ours.tolist() == [pytest.approx([0.25, 0.25])]
    log_ratio_T = (batch.logprobs_BT - batch.old_BT)[0]
    assert restated.roll_topr_gradient(log_ratio_T, -1.0, reward=0.0).tolist() == pytest.approx([0.5, 0.5])
    # the better one of two failures: our sign is the advantage's, theirs the reward's
    better = tokens([[-2.0, -2.0]], old_BT=[[-2.0 + np.log(2)] * 2])
    assert loss_and_gradient("topr", better, how="seq_mean_token_sum")[1].tolist() == [[-1.0, -1.0]]
    assert restated.roll_topr_gradient(log_ratio_T, 1.0, reward=-0.5).tolist() == pytest.approx([-0.5, -0.5])


def test_kimi_penalises_the_log_ratio_of_the_sequence() -> None:
    # two tokens that moved by 1 and by −1: the sequence is as likely as before
    batch = tokens([[-1.0, -2.0]], old_BT=[[-2.0, -1.0]])
    ours = loss_and_gradient("kimi", batch, how="seq_mean_token_sum", tau=0.1)[1]
    assert ours.tolist() == [pytest.approx([-1.0, -1.0])]
    log_ratio_T = (batch.logprobs_BT - batch.old_BT)[0]
    assert restated.roll_kimi_gradient(log_ratio_T, 1.0, tau=0.1).tolist() == pytest.approx([-0.9, -1.1])


@pytest.mark.parametrize(
    ("estimator", "log_ratio", "ours", "theirs"),
    [  # value and gradient for log π
        ("k1", 21.0, (-21.0, 1.0), (-10.0, 0.0)),
        ("k2", 21.0, (220.5, -21.0), (10.0, 0.0)),
        ("k3", 21.0, (10.0, 0.0), (10.0, 0.0)),
        ("k3", 7.0, (10.0, 0.0), (10.0, 0.0)),
        ("k3", -21.0, (10.0, 0.0), (10.0, 0.0)),
        ("k1", 5.0, (-5.0, 1.0), (-5.0, 1.0)),
        ("k2", 4.0, (8.0, -4.0), (8.0, -4.0)),
        ("k3", 2.0, (np.exp(2) - 3, 1 - np.exp(2)), (np.exp(2) - 3, 1 - np.exp(2))),
    ],
)
def test_k3_alone_is_bounded(
    estimator: KLEstimator, log_ratio: float, ours: tuple[float, float], theirs: tuple[float, float]
) -> None:
    for estimate, expected in ((divergence, ours), (restated.nemo_rl_kl, theirs)):
        logprobs = torch.tensor([-1.0 - log_ratio], dtype=torch.float64, requires_grad=True)
        value = estimate(logprobs, torch.tensor([-1.0], dtype=torch.float64), estimator)
        (gradient,) = torch.autograd.grad(value, logprobs)
        assert (value.item(), gradient.item()) == pytest.approx(expected)


def test_k3_without_the_bounds_of_its_configuration() -> None:
    logprobs, reference = (torch.tensor([value], dtype=torch.float64) for value in (-8.0, -1.0))
    unbounded = restated.nemo_rl_kl(logprobs, reference, "k3", largest_log_ratio=None, largest=None)
    assert unbounded.item() == pytest.approx(np.exp(7) - 8)
    assert divergence(logprobs, reference, "k3").item() == 10
