"""Ranks that divide matrices compute what one rank does: losses, gradients, weights, log-probabilities, checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from model_families import make_family
from rank_specs import cpu_rank
from tensor_memory import NewTensors
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]
from tiny_model import make_tiny_model
from torch import Tensor
from trained_weights import largest_difference

from roll_like.algorithms.kl import KLController
from roll_like.builtin.pipelines.distill.answers import HiddenAnswers, chosen
from roll_like.builtin.pipelines.distill.objective import DistillationObjective, Projection, TeacherTargets
from roll_like.builtin.pipelines.on_policy_distill.objective import TaughtPolicyObjective
from roll_like.builtin.pipelines.reward_model.config import RewardModelAlgorithmConfig
from roll_like.builtin.pipelines.reward_model.objective import RewardModelObjective
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.training import CriticConfig, TrainingConfig
from roll_like.inference.weight_transfer.interface import send_buckets
from roll_like.models.tensor_plan import FAMILIES
from roll_like.policy_gradient.critic import ValueObjective, ValueStep
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.registry import DISTILLATION_LOSSES
from roll_like.training.fsdp2 import FSDP2Backend
from roll_like.training.interface import Share
from roll_like.training.rank import TrainingRank, seed_everything
from roll_like.types import PLAIN_LOGITS, Pair, TopKAnswers
from roll_like.values import Metric, merge, reduce

pytestmark = pytest.mark.integration
TOLERANCE, VOCABULARY, TEACHER_WIDTH = 1e-5, 512, 24
#: Gradients of families that amplify rounding: on one rank another order of attention moves these by 7e-6.
ROUNDING = {"granitemoe": 3e-5}
#: Adam's first steps are the signs of gradients whose last bits differ, but for a large eps.
OPTIMIZER = {"lr": 1e-2, "eps": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.01}


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        family: Of the model.
        changes: To its configuration.
        settings: Of `training`, also for the one rank that others are compared with.
        kind: Of the objective.
        experts: Ranks that divide experts, where there are several.
    """

    family: str
    changes: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    kind: str = "policy"
    experts: int = 1

    def folder(self, under: Path) -> Path:
        return under / "-".join([self.family, *(f"{key}-{value}" for key, value in self.changes)])


@dataclass(frozen=True)
class Trained:
    """What a rank tells: of its updates, of the first gradient, and of the model after two and after all.

    Attributes:
        sent: What engines are sent after all.
    """

    metrics: list[dict[str, Metric]]
    gradients: dict[str, Tensor]
    saved: dict[str, Tensor]
    weights: dict[str, Tensor]
    logprobs: list[Any]
    sent: dict[str, Tensor]


CASES = (
    Case("llama", (("pad_token_id", 261),)),  # tokens of samples too, without a gradient
    Case("llama", (("attention_bias", True), ("mlp_bias", True), ("tie_word_embeddings", True)), kind="sft"),
    Case("qwen2", (), (("attention", "varlen"), ("logprob_chunk_vocab", 100), ("logprob_chunk_tokens", 7))),
    Case("qwen3", (("tie_word_embeddings", True), ("vocab_size", 511)), (("gradient_checkpointing", True),)),
    Case("qwen3", (("pad_token_id", 34),), (("attention", "varlen"), ("gradient_checkpointing", True)), kind="sft"),
    Case("qwen3", kind="critic"),
    Case("llama", (("tie_word_embeddings", True),), kind="distill"),
    Case("qwen2", kind="distill top-k"),
    Case("llama", kind="reward model"),
    Case("qwen2", (), (("lora", {"rank": 4, "alpha": 8}), ("gradient_checkpointing", True))),
    Case("llama", (("attention_bias", True), ("mlp_bias", True)), (("lora", {"rank": 4}),), kind="sft"),
    Case("llama", (), (("lora", {"rank": 4, "dropout": 0.5, "target_modules": ["q_proj"]}),)),
    Case("phi3"),  # several matrices in one
    Case("phi3", (("tie_word_embeddings", True),), (("lora", {"rank": 4}),)),
    Case("olmo2"),  # norms over all heads
    Case("deepseek_v3", (), (("attention", "varlen"),)),  # compressed keys
    Case("qwen3_moe", (), (("gradient_checkpointing", True),), kind="routes", experts=2),
    Case("gpt_oss"),  # experts that ranks do not divide, attention sinks
    Case("llama", kind="taught"),
)
#: Families that others stand for by day, and forms of them.
EVERY = tuple(
    [Case(family) for family in FAMILIES]
    + [Case("cohere", (("use_qk_norm", True),)), Case("qwen3_moe", (("mlp_only_layers", [0]),))]
)
#: Of weights that are sent, in bytes.
BUCKET = 400_000
#: Those of which checkpoints are written.
KEPT = (0, 3, 9, 12, 16)


