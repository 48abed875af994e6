"""A policy that follows distributions: its divergence from a teacher's most likely tokens, beside its rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bigram_engine import OneRank
from distillation_samples import distillation_loss
from plain_backend import plain_ranks
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples, with_kept  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn.functional import kl_div
from trained_weights import trained_weights
from transformers import AutoModelForCausalLM

from roll_like.algorithms.distillation.base import DistillationConfig
from roll_like.algorithms.distillation.on_policy import with_prompt
from roll_like.algorithms.distillation.teacher import TeacherTopK
from roll_like.algorithms.kl import KLController
from roll_like.builtin.pipelines.distill.answers import joined_answers
from roll_like.builtin.pipelines.distill.objective import DistillationTarget, TopKObjective
from roll_like.builtin.pipelines.on_policy_distill.objective import TaughtHead, TaughtPolicyObjective, TaughtTarget
from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import top_k_answers
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.training import TrainingConfig
from roll_like.errors import EngineError
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.registry import DISTILLATION_LOSSES
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.types import PLAIN_LOGITS, PolicySample, TopKAnswers, TrainingSample
from roll_like.values import reduce

VOCABULARY = 512
LEARNING = {"lr": 1e-2, "eps": 1e-2, "max_grad_norm": 1000.0}
PROMPT = np.arange(20, 31, dtype=np.int32)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from plain_ranks(monkeypatch)


def engine_of(objective: Any, model: Path, *, frozen: bool = False) -> TrainingEngine[Any]:
    rank = TrainingRank(cpu_rank(objective, model, frozen=frozen), 0, 1)
    rank.start(("127.0.0.1", 1))
    cluster: Any = OneRank(rank)
    return TrainingEngine(cluster, objective, frozen=frozen)


def settings_of(**changed: Any) -> TrainingConfig:
    return TrainingConfig(backend="plain", optimizer=LEARNING, max_tokens_per_micro_batch=100, **changed)


def policy(model: Path, *, rewarded: bool = False, weight: float = 1.0, **of_loss: Any) -> TrainingEngine[Any]:
    """A policy that follows distributions, and can be its own teacher."""
    algorithm = AlgorithmConfig(correction={"type": "none"})
    config = DISTILLATION_LOSSES.get(of_loss.pop("type", "reverse_kl")).Config(**of_loss)
    assert isinstance(config, DistillationConfig)
    objective = TaughtPolicyObjective(
        settings=settings_of(),
        algorithm=algorithm,
        max_response_tokens=16,
        kl=KLController(algorithm.kl),
        top_k=VOCABULARY,
        loss_temperature=config.temperature,
        loss_config=config,
        weight=weight,
        rewarded=rewarded,
    )
    return engine_of(objective, model)


def taught(
    teacher: TrainingEngine[Any], samples: Sequence[PolicySample], seen: Sequence[TrainingSample], k: int
) -> list[PolicySample]:
    """The samples with the k most likely tokens of a teacher that tells all of them."""
    told = top_k_answers(teacher, seen)
    return [
        replace(
            sample,
            taught=TopKAnswers(
                ids_NK=answers.ids_NK[:, :k], logprobs_NK=answers.logprobs_NK[:, :k], entropy_N=answers.entropy_N
            ),
        )
        for sample, (_, answers) in zip(samples, told, strict=True)
    ]


def logits_of(model: Any, sample: TrainingSample) -> Tensor:
    """Logits before each trained token, shape [S, V]."""
    ids = torch.from_numpy(sample.token_ids).long()[None]
    found: Tensor = model(ids).logits[0, :-1][torch.from_numpy(sample.loss_mask[1:])]
    return found


# ---- numbers by hand -----------------------------------------------------------------------------------


def head_of(logits_NV: Tensor) -> tuple[TaughtHead, Tensor]:
    """A head and hidden states that have these logits."""
    vocabulary = logits_NV.shape[1]
    linear = nn.Linear(vocabulary, vocabulary, bias=False, dtype=torch.float64)
    linear.weight.data = torch.eye(vocabulary, dtype=torch.float64)
    head = TaughtHead(linear, chunk_tokens=2, chunk_vocab=3, logits=PLAIN_LOGITS)
    return head, logits_NV.double().clone().requires_grad_()


def compare(logits_NV: Tensor, teacher: TeacherTopK, moves: bool = True, **loss: Any) -> tuple[Any, ...]:
    head, hidden = head_of(logits_NV)
    count = len(logits_NV)
    target = DistillationTarget(
        teacher, distillation_loss(loss.pop("type", "reverse_kl"), **loss), torch.ones(count, dtype=torch.float64)
    )
    targets_N = torch.zeros(count, dtype=torch.long)
    return hidden, *head(hidden, targets_N, 1.0, TaughtTarget(target, None, moves))


def test_two_of_four_tokens_by_hand() -> None:
    """p = ¼ each; q = ½, ¼, ⅛, ⅛, of which the teacher tells two.

    With the rest as an outcome KL(p‖q) = ¼·ln ½ + ¼·ln 1 + ½·ln 2 = ¼·ln 2; its gradient is p·(ln p/q − KL), that of
    the rest divided between its tokens by p. Renormalised p = ½, ½ and q = ⅔, ⅓: ½·ln ¾ + ½·ln 1½ = ½·ln 9/8.
    """
    teacher = TeacherTopK(
        ids_NK=torch.tensor([[2, 0]], dtype=torch.int32), logprobs_NK=torch.tensor([[0.5, 0.25]]).log()
    )
    hidden, logprobs_N, entropy_N, losses_N, figures = compare(torch.zeros(1, 4), teacher)
    assert (logprobs_N.item(), entropy_N.item()) == pytest.approx((math.log(0.25), math.log(4)))
    divergence = 0.25 * math.log(2)
    assert losses_N.item() == pytest.approx(divergence, rel=1e-6)
    assert figures["distill/teacher_mass"].item() == pytest.approx(0.75)
    # token 0 is the second, token 2 the first, 1 and 3 are the rest
    of_rest = 0.25 * (math.log(2) - divergence)
    expected = [0.25 * (0 - divergence), of_rest, 0.25 * (-math.log(2) - divergence), of_rest]
    assert torch.autograd.grad(losses_N.sum(), hidden)[0][0].tolist() == pytest.approx(expected, rel=1e-5)
    _, _, _, alone_N, _ = compare(torch.zeros(1, 4), teacher, tail="renormalise")
    assert alone_N.item() == pytest.approx(0.5 * math.log(9 / 8), rel=1e-6)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "js"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_tokens_are_the_whole_distribution(name: str, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours_NV, theirs_NV = (torch.randn(5, 11, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    theirs_NV = (theirs_NV / temperature).log_softmax(-1)
    logprobs_NK, ids_NK = theirs_NV.topk(11)
    teacher = TeacherTopK(ids_NK=ids_NK, logprobs_NK=logprobs_NK, temperature=temperature)
    hidden, logprobs_N, _, losses_N, _ = compare(ours_NV, teacher, type=name, temperature=temperature)
    again = ours_NV.clone().requires_grad_()
    log_p = (again / temperature).log_softmax(-1)
    if name == "forward_kl":
        expected = kl_div(log_p, theirs_NV, log_target=True, reduction="none").sum(-1)
    elif name == "reverse_kl":
        expected = kl_div(theirs_NV, log_p, log_target=True, reduction="none").sum(-1)
    else:
        middle = ((log_p.exp() + theirs_NV.exp()) / 2).log()
        parts = [kl_div(middle, each, log_target=True, reduction="none").sum(-1) for each in (log_p, theirs_NV)]
        expected = (parts[0] + parts[1]) / 2
    expected = temperature**2 * expected
    assert torch.allclose(losses_N, expected, rtol=1e-10)
    # log-probabilities of tokens stay those of the sampling, and their gradients add up
    plain_N = again.log_softmax(-1)[:, 0]
    assert torch.allclose(logprobs_N, plain_N, rtol=1e-10)
    found = torch.autograd.grad((losses_N * torch.arange(5)).sum() + logprobs_N.sum(), hidden)[0]
    wanted = torch.autograd.grad((expected * torch.arange(5)).sum() + plain_N.sum(), again)[0]
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_what_is_only_measured_has_no_gradient() -> None:
    teacher = TeacherTopK(ids_NK=torch.tensor([[2, 0]]), logprobs_NK=torch.tensor([[0.5, 0.25]]).log())
    _, logprobs_N, entropy_N, losses_N, _ = compare(torch.zeros(1, 4), teacher, moves=False)
    assert not logprobs_N.requires_grad
    assert not entropy_N.requires_grad
    assert losses_N.requires_grad


def two_of(theirs_NV: Tensor) -> TeacherTopK:
    logprobs_NK, ids_NK = theirs_NV.log_softmax(-1).topk(2)
    return TeacherTopK(ids_NK=ids_NK, logprobs_NK=logprobs_NK)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "js"])
def test_two_tokens_and_the_rest_are_a_divergence_of_at_most_that_of_all(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ours_NV, theirs_NV = (torch.randn(200, 6, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    logprobs_NK, ids_NK = theirs_NV.log_softmax(-1).topk(6)
    whole_N = compare(ours_NV, TeacherTopK(ids_NK=ids_NK, logprobs_NK=logprobs_NK), type=name)[3]
    few_N = compare(ours_NV, two_of(theirs_NV), type=name)[3]
    assert (few_N >= 0).all()
    assert (few_N <= whole_N + 1e-9).all()
    assert (few_N < whole_N - 1e-3).any()


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "js"])
def test_a_student_does_not_flee_from_the_tokens_that_are_compared(name: str) -> None:
    theirs = torch.tensor([[3.0, 2.0, 0.0, -1.0, -1.0]], dtype=torch.float64)
    teacher, logits = two_of(theirs), torch.zeros(1, 5, dtype=torch.float64)
    for _ in range(400):
        hidden, _, _, losses_N, _ = compare(logits, teacher, type=name)
        logits = logits - 2.0 * torch.autograd.grad(losses_N.sum(), hidden)[0]
    found, wanted = logits.softmax(-1)[0], theirs.softmax(-1)[0]
    assert found[:2].tolist() == pytest.approx(wanted[:2].tolist(), abs=1e-4)


# ---- training steps ------------------------------------------------------------------------------------


def after_a_plain_step(
    path: Path, samples: Sequence[PolicySample], weight: float = 1.0, *, rewarded: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Loss and weights of a step in plain PyTorch, in which the model at its start teaches with another prompt."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0)
    tokens = sum(sample.trained_tokens for sample in samples)
    total: Tensor = torch.zeros(())
    for sample in samples:
        with torch.no_grad():
            theirs = logits_of(model, with_prompt(sample, PROMPT)).log_softmax(-1)
        ours = logits_of(model, sample).log_softmax(-1)
        total = total + weight * kl_div(theirs, ours, log_target=True, reduction="sum") / tokens
        if rewarded:
            ids = torch.from_numpy(sample.token_ids[sample.loss_mask]).long()
            logprobs = ours.gather(1, ids[:, None])[:, 0]
            advantages = torch.from_numpy(sample.advantages[sample.loss_mask])
            total = total - (advantages * (logprobs - logprobs.detach()).exp()).sum() / tokens
    total.backward()
    optimizer.step()
    return float(total.detach()), {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("rewarded", [False, True])
def test_a_policy_that_teaches_itself_takes_the_step_of_a_plain_loop(tiny_model: Path, rewarded: bool) -> None:
    samples = ragged_policy_samples()
    if not rewarded:
        samples = [replace(sample, advantages=np.zeros_like(sample.advantages)) for sample in samples]
    loss, weights = after_a_plain_step(tiny_model, samples, 0.5, rewarded=rewarded)
    engine = policy(tiny_model, rewarded=rewarded, weight=0.5)
    seen = [with_prompt(sample, PROMPT) for sample in samples]
    told = taught(engine, samples, seen, VOCABULARY)
    figures = reduce(engine.train_step(told))
    assert figures["train/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    parts = figures["train/policy_loss"] + figures["train/distillation_loss"]
    assert figures["train/loss"] == pytest.approx(parts, abs=1e-6)
    assert figures["train/distillation_loss"] == pytest.approx(0.5 * figures["distill/divergence"], rel=1e-5)
    found = trained_weights(engine.cluster)
    for name, parameter in weights.items():
        assert found[name].sub(parameter).abs().max() < 2e-6, name


@pytest.mark.parametrize("tail", ["rest", "renormalise"])
def test_steps_lower_the_divergence(tiny_model: Path, tail: str) -> None:
    samples = [replace(sample, advantages=np.zeros_like(sample.advantages)) for sample in ragged_policy_samples()]
    engine = policy(tiny_model, tail=tail)
    # what the model said at first, with another prompt
    told = taught(engine, samples, [with_prompt(sample, PROMPT) for sample in samples], 20)
    figures = [reduce(engine.train_step(told)) for _ in range(6)]
    assert figures[-1]["distill/divergence"] < figures[0]["distill/divergence"] / 2
    assert all(0 < each["distill/teacher_mass"] < 1 for each in figures)


def test_truncated_samples_are_compared_over_all_tokens(tiny_model: Path) -> None:
    plain = [replace(sample, advantages=np.zeros_like(sample.advantages)) for sample in ragged_policy_samples()]
    truncated = with_kept(plain)
    engine = policy(tiny_model)
    told = [top_k_answers(engine, samples) for samples in (plain, truncated)]
    for (of_plain, answers), (of_truncated, others), sample in zip(*told, truncated, strict=True):
        assert np.array_equal(answers.ids_NK, others.ids_NK)
        assert (of_truncated[sample.loss_mask] >= of_plain[sample.loss_mask] - 1e-5).all()  # of fewer tokens
    assert any(not np.allclose(first, second) for (first, _), (second, _) in zip(*told, strict=True))
    losses = [
        reduce(engine.measure(taught(engine, samples, [with_prompt(each, PROMPT) for each in samples], 20)))
        for samples in (plain, truncated)
    ]
    assert losses[0]["distill/divergence"] == pytest.approx(losses[1]["distill/divergence"], rel=1e-5)


def test_one_token_is_taught_at_its_own_place(tiny_model: Path) -> None:
    whole = ragged_policy_samples()[0]
    first = np.flatnonzero(whole.loss_mask)[0]
    sample = replace(whole, loss_mask=np.arange(len(whole)) == first, advantages=np.zeros(len(whole), np.float32))
    engine = policy(tiny_model)
    seen = with_prompt(sample, PROMPT)
    ((_, answers),) = top_k_answers(engine, [seen])
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(PROMPT).long()[None]).logits[0, -1]
    assert answers.ids_NK[0, :5].tolist() == logits.topk(5).indices.tolist()
    figures = reduce(engine.measure([replace(sample, taught=answers)]))
    theirs, ours = logits.log_softmax(-1), logits_of(model, sample)[0].log_softmax(-1).detach()
    expected = float(kl_div(theirs, ours, log_target=True, reduction="sum"))
    assert figures["distill/divergence"] == pytest.approx(expected, rel=1e-4)


def test_a_teacher_whose_vocabulary_is_padded_further(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.resize_token_embeddings(VOCABULARY + 16, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] = 0.0
        model.lm_head.weight[VOCABULARY + 1] = 50.0  # likely wherever hidden states sum to more than 0
    model.save_pretrained(tmp_path)
    samples = [replace(sample, advantages=np.zeros_like(sample.advantages)) for sample in ragged_policy_samples()]
    teacher = engine_of(TopKObjective[Any, Any](settings=settings_of(), top_k=8, tells_own=True), tmp_path)
    told = [answers for _, answers in top_k_answers(teacher, samples)]
    padding = max(int(answers.ids_NK.max()) for answers in told)
    assert padding >= VOCABULARY, "the teacher finds padding likely"
    taught_samples = [replace(sample, taught=answers) for sample, answers in zip(samples, told, strict=True)]
    with pytest.raises(EngineError, match=r"token ids run from .* the student's vocabulary has 512 tokens"):
        policy(tiny_model).train_step(taught_samples)


def test_log_probabilities_are_those_of_a_policy_that_is_not_taught(tiny_model: Path) -> None:
    samples, algorithm = ragged_policy_samples(), AlgorithmConfig()
    shared: dict[str, Any] = {"settings": settings_of(), "temperature": 0.7}
    plain = engine_of(
        PolicyObjective(**shared, algorithm=algorithm, max_response_tokens=16, kl=KLController(algorithm.kl)),
        tiny_model,
    )
    teacher = engine_of(TopKObjective[Any, Any](**shared, top_k=7, loss_temperature=2.0, tells_own=True), tiny_model)
    told = top_k_answers(teacher, samples)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for sample, ours, theirs, (own, answers) in zip(
        samples, plain.logprobs(samples), teacher.logprobs(samples), told, strict=True
    ):
        assert np.array_equal(ours, theirs)
        assert np.array_equal(ours, own)
        with torch.no_grad():
            expected, ids = (logits_of(model, sample) / 2.0).log_softmax(-1).topk(7)
        assert np.array_equal(answers.ids_NK, ids.numpy())
        assert np.allclose(answers.logprobs_NK, expected.numpy(), atol=1e-5)


def test_answers_are_joined_in_order() -> None:
    parts = [
        TopKAnswers(
            ids_NK=np.full((count, 2), count, np.int32),
            logprobs_NK=np.zeros((count, 2), np.float32),
            entropy_N=np.zeros(count, np.float32),
        )
        for count in (1, 2)
    ]
    assert joined_answers(parts).ids_NK[:, 0].tolist() == [1, 2, 2]
