"""The service's losses: numbers by hand, plain PyTorch and its gradients in float64, and the project's own losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import make_inputs
from torch import Tensor
from torch.nn.functional import cross_entropy

from roll_like.registry import LOSSES
from roll_like.service.losses import service_loss
from roll_like.service.types import Datum, RequestError

Plain = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


def plain_importance_sampling(p: Tensor, given: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return -(p.exp() / given["logprobs"].exp() * given["advantages"]).sum()


def plain_ppo(p: Tensor, given: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Token by token, with Python's min."""
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    total = torch.zeros((), dtype=p.dtype)
    for each, old, advantage in zip(p, given["logprobs"], given["advantages"], strict=True):
        ratio = (each - old).exp()
        clipped = ratio if low <= ratio <= high else torch.tensor(low if ratio < low else high, dtype=p.dtype)
        total = total - min(ratio * advantage, clipped * advantage)
    return total


def plain_cispo(p: Tensor, given: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    weights = [
        min(max(math.exp(float(each - old)), settings["clip_low_threshold"]), settings["clip_high_threshold"])
        for each, old in zip(p.detach(), given["logprobs"], strict=True)
    ]
    return -(torch.tensor(weights, dtype=p.dtype) * given["advantages"] * p).sum()


def plain_dro(p: Tensor, given: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return -(p * given["advantages"] - settings["beta"] * (p - given["logprobs"]) ** 2 / 2).sum()


def plain_gspo(p: Tensor, given: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Section 4.3 of the paper, with a loop over tokens."""
    chosen = given["sequence_ratio_mask"] != 0
    ratio = torch.exp(((p - given["logprobs"]) * chosen).sum().detach() / chosen.sum())
    total = torch.zeros((), dtype=p.dtype)
    for each, advantage in zip(p, given["advantages"], strict=True):
        own = ratio * each.exp() / each.exp().detach()
        clipped = own.clip(settings["clip_low_threshold"], settings["clip_high_threshold"])
        total = total - min(own * advantage, clipped * advantage)
    return total


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
#: Losses of sampled tokens: their plain form, and their settings without a loss_fn_config.
SAMPLED: dict[str, tuple[Plain, dict[str, float]]] = {
    "importance_sampling": (plain_importance_sampling, {}),
    "ppo": (plain_ppo, CLIP),
    "cispo": (plain_cispo, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": (plain_dro, {"beta": 0.05}),
    "gspo": (plain_gspo, {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}),
}


def sampled(seed: int, spread: float, length: int = 40) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of a policy, and what the client sends of one that is `spread` away."""
    draws = torch.Generator().manual_seed(seed)
    p = -torch.rand(length, generator=draws, dtype=torch.float64) * 3 - 0.01
    old = p + spread * torch.randn(length, generator=draws, dtype=torch.float64)
    prompt = torch.arange(length) < length // 3
    advantages = torch.randn(length, generator=draws, dtype=torch.float64)
    given = {"logprobs": old, "advantages": advantages, "sequence_ratio_mask": torch.ones_like(p)}
    return p, {name: values.masked_fill(prompt, 0.0) for name, values in given.items()}


def needed(name: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: given[key] for key in service_loss(name, {}).inputs}


def total_and_gradient(compute: Callable[[Tensor], Tensor], logprobs: Tensor) -> tuple[float, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    total = compute(leaf).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), gradient


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("name", SAMPLED)
def test_losses_are_those_of_plain_pytorch(name: str, spread: float) -> None:
    plain, settings = SAMPLED[name]
    p, given = sampled(3, spread)
    expected, expected_gradient = total_and_gradient(lambda leaf: plain(leaf, given, settings), p)
    narrow = {key: values.float() for key, values in needed(name, given).items()}
    found, gradient = total_and_gradient(lambda leaf: service_loss(name, {})(leaf, narrow), p.float())
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLED)
def test_gradients_are_finite_differences(name: str) -> None:
    """Except where the gradient of the value is not wanted: cispo stops it, gspo's is the token's own."""
    p, given = sampled(5, 0.3, length=9)
    loss, inputs = service_loss(name, {}), needed(name, given)
    if name in ("cispo", "gspo"):
        _, gradient = total_and_gradient(lambda leaf: loss(leaf, inputs), p)
        wanted = {"cispo": -(p - given["logprobs"]).exp().clip(0, 4) * given["advantages"], "gspo": None}[name]
        if wanted is None:
            ratio = ((p - given["logprobs"])[3:].mean()).exp()
            advantages = given["advantages"]
            clipped = ((ratio > 1.0004) & (advantages > 0)) | ((ratio < 0.9997) & (advantages < 0))
            wanted = torch.where(clipped, 0.0, -ratio * advantages)
        torch.testing.assert_close(gradient, wanted)
    else:
        assert torch.autograd.gradcheck(lambda leaf: loss(leaf, inputs).sum(), p.clone().requires_grad_())


def test_cross_entropy_is_the_weighted_sum() -> None:
    draws = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 11, generator=draws)
    targets = torch.randint(0, 11, (6,), generator=draws)
    weights = torch.tensor([0.0, 0.0, 1.0, 0.5, -2.0, 1.0])
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    losses = service_loss("cross_entropy", {})(logprobs, {"weights": weights})
    torch.testing.assert_close(losses, cross_entropy(logits, targets, reduction="none") * weights)
    # without weights each token counts once
    assert service_loss("cross_entropy", {})(logprobs, {}).tolist() == (-logprobs).tolist()


def test_cross_entropy_of_candidates_is_that_of_soft_targets() -> None:
    draws = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 5, generator=draws, requires_grad=True)
    teacher = torch.rand(4, 5, generator=draws).softmax(-1)
    candidates = torch.arange(5).expand(4, 5)
    expected = cross_entropy(logits, teacher, reduction="sum")
    found = service_loss("cross_entropy", {})(logits.log_softmax(-1).gather(-1, candidates), {"weights": teacher})
    torch.testing.assert_close(found.sum(), expected)
    for a, b in zip(torch.autograd.grad(found.sum(), logits), torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(a, b)


def test_numbers_by_hand() -> None:
    # ratios 2, 0.5 and 1
    p = torch.tensor([math.log(0.5), math.log(0.25), math.log(0.5)])
    given = {"logprobs": torch.tensor([0.25, 0.5, 0.5]).log(), "advantages": torch.tensor([1.0, -1.0, 3.0])}
    halves = math.log(0.5)
    expected = {
        "importance_sampling": [-2.0, 0.5, -3.0],
        "ppo": [-1.2, 0.8, -3.0],
        "cispo": [-2 * halves, 0.5 * 2 * halves, -3 * halves],
        "dro": [-halves + 0.025 * halves**2, 2 * halves + 0.025 * halves**2, -3 * halves],
    }
    for name, losses in expected.items():
        assert service_loss(name, {})(p, given).tolist() == pytest.approx(losses, abs=1e-6), name
    # mean log-ratio of the first two: 0; of the first alone: log 2, above the bound
    for mask, losses in ([1.0, 1.0, 0.0], [-1.0, 1.0, -3.0]), ([1.0, 0.0, 0.0], [-1.0004, 2.0, -3 * 1.0004]):
        found = service_loss("gspo", {})(p, {**given, "sequence_ratio_mask": torch.tensor(mask)})
        assert found.tolist() == pytest.approx(losses, abs=1e-6)


def test_settings_replace_the_defaults_one_by_one() -> None:
    p = torch.tensor([0.0])
    given = {"logprobs": torch.tensor([-math.log(3)]), "advantages": torch.tensor([1.0])}
    assert service_loss("ppo", {"clip_high_threshold": 2.5})(p, given).item() == pytest.approx(-2.5)
    assert service_loss("ppo", {"clip_low_threshold": 0.1})(p, given).item() == pytest.approx(-1.2)
    assert service_loss("dro", {"beta": 2})(p, given).item() == pytest.approx(math.log(3) ** 2)


#: The project's loss with the same definition: settings here, its name, and its settings.
OWN: list[tuple[str, dict[str, float], str, dict[str, Any]]] = [
    ("ppo", {}, "ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    ("ppo", {"clip_high_threshold": 1.28}, "ppo", {"dual_clip": None}),
    ("cispo", {}, "cispo", {"clip_low": 1.0, "clip_high": 3.0}),
    ("gspo", {}, "gspo", {}),
    ("dro", {}, "dro", {}),
]


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(("name", "settings", "own", "own_settings"), OWN)
def test_losses_are_those_of_runs(
    name: str, settings: dict[str, float], own: str, own_settings: dict[str, Any], spread: float
) -> None:
    """Also where log-ratios are bounded. A run's tokens are the sampled ones only."""
    p, given = sampled(7, spread)
    trained = given["sequence_ratio_mask"] != 0
    inputs = make_inputs(
        p[trained].tolist(),
        old_logprobs_N=given["logprobs"][trained].tolist(),
        advantages_N=given["advantages"][trained].tolist(),
    )
    plugin = LOSSES.get(own)
    expected = plugin(plugin.Config(**own_settings))(inputs).losses_N
    (expected_gradient,) = torch.autograd.grad(expected.sum(), inputs.logprobs_N)
    weights = given["sequence_ratio_mask"]
    chosen = {**needed(name, given), "weights": weights}
    leaf = p.clone().requires_grad_()
    losses = service_loss(name, settings)(leaf, chosen)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    torch.testing.assert_close(losses[trained].detach().to(expected.dtype), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[trained].to(expected.dtype), expected_gradient, rtol=1e-5, atol=1e-5)
    assert not losses[~trained].any()
    assert not gradient[~trained].any()


def test_importance_sampling_has_the_gradient_of_reinforce() -> None:
    """With importance weights; its value is −ρ·A, and that of reinforce −ρ·A·log π."""
    p, given = sampled(7, 0.5)
    trained = given["sequence_ratio_mask"] != 0
    inputs = make_inputs(
        p[trained].tolist(),
        old_logprobs_N=given["logprobs"][trained].tolist(),
        advantages_N=given["advantages"][trained].tolist(),
    )
    plugin = LOSSES.get("reinforce")
    losses = plugin(plugin.Config(importance_weight=True))(inputs).losses_N
    (expected,) = torch.autograd.grad(losses.sum(), inputs.logprobs_N)
    _, gradient = total_and_gradient(
        lambda leaf: service_loss("importance_sampling", {})(leaf, needed("importance_sampling", given)), p
    )
    torch.testing.assert_close(gradient[trained].to(expected.dtype), expected, rtol=1e-5, atol=1e-5)


def test_a_custom_loss_is_a_cross_entropy_with_its_gradient() -> None:
    """What the client does with a loss of its own gives the gradient of the loss itself."""
    draws = torch.Generator().manual_seed(4)
    weights = torch.randn(8, 13, generator=draws, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(5, 8, generator=draws, dtype=torch.float64)
    targets = torch.randint(0, 13, (5, 1), generator=draws)

    def logprobs() -> Tensor:
        return (hidden @ weights).log_softmax(-1).gather(-1, targets)[:, 0]

    def custom(p: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-(p[:3].sum() - p[3:].sum())) + p.var()

    (expected,) = torch.autograd.grad(custom(logprobs()), weights)
    leaf = logprobs().detach().requires_grad_()
    (sent,) = torch.autograd.grad(custom(leaf), leaf)
    surrogate = service_loss("cross_entropy", {})(logprobs(), {"weights": -sent}).sum()
    (found,) = torch.autograd.grad(surrogate, weights)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_policy_far_away_gives_finite_numbers(name: str) -> None:
    """Where an exponential would overflow, 0·∞ of a prompt's token would make the whole gradient NaN."""
    p = torch.tensor([-0.1, -400.0, -0.1])
    given = {
        "logprobs": torch.tensor([-200.0, -0.1, -300.0]),
        "advantages": torch.tensor([0.0, -1.0, 1.0]),
        "sequence_ratio_mask": torch.tensor([0.0, 0.0, 1.0]),
    }
    total, gradient = total_and_gradient(lambda leaf: service_loss(name, {})(leaf, needed(name, given)), p)
    assert math.isfinite(total)
    assert gradient.isfinite().all()


def datum(length: int = 3, **inputs: Any) -> Datum:
    made = {"target_tokens": np.arange(length), **inputs}
    return Datum(
        tokens=np.arange(length, dtype=np.int32),
        inputs={name: np.asarray(values) for name, values in made.items() if values is not None},
    )


def refuse(loss: str, *data: Datum) -> None:
    service_loss(loss, {}).refuse(data, vocabulary=10, max_tokens=8)


RL = {"logprobs": [-1.0, -1.0, -1.0], "advantages": [0.0, 1.0, -1.0]}


def test_good_data_are_taken() -> None:
    refuse("cross_entropy", datum(), datum(weights=[0.0, 1.0, 0.5]), datum(8))
    refuse("cross_entropy", datum(target_tokens=np.ones((3, 2), np.int64), weights=np.ones((3, 2))))
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        refuse(name, datum(**RL), datum(**RL, weights=[0, 1, 1]))
    refuse("gspo", datum(**RL, sequence_ratio_mask=[0.0, 1.0, 1.0]))


BAD: dict[str, tuple[str, list[Datum]]] = {
    "no data": ("cross_entropy", []),
    r"datum 1 has 0 tokens; .* 1 to 8": ("cross_entropy", [datum(), datum(0)]),
    "datum 0 has 9 tokens": ("cross_entropy", [datum(9)]),
    r"no loss_fn_inputs\['target_tokens'\]": ("cross_entropy", [datum(target_tokens=None)]),
    r"no loss_fn_inputs\['advantages'\]; ppo needs target_tokens, logprobs, advantages": (
        "ppo",
        [datum(logprobs=[0.0, 0.0, 0.0])],
    ),
    r"no loss_fn_inputs\['sequence_ratio_mask'\]": ("gspo", [datum(**RL)]),
    r"has loss_fn_inputs\['mask'\]; ppo takes target_tokens, logprobs, advantages and weights": (
        "ppo",
        [datum(**RL, mask=[1.0, 1.0, 1.0])],
    ),
    "target_tokens is of float64": ("cross_entropy", [datum(target_tokens=[1.0, 2.0, 3.0])]),
    "target_tokens has token 10; the vocabulary is 0 to 9": ("cross_entropy", [datum(target_tokens=[1, 10, 2])]),
    "target_tokens has token -100": ("cross_entropy", [datum(target_tokens=[1, -100, 2])]),
    r"target_tokens has shape \[2\]; cross_entropy takes \[3\] or \[3, K\]": (
        "cross_entropy",
        [datum(target_tokens=[1, 2])],
    ),
    r"target_tokens has shape \[3, 2\]; ppo takes \[3\]": ("ppo", [datum(**RL, target_tokens=np.ones((3, 2), int))]),
    r"target_tokens has shape \[3, 0\]": ("cross_entropy", [datum(target_tokens=np.ones((3, 0), int))]),
    r"weights has shape \[2\], target_tokens \[3\]": ("cross_entropy", [datum(weights=[1.0, 1.0])]),
    r"datum 0: advantages\[1\] is nan": ("ppo", [datum(**{**RL, "advantages": [0.0, math.nan, 1.0]})]),
    r"datum 0: logprobs\[2\] is -inf": ("cispo", [datum(**{**RL, "logprobs": [0.0, 0.0, -math.inf]})]),
    r"weights\[0, 1\] is inf": (
        "cross_entropy",
        [datum(2, target_tokens=np.ones((2, 2), int), weights=[[0.0, math.inf], [0.0, 0.0]])],
    ),
    "sequence_ratio_mask is 0 everywhere": ("gspo", [datum(**RL, sequence_ratio_mask=[0.0, 0.0, 0.0])]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_data_are_refused_with_the_place(message: str) -> None:
    loss, data = BAD[message]
    with pytest.raises(RequestError, match=message):
        refuse(loss, *data)


def test_a_token_outside_the_vocabulary_in_the_input() -> None:
    wrong = Datum(tokens=np.array([1, 99]), inputs={"target_tokens": np.array([1, 2])})
    with pytest.raises(RequestError, match="datum 0: model_input has token 99"):
        refuse("cross_entropy", wrong)


BAD_SETTINGS: dict[str, tuple[str, dict[str, float | str]]] = {
    "the loss 'crossentropy' is not served; use one of cross_entropy, importance_sampling": ("crossentropy", {}),
    r"'stable_reinforce' is not served \(its definition is not published\)": ("stable_reinforce", {}),
    r"'custom' is not served \(pass the function": ("custom", {"loss_id": "1"}),
    r"loss_fn_config has 'eps_clip'; ppo takes clip_low_threshold, clip_high_threshold": ("ppo", {"eps_clip": 0.2}),
    r"loss_fn_config has 'beta'; cross_entropy takes no settings": ("cross_entropy", {"beta": 0.2}),
    r"loss_fn_config\['beta'\] is 'much'": ("dro", {"beta": "much"}),
    r"loss_fn_config\['beta'\] is -1": ("dro", {"beta": -1}),
    r"loss_fn_config\['clip_high_threshold'\] is nan": ("cispo", {"clip_high_threshold": math.nan}),
    # as someone who thinks of distances from 1 writes them
    "clip_low_threshold is 0.8, above clip_high_threshold 0.2": ("ppo", {"clip_high_threshold": 0.2}),
}


@pytest.mark.parametrize("message", BAD_SETTINGS)
def test_wrong_losses_and_settings_are_refused(message: str) -> None:
    with pytest.raises(RequestError, match=message):
        service_loss(*BAD_SETTINGS[message])