def objective_of(case: Case, section: Any) -> Any:
    if case.kind == "sft":
        return SupervisedObjective(settings=section, packing=True)
    if case.kind == "critic":
        return ValueObjective(settings=section)
    if case.kind == "reward model":
        return RewardModelObjective(settings=section, algorithm=RewardModelAlgorithmConfig(), pad_token_id=0)
    if case.kind in ("policy", "routes", "taught"):
        algorithm = AlgorithmConfig()
        policy = {"algorithm": algorithm, "kl": KLController(algorithm.kl), "replays_routes": case.kind == "routes"}
        policy |= {"settings": section, "max_response_tokens": 16, "temperature": 0.8}
        if case.kind != "taught":
            return PolicyObjective(**policy)
        loss = DISTILLATION_LOSSES.get("reverse_kl").Config()
        return TaughtPolicyObjective(
            **policy, top_k=9, loss_temperature=1.0, loss_config=loss, weight=0.5, rewarded=True
        )
    loss = DISTILLATION_LOSSES.get("forward_kl").Config(temperature=2.0, ce_weight=0.25)
    weight = torch.randn(VOCABULARY, TEACHER_WIDTH, generator=torch.Generator().manual_seed(0)) / 4
    projection = Projection(weight_VE=weight, bias_V=None, logits=PLAIN_LOGITS)
    return DistillationObjective(settings=section, loss_config=loss, packing=True, projections={"it": projection})


def step_of(case: Case, seed: int) -> Any:
    """What an objective learns from."""
    samples, random = ragged_policy_samples(seed=seed), np.random.default_rng(seed)
    drawn = [random.normal(size=(2, len(each.token_ids))).astype(np.float32) * each.loss_mask for each in samples]
    if case.kind == "critic":
        return ValueStep(samples=samples, values=[each[0] for each in drawn], returns=[each[1] for each in drawn])
    if case.kind == "reward model":
        pairs = zip(samples[::3], samples[1::3], strict=True)
        return [Pair(chosen=chosen, rejected=rejected, margin=0.5) for chosen, rejected in pairs]
    if case.kind == "routes":
        return [replace(each, routes=routes_of(each.token_ids)) for each in samples]
    if not case.kind.startswith(("distill", "taught")):
        return samples
    count = sum(int(each.loss_mask.sum()) for each in samples)
    answers: Any = HiddenAnswers(hidden_NE=random.normal(size=(count, TEACHER_WIDTH)).astype(np.float32))
    if case.kind != "distill":
        logits = random.normal(size=(count, VOCABULARY))
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ids = np.argsort(-logprobs)[:, :9]
        answers = TopKAnswers(
            ids_NK=ids.astype(np.int32),
            logprobs_NK=np.take_along_axis(logprobs, ids, -1).astype(np.float32),
            entropy_N=-(np.exp(logprobs) * logprobs).sum(-1).astype(np.float32),
        )
    if case.kind == "taught":
        ends = np.cumsum([each.trained_tokens for each in samples])
        parts = [
            chosen(answers, slice(end - each.trained_tokens, end)) for each, end in zip(samples, ends, strict=True)
        ]
        return [replace(each, taught=part) for each, part in zip(samples, parts, strict=True)]
    return [TeacherTargets(teacher="it", samples=samples, answers=answers)]


