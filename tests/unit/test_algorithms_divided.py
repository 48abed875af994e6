"""Ranks that divide a vocabulary find what one rank with all of it finds, gradients included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from algorithm_samples import same_cases
from distillation_samples import distillation_loss, make_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vocabulary_threads import compare_with_ranks, on_threads

from roll_like.algorithms.distillation.objective import distillation_losses
from roll_like.algorithms.distillation.teacher import TeacherTopK, teacher_topk
from roll_like.algorithms.distillation.texts import TeacherTexts
from roll_like.algorithms.divided import DividedVocabulary
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.errors import ConfigError, EngineError
from roll_like.types import LogitTransform

few_cases = settings(same_cases, max_examples=15)
ranks_of = st.sampled_from([(1, 8), (2, 11), (3, 11), (4, 7), (4, 8)])
chunks = st.sampled_from([(1, 1), (3, 2), (100, 3), (2, 100), (100, 100)])


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, logits: LogitTransform) -> Any:
    """All logits at once, at temperature 0.7."""
    products = torch.nn.functional.linear(hidden, weight, bias) * logits.scale
    if logits.cap is not None:
        products = torch.tanh(products / logits.cap) * logits.cap
    logprobs = (products / 0.7).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("entropy", [0.0, 0.6])
@few_cases
@given(
    size=ranks_of,
    chunk=chunks,
    tokens=st.integers(0, 6),
    with_bias=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
def test_log_probabilities(entropy, size, chunk, tokens, with_bias, cap, seed):
    ranks, vocabulary = size
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((tokens, 5), (vocabulary, 5), (vocabulary,))
    )
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator, dtype=torch.float64) * torch.tensor([[1.0], [entropy]])
    logits = LogitTransform(scale=1.5, cap=cap)
    inputs = [each.clone().requires_grad_() for each in ((hidden, weight, bias) if with_bias else (hidden, weight))]
    wanted = plain(inputs[0], inputs[1], inputs[2] if with_bias else None, targets, logits)

    def compute(own: Sequence[Tensor], divided: DividedVocabulary) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            own[0],
            own[1],
            targets,
            temperature=0.7,
            chunk_tokens=chunk[0],
            chunk_vocab=chunk[1],
            bias=own[2] if with_bias else None,
            logits=logits,
            divided=divided,
        )

    compare_with_ranks(compute, inputs, wanted, upstream, ranks=ranks)


def texts_of(told: TeacherTopK, vocabulary: int) -> TeacherTexts:
    """The same as texts of two tokens each, where the student has three tokens that the teacher does not."""
    ids_NK = told.ids_NK.long()
    ids_NK[:, 1:][:, ::3] = -1  # what only the teacher can write
    return TeacherTexts(
        ids_NK=ids_NK,
        logprobs_NK=told.logprobs_NK,
        spans_N=torch.arange(len(told)) // 2,
        entropy_N=torch.zeros(len(told), dtype=torch.float64),
        best_N=ids_NK[:, 0],
        temperature=told.temperature,
        unmatched_U=torch.arange(vocabulary - 3, vocabulary),
    )


@pytest.mark.parametrize("name", ["forward_kl", "js", "adaptive_kl"])
@pytest.mark.parametrize("kind", ["head", "top_k", "texts"])
@few_cases
@given(
    size=ranks_of,
    chunk=chunks,
    tokens=st.integers(0, 6),
    k=st.integers(1, 7),
    ce_weight=st.sampled_from([0.0, 0.3]),
    cap=st.sampled_from([None, 2.0]),
)
def test_distillation(name, kind, size, chunk, tokens, k, ce_weight, cap):
    ranks, vocabulary = size
    pair = make_pair(tokens, vocabulary, seed=k)
    teacher = pair.head if kind == "head" else pair.top_k(k, 1.3)
    if kind == "texts":
        teacher = texts_of(teacher, vocabulary)
    loss = distillation_loss(name, temperature=1.3, ce_weight=ce_weight, unmatched_weight=float(kind == "texts"))
    options: dict[str, Any] = {"targets_N": pair.targets_N, "logits": LogitTransform(cap=cap)}
    options |= {"chunk_tokens": chunk[0], "chunk_vocab": chunk[1]}
    wanted = distillation_losses(pair.hidden_ND, pair.weight_VD, teacher, loss, bias=pair.bias, **options)
    wanted_grads = torch.autograd.grad((pair.upstream_N * wanted.losses_N).sum(), pair.learned)

    def of_rank(divided: DividedVocabulary) -> Any:
        hidden, weight, bias = (
            each.detach().clone().requires_grad_()
            for each in (pair.hidden_ND, pair.weight_VD[divided.own], pair.bias[divided.own])
        )
        found = distillation_losses(hidden, weight, teacher, loss, bias=bias, divided=divided, **options)
        return found, torch.autograd.grad((pair.upstream_N * found.losses_N).sum(), (hidden, weight, bias))

    results = on_threads(of_rank, ranks=ranks, vocabulary=vocabulary)
    for found, grads in results:
        torch.testing.assert_close(found.losses_N, wanted.losses_N)
        for figure, expected in wanted.metrics.items():
            torch.testing.assert_close(found.metrics[figure], expected)
        torch.testing.assert_close(grads[0], wanted_grads[0])
    for place in (1, 2):
        torch.testing.assert_close(torch.cat([grads[place] for _, grads in results]), wanted_grads[place])


@few_cases
@given(size=ranks_of, chunk=chunks, tokens=st.integers(0, 6), k=st.integers(1, 7))
def test_a_teachers_top_k(size, chunk, tokens, k):
    ranks, vocabulary = size
    pair = make_pair(tokens, vocabulary, seed=k)
    options = {"temperature": 0.8, "chunk_tokens": chunk[0], "chunk_vocab": chunk[1]}
    wanted = teacher_topk(pair.hidden_ND, pair.weight_VD, k, bias=pair.bias, **options)

    def of_rank(divided: DividedVocabulary) -> Any:
        own = divided.own
        return teacher_topk(pair.hidden_ND, pair.weight_VD[own], k, bias=pair.bias[own], divided=divided, **options)

    for found in on_threads(of_rank, ranks=ranks, vocabulary=vocabulary):
        assert torch.equal(found.ids_NK.sort(-1).values, wanted.ids_NK.sort(-1).values)
        torch.testing.assert_close(found.logprobs_NK.sort(-1).values, wanted.logprobs_NK.sort(-1).values)
        torch.testing.assert_close(found.entropy_N, wanted.entropy_N)


def test_a_certain_token_keeps_its_digits() -> None:
    """log(1 − p) of the rest is 1e-9: a difference of logits around 30 would round it to 0 or to 2e-6."""
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[30.0], [-1.0], [9.3], [-2.0]])
    (exact,) = plain(hidden.double(), weight.double(), None, torch.tensor([0]), LogitTransform())[0].tolist()

    def of_rank(divided: DividedVocabulary) -> float:
        options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": 4, "chunk_vocab": 4, "divided": divided}
        return token_logprobs(hidden, weight[divided.own], torch.tensor([0]), **options)[0].item()

    for found in on_threads(of_rank, ranks=2, vocabulary=4):
        assert found == pytest.approx(exact, abs=1.2e-7)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="a vocabulary of 5 tokens cannot be divided among 4 ranks"):
        on_threads(lambda divided: divided, ranks=4, vocabulary=5)

    def of_rank(divided: DividedVocabulary) -> Any:
        options: dict[str, Any] = {"temperature": 1.0, "chunk_tokens": 4, "chunk_vocab": 4, "divided": divided}
        return token_logprobs(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([8]), **options)

    with pytest.raises(EngineError, match="from 8 to 8 are to be predicted by a model with a vocabulary of 8"):
        on_threads(of_rank, ranks=2, vocabulary=8)
    with pytest.raises(ConfigError, match="top-k of the teacher is 9; 1 to 8, its vocabulary"):
        on_threads(
            lambda divided: teacher_topk(
                torch.zeros(1, 2), torch.zeros(4, 2), 9, temperature=1.0, chunk_tokens=1, chunk_vocab=1, divided=divided
            ),
            ranks=2,
            vocabulary=8,
        )
