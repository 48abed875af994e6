from __future__ import annotations

import json
import math
from typing import get_args

import numpy as np
import pytest
import torch
from algorithm_samples import make_inputs, make_policy_sample, same_cases
from hypothesis import given
from hypothesis import strategies as st

from roll_like.algorithms.kl import KLController, KLEstimator, divergence, token_penalties
from roll_like.algorithms.losses import policy_objective
from roll_like.config.algorithm import CorrectionConfig, KLConfig
from roll_like.errors import ConfigError, EngineError
from roll_like.registry import LOSSES


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # r = log π_ref − log π = −1 − (−0.5) = −0.5
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_hand_computed_values_and_gradients(estimator, value, gradient):
    logprobs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    estimate = divergence(logprobs, torch.tensor([-1.0], dtype=torch.float64), estimator)
    assert estimate.item() == pytest.approx(value, abs=1e-12)
    estimate.sum().backward()
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
def test_finite_differences(estimator):
    logprobs = torch.tensor([-0.1, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, -1.0, -1.7], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: divergence(x, reference, estimator), logprobs)


def test_k3_is_bounded_with_a_finite_gradient():
    logprobs = torch.tensor([-100.0, -0.01, -1.0], requires_grad=True)
    reference = torch.tensor([-0.01, -100.0, -1.0])
    estimate = divergence(logprobs, reference, "k3")
    assert estimate.tolist() == [10.0, 10.0, 0.0]
    estimate.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_small_k3_keeps_its_digits_in_float32():
    log_ratios = [step / 4096 for step in range(1, 20)]
    estimate = divergence(torch.full((19,), -1.0), torch.tensor(log_ratios) - 1, "k3")
    assert estimate.tolist() == pytest.approx([math.expm1(ratio) - ratio for ratio in log_ratios], rel=2e-3)


@same_cases
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.lists(st.floats(0.01, 1), min_size=5, max_size=5))
def test_k1_and_k3_are_unbiased(policy, reference):
    p = torch.tensor(policy, dtype=torch.float64)
    q = torch.tensor(reference[: len(policy)], dtype=torch.float64)
    p, q = p / p.sum(), q / q.sum()
    k1, k3 = (divergence(p.log(), q.log(), name) for name in ("k1", "k3"))
    if k3.max() < 10:
        assert (p * k3).sum().item() == pytest.approx((p * k1).sum().item(), abs=1e-9)
    assert (k3 >= 0).all()


def test_penalties_of_sampled_tokens():
    sample = make_policy_sample([0, 1, 1], [0.0, -0.5, -1.0])
    (penalties,) = token_penalties(
        [sample], [np.array([-7.0, -1.0, -1.0], np.float32)], estimator="k1", coefficient=0.1
    )
    assert penalties == pytest.approx([0, 0.05, 0], abs=1e-7)
    assert penalties.dtype == np.float32
    (squared,) = token_penalties([sample], [np.array([-7.0, -1.0, -1.0], np.float32)], estimator="k2", coefficient=2)
    assert squared == pytest.approx([0, 0.25, 0], abs=1e-7)


def test_penalties_that_cannot_be_are_refused():
    sample = make_policy_sample([0, 1], [0.0, -0.5])
    with pytest.raises(EngineError, match="0 arrays of the reference model's log-probabilities for 1 samples"):
        token_penalties([sample], [], estimator="k1", coefficient=1)
    with pytest.raises(EngineError, match=r"sample 0 \(group 'toy/0#0'\) have shape \(3,\)"):
        token_penalties([sample], [np.zeros(3, np.float32)], estimator="k1", coefficient=1)
    with pytest.raises(EngineError, match=r"sample 0 \(group 'toy/0#0'\) hold infinities or NaN"):
        token_penalties([sample], [np.array([0, -np.inf], np.float32)], estimator="k1", coefficient=1)


def test_the_configuration_knows_the_same_names():
    assert get_args(KLConfig.model_fields["estimator"].annotation) == get_args(KLEstimator)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k3"])
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(estimator):
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.2], dtype=torch.float64)
    value = divergence(policy, reference, estimator, straight_through=True)
    assert value.tolist() == pytest.approx(divergence(policy, reference, estimator).tolist())
    value.sum().backward()
    assert policy.grad.tolist() == pytest.approx([0.5, -0.8])


