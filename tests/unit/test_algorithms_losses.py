from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from algorithm_samples import NO_CORRECTION, make_inputs, same_cases
from hypothesis import given
from hypothesis import strategies as st

from roll_like.algorithms.losses import LossInputs, PolicyLoss, TokenLosses, policy_objective
from roll_like.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig
from roll_like.config.base import PluginConfig
from roll_like.errors import ConfigError, EngineError
from roll_like.registry import LOSSES
from roll_like.values import Mean, merge, reduce


def ppo(**settings: object) -> PolicyLoss:
    plugin = LOSSES.get("ppo")
    return plugin(plugin.Config(**settings))


def ratios(*values: float) -> list[float]:
    """Log-probabilities that are these ratios away from an old policy at −1."""
    return [math.log(value) - 1 for value in values]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # the gradient is ∂ℓ/∂log π = −ρ·A inside the range, 0 where clipped
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.56, 0.0),  # above 1.28
        (0.5, 2.0, -1.0, -1.0),  # a pessimistic bound: not clipped below where A > 0
        (0.5, -2.0, 1.6, 0.0),  # below 0.8
        (1.5, -2.0, 3.0, 3.0),  # not clipped above where A < 0
        (4.0, -2.0, 6.0, 0.0),  # dual clip at 3
        (4.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_by_hand(ratio, advantage, loss, gradient):
    inputs = make_inputs(ratios(ratio), old_logprobs_N=[-1.0], advantages_N=[advantage])
    losses = ppo()(inputs).losses_N
    assert losses.item() == pytest.approx(loss, abs=1e-12)
    losses.sum().backward()
    assert inputs.logprobs_N.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_ppo_settings_move_the_bounds():
    inputs = make_inputs(ratios(1.5, 0.5, 4.0), old_logprobs_N=[-1.0] * 3, advantages_N=[1.0, -1.0, -1.0])
    assert ppo(clip_high=0.4)(inputs).losses_N.tolist() == pytest.approx([-1.4, 0.8, 3.0])
    assert ppo(clip_low=0.4)(inputs).losses_N.tolist() == pytest.approx([-1.28, 0.6, 3.0])
    assert ppo(dual_clip=2.0)(inputs).losses_N.tolist() == pytest.approx([-1.28, 0.8, 2.0])
    assert ppo(dual_clip=None)(inputs).losses_N.tolist() == pytest.approx([-1.28, 0.8, 4.0])


def test_ppo_counts_what_it_clips():
    inputs = make_inputs(ratios(1.5, 0.5, 4.0, 1.0), old_logprobs_N=[-1.0] * 4, advantages_N=[1.0, -1.0, -1.0, 1.0])
    _, metrics = policy_objective(inputs, ppo(), None, 0.0, NO_CORRECTION)
    for name in ("high", "low", "dual"):
        assert metrics[f"train/clip_fraction_{name}"] == Mean(0.25, 4.0)
    assert metrics["train/ratio"].value == pytest.approx(7 / 4)
    assert "train/clip_fraction_dual" not in ppo(dual_clip=None)(inputs).metrics


@pytest.mark.parametrize(
    "settings", [{"clip_low": 1.0}, {"clip_low": -0.1}, {"clip_high": -0.1}, {"dual_clip": 1.0}, {"dual_clip": 1.2}]
)
def test_ppo_refuses_bounds_that_make_no_sense(settings):
    with pytest.raises(ConfigError, match="clip"):
        ppo(**settings)


def test_a_huge_ratio_stays_finite():
    # in float32, exp(199.9) is infinite
    inputs = make_inputs(
        [-0.1, -200.0],
        logprobs_N=torch.tensor([-0.1, -200.0], requires_grad=True),
        old_logprobs_N=torch.tensor([-200.0, -0.1]),
        advantages_N=torch.tensor([-1.0, 1.0]),
    )
    loss, _ = policy_objective(inputs, ppo(dual_clip=None), None, 0.0, NO_CORRECTION)
    loss.backward()
    assert loss.isfinite()
    assert inputs.logprobs_N.grad.isfinite().all()


def test_the_objective_by_hand():
    inputs = make_inputs(
        ratios(1.1, 1.0),
        old_logprobs_N=[-1.0, -1.0],
        behaviour_logprobs_N=[-1.0 - math.log(1.5), -1.0 - math.log(8)],
        advantages_N=[2.0, -1.0],
        weights_N=[0.25, 0.5],
        entropy_N=torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True),
        reference_logprobs_N=[-1.0, -1.5],
    )
    loss, metrics = policy_objective(
        inputs, ppo(), KLConfig(estimator="k1", coefficient=0.1), 0.01, CorrectionConfig(cap=2.0)
    )
    # policy: 0.25·(−2.2)·1.5 + 0.5·1·2; KL: 0.1·(0.25·log 1.1 + 0.5·0.5); entropy: 0.01·(0.25·2 + 0.5·3)
    policy, kl = -0.825 + 1.0, 0.1 * (0.25 * math.log(1.1) + 0.25)
    assert loss.item() == pytest.approx(policy + kl - 0.02, abs=1e-12)
    assert metrics["train/loss"].value == pytest.approx(loss.item())
    assert metrics["train/policy_loss"].value == pytest.approx(policy)
    assert metrics["train/kl_loss"].value == pytest.approx(kl)
    assert metrics["train/kl"].value == pytest.approx((math.log(1.1) + 0.5) / 2)
    assert metrics["train/entropy"] == Mean(2.5, 2.0)
    assert metrics["correction/weight"].value == pytest.approx(1.75)
    assert metrics["correction/capped_fraction"].value == 0.5
    loss.backward()
    assert inputs.logprobs_N.grad.tolist() == pytest.approx([-0.825 + 0.025, 1.0 + 0.05], abs=1e-12)
    assert inputs.entropy_N.grad.tolist() == pytest.approx([-0.0025, -0.005], abs=1e-12)


