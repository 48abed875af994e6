"""The real DeepSpeed engine on steps: its updates are those of a plain loop, however they are computed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]
from tiny_model import make_tiny_model
from trained_weights import trained_weights
from transformers import AutoModelForCausalLM

from roll_like.algorithms.distillation.on_policy import with_prompt
from roll_like.algorithms.kl import KLController
from roll_like.builtin.pipelines.distill.objective import (
    DistillationObjective,
    TeacherObjective,
    TeacherTargets,
    send_projections,
    teacher_answers,
)
from roll_like.builtin.pipelines.on_policy_distill.objective import TaughtPolicyObjective
from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import top_k_answers
from roll_like.cluster import ResourceManager
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.registry import DISTILLATION_LOSSES
from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import Objective, RankSpec
from roll_like.training.start import start_engine
from roll_like.types import TrainingSample
from roll_like.values import reduce

pytestmark = pytest.mark.integration
LR, EPS = 1e-2, 1e-2  # the large eps keeps Adam's first step from being the sign of the gradient's last bits
VOCABULARY, TEMPERATURE, CE = 512, 2.0, 0.25
SPAN = DeviceRange.model_validate("0-1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A student and two teachers of other sizes, one vocabulary."""
    make = tmp_path_factory.mktemp
    return (
        make_tiny_model(make("student"), dtype="float32"),
        make_tiny_model(make("first"), dtype="float32", seed=1, layers=3),
        make_tiny_model(make("second"), dtype="float32", seed=2, layers=1),
    )


def batches() -> list[list[TrainingSample]]:
    return [ragged_policy_samples(seed=seed) for seed in (0, 1)]


def spec_of(model: Path, objective: Objective[Any, Any], *, frozen: bool) -> RankSpec[Any]:
    return cpu_rank(objective, model, frozen=frozen)


def teacher(
    resources: ResourceManager, model: Path, stack: ExitStack, name: str, top_k: int | None, workers: int
) -> TrainingEngine[Any]:
    training = TrainingConfig(workers=workers, max_tokens_per_micro_batch=80)
    objective = TeacherObjective(settings=training, temperature=TEMPERATURE, top_k=top_k)
    return start_engine(name, spec_of(model, objective, frozen=True), resources, SPAN, stack=stack)