def test_a_fixed_coefficient_stays():
    controller = KLController(KLConfig(coefficient=0.1))
    controller.update(100.0, 1000)
    assert controller.coefficient == 0.1


def test_an_adaptive_coefficient_follows_by_hand():
    config = KLConfig(use="loss", coefficient=0.1, adaptive={"target": 0.02, "horizon": 100})
    controller = KLController(config)
    controller.update(0.022, 50)  # an error of 0.1
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    controller.update(0.2, 50)  # an error of 9, limited to 0.2
    assert controller.coefficient == pytest.approx(0.105 * 1.1)
    controller.update(0.0, 50)
    assert controller.coefficient == pytest.approx(0.105 * 1.1 * 0.9)
    resumed = KLController(config)
    resumed.load_state(json.loads(json.dumps(controller.state())))
    assert resumed.coefficient == controller.coefficient


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use": "reward", "straight_through": True}, "set use: loss"),
        ({"use": "loss", "straight_through": True, "estimator": "k2"}, "k2 has anyway"),
        ({"adaptive": {"target": 0.1}}, "nowhere"),
        ({"use": "loss", "coefficient": 0, "adaptive": {"target": 0.1}}, "0 stays 0"),
    ],
)
def test_settings_without_an_effect_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        KLConfig(**config)


def test_a_weighted_estimate_has_the_gradient_of_the_divergence_on_average():
    """Over all tokens of a small vocabulary, drawn from an older policy, the expectation is exact."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=draw, dtype=torch.float64, requires_grad=True)
    old, reference = (torch.randn(5, generator=draw, dtype=torch.float64).log_softmax(0) for _ in range(2))
    logprobs = logits.log_softmax(0)
    divergence_itself = (logprobs.exp() * (logprobs - reference)).sum()
    (wanted,) = torch.autograd.grad(divergence_itself, logits, retain_graph=True)
    loss = LOSSES.get("reinforce")
    for estimator, weighted, unbiased in (("k3", True, True), ("k1", True, True), ("k3", False, False)):
        kl = KLConfig(use="loss", estimator=estimator, coefficient=1.0, importance_weight=weighted)
        inputs = make_inputs(
            [0.0] * 5,
            logprobs_N=logprobs,
            old_logprobs_N=old,
            behaviour_logprobs_N=old,
            reference_logprobs_N=reference,
            weights_N=old.exp(),
            advantages_N=torch.zeros(5, dtype=torch.float64),
        )
        objective, metrics = policy_objective(inputs, loss(loss.Config()), kl, 0.0, CorrectionConfig(type="none"))
        (found,) = torch.autograd.grad(objective, logits, retain_graph=True)
        close = torch.allclose(found, wanted, atol=1e-12) and torch.allclose(objective, divergence_itself, atol=1e-12)
        assert close == unbiased
        log_ratio = (reference - logprobs).detach()
        plain = torch.expm1(log_ratio) - log_ratio if estimator == "k3" else -log_ratio
        assert metrics["train/kl"].value == pytest.approx(plain.mean().item()), "the figure is not weighted"


def test_a_weighted_penalty_moves_the_policy_on_policy_too():
    # ρ = 1: ρ·k3 has the gradient k3 + 1 − exp(r) = −r, here 0.5; k3 alone has 1 − exp(−0.5)
    for weighted, slope in ((True, 0.5), (False, 1 - math.exp(-0.5))):
        inputs = make_inputs([-0.5], reference_logprobs_N=[-1.0], advantages_N=[0.0])
        kl = KLConfig(use="loss", coefficient=2.0, importance_weight=weighted)
        loss = LOSSES.get("reinforce")
        policy_objective(inputs, loss(loss.Config()), kl, 0.0, CorrectionConfig(type="none"))[0].backward()
        assert inputs.logprobs_N.grad.item() == pytest.approx(2 * slope)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use": "reward"}, "a penalty in the reward has no gradient"),
        ({"use": "loss", "straight_through": True}, "both decide the gradient"),
        ({"use": "loss", "estimator": "k2"}, "k2 is biased in any case"),
    ],
)
def test_a_weight_where_it_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        KLConfig(importance_weight=True, **settings)