def routes_of(token_ids: Any) -> Any:
    """Two of four experts in each of two layers, shape [T, 2, 2]; those of a group's prompt are the same."""
    first = np.stack([token_ids % 4, token_ids // 4 % 4], 1)
    return np.stack([first, (first + 1 + token_ids[:, None] % 3) % 4], 2).astype(np.uint8)


def rank_of(case: Case, rank: int, ranks: int, folder: Path, tensor_parallel: int) -> TrainingRank:
    """A rank in this process, whose backend has met the others already."""
    seed_everything(0)
    section = (CriticConfig if case.kind == "critic" else TrainingConfig)(
        backend="fsdp2",
        zero_stage=3,
        workers=ranks,
        tensor_parallel=tensor_parallel,
        max_tokens_per_micro_batch=64,
        optimizer=OPTIMIZER,
        expert_parallel=case.experts if ranks > 1 else 1,
        **dict(case.settings),
    )
    objective = objective_of(case, section)
    trainer = TrainingRank(cpu_rank(objective, folder), rank, ranks)
    trainer._backend = FSDP2Backend(section, dtype="float32", device="cpu", world_size=ranks)
    trainer.take(objective.load(trainer._spec))
    return trainer


def shards(trainer: TrainingRank, case: Case, seed: int) -> tuple[Any, Any]:
    """This rank's micro-batches of an update, and what is shared."""
    objective = trainer._objective
    layout = {**objective.layout(trainer.world_size), "joined": trainer.joins_rows()}
    engine: Any = SimpleNamespace(layout=layout)
    (update,) = objective.updates(step_of(case, seed), engine)
    return update.shards[trainer.rank * len(update.shards) // trainer.world_size], update.shared


def updated(trainer: TrainingRank, case: Case, seed: int) -> tuple[dict[str, Metric], dict[str, Tensor]]:
    """Take an update; return its figures and its gradient."""
    batches, shared = shards(trainer, case, seed)
    found = trainer.forward_backward(Share(batches=batches, shared=shared))
    parameters = trainer._model.module.named_parameters()
    gradients = {name: each.grad.full_tensor().clone() for name, each in parameters if each.grad is not None}
    found = {**found, **trainer.optimizer_step()}
    # padding follows from the layout; a value that has hardly moved is clipped or not by the last bit of a sum
    others = {"train/computed_tokens", "train/padding_tokens", "critic/clip_fraction"}
    metrics = {name: each for name, each in found.items() if not name.startswith("time/") and name not in others}
    return metrics, gradients


def weights(trainer: TrainingRank) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in trainer._parameters()}


def join(rank: int, ranks: int, address: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")


def train(
    rank: int,
    ranks: int,
    address: Any,
    models: Path,
    tensor_parallel: int,
    checkpoints: Path,
    cases: tuple[Case, ...] = CASES,
) -> list[Trained]:
    """Train each case for two updates; of some write a checkpoint then, and take a third."""
    join(rank, ranks, address)
    results = []
    for index, case in enumerate(cases):
        trainer = rank_of(case, rank, ranks, case.folder(models), tensor_parallel)
        first, gradients = updated(trainer, case, 0)
        second, _ = updated(trainer, case, 1)
        kept = cases is CASES and index in KEPT
        saved = weights(trainer) if kept else {}
        if saved:
            folder = checkpoints / str(index)
            folder.mkdir(parents=True, exist_ok=True)
            trainer.save(str(folder))
        third = [updated(trainer, case, 2)[0]] if kept else []  # as from the checkpoint
        logprobs = []
        if case.kind in ("sft", "policy", "routes", "critic"):  # others have a loss only
            logprobs = [np.asarray(found) for found in trainer.forward(shards(trainer, case, 3)[0])]
        if case.kind == "taught":
            told = trainer.teach(shards(trainer, case, 3)[0])
            logprobs = [np.concatenate([each.logprobs_NK.ravel(), each.entropy_N, each.own_N]) for each in told]
        sent = {name: each.detach().clone() for name, each in trainer.full_weights()} if kept else {}
        results.append(Trained([first, second, *third], gradients, saved, weights(trainer), logprobs, sent))
    torch.distributed.destroy_process_group()
    return results


def resume(
    rank: int, ranks: int, address: Any, models: Path, tensor_parallel: int, checkpoints: Path
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights of each checkpoint as loaded, and after the third update."""
    join(rank, ranks, address)
    results = []
    for index in KEPT:
        trainer = rank_of(CASES[index], rank, ranks, CASES[index].folder(models), tensor_parallel)
        trainer.load(str(checkpoints / str(index)))
        loaded = weights(trainer)
        updated(trainer, CASES[index], 2)
        results.append((loaded, weights(trainer)))
    torch.distributed.destroy_process_group()
    return results if rank == 0 else []


def make_models(under: Path, cases: tuple[Case, ...]) -> Path:
    """Write the models of cases that are not there yet."""
    for case in cases:
        if not case.folder(under).exists():
            changes = {"vocab_size": VOCABULARY, **dict(case.changes)}
            make_family(case.family, **changes).save_pretrained(case.folder(under))
    return under


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("families"), CASES)


@pytest.fixture(scope="module")
def alone(models: Path) -> list[Trained]:
    """What one rank trains, with checkpoints in `alone`."""
    (found,) = on_ranks(train, models, 1, models / "alone", ranks=1)
    return found


@pytest.fixture(scope="module")
def divided(models: Path) -> list[Trained]:
    """What two ranks train that divide matrices, with checkpoints in `divided`."""
    return together(on_ranks(train, models, 2, models / "divided"))


def together(ranks: list[list[Trained]]) -> list[Trained]:
    """What all ranks tell of each case: pairs that divide matrices tell the same metrics, and all the same weights."""
    found = []
    for of_case in zip(*ranks, strict=True):
        for each in of_case:
            assert largest_difference(each.weights, of_case[0].weights) == 0
        metrics = [merge(parts) for parts in zip(*(each.metrics for each in of_case[::2]), strict=True)]
        found.append(replace(of_case[0], metrics=metrics))
    return found


def compare(found: list[Trained], expected: list[Trained], cases: tuple[Case, ...] = CASES) -> None:
    for case, mine, theirs in zip(cases, found, expected, strict=True):
        for own, figures in zip(mine.metrics, theirs.metrics, strict=True):
            assert reduce(own) == pytest.approx(reduce(figures), rel=TOLERANCE, abs=TOLERANCE), case
        largest = max(float(each.abs().max()) for each in theirs.gradients.values())
        rounding = ROUNDING.get(case.family, TOLERANCE)
        assert largest_difference(mine.gradients, theirs.gradients) < rounding * max(1.0, largest), case
        assert largest_difference(mine.weights, theirs.weights) < TOLERANCE, case


def test_two_ranks_compute_what_one_does(divided: list[Trained], alone: list[Trained]) -> None:
    compare(divided, alone)
    for case, mine, theirs in zip(CASES, divided, alone, strict=True):
        for own, expected in zip(mine.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(own, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=str(case))


@pytest.mark.slow
def test_two_groups_of_two_ranks_compute_what_one_does(models: Path, alone: list[Trained]) -> None:
    compare(together(on_ranks(train, models, 2, models / "groups", ranks=4)), alone)


@pytest.mark.slow
def test_every_family_is_computed_as_on_one_rank(models: Path) -> None:
    """Prints the table of docs/compatibility.md with `-s`."""
    make_models(models, EVERY)
    found = together(on_ranks(train, models, 2, models / "every", EVERY))
    (expected,) = on_ranks(train, models, 1, models / "every", EVERY, ranks=1)
    compare(found, expected, EVERY)
    for case, mine, theirs in zip(EVERY, found, expected, strict=True):
        logprobs = max(float(abs(a - b).max()) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True))
        gradients, weights = (
            largest_difference(getattr(mine, each), getattr(theirs, each)) for each in ("gradients", "weights")
        )
        losses = max(
            abs(a["train/loss"].value - b["train/loss"].value)
            for a, b in zip(mine.metrics, theirs.metrics, strict=True)
        )
        assert logprobs < 10 * TOLERANCE
        if not case.changes:
            print(f"| {case.family} | {losses:.0e} | {gradients:.0e} | {weights:.0e} | {logprobs:.0e} |")


@pytest.mark.parametrize(
    ("written", "ranks", "tensor_parallel"),
    [
        ("alone", 2, 2),
        pytest.param("divided", 2, 1, marks=pytest.mark.slow),
        pytest.param("divided", 1, 1, marks=pytest.mark.slow),
        pytest.param("divided", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_other_layouts_go_on_from_a_checkpoint(
    models: Path, divided: list[Trained], alone: list[Trained], written: str, ranks: int, tensor_parallel: int
) -> None:
    expected = {"divided": divided, "alone": alone}[written]
    found = on_ranks(resume, models, tensor_parallel, models / written, ranks=ranks)[0]
    for index, (loaded, after) in zip(KEPT, found, strict=True):
        assert largest_difference(loaded, expected[index].saved) == 0
        assert largest_difference(after, expected[index].weights) < TOLERANCE


def test_engines_are_sent_whole_tensors(divided: list[Trained], alone: list[Trained]) -> None:
    for index in KEPT:
        found = divided[index]
        assert largest_difference(found.sent, alone[index].sent) < TOLERANCE
        if not any("experts" in name for name in found.weights):  # those are fused in memory
            assert found.sent.keys() == found.weights.keys() >= {"model.layers.1.mlp.down_proj.weight"}
            assert largest_difference(found.sent, found.weights) == 0


def stream(rank: int, ranks: int, address: Any, model: Path, tensor_parallel: int) -> dict[str, int]:
    """Send all weights in buckets; return bytes of the model, of this rank's part, and of what sending adds."""
    join(rank, ranks, address)
    trainer = rank_of(Case("llama"), rank, ranks, model, tensor_parallel)
    own = sum(each.untyped_storage().nbytes() for each in trainer._backend.tensors("weights"))
    sent: list[int] = []
    with NewTensors() as tensors:
        report = send_buckets(trainer, BUCKET, rank, 0, lambda bucket: sent.append(sum(t.nbytes for _, t in bucket)))
    sizes = [each.numel() * 4 for each in trainer._model.module.parameters()]
    torch.distributed.destroy_process_group()
    found = {"model": sum(sizes), "largest": max(sizes), "own": own, "added": tensors.peak, "left": tensors.held}
    return {**found, "sent": report.bytes, "buckets": report.buckets, "bucket": max(sent, default=0)}


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_weights_are_sent_in_a_stream(tmp_path: Path, ranks: int, tensor_parallel: int) -> None:
    """No rank ever holds the model: beside its own part it has a bucket, and the tensor that is gathered."""
    model = make_tiny_model(tmp_path / "model", dtype="float32", layers=24)
    found = on_ranks(stream, model, tensor_parallel, ranks=ranks)
    for each in found:
        assert each["own"] < each["model"] / ranks * 1.05
        assert BUCKET / 2 < each["added"] <= BUCKET + 2 * each["largest"]
        assert each["own"] + each["added"] < each["model"] * 0.8
        assert each["left"] <= each["largest"]
    assert found[0]["sent"] == found[0]["model"]
    assert found[0]["buckets"] > 6
    assert found[0]["bucket"] <= BUCKET + found[0]["largest"]


def test_an_export_from_a_checkpoint_has_the_same_bits(models: Path, divided: list[Trained]) -> None:
    for index in KEPT[:2]:  # of adapters the checkpoint has these alone
        merged = FSDP2Backend.merged(models / "divided" / str(index))
        saved = divided[index].saved
        named = {name.removeprefix("causal_lm."): merged[name] for name in merged if name.startswith("causal_lm.")}
        assert saved.keys() <= named.keys()
        assert largest_difference({name: named[name] for name in saved}, saved) == 0
