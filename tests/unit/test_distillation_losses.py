"""Distillation from hidden states: the same numbers as from all logits at once, in bounded memory."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_samples import same_cases
from distillation_samples import Pair, distillation_loss, make_pair, plain_losses, teacher_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roll_like.algorithms import blocks
from roll_like.algorithms.distillation.objective import distillation_losses, distillation_objective
from roll_like.algorithms.distillation.student import TEMPORARIES
from roll_like.algorithms.distillation.teacher import Teacher, TeacherHead, TeacherTopK, teacher_topk
from roll_like.algorithms.losses.base import TokenLosses
from roll_like.errors import ConfigError, EngineError
from roll_like.registry import DISTILLATION_LOSSES
from roll_like.types import LogitTransform
from roll_like.values import merge, reduce

NAMES = [name for name in DISTILLATION_LOSSES.names() if DISTILLATION_LOSSES.origin(name).startswith("roll_like.")]
VOCABULARY = 11
WHOLE: dict[str, Any] = {"chunk_tokens": 100, "chunk_vocab": 100}
#: Several properties are checked a case, on several parameters.
few_cases = settings(same_cases, max_examples=15)
chunks = st.sampled_from([(1, 1), (3, 4), (2, 7), (100, 4), (3, 100), (100, 100)])


def losses_of(pair: Pair, teacher: Teacher, name: str = "forward_kl", **given: Any) -> TokenLosses:
    options = {key: given.pop(key) for key in ("temperature", "ce_weight", "tail", "skew") if key in given}
    return distillation_losses(
        pair.hidden_ND,
        pair.weight_VD,
        teacher,
        distillation_loss(name, **options),
        **{**WHOLE, "bias": pair.bias, "targets_N": pair.targets_N, **given},
    )


def gradients(pair: Pair, losses_N: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((pair.upstream_N * losses_N).sum(), pair.learned, retain_graph=True)


@pytest.mark.parametrize("tile", [1, 80, 1 << 20])
@pytest.mark.parametrize("name", NAMES)
@few_cases
@given(
    tokens=st.integers(0, 7),
    chunk=chunks,
    temperature=st.sampled_from([1.0, 0.6, 2.0]),
    ce_weight=st.sampled_from([0.0, 0.3, 1.0]),
    kind=st.sampled_from(["head", "top_k"]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_those_of_all_logits(tile, name, tokens, chunk, temperature, ce_weight, kind, seed):
    pair = make_pair(tokens, VOCABULARY, seed=seed)
    # with K = V a top-k is the whole distribution
    teacher = {"head": pair.head, "top_k": pair.top_k(VOCABULARY, temperature)}[kind]
    loss = distillation_loss(name, temperature=temperature, ce_weight=ce_weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CPU_TILE", tile)
        found = distillation_losses(
            pair.hidden_ND,
            pair.weight_VD,
            teacher,
            loss,
            chunk_tokens=chunk[0],
            chunk_vocab=chunk[1],
            bias=pair.bias,
            targets_N=pair.targets_N,
        )
        expected = plain_losses(loss, pair.logits_NV, pair.teacher_logits_NV, pair.targets_N)
        torch.testing.assert_close(found.losses_N, expected)
        torch.testing.assert_close(gradients(pair, found.losses_N), gradients(pair, expected))
        # a second backward pass finds what the first one needed
        torch.testing.assert_close(gradients(pair, found.losses_N), gradients(pair, expected))


@pytest.mark.parametrize("kind", ["head", "top_k"])
@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 3.0), (2.0, 0.7)])
@few_cases
@given(chunk=chunks, temperature=st.sampled_from([1.0, 0.6, 2.0]), ce_weight=st.sampled_from([0.0, 0.3, 1.0]))
def test_students_and_teachers_may_scale_and_bound_their_logits(kind, scale, cap, chunk, temperature, ce_weight):
    pair, ours, theirs = make_pair(5, VOCABULARY), LogitTransform(scale=scale, cap=cap), LogitTransform(cap=2.0)
    cut = {"chunk_tokens": chunk[0], "chunk_vocab": chunk[1]}
    teacher: Teacher = replace(pair.head, logits=theirs)
    if kind == "top_k":
        head = (pair.teacher_hidden_NE, pair.teacher_weight_VE, VOCABULARY)
        teacher = teacher_topk(*head, temperature=temperature, bias=pair.teacher_bias, logits=theirs, **cut)
    given = {"temperature": temperature, "ce_weight": ce_weight}
    found = losses_of(pair, teacher, "js", logits=ours, **given, **cut)
    student_NV = pair.logits_NV * scale
    if cap is not None:
        student_NV = cap * torch.tanh(student_NV / cap)
    teacher_NV = 2.0 * torch.tanh(pair.teacher_logits_NV / 2.0)
    expected = plain_losses(distillation_loss("js", **given), student_NV, teacher_NV, pair.targets_N)
    torch.testing.assert_close(found.losses_N, expected)
    torch.testing.assert_close(gradients(pair, found.losses_N), gradients(pair, expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tail", ["rest", "renormalise"])
@few_cases
@given(chunk=chunks, k=st.integers(1, VOCABULARY - 1), temperature=st.sampled_from([1.0, 2.0]))
def test_top_k_equals_the_plain_way_with_the_others_lumped_or_left_out(name, tail, chunk, k, temperature):
    pair = make_pair(5, VOCABULARY, seed=k)
    teacher = pair.top_k(k, temperature)
    loss = distillation_loss(name, temperature=temperature, tail=tail)

    def outcomes(logits_NV: Tensor) -> Tensor:
        logprobs_NV = (logits_NV / temperature).log_softmax(-1)
        chosen_NK = logprobs_NV.gather(1, teacher.ids_NK)
        if tail == "renormalise":
            return chosen_NK * temperature
        others_N1 = logprobs_NV.scatter(1, teacher.ids_NK, -math.inf).logsumexp(-1, keepdim=True)
        return torch.cat([chosen_NK, others_N1], 1) * temperature

    if name == "adaptive_kl" and tail == "rest":
        expected = adaptive_with_rest(loss, outcomes(pair.logits_NV), outcomes(pair.teacher_logits_NV))
    else:
        expected = plain_losses(loss, outcomes(pair.logits_NV), outcomes(pair.teacher_logits_NV))
    found = distillation_losses(
        pair.hidden_ND, pair.weight_VD, teacher, loss, chunk_tokens=chunk[0], chunk_vocab=chunk[1], bias=pair.bias
    )
    torch.testing.assert_close(found.losses_N, expected)
    torch.testing.assert_close(gradients(pair, found.losses_N), gradients(pair, expected))
    mass = pair.teacher_logits_NV.div(temperature).softmax(-1).gather(1, teacher.ids_NK).sum(-1)
    torch.testing.assert_close(found.metrics["distill/teacher_mass"], mass)


def adaptive_with_rest(loss: Any, student_NM: Tensor, teacher_NM: Tensor) -> Tensor:
    """The head is looked for among tokens only: the outcome of all others, the last, stays in the tail."""
    temperature = loss.config.temperature
    student_NM, teacher_NM = (logits_NM / temperature for logits_NM in (student_NM, teacher_NM))
    gap_NM = (teacher_NM.exp() - student_NM.exp()).abs().detach()
    shares = []
    for gap_M, mass_M in zip(gap_NM.tolist(), teacher_NM.exp().tolist(), strict=True):
        order = sorted(range(len(mass_M) - 1), key=lambda at: -mass_M[at])
        head, mass = gap_M[order[0]], mass_M[order[0]]
        for at in order[1:]:
            mass += mass_M[at]
            head += gap_M[at] if mass <= 0.5 else 0.0
        shares.append(head / sum(gap_M))
    share_N = torch.tensor(shares, dtype=torch.float64)
    forward_N = (teacher_NM.exp() * (teacher_NM - student_NM)).sum(-1)
    reverse_N = (student_NM.exp() * (student_NM - teacher_NM)).sum(-1)
    return loss.divergence_factor * (share_N * forward_N + (1 - share_N) * reverse_N)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["head", "top_k"])
def test_float32_and_bfloat16(name: str, kind: str):
    exact = make_pair(40, VOCABULARY)
    loss = distillation_loss(name, temperature=1.5)
    expected = plain_losses(loss, exact.logits_NV, exact.teacher_logits_NV)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        pair = make_pair(40, VOCABULARY, dtype=dtype)
        teacher = pair.head if kind == "head" else pair.top_k(VOCABULARY, 1.5)
        if kind == "top_k" and dtype == torch.bfloat16:
            teacher = TeacherTopK(
                ids_NK=teacher.ids_NK,
                logprobs_NK=(pair.teacher_logits_NV.float() / 1.5).log_softmax(-1).gather(1, teacher.ids_NK),
                temperature=1.5,
            )
        found = losses_of(pair, teacher, name, temperature=1.5, chunk_tokens=16, chunk_vocab=VOCABULARY)
        assert found.losses_N.dtype == torch.float32
        torch.testing.assert_close(found.losses_N.double(), expected, atol=tolerance, rtol=tolerance)
        for ours, theirs in zip(gradients(pair, found.losses_N), gradients(exact, expected), strict=True):
            assert ours.dtype == dtype
            assert (ours.double() - theirs).norm() / theirs.norm() < tolerance


def test_small_weights_survive_half_precision():
    tokens, weight = 4096, 2.0**-24  # float16 rounds half of it to 0
    exact = make_pair(1, VOCABULARY)
    wanted = plain_losses(distillation_loss("forward_kl"), exact.logits_NV, exact.teacher_logits_NV)
    wanted = torch.autograd.grad(tokens * weight * wanted.sum(), exact.learned)
    half = make_pair(1, VOCABULARY, dtype=torch.float16)
    hidden = half.hidden_ND.detach().expand(tokens, -1)
    logprobs, ids = exact.teacher_logits_NV.log_softmax(-1).topk(VOCABULARY)
    for teacher in (
        teacher_of(exact.teacher_logits_NV.expand(tokens, -1)),
        TeacherTopK(ids_NK=ids.expand(tokens, -1), logprobs_NK=logprobs.expand(tokens, -1)),
    ):
        loss = distillation_loss("forward_kl")
        losses = distillation_losses(hidden, half.weight_VD, teacher, loss, bias=half.bias, **WHOLE)
        found = torch.autograd.grad(weight * losses.losses_N.sum(), (half.weight_VD, half.bias))
        for ours, theirs in zip(found, wanted[1:], strict=True):
            assert ours.dtype == torch.float16
            assert (ours.double() - theirs).norm() / theirs.norm() < 0.01


@pytest.mark.parametrize("frozen", ["hidden_ND", "weight_VD", "bias"])
def test_only_what_needs_a_gradient_gets_one(frozen: str):
    pair = make_pair(5, VOCABULARY)
    getattr(pair, frozen).requires_grad_(False)
    for teacher in (pair.head, pair.top_k(4)):
        for tensor in pair.learned:
            tensor.grad = None
        losses_of(pair, teacher, ce_weight=0.5).losses_N.sum().backward()
        assert getattr(pair, frozen).grad is None
        assert all(tensor.grad is not None for tensor in pair.learned if tensor is not getattr(pair, frozen))


def test_works_without_gradients_without_bias_and_under_autocast():
    pair = make_pair(5, VOCABULARY, dtype=torch.float32)
    for teacher in (teacher_of(pair.teacher_logits_NV), pair.top_k(4)):
        plain = losses_of(pair, teacher, "js")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = losses_of(pair, teacher, "js")
            torch.testing.assert_close(gradients(pair, cast.losses_N), gradients(pair, plain.losses_N))
        torch.testing.assert_close(cast.losses_N, plain.losses_N)
        with torch.no_grad():
            assert not losses_of(pair, teacher, "js").losses_N.requires_grad
        unbiased = losses_of(pair, teacher, "js", bias=None).losses_N
        with_zeros = losses_of(pair, teacher, "js", bias=torch.zeros(VOCABULARY)).losses_N
        torch.testing.assert_close(unbiased, with_zeros)


class Memory(TorchDispatchMode):
    """Counts elements: of the largest tensor that any operation makes, and of all that are alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self.owners: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if torch.is_tensor(value):
                self._see(value)
        return result

    def _see(self, value: Tensor) -> None:
        self.largest = max(self.largest, value.numel())
        place, size = value.untyped_storage().data_ptr(), value.untyped_storage().nbytes() // value.element_size()
        self.owners[place] = self.owners.get(place, 0) + 1
        self.alive += size if self.owners[place] == 1 else 0
        self.peak = max(self.peak, self.alive)
        weakref.finalize(value, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self.owners[place] -= 1
        self.alive -= size if self.owners[place] == 0 else 0


@pytest.mark.parametrize("name", ["forward_kl", "js", "adaptive_kl"])
@pytest.mark.parametrize("kind", ["head", "top_k"])
def test_memory_is_bounded_at_a_large_vocabulary(name: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    tokens, vocabulary, width, budget = 48, 150_000, 2, 400_000
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs = (
        torch.randn(rows, width, generator=generator) for rows in (tokens, vocabulary, vocabulary)
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    monkeypatch.setattr(blocks, "CPU_TILE", vocabulary)
    chunk: dict[str, Any] = {"chunk_tokens": 16, "chunk_vocab": budget // 16}
    with Memory() as seen:
        teacher: Teacher = TeacherHead(hidden_NE=hidden.detach(), weight_VE=theirs)
        if kind == "top_k":
            teacher = teacher_topk(hidden.detach(), theirs, 64, temperature=1.0, **chunk)
        losses = distillation_losses(hidden, weight, teacher, distillation_loss(name), **chunk)
        losses.losses_N.sum().backward()
    # the head's gradient: summed up, of one block, and as it is returned
    held = 3 * vocabulary * width
    if kind == "head":  # a block of each model, their tiles, and what is made of one tile
        held += 2 * budget + (4 + TEMPORARIES) * vocabulary
    else:
        held += budget + 8 * chunk["chunk_vocab"]
    assert seen.largest <= budget
    assert budget < seen.peak <= held
    assert seen.peak < tokens * vocabulary


def test_tokens_of_weight_0_are_not_even_looked_at():
    pair = make_pair(6, VOCABULARY)
    weights = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.0, 2.0], dtype=torch.float64)
    kept = weights != 0
    logits = pair.teacher_logits_NV.clone()
    logits[~kept] = math.nan
    broken_top_k = TeacherTopK(
        ids_NK=pair.top_k(4).ids_NK.masked_fill(~kept[:, None], 3),  # one token four times
        logprobs_NK=pair.top_k(4).logprobs_NK.masked_fill(~kept[:, None], math.nan),
    )
    for clean, broken in ((pair.head, teacher_of(logits)), (pair.top_k(4), broken_top_k)):
        expected, found = (
            distillation_objective(losses_of(pair, teacher, ce_weight=0.5, weights_N=given), weights)
            for teacher, given in ((clean, None), (broken, weights))
        )
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(*(torch.autograd.grad(each[0], pair.learned) for each in (found, expected)))
        assert reduce(found[1]) == pytest.approx(reduce(expected[1]))
        hidden_gradient = torch.autograd.grad(
            distillation_objective(losses_of(pair, broken, weights_N=weights), weights)[0], pair.hidden_ND
        )[0]
        assert (hidden_gradient[~kept] == 0).all()


def test_losses_that_are_computed_all_the_same_are_left_out_of_the_objective():
    pair = make_pair(3, VOCABULARY)
    logits = pair.teacher_logits_NV.clone()
    logits[1] = math.nan
    losses = losses_of(pair, teacher_of(logits))
    weights = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    objective, metrics = distillation_objective(losses, weights)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(objective, pair.learned))
    assert all(math.isfinite(figure) for figure in reduce(metrics).values())


def test_micro_batches_add_up():
    pair = make_pair(9, VOCABULARY)
    weights = torch.rand(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights[4] = 0
    whole, metrics = distillation_objective(losses_of(pair, pair.top_k(3), ce_weight=0.2), weights)
    losses = losses_of(pair, pair.top_k(3), ce_weight=0.2)
    parts = [
        distillation_objective(
            TokenLosses(losses.losses_N[at], {name: figure[at] for name, figure in losses.metrics.items()}), weights[at]
        )
        for at in (slice(0, 2), slice(2, 5), slice(4, 5), slice(5, 9))
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item())
    assert reduce(merge(figures for _, figures in parts)) == pytest.approx(reduce(metrics))
    # a micro-batch in which nothing counts still takes part in the backward pass
    nothing, figures = parts[2]
    assert nothing.item() == 0
    assert nothing.requires_grad
    assert reduce(figures) == {"train/loss": 0}


def test_figures_by_hand():
    # the teacher is sure of token 0 at the first position, of token 2 at the second
    teacher = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64).log()
    student = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]], dtype=torch.float64).log()
    eye = torch.eye(3, dtype=torch.float64)
    given: dict[str, Any] = {"targets_N": torch.tensor([0, 2]), **WHOLE}
    loss = distillation_loss("reverse_kl", ce_weight=0.25)
    losses = distillation_losses(student, eye, teacher_of(teacher), loss, **given)
    metrics = reduce(distillation_objective(losses, torch.tensor([0.5, 0.5]))[1])
    forward = [
        0.7 * math.log(1.4) + 0.2 * math.log(2 / 3) + 0.1 * math.log(0.5),
        0.1 * math.log(0.5) + 0.3 * math.log(0.6) + 0.6 * math.log(2),
    ]
    reverse = [
        0.5 * math.log(5 / 7) + 0.3 * math.log(1.5) + 0.2 * math.log(2),
        0.2 * math.log(2) + 0.5 * math.log(5 / 3) + 0.3 * math.log(0.5),
    ]
    entropy = [-sum(mass * math.log(mass) for mass in row) for row in ((0.7, 0.2, 0.1), (0.1, 0.3, 0.6))]
    cross_entropy = -(math.log(0.5) + math.log(0.3)) / 2
    expected = {
        "train/loss": 0.75 * sum(reverse) / 2 + 0.25 * cross_entropy,
        "distill/divergence": sum(reverse) / 2,
        "distill/kl": sum(forward) / 2,
        "distill/top1_agreement": 0.5,
        "distill/teacher_entropy": sum(entropy) / 2,
        "distill/cross_entropy": cross_entropy,
    }
    assert metrics == pytest.approx(expected)
    # of the top-1 and the rest, as much as can be known
    top = TeacherTopK(ids_NK=torch.tensor([[0], [2]]), logprobs_NK=torch.tensor([[0.7], [0.6]]).double().log())
    losses = distillation_losses(student, eye, top, loss, **given)
    metrics = reduce(distillation_objective(losses, torch.tensor([0.5, 0.5]))[1])
    assert metrics["distill/teacher_mass"] == pytest.approx(0.65)
    assert metrics["distill/top1_agreement"] == 0.5
    assert metrics["distill/kl"] == pytest.approx(
        (0.7 * math.log(1.4) + 0.3 * math.log(0.6) + 0.6 * math.log(2) + 0.4 * math.log(4 / 7)) / 2
    )
    lumped = [-a * math.log(a) - (1 - a) * math.log(1 - a) for a in (0.7, 0.6)]
    assert metrics["distill/teacher_entropy"] == pytest.approx(sum(lumped) / 2)