def test_no_entropy_gradient_without_a_coefficient():
    inputs = make_inputs([-1.0])
    loss, _ = policy_objective(inputs, ppo(), None, 0.0, NO_CORRECTION)
    loss.backward()
    assert inputs.entropy_N.grad is None


@pytest.mark.parametrize(
    "kl",
    [
        None,
        KLConfig(estimator="k1", coefficient=0.3),
        KLConfig(estimator="k2", coefficient=0.3),
        KLConfig(estimator="k3", coefficient=0.3),
    ],
)
def test_finite_differences_of_the_whole_objective(kl):
    fixed = make_inputs(
        ratios(1.1, 0.5, 1.6, 5.0, 0.9),
        old_logprobs_N=[-1.0] * 5,
        behaviour_logprobs_N=[-1.2, -0.9, -3.0, -1.0, -1.1],
        advantages_N=[1.0, -2.0, 0.5, -1.0, -0.3],
        weights_N=[0.1, 0.2, 0.3, 0.15, 0.25],
        reference_logprobs_N=[-1.5, -0.8, -1.0, -1.1, -2.0],
    )

    def objective(logprobs, entropy):
        inputs = dataclasses.replace(fixed, logprobs_N=logprobs, entropy_N=entropy)
        return policy_objective(inputs, ppo(), kl, 0.2, CorrectionConfig(cap=2.0))[0]

    assert torch.autograd.gradcheck(objective, (fixed.logprobs_N, fixed.entropy_N))


def part(inputs: LossInputs, at: slice) -> LossInputs:
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return LossInputs(**{name: value[at] if torch.is_tensor(value) else value for name, value in fields.items()})


