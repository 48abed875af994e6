"""Reverse KL on tokens that the student sampled: as a loss, as an advantage, and mixed with a reward's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from algorithm_samples import make_policy_sample
from distillation_samples import distillation_loss

from roll_like.algorithms.distillation.base import Outcomes
from roll_like.algorithms.distillation.on_policy import teacher_advantages, with_teacher_advantages
from roll_like.algorithms.kl import KLEstimator, divergence
from roll_like.errors import EngineError


def scored(mask: list[int], differences: list[float]) -> tuple:
    """A sample, and a teacher that is this much less sure of each of its tokens."""
    sample = make_policy_sample(mask, [-1.0] * len(mask))
    return sample, np.array([-1.0 - difference for difference in differences], np.float32)


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
def test_the_expected_gradient_of_the_loss_is_that_of_the_reverse_kl(estimator: KLEstimator):
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    student, teacher = logits.log_softmax(-1), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    whole = distillation_loss("reverse_kl").divergence(Outcomes(student[None], teacher[None]))
    (wanted,) = torch.autograd.grad(whole.sum(), logits, retain_graph=True)
    # every token, as often as it is sampled
    losses = divergence(student, teacher, estimator, straight_through=True)
    (found,) = torch.autograd.grad((student.exp().detach() * losses).sum(), logits)
    torch.testing.assert_close(found, wanted)


def test_the_value_of_the_loss_is_the_estimators():
    ours = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    theirs = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    assert divergence(ours, theirs, "k1", straight_through=True).tolist() == [0.5, -1.0]
    assert divergence(ours, theirs, "k2", straight_through=True).tolist() == [0.125, 0.5]
    assert divergence(ours, theirs, "k3", straight_through=True).tolist() == pytest.approx(
        [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1]
    )
    through, own = (
        torch.autograd.grad(divergence(ours, theirs, "k1", straight_through=choice).sum(), ours)[0]
        for choice in (True, False)
    )
    assert through.tolist() == [0.5, -1.0]
    assert own.tolist() == [1.0, 1.0]  # ∇ log π, whose expectation is 0


@pytest.mark.parametrize(
    ("discount", "expected"),
    [(0.0, [-1.0, 0.0, -2.0]), (0.5, [-1.5, -1.0, -2.0]), (1.0, [-3.0, -2.0, -2.0])],
)
def test_advantages_by_hand(discount: float, expected: list[float]):
    sample, teacher = scored([1, 1, 1], [1.0, 0.0, 2.0])
    (found,) = teacher_advantages([sample], [teacher], discount=discount)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(expected)


def test_tokens_that_the_student_did_not_sample_are_passed_over():
    # a prompt, two tokens, a tool's answer of two, and one more token
    sample, teacher = scored([0, 1, 1, 0, 0, 1], [9.0, 1.0, 0.0, 9.0, 9.0, 2.0])
    (found,) = teacher_advantages([sample], [teacher], discount=0.5)
    assert found.tolist() == pytest.approx([0.0, -1.5, -1.0, 0.0, 0.0, -2.0])


def test_estimators_of_advantages():
    sample, teacher = scored([1, 1], [1.0, -1.0])
    found = {name: teacher_advantages([sample], [teacher], estimator=name)[0].tolist() for name in ("k2", "k3", "abs")}
    assert found["k2"] == pytest.approx([-0.5, -0.5])
    assert found["abs"] == pytest.approx([-1.0, -1.0])
    assert found["k3"] == pytest.approx([-math.exp(-1), 2 - math.e])


def test_advantages_of_teacher_and_reward_are_mixed_by_weights():
    sample, teacher = scored([0, 1, 1], [9.0, 1.0, -3.0])
    sample = replace(sample, advantages=np.array([0.0, 2.0, 2.0], np.float32))
    (alone,) = with_teacher_advantages([sample], [teacher])
    assert alone.advantages.tolist() == [0.0, -1.0, 3.0]
    (mixed,) = with_teacher_advantages([sample], [teacher], teacher_weight=0.5, reward_weight=2.0)
    assert mixed.advantages.tolist() == [0.0, 3.5, 5.5]
    assert mixed.advantages.dtype == np.float32
    (reward,) = with_teacher_advantages([sample], [teacher], teacher_weight=0.0, reward_weight=1.0)
    assert reward.advantages.tolist() == sample.advantages.tolist()
    # the sample that came is as it was
    assert sample.advantages.tolist() == [0.0, 2.0, 2.0]
    assert replace(mixed, advantages=sample.advantages) == replace(sample, advantages=sample.advantages)


def test_no_samples_and_no_sampled_tokens():
    assert teacher_advantages([], []) == []
    sample, teacher = scored([0, 0], [1.0, 1.0])
    assert teacher_advantages([sample], [teacher], discount=1.0)[0].tolist() == [0.0, 0.0]


def test_bad_input_is_refused():
    sample, teacher = scored([0, 1], [0.0, 0.0])
    with pytest.raises(EngineError, match="2 arrays of the teacher's log-probabilities for 1 samples"):
        teacher_advantages([sample], [teacher, teacher])
    with pytest.raises(EngineError, match=r"sample 0 .* have shape \(1,\); \(2,\) was expected"):
        teacher_advantages([sample], [teacher[:1]])
    for wrong in (math.nan, -math.inf):
        with pytest.raises(EngineError, match="infinities or NaN"):
            teacher_advantages([sample], [np.array([0.0, wrong], np.float32)])
    # where nothing was sampled, nothing is asked of the teacher
    assert teacher_advantages([sample], [np.array([math.nan, -2.0], np.float32)])[0].tolist() == [0.0, -1.0]