def test_a_student_that_equals_its_teacher_has_no_loss_at_any_top_k():
    pair = make_pair(6, VOCABULARY)
    student = pair.logits_NV.detach()
    for name in NAMES:
        for k in (1, 4, VOCABULARY):
            logprobs, ids = student.log_softmax(-1).topk(k)
            losses = losses_of(pair, TeacherTopK(ids_NK=ids, logprobs_NK=logprobs), name).losses_N
            assert losses.abs().max() < 1e-12
            assert all(gradient.abs().max() < 1e-9 for gradient in gradients(pair, losses))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["logits", "top_k"])
def test_extreme_logits_stay_finite(name: str, kind: str):
    eye = (1e4 * torch.eye(4)).requires_grad_()
    hidden = torch.tensor([[1.0, -1, 0, 0], [-1, 1, 1, -1], [1, 0, 0, 0]], requires_grad=True)
    logits = 1e4 * torch.tensor([[-1.0, 1, 0, 0], [1, -1, -1, 1], [1, 0, 0, 0]])
    logprobs, ids = logits.log_softmax(-1).topk(2)
    teacher = teacher_of(logits) if kind == "logits" else TeacherTopK(ids_NK=ids, logprobs_NK=logprobs)
    losses = distillation_losses(hidden, eye, teacher, distillation_loss(name), **WHOLE).losses_N
    assert losses.isfinite().all()
    assert losses[0] > 0.1
    assert losses[2].abs() < 1e-5
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(losses.sum(), (hidden, eye)))


