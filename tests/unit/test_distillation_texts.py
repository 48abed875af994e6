"""A teacher with another tokenizer in `distill`: outcomes are texts, in both models' distributions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import same_cases
from bigram_engine import OneRank
from chat_templates import renderer as renderer_of
from distillation_samples import distillation_loss
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_backend import plain_ranks  # type: ignore[import-not-found]
from rank_specs import cpu_rank
from run_config import write_distill_run
from tiny_model import CHAT_TEMPLATE, make_other_model, make_tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from roll_like.algorithms.distillation.base import Outcomes
from roll_like.algorithms.distillation.objective import distillation_losses
from roll_like.algorithms.distillation.texts import TeacherTexts, rank_distance, text_outcomes
from roll_like.builtin.pipelines.distill.answers import OwnTopKAnswers, TextAnswers
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.data import load_samples_of_teachers
from roll_like.builtin.pipelines.distill.objective import DistillationObjective, TeacherObjective, send_unmatched
from roll_like.builtin.pipelines.distill.other_tokens import TokenBytes, Translation
from roll_like.builtin.pipelines.distill.pipeline import DistillPipeline
from roll_like.builtin.pipelines.distill.teachers import distributions
from roll_like.config.load import load_config
from roll_like.config.teachers import teacher_model
from roll_like.config.training import TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError, DataError
from roll_like.models.load import load_renderer
from roll_like.registry import DISTILLATION_LOSSES
from roll_like.training.engine import TrainingEngine, untimed
from roll_like.training.rank import TrainingRank
from roll_like.types import TrainingSample
from roll_like.values import reduce

NAMES = [name for name in DISTILLATION_LOSSES.names() if DISTILLATION_LOSSES.origin(name).startswith("roll_like.")]
WHOLE: dict[str, Any] = {"chunk_tokens": 2, "chunk_vocab": 3}
VOCABULARY = 6


def made_texts(spans: list[int], *, seed: int = 0, columns: int = 3) -> tuple[TeacherTexts, Tensor]:
    """What some teacher says of tokens in these stretches, and the tokens."""
    draw = torch.Generator().manual_seed(seed)
    count = len(spans)
    ids_NK = torch.stack([torch.randperm(VOCABULARY, generator=draw)[:columns] for _ in spans])
    ids_NK[:, columns - 1] = torch.where(torch.rand(count, generator=draw) < 0.4, -1, ids_NK[:, columns - 1])
    logprobs_NK = torch.randn(count, columns + 1, generator=draw, dtype=torch.float64).log_softmax(-1)[:, :columns]
    texts = TeacherTexts(
        ids_NK=ids_NK,
        logprobs_NK=logprobs_NK.masked_fill(ids_NK < 0, -math.inf),
        spans_N=torch.tensor(spans),
        entropy_N=torch.rand(count, generator=draw, dtype=torch.float64),
        best_N=ids_NK[:, 0],
    )
    return texts, ids_NK[:, 0]


def plain_outcomes(logits_NV: Tensor, texts: TeacherTexts) -> list[tuple[list[Tensor], list[float]]]:
    """Probabilities of a stretch's texts and of any other one, by sums over single tokens: student's and teacher's."""
    found = []
    probabilities = logits_NV.softmax(-1)
    for stretch in sorted(set(texts.spans_N.tolist())):
        rows = (texts.spans_N == stretch).nonzero().flatten().tolist()
        before = torch.ones((), dtype=logits_NV.dtype)
        for row in rows[:-1]:
            before = before * probabilities[row, texts.ids_NK[row, 0]]
        last = rows[-1]
        places = [place for place, token in enumerate(texts.ids_NK[last].tolist()) if token >= 0]
        ours = [before * probabilities[last, texts.ids_NK[last, place]] for place in places]
        theirs = [float(texts.logprobs_NK[last, place].exp()) for place in places]
        found.append(([*ours, 1 - sum(ours)], [*theirs, 1 - sum(theirs)]))
    return found


few_cases = settings(same_cases, max_examples=10)
STRETCHES = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(
    lambda lengths: [index for index, length in enumerate(lengths) for _ in range(length)]
)


