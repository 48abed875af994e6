"""Where distillation differs between references and us: what each does, and that ours does what the page says."""

from __future__ import annotations

import math
from dataclasses import replace

import distillation_reference as reference
import pytest
import torch
from distillation_cases import VOCABULARY, DistillationCase, ours
from distillation_samples import distillation_loss, make_pair
from torch import Tensor

from roll_like.algorithms.distillation.base import Outcomes
from roll_like.algorithms.kl import divergence
from roll_like.errors import ConfigError


def case(tokens: int = 3, *, k: int = 3, temperature: float = 1.0, all_k: bool = False) -> DistillationCase:
    return DistillationCase(make_pair(tokens), torch.ones(tokens, dtype=torch.bool), temperature, k, all_k)


def logprobs(given: DistillationCase) -> tuple[Tensor, Tensor]:
    return given.pair.logits_NV.log_softmax(-1).detach(), given.teacher_NV.log_softmax(-1)


def test_the_ends_of_the_jensen_shannon_divergence() -> None:
    given = case()
    forward = ours(given, "forward_kl")[0].item()
    # it vanishes towards β = 0, and where it is to be 0, TRL and liger-kernel take the forward KL instead
    near, nearer = (reference.trl_gkd(given, beta)[0].item() for beta in (1e-3, 1e-5))
    assert nearer == pytest.approx(1e-5 * forward, rel=1e-2)
    assert nearer < 0.02 * near
    for at_the_end in (reference.trl_gkd, reference.liger_jsd, reference.trl_chunked):
        assert at_the_end(given, 0.0)[0].item() == pytest.approx(forward, rel=1e-5)
    assert ours(given, "js", beta=1e-5)[0].item() == pytest.approx(nearer, rel=1e-3)
    for beta in (0.0, 1.0):
        with pytest.raises(ConfigError):
            ours(given, "js", beta=beta)


def test_the_square_of_the_temperature() -> None:
    given = case(temperature=2.0)
    without = ours(given, "forward_kl")
    for theirs in (reference.trl_gkd(given, 0), reference.trl_chunked(given, 0.0), reference.liger_jsd(given, 0.0)):
        assert theirs[0].item() == pytest.approx(without[0].item(), rel=1e-5)
    scaled = ours(given, "forward_kl", scale_by_temperature=True)
    torch.testing.assert_close(scaled, tuple(4 * part for part in without))


def test_tokens_beyond_the_top_k() -> None:
    given = case(k=3)
    student, teacher = logprobs(given)
    ids = given.teacher_top_k.ids_NK
    chosen, theirs = student.gather(1, ids), teacher.gather(1, ids)
    within = (theirs.exp() * (theirs - chosen)).sum(-1)
    others, their_others = 1 - chosen.exp().sum(-1), 1 - theirs.exp().sum(-1)
    for chunked in (False, True):
        # verl leaves them out without renormalising
        assert reference.verl_top_k(given, chunked=chunked)[0].item() == pytest.approx(within.mean().item(), rel=1e-5)
    lumped = within + their_others * (their_others / others).log()
    assert ours(given, "forward_kl", "top_k")[0].item() == pytest.approx(lumped.mean().item())
    assert reference.trl_server_top_k(given, tail=True)[0].item() == pytest.approx(lumped.mean().item())


def test_a_divergence_that_leaves_tokens_out_may_be_negative() -> None:
    # the student is surer of the teacher's three tokens than the teacher is
    given = case(1, k=3)
    teacher = given.teacher_top_k
    student = given.teacher_NV.log_softmax(-1)
    student = student.scatter_add(1, teacher.ids_NK, torch.full((1, 3), 1.0, dtype=torch.float64))
    pair = replace(
        given.pair,
        hidden_ND=student.clone().requires_grad_(),
        weight_VD=torch.eye(VOCABULARY, dtype=torch.float64, requires_grad=True),
        bias=torch.zeros(VOCABULARY, dtype=torch.float64, requires_grad=True),
    )
    sure = replace(given, pair=pair)
    assert reference.verl_top_k(sure, chunked=False)[0] < -0.1
    assert ours(sure, "forward_kl", "top_k")[0] > 0.01
    assert ours(sure, "forward_kl", "top_k", tail="renormalise")[0].item() == pytest.approx(0, abs=1e-12)


def test_whose_top_k_it_is() -> None:
    given = case(4, k=2)
    assert not torch.equal(given.teacher_top_k.ids_NK, given.student_top_k.ids_NK)
    theirs = reference.trl_sdpo_top_k(given, 1.0, tail=True)[0].item()
    assert ours(given, "reverse_kl", "student_top_k")[0].item() == pytest.approx(theirs)
    assert ours(given, "reverse_kl", "top_k")[0].item() != pytest.approx(theirs, rel=1e-2)


def test_tokens_that_the_teacher_excludes() -> None:
    given = case()
    teacher = given.teacher_NV.clone()
    teacher[:, 3] = -math.inf
    excluding = replace(given)
    excluding.__dict__["teacher_NV"] = teacher
    assert reference.trl_gkd(excluding, 0)[0].isnan()
    assert reference.trl_gkd(excluding, 0.5)[0].isnan()
    student, _ = logprobs(given)
    both = Outcomes(student, teacher.log_softmax(-1))
    kept = [column for column in range(VOCABULARY) if column != 3]
    theirs = teacher.log_softmax(-1)[:, kept]
    expected = (theirs.exp() * (theirs - student[:, kept])).sum(-1)
    torch.testing.assert_close(distillation_loss("forward_kl").divergence(both), expected)
    assert distillation_loss("js").divergence(both).isfinite().all()


def test_the_value_of_the_loss_on_sampled_tokens() -> None:
    given = case()
    student, teacher = (rows.gather(1, given.pair.targets_N[:, None]).squeeze(1) for rows in logprobs(given))
    # SDPO's surrogate has the gradient only; ours has the divergence's estimate for its value too
    surrogate = ((student - teacher) * student).mean().item()
    assert reference.trl_sdpo_sampled(given)[0].item() == pytest.approx(surrogate)
    assert divergence(student, teacher, "k1", straight_through=True).mean().item() == pytest.approx(
        (student - teacher).mean().item()
    )
    assert surrogate != pytest.approx((student - teacher).mean().item(), rel=1e-2)


def test_denominators_are_of_the_whole_batch() -> None:
    given = case(3)
    first, second = (replace(given, mask_N=torch.tensor(mask)) for mask in ([True, True, False], [False, False, True]))
    # a mean of the means of two micro-batches is not the mean over their three tokens
    whole = reference.trl_gkd(given, 0)[0].item()
    halves = [reference.trl_gkd(part, 0)[0].item() for part in (first, second)]
    assert sum(halves) / 2 != pytest.approx(whole, rel=1e-2)
    assert sum(ours(part, "forward_kl")[0].item() * weight for part, weight in ((first, 2 / 3), (second, 1 / 3))) == (
        pytest.approx(ours(given, "forward_kl")[0].item())
    )
