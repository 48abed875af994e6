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
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_backend import PlainBackend  # type: ignore[import-not-found]
from rank_specs import cpu_rank
from run_config import write_distill_run
from tiny_model import make_other_model
from torch import Tensor

from roll_like.algorithms.distillation.base import Outcomes
from roll_like.algorithms.distillation.objective import distillation_losses
from roll_like.algorithms.distillation.texts import TeacherTexts, text_outcomes
from roll_like.builtin.pipelines.distill.answers import OwnTopKAnswers, TextAnswers
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.data import load_samples_of_teachers
from roll_like.builtin.pipelines.distill.objective import DistillationObjective, TeacherObjective
from roll_like.builtin.pipelines.distill.other_tokens import TokenBytes, Translation
from roll_like.builtin.pipelines.distill.teachers import distributions
from roll_like.config.load import load_config
from roll_like.config.teachers import teacher_model
from roll_like.config.training import TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError, DataError
from roll_like.models.load import load_renderer
from roll_like.registry import DISTILLATION_LOSSES, TRAINING_BACKENDS
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
    at = begun = 0
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
                assert told_logprob == -np.inf
                continue
            text = before + spell.of[token]
            source = next(other for other in told.ids_NK[at - 1] if their_before + spell_theirs.of[other] == text)
            assert told_logprob == pytest.approx(earlier + logprobs[at - 1, source], abs=1e-4)
        chosen = answers.ids_NK[last][answers.ids_NK[last] >= 0]
        assert len(set(chosen.tolist())) == len(chosen)
    assert at == len(their_ids)


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


# ---- from rows to an update --------------------------------------------------------------------------


@pytest.fixture
def plain_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks of plain PyTorch, in this process."""
    TRAINING_BACKENDS.names()  # the built-in ones
    monkeypatch.setitem(TRAINING_BACKENDS._plugins, "plain", PlainBackend)
    monkeypatch.setattr("roll_like.training.rank.seed_everything", torch.manual_seed)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def engine_of(objective: Any, model: Path, *, frozen: bool = False) -> TrainingEngine[Any]:
    rank = TrainingRank(cpu_rank(objective, model, frozen=frozen, total_updates=100), 0, 1)
    rank.start(("127.0.0.1", 1))
    cluster: Any = OneRank(rank)
    return TrainingEngine(cluster, objective, frozen=frozen)


@pytest.mark.usefixtures("plain_ranks")
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
