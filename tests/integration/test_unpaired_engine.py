"""The real DeepSpeed engine on single answers: its updates are those of a plain loop, however they are computed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_specs import cpu_rank
from tests_support import answer_logprobs  # type: ignore[import-not-found]
from trained_weights import trained_weights
from transformers import AutoModelForCausalLM

from roll_like.builtin.pipelines.dpo.labelled_data import LabelledSample
from roll_like.builtin.pipelines.dpo.labelled_objective import LabelledObjective, LabelledStep, labelled_step
from roll_like.cluster import ResourceManager
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.errors import EngineError
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.training.engine import TrainingEngine
from roll_like.training.start import start_engine
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import reduce

pytestmark = pytest.mark.integration
LR, EPS, BETA, DESIRABLE, UNDESIRABLE = 1e-2, 1e-2, 0.5, 1.5, 0.8
LABELS = [True, False, True, True, False, False, True]
#: The first two answer one prompt.
PROMPTS = [0, 0, 1, 2, 3, 4, 5]


def batch(vocabulary: int = 400) -> LabelledStep:
    """Ragged answers, and the same after other prompts."""
    random = np.random.default_rng(0)
    prompts = [random.integers(5, vocabulary, random.integers(3, 10)) for _ in range(6)]
    labelled = []
    for prompt, label in zip(PROMPTS, LABELS, strict=True):
        tokens = np.concatenate([prompts[prompt], random.integers(5, vocabulary, random.integers(2, 12))])
        loss_mask = np.arange(len(tokens)) >= len(prompts[prompt])
        labelled.append(LabelledSample(token_ids=tokens.astype(np.int32), loss_mask=loss_mask, desirable=label))
    return labelled_step(labelled, max_tokens=64, baseline=True)


def reference_of(samples: list[TrainingSample]) -> FloatArray:
    """What a reference model could have said: a little less than what a random model says."""
    noise = np.random.default_rng(1).normal(size=len(samples))
    return np.array([-6.5 * sample.loss_mask.sum() for sample in samples], np.float32) + noise.astype(np.float32)


def engine(resources: ResourceManager, model: Path, stack: ExitStack, **training: Any) -> TrainingEngine[LabelledStep]:
    config = TrainingConfig(optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": EPS}, **training)
    settings = {"type": "kto", "beta": BETA, "desirable_weight": DESIRABLE, "undesirable_weight": UNDESIRABLE}
    loss = PREFERENCE_LOSSES.get("kto").Config.model_validate(settings)
    spec = cpu_rank(LabelledObjective(settings=config, loss_config=loss), model)
    return start_engine("training", spec, resources, DeviceRange.model_validate("0-1"), stack=stack)


@pytest.fixture(scope="module")
def plain(float_model: Path) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, baseline and weights after a step in plain PyTorch, written from the paper (arXiv:2402.01306, eq. 8)."""
    model = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    samples = batch().sequences
    reference = reference_of(samples)
    count = len(LABELS)
    with torch.no_grad():
        moved = [float(answer_logprobs(model, samples[at]).sum() - reference[at]) for at in range(count, len(samples))]
    baseline = max(0.0, sum(moved) / len(moved))
    loss = torch.tensor(0.0)
    for at, desirable in enumerate(LABELS):
        ratio = answer_logprobs(model, samples[at]).sum() - float(reference[at])
        gain = BETA * (ratio - baseline) if desirable else BETA * (baseline - ratio)
        loss = loss + (DESIRABLE if desirable else UNDESIRABLE) * (1 - torch.sigmoid(gain)) / count
    loss.backward()
    optimizer.step()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return float(loss.detach()), baseline, weights


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 0},
        pytest.param({"zero_stage": 3, "max_tokens_per_micro_batch": 48}, marks=pytest.mark.slow),
        pytest.param({"workers": 2, "zero_stage": 0, "max_tokens_per_micro_batch": 32}, marks=pytest.mark.slow),
        {"workers": 2, "zero_stage": 3},
        {"workers": 2, "zero_stage": 3, "backend": "fsdp2"},
    ],
    ids=str,
)
def test_an_update_is_that_of_a_plain_loop(
    resources: ResourceManager,
    float_model: Path,
    plain: tuple[float, float, dict[str, torch.Tensor]],
    options: dict[str, Any],
) -> None:
    loss, baseline, weights = plain
    assert baseline > 0.5  # else there would be nothing to see of it
    samples = batch()
    step = replace(samples, reference=reference_of(samples.sequences))
    with ExitStack() as stack:
        trainer = engine(resources, float_model, stack, **options)
        measured = reduce(trainer.measure(step))
        with pytest.raises(EngineError, match="these mismatched samples have none"):
            trainer.measure(samples)
        report = reduce(trainer.train_step(step))
        found = trained_weights(trainer.cluster)
    for figures in (measured, report):
        assert figures["train/loss"] == pytest.approx(loss, rel=1e-5)
        assert figures["preference/baseline"] == pytest.approx(BETA * baseline, rel=1e-5)
        assert figures["preference/samples"] == len(LABELS)
        assert figures["preference/reward_margin"] == pytest.approx(
            figures["preference/reward_chosen"] - figures["preference/reward_rejected"]
        )
        assert "preference/pair_accuracy" not in figures
    assert {name: report[name] for name in measured} == pytest.approx(measured, rel=1e-4, abs=1e-6)
    for name, parameter in weights.items():
        assert found[name].sub(parameter).abs().max() < 2e-6, name