@same_cases
@given(
    tokens=st.integers(0, 6),
    k=st.integers(1, VOCABULARY),
    chunk=chunks,
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
)
def test_a_teachers_top_k_from_its_hidden_states(tokens: int, k: int, chunk: tuple[int, int], temperature: float):
    pair = make_pair(tokens, VOCABULARY, seed=k)
    found = teacher_topk(
        pair.teacher_hidden_NE,
        pair.teacher_weight_VE,
        k,
        temperature=temperature,
        chunk_tokens=chunk[0],
        chunk_vocab=chunk[1],
        bias=pair.teacher_bias,
    )
    distribution = (pair.teacher_logits_NV / temperature).log_softmax(-1)
    logprobs, ids = distribution.topk(k)
    torch.testing.assert_close(found.logprobs_NK, logprobs)
    assert torch.equal(found.ids_NK.long(), ids)
    assert found.ids_NK.dtype == torch.int32
    torch.testing.assert_close(found.entropy_N, -(distribution.exp() * distribution).sum(-1))
    torch.testing.assert_close(found.mass(), logprobs.exp().sum(-1))


def test_a_teachers_top_k_of_extreme_logits():
    found = teacher_topk(
        torch.tensor([[1.0]]),
        torch.tensor([[-1e4], [1e4], [0.0]]),
        2,
        temperature=1.0,
        chunk_tokens=1,
        chunk_vocab=1,
    )
    assert found.ids_NK.tolist() == [[1, 2]]
    assert found.logprobs_NK.tolist() == [[0.0, -1e4]]
    assert found.entropy_N.tolist() == [0.0]