def student(
    resources: ResourceManager, model: Path, stack: ExitStack, *, packing: bool, **training: Any
) -> TrainingEngine[Any]:
    config = TrainingConfig(optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": EPS}, **training)
    loss = DISTILLATION_LOSSES.get("forward_kl").Config(temperature=TEMPERATURE, ce_weight=CE)
    objective = DistillationObjective(settings=config, loss_config=loss, packing=packing)
    return start_engine("training", spec_of(model, objective, frozen=False), resources, SPAN, stack=stack)


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path, Path]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of two AdamW steps in plain PyTorch; samples have the two teachers in turn."""
    model, *teachers = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    losses = []
    for samples in batches():
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        optimizer.zero_grad()
        total = 0.0
        for index, sample in enumerate(samples):
            ids = torch.from_numpy(sample.token_ids).long()
            at = torch.from_numpy(sample.loss_mask[1:])
            with torch.no_grad():
                theirs = teachers[index % 2](ids[None]).logits[0, :-1][at]
            logits = model(ids[None]).logits[0, :-1][at]
            cross_entropy = torch.nn.functional.cross_entropy(logits, ids[1:][at], reduction="sum")
            divergence = torch.nn.functional.kl_div(
                (logits / TEMPERATURE).log_softmax(-1),
                (theirs / TEMPERATURE).log_softmax(-1),
                log_target=True,
                reduction="sum",
            )
            loss = (CE * cross_entropy + (1 - CE) * TEMPERATURE**2 * divergence) / tokens
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("packing", "top_k", "teachers", "options"),
    [
        pytest.param(False, None, 1, {}, marks=pytest.mark.slow),
        pytest.param(True, VOCABULARY, 2, {"zero_stage": 2, "max_tokens_per_micro_batch": 64}, marks=pytest.mark.slow),
        pytest.param(
            True,
            VOCABULARY,
            1,
            {"workers": 2, "zero_stage": 1, "max_tokens_per_micro_batch": 48},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            True,
            None,
            1,
            {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 64, "gradient_checkpointing": True},
            marks=pytest.mark.slow,
        ),
        (True, None, 1, {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 32, "sequence_parallel": 2}),
        (True, None, 1, {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 64, "backend": "fsdp2"}),
    ],
)
def test_updates_are_those_of_a_plain_loop(
    resources: ResourceManager,
    models: tuple[Path, Path, Path],
    plain: tuple[list[float], dict[str, torch.Tensor]],
    packing: bool,
    top_k: int | None,
    teachers: int,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    losses, weights = plain
    with ExitStack() as stack:
        engines = {
            name: teacher(resources, path, stack, name, top_k, teachers)
            for name, path in zip(("first", "second"), models[1:], strict=True)
        }
        steps = [
            [
                TeacherTargets(teacher=name, samples=part, answers=teacher_answers(engines[name], part))
                for name, part in (("first", samples[::2]), ("second", samples[1::2]))
            ]
            for samples in batches()
        ]
        trainer = student(resources, models[0], stack, packing=packing, **options)
        if top_k is None:
            send_projections(engines, trainer)
        measured = reduce(trainer.measure(steps[0]))
        first = reduce(trainer.train_step(steps[0]))
        assert first["train/loss"] == pytest.approx(losses[0], rel=1e-5)
        assert measured["distill/kl"] == pytest.approx(first["distill/kl"], rel=1e-5)
        assert 0 < first["distill/kl"] < 10
        trainer.save(tmp_path)
        trainer.train_step(steps[0])  # away from where the checkpoint was taken, and back
        trainer.load(tmp_path)
        assert reduce(trainer.train_step(steps[1]))["train/loss"] == pytest.approx(losses[1], rel=1e-5)
        found = trained_weights(trainer.cluster)
    for name, parameter in weights.items():
        assert found[name].sub(parameter).abs().max() < 2e-6, name


#: What a policy that teaches itself reads in the place of each prompt, as a teacher.
PROMPT = np.arange(20, 31, dtype=np.int32)


@pytest.fixture(scope="module")
def taught_plainly(models: tuple[Path, Path, Path]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of two AdamW steps to what the policy itself says after another prompt, and a reward."""
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    losses = []
    for seed in (0, 1):
        samples = ragged_policy_samples(seed=seed)
        tokens = sum(sample.trained_tokens for sample in samples)

        def logprobs(sample: TrainingSample) -> torch.Tensor:
            logits = model(torch.from_numpy(sample.token_ids).long()[None]).logits[0, :-1]
            return torch.as_tensor(logits[torch.from_numpy(sample.loss_mask[1:])].log_softmax(-1))

        total: torch.Tensor = torch.zeros(())
        for sample in samples:
            with torch.no_grad():
                theirs = logprobs(with_prompt(sample, PROMPT))
            ours = logprobs(sample)
            total = total + torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="sum")
            own = ours.gather(1, torch.from_numpy(sample.token_ids[sample.loss_mask]).long()[:, None])[:, 0]
            total = total - (torch.from_numpy(sample.advantages[sample.loss_mask]) * (own - own.detach()).exp()).sum()
        optimizer.zero_grad()
        (total / tokens).backward()
        optimizer.step()
        losses.append(float(total.detach()) / tokens)
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 32, "sequence_parallel": 2},
        {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 64, "backend": "fsdp2"},
        pytest.param({"workers": 1, "zero_stage": 2, "max_tokens_per_micro_batch": 64}, marks=pytest.mark.slow),
        pytest.param(
            {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 48, "gradient_checkpointing": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tokens", "fsdp2", "one rank", "zero 3"],
)
def test_a_policy_that_teaches_itself_takes_the_steps_of_a_plain_loop(
    resources: ResourceManager,
    models: tuple[Path, Path, Path],
    taught_plainly: tuple[list[float], dict[str, torch.Tensor]],
    options: dict[str, Any],
) -> None:
    losses, weights = taught_plainly
    algorithm = AlgorithmConfig(correction={"type": "none"})
    objective = TaughtPolicyObjective(
        settings=TrainingConfig(optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": EPS}, **options),
        algorithm=algorithm,
        max_response_tokens=16,
        kl=KLController(algorithm.kl),
        top_k=VOCABULARY,
        loss_config=DISTILLATION_LOSSES.get("reverse_kl").Config(),
        weight=1.0,
        rewarded=True,
    )
    with ExitStack() as stack:
        spec = spec_of(models[0], objective, frozen=False)
        trainer = start_engine("training", spec, resources, SPAN, stack=stack)
        for seed, loss in enumerate(losses):
            samples = ragged_policy_samples(seed=seed)
            told = top_k_answers(trainer, [with_prompt(sample, PROMPT) for sample in samples])
            step = [replace(sample, taught=answers) for sample, (_, answers) in zip(samples, told, strict=True)]
            assert reduce(trainer.train_step(step))["train/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        found = trained_weights(trainer.cluster)
    for name, parameter in weights.items():
        assert found[name].sub(parameter).abs().max() < 2e-6, name
