"""Every registered divergence: by hand, against finite differences, in its limits and at extremes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithm_samples import same_cases
from distillation_samples import distillation_loss
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll_like.algorithms.distillation.base import DistillationConfig, DistillationLoss, Outcomes
from roll_like.algorithms.distillation.divergences import LIKELY
from roll_like.errors import ConfigError
from roll_like.registry import DISTILLATION_LOSSES

#: The teacher's and the student's distribution over three tokens.
TEACHER, STUDENT = (0.6, 0.3, 0.1), (0.25, 0.25, 0.5)
NAMES = [name for name in DISTILLATION_LOSSES.names() if DISTILLATION_LOSSES.origin(name).startswith("roll_like.")]


def nats(*pairs: tuple[float, float]) -> float:
    """Σ a·log(a/b)."""
    return sum(first * math.log(first / second) for first, second in pairs)


def outcomes(teacher: tuple[float, ...], student: tuple[float, ...], *, rest: bool = False) -> Outcomes:
    return Outcomes(*(torch.tensor([row], dtype=torch.float64).log() for row in (student, teacher)), rest=rest)


def value(name: str, teacher: tuple[float, ...] = TEACHER, student: tuple[float, ...] = STUDENT, **settings) -> float:
    return distillation_loss(name, **settings).divergence(outcomes(teacher, student)).item()


def mixed(first: tuple[float, ...], second: tuple[float, ...], share: float) -> list[float]:
    return [share * a + (1 - share) * b for a, b in zip(first, second, strict=True)]


def test_by_hand():
    forward = 0.6 * math.log(2.4) + 0.3 * math.log(1.2) + 0.1 * math.log(0.2)
    reverse = 0.25 * math.log(1 / 2.4) + 0.25 * math.log(1 / 1.2) + 0.5 * math.log(5)
    assert value("forward_kl") == pytest.approx(forward)
    assert value("reverse_kl") == pytest.approx(reverse)
    # λ = 0.2: mixtures of 0.32, 0.26, 0.42 and of 0.53, 0.29, 0.18
    assert value("skewed_forward_kl", skew=0.2) == pytest.approx(nats((0.6, 0.32), (0.3, 0.26), (0.1, 0.42)))
    assert value("skewed_reverse_kl", skew=0.2) == pytest.approx(nats((0.25, 0.53), (0.25, 0.29), (0.5, 0.18)))
    # β = 0.2: the first of them again
    first, second = nats((0.6, 0.32), (0.3, 0.26), (0.1, 0.42)), nats((0.25, 0.32), (0.25, 0.26), (0.5, 0.42))
    assert value("js", beta=0.2) == pytest.approx(0.2 * first + 0.8 * second)
    # gaps of 0.35, 0.05 and 0.4; the first token alone has more than 0.5, and is the head; up to 0.9 it is two
    assert value("adaptive_kl") == pytest.approx(0.35 / 0.8 * forward + 0.45 / 0.8 * reverse)
    assert value("adaptive_kl", head_mass=0.95) == pytest.approx(0.4 / 0.8 * forward + 0.4 / 0.8 * reverse)
    assert value("adaptive_kl", head_mass=0.0) == value("adaptive_kl")


def test_every_divergence_has_hand_computed_numbers():
    assert set(NAMES) == {"forward_kl", "reverse_kl", "skewed_forward_kl", "skewed_reverse_kl", "js", "adaptive_kl"}


def test_any_other_token_is_of_the_tail():
    # 0.6 of the teacher's mass is beyond its top-2, and is no head although it is the largest
    loss = distillation_loss("adaptive_kl")
    among_tokens = loss.head_share(outcomes((0.3, 0.1, 0.6), (0.2, 0.4, 0.4)))
    with_rest = loss.head_share(outcomes((0.3, 0.1, 0.6), (0.2, 0.4, 0.4), rest=True))
    assert among_tokens.item() == pytest.approx(0.2 / 0.6)
    assert with_rest.item() == pytest.approx((0.1 + 0.3) / 0.6)


def test_skew_0_is_plain():
    assert value("skewed_forward_kl", skew=0.0) == value("forward_kl")
    assert value("skewed_reverse_kl", skew=0.0) == value("reverse_kl")


def test_js_tends_to_both_kl_divergences():
    for beta in (1e-3, 1e-4, 1e-5):
        assert value("js", beta=beta) / beta == pytest.approx(value("forward_kl"), rel=4 * beta)
        assert value("js", beta=1 - beta) / beta == pytest.approx(value("reverse_kl"), rel=4 * beta)
    assert value("js") == pytest.approx(value("js", STUDENT, TEACHER))


@pytest.mark.parametrize("name", NAMES)
@same_cases
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 8.0]))
def test_zero_at_equality_and_positive_elsewhere(name: str, seed: int, scale: float):
    generator = torch.Generator().manual_seed(seed)
    first, second = (
        (scale * torch.randn(5, 7, generator=generator, dtype=torch.float64)).log_softmax(-1) for _ in range(2)
    )
    loss = distillation_loss(name)
    student = first.clone().requires_grad_()
    equal = loss.divergence(Outcomes(student.log_softmax(-1), first))
    assert equal.abs().max() < 1e-12
    assert torch.autograd.grad(equal.sum(), student)[0].abs().max() < 1e-12
    assert (loss.divergence(Outcomes(first, second)) > 0).all()


def test_skewed_and_js_are_bounded():
    apart = ((1 - 1e-12, 1e-12), (1e-12, 1 - 1e-12))
    assert value("skewed_forward_kl", *apart, skew=0.1) == pytest.approx(-math.log(0.1), rel=1e-6)
    assert value("skewed_reverse_kl", *apart, skew=0.1) == pytest.approx(-math.log(0.1), rel=1e-6)
    assert value("js", *apart) == pytest.approx(math.log(2), rel=1e-6)
    assert value("forward_kl", *apart) > 20


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adaptive_kl"])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_finite_differences(name: str, seed: int):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    loss = distillation_loss(name)

    def divergence(logits: Tensor) -> Tensor:
        return loss.divergence(Outcomes(logits.log_softmax(-1), teacher.log_softmax(-1)))

    assert torch.autograd.gradcheck(divergence, student.requires_grad_())


@pytest.mark.parametrize("seed", range(4))
def test_the_weights_of_adaptive_kl_have_no_gradient(seed: int):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    loss, teacher = distillation_loss("adaptive_kl"), teacher.log_softmax(-1)
    share = loss.head_share(Outcomes(student.log_softmax(-1), teacher))

    def frozen(logits: Tensor) -> Tensor:
        both = Outcomes(logits.log_softmax(-1), teacher)
        forward, reverse = (distillation_loss(name).divergence(both) for name in ("forward_kl", "reverse_kl"))
        return (share * forward + (1 - share) * reverse).sum()

    logits = student.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss.divergence(Outcomes(logits.log_softmax(-1), teacher)).sum(), logits)
    numeric = np.zeros(student.shape)
    for at in np.ndindex(*student.shape):
        moved = torch.zeros_like(student)
        moved[at] = 1e-6
        numeric[at] = (frozen(student + moved) - frozen(student - moved)).item() / 2e-6
    torch.testing.assert_close(found, torch.from_numpy(numeric), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_logits_stay_finite(name: str, dtype: torch.dtype):
    student = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 0.0, 1e4], [1e4, 1e4, 1e4]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[-1e4, 1e4, 0.0], [-1e4, 0.0, 1e4], [-1e4, 0.0, 1e4]], dtype=dtype).log_softmax(-1)
    losses = distillation_loss(name).divergence(Outcomes(student.log_softmax(-1), teacher))
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    assert abs(losses[1].item()) < 1e-7  # equal and certain
    assert losses[0] > 0


@pytest.mark.parametrize("name", ["forward_kl", "skewed_forward_kl", "skewed_reverse_kl", "js"])
def test_tokens_that_the_teacher_excludes(name: str):
    excluded, nearly = (
        torch.tensor([[math.log(0.7), math.log(0.3), low]], dtype=torch.float64) for low in (-math.inf, -745.0)
    )
    student = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    found, expected = (
        distillation_loss(name).divergence(Outcomes(student.log_softmax(-1), teacher)) for teacher in (excluded, nearly)
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), student), torch.autograd.grad(expected.sum(), student))


def test_reverse_kl_is_infinite_where_the_teacher_excludes_what_the_student_says():
    assert value("reverse_kl", (1.0, 0.0), (0.5, 0.5)) == math.inf
    assert value("reverse_kl", (0.5, 0.5), (1.0, 0.0)) == pytest.approx(math.log(2))


def test_the_factor_of_the_divergence():
    assert distillation_loss("forward_kl").divergence_factor == 1
    assert distillation_loss("forward_kl", temperature=2.0).divergence_factor == 4
    assert distillation_loss("forward_kl", temperature=2.0, scale_by_temperature=False).divergence_factor == 1
    assert distillation_loss("forward_kl", temperature=2.0, ce_weight=0.25).divergence_factor == 3


def test_the_square_of_the_temperature_keeps_the_size_of_the_gradient():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(50, 30, generator=generator, dtype=torch.float64) for _ in range(2))

    def size(temperature: float) -> float:
        logits = student.clone().requires_grad_()
        loss = distillation_loss("forward_kl", temperature=temperature)
        both = Outcomes((logits / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1))
        return torch.autograd.grad((loss.divergence_factor * loss.divergence(both)).sum(), logits)[0].norm().item()

    # of very soft distributions the gradient is that of the squared difference of centred logits, over V
    difference = (student - teacher) - (student - teacher).mean(-1, keepdim=True)
    assert size(1e4) == pytest.approx((difference / 30).norm().item(), rel=1e-3)
    assert size(1e4) == pytest.approx(size(1e3), rel=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_description_and_its_bounds(name: str):
    config = DISTILLATION_LOSSES.get(name).Config
    assert config().type == name
    assert issubclass(config, DistillationConfig)
    assert all(field.description for key, field in config.model_fields.items() if key != "type")
    for wrong in (
        {"temperature": 0},
        {"temperature": -1},
        {"ce_weight": 1.1},
        {"ce_weight": -0.1},
        {"tail": "drop"},
        {"unknown": 1},
        {"type": "other"},
    ):
        with pytest.raises(ConfigError):
            config(**wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("js", {"beta": 0.0}),
        ("js", {"beta": 1.0}),
        ("skewed_forward_kl", {"skew": 1.0}),
        ("skewed_reverse_kl", {"skew": -0.1}),
        ("adaptive_kl", {"head_mass": 1.5}),
    ],
)
def test_options_out_of_range(name: str, wrong: dict[str, float]):
    with pytest.raises(ConfigError):
        distillation_loss(name, **wrong)


def test_a_users_own_loss(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DISTILLATION_LOSSES, "_plugins", dict(DISTILLATION_LOSSES._plugins))

    @DISTILLATION_LOSSES.register("squared")
    class Squared(DistillationLoss):
        def divergence(self, outcomes: Outcomes) -> Tensor:
            return (outcomes.student_NM.exp() - outcomes.teacher_NM.exp()).square().sum(-1)

    made = DISTILLATION_LOSSES.get("squared")(Squared.Config(type="squared"))
    assert made.divergence(outcomes(TEACHER, STUDENT)).item() == pytest.approx(0.35**2 + 0.05**2 + 0.4**2)


def test_a_head_of_any_length():
    # a nearly flat teacher over more tokens than are looked at first, and a sharp one: a row's head is its own
    generator = torch.Generator().manual_seed(0)
    flat, sharp = (scale * torch.randn(1, 5 * LIKELY, generator=generator, dtype=torch.float64) for scale in (0.1, 9.0))
    student = torch.randn(2, 5 * LIKELY, generator=generator, dtype=torch.float64).log_softmax(-1)
    teacher = torch.cat([flat, sharp]).log_softmax(-1)
    loss = distillation_loss("adaptive_kl")
    shares = []
    for ours, theirs in zip(student.exp().tolist(), teacher.exp().tolist(), strict=True):
        order = sorted(range(len(theirs)), key=lambda at: -theirs[at])
        mass = np.cumsum([theirs[at] for at in order])
        size = max(1, int((mass <= 0.5).sum()))
        gaps = np.abs(np.array(ours) - np.array(theirs))
        shares.append(gaps[order[:size]].sum() / gaps.sum())
        assert (size > LIKELY) == (len(shares) == 1)
    assert loss.head_share(Outcomes(student, teacher)).tolist() == pytest.approx(shares)
    assert loss.head_share(Outcomes(student[1:], teacher[1:])).tolist() == pytest.approx(shares[1:])