@few_cases
@given(spans=STRETCHES, seed=st.integers(0, 1000))
def test_the_distributions_are_those_over_texts(spans: list[int], seed: int) -> None:
    texts, _ = made_texts(spans, seed=seed)
    logits_NV = torch.randn(len(spans), VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen_NK = logits_NV.gather(1, texts.ids_NK.clamp(min=0))
    rest_N = torch.stack(
        [
            row.index_fill(0, ids[ids >= 0], -math.inf).logsumexp(0)
            for row, ids in zip(logits_NV, texts.ids_NK, strict=True)
        ]
    )
    made = text_outcomes(chosen_NK, rest_N, texts, rest=True)
    assert made.last_N.tolist() == [one != other for one, other in zip(spans, [*spans[1:], -1], strict=True)]
    assert made.stretch_N.tolist() == spans
    for row, (ours, theirs) in enumerate(plain_outcomes(logits_NV, texts)):
        for found, expected in ((made.outcomes.student_NM[row], ours), (made.outcomes.teacher_NM[row], theirs)):
            values = [value for value in found.exp().tolist() if value > 0]
            assert values == pytest.approx([float(value) for value in expected], abs=1e-9)
            assert sum(values) == pytest.approx(1)


@pytest.mark.parametrize("tail", ["rest", "renormalise"])
@pytest.mark.parametrize("name", NAMES)
@few_cases
@given(spans=STRETCHES, seed=st.integers(0, 1000))
def test_gradients_are_those_of_plain_sums(name: str, tail: str, spans: list[int], seed: int) -> None:
    """From hidden states, in small blocks, against autograd through the whole distribution."""
    texts, targets_N = made_texts(spans, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(len(spans), 4, generator=draw, dtype=torch.float64).requires_grad_()
    weight_VD = torch.randn(VOCABULARY, 4, generator=draw, dtype=torch.float64).requires_grad_()
    loss = distillation_loss(name, tail=tail, ce_weight=0.25)
    losses = distillation_losses(hidden_ND, weight_VD, texts, loss, targets_N=targets_N, **WHOLE)
    found = torch.autograd.grad(losses.losses_N.sum(), (hidden_ND, weight_VD))

    logits_NV = hidden_ND @ weight_VD.t()
    expected = -0.25 * logits_NV.log_softmax(-1).gather(1, targets_N[:, None]).sum()
    for ours, theirs in plain_outcomes(logits_NV, texts):
        student, teacher = torch.stack(ours), torch.tensor(theirs, dtype=torch.float64)
        if tail == "renormalise":
            student, teacher = student[:-1] / student[:-1].sum(), teacher[:-1] / teacher[:-1].sum()
        outcomes = Outcomes(student.log()[None], teacher.log()[None], rest=tail == "rest")
        expected = expected + 0.75 * loss.divergence(outcomes).sum()
    assert losses.losses_N.sum().item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
    for ours, theirs in zip(found, torch.autograd.grad(expected, (hidden_ND, weight_VD)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_by_hand() -> None:
    """Our "a" "b" and their "ab", or "ac" which we would write as "a" "c": P = ½·¼ and ½·½; their ⅛ and ⅜ of 1."""
    logits_NV = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 2.0]], dtype=torch.float64).log()
    texts = TeacherTexts(
        ids_NK=torch.tensor([[0, -1], [1, 2]]),
        logprobs_NK=torch.tensor([[-math.inf, -math.inf], [1 / 8, 3 / 8]], dtype=torch.float64).log(),
        spans_N=torch.tensor([0, 0]),
        entropy_N=torch.tensor([0.0, 1.5]),
        best_N=torch.tensor([-1, 2]),
    )
    texts = replace(texts, logprobs_NK=texts.logprobs_NK.nan_to_num(nan=-math.inf))
    identity = torch.eye(3, dtype=torch.float64)
    losses = distillation_losses(logits_NV, identity, texts, distillation_loss("forward_kl"), **WHOLE)
    divergence = 1 / 8 * math.log(1) + 3 / 8 * math.log(3 / 2) + 1 / 2 * math.log((1 / 2) / (5 / 8))
    assert losses.losses_N.tolist() == pytest.approx([0.0, divergence])
    assert losses.metrics["distill/kl"].tolist() == pytest.approx([0.0, divergence])
    assert losses.metrics["distill/teacher_mass"].tolist() == pytest.approx([0.5, 0.5])
    assert losses.metrics["distill/teacher_entropy"].tolist() == [1.5, 1.5]
    assert losses.metrics["distill/top1_agreement"].tolist() == [1, 1]


# ---- tokens that only one vocabulary has, by rank ----------------------------------------------------

#: The student's tokens that the teacher does not have: the last ones of a larger vocabulary.
UNMATCHED = [VOCABULARY, VOCABULARY + 1, VOCABULARY + 2]


def test_ranks_by_hand() -> None:
    ours = torch.tensor([[0.1, 0.4], [0.0, 0.5]], dtype=torch.float64, requires_grad=True)
    theirs = torch.tensor([[0.3, 0.2, 0.1], [0.0, 0.0, 0.0]], dtype=torch.float64)
    distances = rank_distance(ours, theirs)
    assert distances.tolist() == pytest.approx([0.3, 0.5])
    # the larger of the first row is above the teacher's larger one, the smaller below
    assert torch.autograd.grad(distances[0], ours)[0].tolist() == [[-1.0, 1.0], [0.0, 0.0]]
    assert rank_distance(theirs, ours).tolist() == pytest.approx([0.3, 0.5]), "the longer list on either side"


def with_unmatched(texts: TeacherTexts, *, seed: int) -> TeacherTexts:
    """The same with two texts that only the teacher can write, in columns without a token of the student."""
    count = len(texts)
    more_N2 = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 5
    return replace(
        texts,
        ids_NK=torch.cat([texts.ids_NK, torch.full((count, 2), -1)], 1),
        logprobs_NK=torch.cat([texts.logprobs_NK, more_N2.log()], 1),
        unmatched_U=torch.tensor(UNMATCHED),
    )


@pytest.mark.parametrize("tail", ["rest", "renormalise"])
@pytest.mark.parametrize("name", ["forward_kl", "js"])
@few_cases
@given(spans=STRETCHES, seed=st.integers(0, 1000))
def test_what_one_vocabulary_lacks_is_compared_by_rank(name: str, tail: str, spans: list[int], seed: int) -> None:
    """Loss and gradients against sorted probabilities of a whole softmax; the divergence stays as it is."""
    plain, targets_N = made_texts(spans, seed=seed)
    if seed % 2:  # an outcome that a longer stretch has, of a token that the teacher does not
        plain.ids_NK[:, 1] = UNMATCHED[0]
    texts = with_unmatched(plain, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(len(spans), 4, generator=draw, dtype=torch.float64).requires_grad_()
    weight_VD = torch.randn(VOCABULARY + 3, 4, generator=draw, dtype=torch.float64).requires_grad_()
    bias_V = torch.randn(VOCABULARY + 3, generator=draw, dtype=torch.float64).requires_grad_()
    factors = (hidden_ND, weight_VD, bias_V)

    def made(weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        loss = distillation_loss(name, tail=tail, ce_weight=0.25, temperature=2.0, unmatched_weight=weight)
        given = replace(texts, temperature=2.0)
        losses = distillation_losses(hidden_ND, weight_VD, given, loss, bias=bias_V, targets_N=targets_N, **WHOLE)
        return losses.losses_N.sum(), dict(losses.metrics)

    (ranked, figures), (unranked, before) = made(0.5), made(0.0)
    assert "distill/unmatched" not in before
    for key in before:
        torch.testing.assert_close(figures[key], before[key])

    probabilities = ((hidden_ND @ weight_VD.t() + bias_V) / 2).softmax(-1)
    expected = []
    for stretch in range(spans[-1] + 1):
        *earlier, last = (row for row, each in enumerate(spans) if each == stretch)
        share = torch.stack([probabilities[row, texts.ids_NK[row, 0]] for row in earlier]).prod() if earlier else 1.0
        tokens = [token for token in UNMATCHED if token not in texts.ids_NK[last].tolist()]
        ours = sorted((share * probabilities[last, token] for token in tokens), key=Tensor.item, reverse=True)
        theirs = [*sorted(texts.logprobs_NK[last, -2:].exp().tolist(), reverse=True), 0.0]
        expected.append(
            sum(abs(one - other) for one, other in zip([*ours, *[0.0] * (3 - len(ours))], theirs, strict=True))
        )
    distance = torch.stack(expected).sum()
    assert figures["distill/unmatched"].sum().item() == pytest.approx(distance.item())
    extra = 0.75 * 4 * 0.5 * distance
    assert (ranked - unranked).item() == pytest.approx(extra.item())
    found = torch.autograd.grad(ranked - unranked, factors)
    for ours, theirs in zip(found, torch.autograd.grad(extra, factors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_another_temperature_is_refused() -> None:
    texts, _ = made_texts([0])
    hidden, weight = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(VOCABULARY, 2, dtype=torch.float64)
    with pytest.raises(ConfigError, match="are at temperature 1, the loss compares at 2"):
        distillation_losses(hidden, weight, texts, distillation_loss("forward_kl", temperature=2.0), **WHOLE)


# ---- from a teacher's tokens to the student's --------------------------------------------------------


TEXTS = ["The answer is 42.", "  def f(x):\n\treturn x ** 2  # naïve\n\n", "日本語 and 🦜, then Ünïcödé", "1234567890"]


@cache
def translation_of(student: str, teacher: str) -> Translation:
    return Translation(renderer_of(student), renderer_of(teacher), name="large")


@pytest.mark.parametrize("name", ["SmolLM2", "chatml"])
def test_tokens_spell_the_bytes_of_their_text(name: str) -> None:
    renderer = renderer_of(name)
    tokens = TokenBytes(renderer, "model.path")
    for text in TEXTS:
        assert b"".join(tokens.spelled(renderer.encode(text).tolist())) == text.encode()
    assert all(tokens.of[token] == b"" for token in renderer.special_ids)


def conversation(renderer: Renderer, answer: str) -> TrainingSample:
    """One question and its answer, as a chat template writes them; the answer and its end are trained."""
    question = {"role": "user", "content": "Hi"}
    prompt = renderer.encode(renderer.render([question], ()))
    body = renderer.encode(answer)
    ids = np.concatenate([prompt, body, [renderer.turn_end]]).astype(np.int32)
    return TrainingSample(token_ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt), prompt_length=len(prompt))


def told_of(sample: TrainingSample, vocabulary: int, k: int) -> tuple[OwnTopKAnswers, np.ndarray]:
    """A teacher's answers from random distributions, and these, shape [N, W]."""
    targets = sample.token_ids[sample.loss_mask]
    logits = np.random.default_rng(0).normal(0, 3, (len(targets), vocabulary))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, -1)[:, :k].astype(np.int32)
    top = np.take_along_axis(logprobs, ids, -1).astype(np.float32)
    own = np.take_along_axis(logprobs, targets[:, None], -1)[:, 0].astype(np.float32)
    return OwnTopKAnswers(ids_NK=ids, logprobs_NK=top, entropy_N=np.ones(len(targets), np.float32), own_N=own), logprobs


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pair", [("chatml", "SmolLM2"), ("SmolLM2", "chatml")])
def test_outcomes_spell_what_the_teacher_says(pair: tuple[str, str], text: str) -> None:
    student, teacher = map(renderer_of, pair)
    translation = translation_of(*pair)
    ours, theirs = conversation(student, text), conversation(teacher, text)
    assert translation.difference(ours, theirs) is None
    told, logprobs = told_of(theirs, len(teacher.tokenizer), 40)
    answers = translation.answers([ours, ours], [theirs, theirs], _twice(told))
    count = ours.trained_tokens
    assert answers.ids_NK.shape == (2 * count, 41)
    assert np.array_equal(answers.ids_NK[:count], answers.ids_NK[count:])
    assert set(answers.spans_N[:count]).isdisjoint(answers.spans_N[count:])

    spell, spell_theirs = translation._ours, translation._theirs
    our_ids, their_ids = (each.token_ids[each.loss_mask].tolist() for each in (ours, theirs))
    at = begun = told_for_ranks = 0
    for stretch in range(int(answers.spans_N[count - 1]) + 1):
        own = np.flatnonzero(answers.spans_N[:count] == stretch)
        before = b"".join(spell.spelled([our_ids[token] for token in own[:-1]]))
        whole = before + spell.of[our_ids[own[-1]]]
        begun = at  # the teacher's tokens of the same stretch
        spelled = b""
        while at < len(their_ids) and (spelled != whole or at == begun):
            spelled += spell_theirs.of[their_ids[at]]
            at += 1
        earlier = sum(logprobs[token, their_ids[token]] for token in range(begun, at - 1))
        their_before = b"".join(spell_theirs.spelled(their_ids[begun : at - 1]))
        last = own[-1]
        assert answers.ids_NK[last, 0] == our_ids[last]
        assert answers.logprobs_NK[last, 0] == pytest.approx(earlier + logprobs[at - 1, their_ids[at - 1]], abs=1e-4)
        for token, told_logprob in zip(answers.ids_NK[last, 1:], answers.logprobs_NK[last, 1:], strict=True):
            if token < 0:
                told_for_ranks += np.isfinite(told_logprob)
                continue
            text = before + spell.of[token]
            source = next(other for other in told.ids_NK[at - 1] if their_before + spell_theirs.of[other] == text)
            assert told_logprob == pytest.approx(earlier + logprobs[at - 1, source], abs=1e-4)
        chosen = answers.ids_NK[last][answers.ids_NK[last] >= 0]
        assert len(set(chosen.tolist())) == len(chosen)
        alone = [
            earlier + logprobs[at - 1, other]
            for other in told.ids_NK[at - 1]
            if spell_theirs.of[other] and spell_theirs.of[other] not in spell.ids
        ]
        unspelled = answers.logprobs_NK[last][(answers.ids_NK[last] < 0) & np.isfinite(answers.logprobs_NK[last])]
        assert {round(float(each), 3) for each in unspelled} <= {round(float(each), 3) for each in alone}
    assert at == len(their_ids)
    assert told_for_ranks, "some of the teacher's tokens are unknown to the student"
    assert {spell.of[token] for token in translation.unmatched.tolist()} == set(spell.ids) - set(spell_theirs.ids)


def _twice(told: OwnTopKAnswers) -> OwnTopKAnswers:
    return OwnTopKAnswers(
        **{name: np.concatenate([getattr(told, name)] * 2) for name in ("ids_NK", "logprobs_NK", "entropy_N", "own_N")}
    )


def test_ends_of_turns_are_one_outcome() -> None:
    student, teacher = renderer_of("SmolLM2"), renderer_of("chatml")
    ours, theirs = conversation(student, "ok"), conversation(teacher, "ok")
    told, logprobs = told_of(theirs, len(teacher.tokenizer), len(teacher.tokenizer))
    answers = translation_of("SmolLM2", "chatml").answers([ours], [theirs], told)
    assert answers.ids_NK[-1, 0] == student.turn_end
    assert answers.logprobs_NK[-1, 0] == pytest.approx(logprobs[-1, teacher.turn_end], abs=1e-4)
    assert answers.spans_N[-1] != answers.spans_N[-2]


def test_conversations_that_train_other_texts_are_told() -> None:
    student, teacher = renderer_of("SmolLM2"), renderer_of("chatml")
    translation = translation_of("SmolLM2", "chatml")
    one, other = conversation(student, "yes"), conversation(teacher, "no")
    assert translation.difference(one, other) == (
        "'yes' with an end is trained, and in the teacher's chat template it is 'no' with one"
    )
    unended = replace(other, loss_mask=other.loss_mask & (other.token_ids != teacher.turn_end))
    assert "without one" in str(translation.difference(conversation(student, "no"), unended))


def test_a_tokenizer_that_spells_nothing_is_refused() -> None:
    renderer = renderer_of("chatml")
    other = Renderer(renderer.tokenizer)
    other.tokenizer = type(
        "Slow", (), {"added_tokens_decoder": {}, "get_vocab": lambda self: {}, "backend_tokenizer": None}
    )()
    with pytest.raises(ConfigError, match=r"teachers\.large\.path: its tokenizer \(Slow, decoder unknown\)"):
        TokenBytes(other, "teachers.large.path")


WORDS = ("hello", "there", "▁you", "▁▁", "▁", "naï", "ve")


@cache
def pieces(*, user_defined: bool = True, words: tuple[str, ...] = WORDS) -> Renderer:
    """Gemma's kind of SentencePiece: bytes before characters, no space before a text, user-defined spaces."""
    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    vocabulary = dict.fromkeys([*special, *(f"<0x{byte:02X}>" for byte in range(256)), "<0xZZ>", "\n"])
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        vocabulary |= dict.fromkeys(word)
        vocabulary |= dict.fromkeys(word[:end] for end in range(2, len(word) + 1))
        merges |= dict.fromkeys((word[:end], word[end]) for end in range(1, len(word)))
    ids = {token: token_id for token_id, token in enumerate(vocabulary)}
    model = models.BPE(vocab=ids, merges=[*merges], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    if user_defined:
        tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("\n", normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return Renderer(fast)


PIECES = "hello there  you\nnaïve 🦜 <0xZZ>"


@pytest.mark.parametrize("user_defined", [True, False])
def test_pieces_spell_the_bytes_of_their_text(user_defined: bool) -> None:
    renderer = pieces(user_defined=user_defined)
    tokens, ids = TokenBytes(renderer, "model.path"), renderer.encode(PIECES).tolist()
    assert b"".join(tokens.spelled(ids)) == PIECES.encode()
    for token_id in range(len(renderer.tokenizer)):
        if token_id not in renderer.special_ids:
            assert tokens.of[token_id].decode(errors="replace") == renderer.tokenizer.decode([token_id])
    named = renderer.tokenizer.get_vocab()
    assert tokens.ids[b"e"] == named["e"] > named["<0x65>"]
    assert tokens.ids[b"  "] == named["▁▁"]
    assert tokens.ids[b"\n"] == named["\n"]
    assert tokens.ids[b"q"] == named["<0x71>"], "nothing else spells it"
    assert tokens.same[named["<0x65>"]] == named["e"]
    assert tokens.same[named["<|im_end|>"]] == named["<|im_end|>"]


@pytest.mark.parametrize("pieces_of", ["student", "teacher", "both"])
def test_bytes_of_sentencepiece_are_no_outcomes_beside_their_characters(pieces_of: str) -> None:
    """Against sums over the texts themselves."""
    student = renderer_of("chatml") if pieces_of == "teacher" else pieces()
    teacher = renderer_of("chatml") if pieces_of == "student" else pieces(words=("there", "▁you", "lo", "▁▁"))
    translation = Translation(student, teacher, name="large")
    ours, theirs = conversation(student, "hello there  you"), conversation(teacher, "hello there  you")
    assert translation.difference(ours, theirs) is None
    told, logprobs = told_of(theirs, len(teacher.tokenizer), len(teacher.tokenizer))
    answers = translation.answers([ours], [theirs], told)
    alone = [place for place in range(ours.trained_tokens) if (answers.spans_N == answers.spans_N[place]).sum() == 1]
    bytes_of_pieces = {token_id for token, token_id in student.tokenizer.get_vocab().items() if token.startswith("<0x")}
    for row in answers.ids_NK:
        chosen = [token_id for token_id in row.tolist() if token_id >= 0]
        texts = [translation._ours.of[token_id] for token_id in chosen]
        assert len(set(texts)) == len(texts)
        if pieces_of != "teacher":
            spelled = {translation._ours.of[token_id] for token_id in bytes_of_pieces.intersection(chosen)}
            assert not spelled & {b"h", b"e", b"l", b"o", b" ", b"\n"}
    assert alone
    letter = translation._ours.ids[b"e"]  # compared wherever a stretch is one token on both sides
    their_letter = teacher.tokenizer.get_vocab()["e"]
    ends = np.cumsum([len(text) for text in translation._ours.spelled(ours.token_ids[ours.loss_mask].tolist())])
    their_ends = np.cumsum(
        [len(text) for text in translation._theirs.spelled(theirs.token_ids[theirs.loss_mask].tolist())]
    )
    compared = 0
    for place in alone[:-1]:
        (at,) = np.flatnonzero(their_ends[:-1] == ends[place])
        if (their_ends[at - 1] if at else 0) != (ends[place - 1] if place else 0):
            continue  # several of the teacher's
        (found,) = np.flatnonzero(answers.ids_NK[place] == letter)
        assert answers.logprobs_NK[place, found] == pytest.approx(logprobs[at, their_letter], abs=1e-4)
        compared += 1
    assert compared


def test_the_samples_own_token_stands_for_all_that_spell_its_text() -> None:
    """Two tokens of each side spell "e": ours is the byte, as in answers that a policy sampled; theirs, too."""
    renderer = pieces()
    named, translation = renderer.tokenizer.get_vocab(), Translation(renderer, renderer, name="large")
    letter, byte, other = named["e"], named["<0x65>"], named["h"]
    sample = conversation(renderer, "e")
    sample = replace(sample, token_ids=np.where(sample.token_ids == letter, byte, sample.token_ids))
    told = OwnTopKAnswers(
        ids_NK=np.array([[letter, byte, other]] * 2, np.int32),
        logprobs_NK=np.log(np.array([[0.25, 0.5, 0.125]] * 2, np.float32)),
        entropy_N=np.zeros(2, np.float32),
        own_N=np.log(np.array([0.5, 0.5], np.float32)),
    )
    answers = translation.answers([sample], [sample], told)
    assert answers.ids_NK[0].tolist() == [byte, -1, -1, other]
    assert np.exp(answers.logprobs_NK[0]).tolist() == pytest.approx([0.5, 0, 0, 0.125])
    assert answers.best_N[0] == byte
    # the byte beside another sample's token is the letter's text, and no outcome of its own
    answers = translation.answers([conversation(renderer, "h")], [conversation(renderer, "h")], told)
    assert answers.ids_NK[0].tolist() == [other, letter, -1, -1]


def test_an_added_token_is_what_a_tokenizer_over_bytes_writes() -> None:
    """Like the runs of spaces of Pythia and CodeGen, which older tokens spell, too; odd names spell nothing."""
    tokenizer = make_tiny_tokenizer()
    older = next(token for token in tokenizer.get_vocab() if token.startswith("Ġ") and token[1:].isalpha())
    word = older.replace("Ġ", " ")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["本"] = len(tokenizer)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([AddedToken(word, normalized=False), AddedToken("日", normalized=False)])
    renderer, named = Renderer(tokenizer), tokenizer.get_vocab()
    tokens, text = TokenBytes(renderer, "model.path"), f"so{word} 日本"
    assert tokens.of[named["本"]] == b""
    assert tokens.of[named["日"]] == "日".encode()
    assert tokens.of[named[older]] == tokens.of[named[word]] == word.encode()
    assert tokens.ids[word.encode()] == tokens.same[named[older]] == named[word]
    written = renderer.encode(text).tolist()
    assert named[word] in written
    assert b"".join(tokens.spelled(written)) == text.encode()


# ---- from rows to an update --------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from plain_ranks(monkeypatch)


def engine_of(objective: Any, model: Path, *, frozen: bool = False) -> TrainingEngine[Any]:
    rank = TrainingRank(cpu_rank(objective, model, frozen=frozen, total_updates=100), 0, 1)
    rank.start(("127.0.0.1", 1))
    cluster: Any = OneRank(rank)
    return TrainingEngine(cluster, objective, frozen=frozen)


@pytest.mark.usefixtures("registered")
def test_a_student_comes_nearer_to_a_teacher_with_other_tokens(tmp_path: Path, tiny_model: Path) -> None:
    other = make_other_model(tmp_path / "other")  # joins less: a token of the teacher is several of the student
    teachers = {"other": {"path": str(tiny_model), "other_tokenizer": True}}
    config: DistillConfig = load_config(write_distill_run(tmp_path, other, tiny_model, teachers=teachers))
    answers = [f"{who} describes the question {where}." for who in ("Nobody", "A river") for where in ("", "at night")]
    rows = [json.dumps({"prompt": "Say it", "completion": answer}) for answer in answers]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    student = load_renderer(config.model)
    data = load_samples_of_teachers(config, config.data, student, "data")
    assert str(data.report[0]).startswith("train: 4 of 4 rows")
    settings = TrainingConfig(backend="plain", optimizer={"lr": 3e-3}, max_tokens_per_micro_batch=256)
    teacher = engine_of(TeacherObjective(settings=settings, top_k=32, tells_own=True), tiny_model, frozen=True)
    trainer = engine_of(DistillationObjective(settings=settings, loss_config=config.algorithm.loss), other)
    renderer = load_renderer(teacher_model(config.model, config.teachers["other"]))
    translations = {"other": Translation(student, renderer, name="other")}
    scored = distributions({"other": teacher}, translations, untimed, data.samples)
    (of_teacher,) = scored
    told = of_teacher.answers
    assert isinstance(told, TextAnswers)
    assert len(np.unique(told.spans_N)) < len(told.spans_N), "some stretches have several tokens"
    figures = [reduce(trainer.train_step(scored)) for _ in range(6)]
    assert figures[-1]["distill/kl"] < figures[0]["distill/kl"] / 2
    assert all(0 < each["distill/teacher_mass"] < 1 for each in figures)
    assert "distill/unmatched" not in figures[0]
    with pytest.raises(ConfigError, match=r"teachers\.other\.path: its vocabulary has every token of the student's"):
        send_unmatched(translations, trainer)


@pytest.mark.usefixtures("registered")
def test_a_student_gives_up_tokens_that_its_teacher_does_not_have(tmp_path: Path, tiny_model: Path) -> None:
    other = make_other_model(tmp_path / "other")
    state = json.loads((other / "tokenizer.json").read_text())
    joined = {"".join(merge.split() if isinstance(merge, str) else merge) for merge in state["model"]["merges"]}
    special = {token["content"] for token in state["added_tokens"]}
    state["model"]["vocab"] = {  # what is not joined any more is another token
        token if len(token) == 1 or token in joined | special else token * 2: token_id
        for token, token_id in state["model"]["vocab"].items()
    }
    (other / "tokenizer.json").write_text(json.dumps(state))
    teachers = {"other": {"path": str(other), "other_tokenizer": True}}
    run = write_distill_run(tmp_path, tiny_model, other, teachers=teachers)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "Say it", "completion": "A river describes it."}))
    config: DistillConfig = load_config(run, ["algorithm.loss={type: forward_kl, unmatched_weight: 20}"])
    student, renderer = (
        load_renderer(config.model),
        load_renderer(teacher_model(config.model, config.teachers["other"])),
    )
    data = load_samples_of_teachers(config, config.data, student, "data")
    settings = TrainingConfig(backend="plain", optimizer={"lr": 3e-3}, max_tokens_per_micro_batch=256)
    teacher = engine_of(TeacherObjective(settings=settings, top_k=32, tells_own=True), other, frozen=True)
    trainer = engine_of(DistillationObjective(settings=settings, loss_config=config.algorithm.loss), tiny_model)
    translations = {"other": Translation(student, renderer, name="other")}
    send_unmatched(translations, trainer)
    scored = distributions({"other": teacher}, translations, untimed, data.samples)
    figures = [reduce(trainer.train_step(scored)) for _ in range(6)]
    assert 0 < figures[-1]["distill/unmatched"] < figures[0]["distill/unmatched"] / 2
    assert figures[0]["train/loss"] == pytest.approx(
        figures[0]["distill/divergence"] + 20 * figures[0]["distill/unmatched"], rel=1e-4
    )


def test_rows_that_train_other_texts_are_left_out_or_refused(tmp_path: Path, tiny_model: Path) -> None:
    other = make_other_model(tmp_path / "other")
    template = other / "chat_template.jinja"
    content = "{{ message.content }}"
    template.write_text(template.read_text().replace(content, "{{ message.content | replace('z', '') }}"))
    teachers = {"other": {"path": str(other), "other_tokenizer": True}}
    run = write_distill_run(tmp_path, tiny_model, other, teachers=teachers)
    config: DistillConfig = load_config(run, ["data.bad_rows=skip"])
    data = load_samples_of_teachers(config, config.data, load_renderer(config.model), "data")
    report = str(data.report[0])
    assert report.startswith("train: 17 of 20 rows")
    assert "3 with other text in the teacher's tokens left out, first " in report
    assert "train.jsonl:16 (" in report
    refusing: DistillConfig = load_config(run)
    renderer = load_renderer(refusing.model)
    with pytest.raises(DataError, match=r"train\.jsonl:16: ") as raised:
        load_samples_of_teachers(refusing, refusing.data, renderer, "data")
    assert "data.bad_rows: skip" in str(raised.value)


def test_rows_that_are_longer_in_the_teachers_tokens_are_too_long(tmp_path: Path, tiny_model: Path) -> None:
    other = make_other_model(tmp_path / "other")  # it joins less
    teachers = {"other": {"path": str(other), "other_tokenizer": True}}
    run = write_distill_run(tmp_path, tiny_model, other, teachers=teachers)
    rows = [{"prompt": "Say it", "completion": text} for text in ("ok", "Nobody describes the question")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config: DistillConfig = load_config(run)
    renderer = load_renderer(config.model)
    ours = load_samples_of_teachers(config, config.data, renderer, "data").sources[0].items
    limit = len(ours[1])
    assert len(ours[1].theirs) > limit
    config = load_config(run, [f"data.max_tokens={limit}"])  # bad rows are refused, and it is none
    (report,) = load_samples_of_teachers(config, config.data, renderer, "data").report
    assert str(report).startswith("train: 1 of 2 rows, ")
    assert "; 1 over the limit of tokens left out, first " in str(report)
    assert f"train.jsonl:2 ({len(ours[1].theirs)} of the teacher's tokens, the limit is {limit})" in str(report)
    config = load_config(run, [f"data.max_tokens={limit}", "data.too_long=refuse"])
    with pytest.raises(DataError, match=r"train\.jsonl:2: \d+ of the teacher's tokens") as raised:
        load_samples_of_teachers(config, config.data, renderer, "data")
    assert "data.max_tokens" in str(raised.value)
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[1]))
    config = load_config(run, [f"data.max_tokens={limit}"])
    with pytest.raises(DataError, match=r"train: 0 of 1 rows, 0 of 0 tokens trained; 1 over the limit of tokens"):
        load_samples_of_teachers(config, config.data, renderer, "data")


def test_rows_that_the_teachers_template_refuses_say_why(tmp_path: Path, tiny_model: Path) -> None:
    other = make_other_model(tmp_path / "other")
    template = other / "chat_template.jinja"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    teachers = {"other": {"path": str(other), "other_tokenizer": True}}
    run = write_distill_run(tmp_path, tiny_model, other, teachers=teachers)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]
    rows = [{"messages": turns}, {"messages": [{"role": "system", "content": "Be brief"}, *turns]}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config: DistillConfig = load_config(run, ["data.bad_rows=skip"])
    (report,) = load_samples_of_teachers(config, config.data, load_renderer(config.model), "data").report
    assert "1 with other text in the teacher's tokens left out" in str(report)
    assert "1 with roles that the chat template refuses" in str(report)
    assert "no system" in str(report)


def check_of(run: Path, *changes: str) -> tuple[list[str], list[str]]:
    """What `--check` says of teachers and of rows, and what became of rows."""
    report = DistillPipeline.check(load_config(run, list(changes)))
    said = [str(each) for each in report.findings if each.key.startswith(("teachers.", "data."))]
    return said, [str(source) for source in report.sources]


def test_a_check_downloads_no_teacher(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, *, local_files_only: bool = False, **options: Any) -> str:
        assert local_files_only, f"a check downloads {repo}"
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    teachers = {"other": {"path": "org/far", "other_tokenizer": True}}
    run = write_distill_run(tmp_path, tiny_model, tiny_model, teachers=teachers)
    said, rows = check_of(run)
    unchecked, note = said
    assert unchecked.startswith("warning: teachers.other.path: org/far is not checked")
    assert note.startswith("note: teachers.other.path: that its chat template trains the same texts is not checked")
    assert rows[0].startswith("train: 20 of 20 rows")


def test_a_check_names_the_teacher_that_is_wrong(tmp_path: Path, tiny_model: Path) -> None:
    other = make_other_model(tmp_path / "other")
    (other / "chat_template.jinja").unlink()
    teachers = {"other": {"path": str(other), "other_tokenizer": True}}
    run = write_distill_run(tmp_path, tiny_model, other, teachers=teachers)
    (error,), rows = check_of(run)
    assert error.startswith("error: teachers.other.path: the tokenizer of ")
    assert error.endswith("; set teachers.other.path to an instruction-tuned model")
    assert rows[0].startswith("train: 20 of 20 rows")
    config: DistillConfig = load_config(run)
    with pytest.raises(ConfigError, match=r"^teachers\.other\.path: the tokenizer"):
        load_samples_of_teachers(config, config.data, load_renderer(config.model), "data")