def test_bad_input_is_refused():
    pair = make_pair(3, VOCABULARY)
    top = pair.top_k(4)

    def broken(**fields: Any) -> TeacherTopK:
        return TeacherTopK(**{"ids_NK": top.ids_NK, "logprobs_NK": top.logprobs_NK, **fields})

    with pytest.raises(ConfigError, match=r"ce_weight is 0\.5, and there are no target tokens"):
        losses_of(pair, top, ce_weight=0.5, targets_N=None)
    with pytest.raises(ConfigError, match="at temperature 1, the loss compares at 2"):
        losses_of(pair, top, temperature=2.0)
    with pytest.raises(EngineError, match="from 0 to 11, the student's vocabulary has 11"):
        losses_of(pair, broken(ids_NK=torch.tensor([[0, 1, 2, VOCABULARY]] * 3)))
    with pytest.raises(EngineError, match=r"token 1 \(1 of 3 tokens\) name a token twice"):
        losses_of(pair, broken(ids_NK=torch.tensor([[0, 1, 2, 3], [5, 6, 5, 7], [0, 1, 2, 3]])))
    for wrong in (top.logprobs_NK + 1.5, top.logprobs_NK * math.nan, top.logprobs_NK - math.inf):
        with pytest.raises(EngineError, match="no log-probabilities of a softmax"):
            losses_of(pair, broken(logprobs_NK=wrong))
    with pytest.raises(EngineError, match=r"\[N, K\] of both was expected"):
        losses_of(pair, broken(logprobs_NK=top.logprobs_NK[:, :3]))
    with pytest.raises(EngineError, match="the teacher has 12 logits a token, the student 11"):
        losses_of(pair, teacher_of(torch.zeros(3, 12)))
    with pytest.raises(EngineError, match="do not fit"):
        losses_of(pair, teacher_of(torch.zeros(2, VOCABULARY)))
    with pytest.raises(EngineError, match="do not fit"):
        losses_of(pair, top, weights_N=torch.ones(4))
    with pytest.raises(EngineError, match="target tokens run from 0 to 11"):
        losses_of(pair, top, targets_N=torch.tensor([0, 1, VOCABULARY]))
    for k in (0, VOCABULARY + 1):
        with pytest.raises(ConfigError, match=f"is {k}; 1 to 11"):
            teacher_topk(pair.teacher_hidden_NE, pair.teacher_weight_VE, k, temperature=1.0, **WHOLE)


def test_a_loss_that_is_not_finite_is_refused():
    pair = make_pair(3, VOCABULARY)
    bias = pair.teacher_bias.clone()
    bias[4] = -math.inf
    excluded = replace(pair.head, bias=bias)
    losses = losses_of(pair, excluded, "reverse_kl")
    with pytest.raises(EngineError, match=r"is inf at token 0 of this micro-batch \(3 of 3 tokens\)"):
        distillation_objective(losses, torch.ones(3))
    assert distillation_objective(losses_of(pair, excluded, "js"), torch.ones(3))[0].isfinite()