@same_cases
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 10_000))
def test_micro_batches_add_up(count, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(count, generator=generator, dtype=torch.float64)  # noqa: E731
    whole = make_inputs(
        draw().tolist(),
        old_logprobs_N=draw(),
        behaviour_logprobs_N=draw(),
        advantages_N=draw(),
        weights_N=draw().abs() + 0.1,
        reference_logprobs_N=draw(),
        entropy_N=draw().requires_grad_(),
    )
    cut = min(cut, count)
    arguments = (ppo(), KLConfig(estimator="k3", coefficient=0.1), 0.01, CorrectionConfig(cap=2.0))
    loss, metrics = policy_objective(whole, *arguments)
    parts = [policy_objective(part(whole, at), *arguments) for at in (slice(0, cut), slice(cut, count))]
    (expected,) = torch.autograd.grad(loss, whole.logprobs_N)
    (found,) = torch.autograd.grad(sum(loss for loss, _ in parts), whole.logprobs_N)
    torch.testing.assert_close(found, expected)
    together = reduce(merge(metrics for _, metrics in parts))
    one = reduce(metrics)
    # an effective sample size is no mean; every other figure adds up
    del together["correction/ess"], one["correction/ess"]
    assert together == pytest.approx(one)


def test_filling_tokens_change_nothing():
    real = {"old_logprobs_N": [-1.0], "advantages_N": [1.0], "weights_N": [1.0]}
    filled = {"old_logprobs_N": [-1.0, -9.0], "advantages_N": [1.0, 5.0], "weights_N": [1.0, 0.0]}
    (loss, metrics), (filled_loss, filled_metrics) = (
        policy_objective(make_inputs(ratios(*values), **inputs), ppo(), None, 0.0, NO_CORRECTION)
        for values, inputs in (((1.1,), real), ((1.1, 7.0), filled))
    )
    assert filled_loss.item() == loss.item()
    assert reduce(filled_metrics) == reduce(metrics)


def test_a_micro_batch_of_filling_reports_nothing():
    inputs = make_inputs([-1.0, -2.0], weights_N=[0.0, 0.0])
    loss, metrics = policy_objective(inputs, ppo(), None, 0.0, NO_CORRECTION)
    assert loss.item() == 0
    assert reduce(metrics) == {"train/loss": 0.0, "train/policy_loss": 0.0, "train/tokens": 0.0}


def test_a_kl_term_without_a_reference_is_refused():
    with pytest.raises(EngineError, match=r"algorithm\.kl\.use: none"):
        policy_objective(make_inputs([-1.0]), ppo(), KLConfig(estimator="k3", coefficient=0.1), 0.0, NO_CORRECTION)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("logprobs_N", "the policy's log-probabilities"),
        ("old_logprobs_N", "the old policy's"),
        ("behaviour_logprobs_N", "the inference engine's"),
        ("reference_logprobs_N", "the reference model's"),
        ("advantages_N", "the advantages"),
        ("weights_N", "the weights"),
        ("entropy_N", "the policy's entropies"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_infinities_are_refused_and_named(field, name, value):
    inputs = make_inputs([-1.0] * 4, reference_logprobs_N=[-1.0] * 4, sequence_N=torch.tensor([0, 0, 1, 1]))
    inputs = dataclasses.replace(
        inputs, sequences=2, **{field: torch.tensor([-1.0, -1.0, -1.0, value], dtype=torch.float64)}
    )
    with pytest.raises(EngineError, match=rf"{name}.* hold {value} at trained token 1 of sequence 1 \(of 2"):
        policy_objective(inputs, ppo(), None, 0.0, NO_CORRECTION)


def test_a_users_own_loss_and_correction(monkeypatch):
    class Reinforce(PolicyLoss):
        class Config(PluginConfig):
            type: Literal["reinforce_test"] = "reinforce_test"
            scale: float = 1.0

        def __call__(self, inputs: LossInputs) -> TokenLosses:
            losses = -self.config.scale * inputs.advantages_N * inputs.logprobs_N
            return TokenLosses(losses, {"train/own": inputs.advantages_N})

    monkeypatch.setattr(LOSSES, "_plugins", dict(LOSSES._plugins))
    LOSSES.register("reinforce_test")(Reinforce)
    config = AlgorithmConfig.model_validate({"loss": {"type": "reinforce_test", "scale": 2.0}}).loss
    inputs = make_inputs(
        [-1.0, -2.0, -3.0],
        behaviour_logprobs_N=[-1.5, -2.5, -3.0],
        sequence_N=torch.tensor([0, 0, 1]),
        sequences=2,
    )
    loss, metrics = policy_objective(
        inputs, LOSSES.get(config.type)(config), None, 0.0, CorrectionConfig(level="sequence", cap=100.0)
    )
    assert loss.item() == pytest.approx(2 * math.e * 3 + 2 * 3)
    assert metrics["train/own"] == Mean(1.0, 3.0)
