"""The real DeepSpeed engine on pairs: its updates are those of a plain loop, however they are computed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_specs import cpu_rank
from tests_support import (
    answer_logprobs,
    pairs_of,  # type: ignore[import-not-found]
)
from trained_weights import trained_weights
from transformers import AutoModelForCausalLM

from roll_like.builtin.pipelines.dpo.objective import PairedObjective, PairStep, whole_logprobs
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
LR, EPS, BETA = 1e-2, 1e-2, 0.5


def pairs(count: int = 5, vocabulary: int = 400, seed: int = 0) -> list[TrainingSample]:
    """Ragged pairs: chosen and rejected answers in turn."""
    random = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        prompt = random.integers(5, vocabulary, random.integers(3, 10))
        for _ in range(2):
            tokens = np.concatenate([prompt, random.integers(5, vocabulary, random.integers(2, 12))]).astype(np.int32)
            samples.append(
                TrainingSample(
                    group_id=str(index),
                    token_ids=tokens,
                    prompt_length=len(prompt),
                    loss_mask=np.arange(len(tokens)) >= len(prompt),
                )
            )
    return samples


def reference_of(samples: list[TrainingSample]) -> FloatArray:
    """What a reference model could have said: near what a random model says."""
    noise = np.random.default_rng(1).normal(size=len(samples))
    return np.array([-6.0 * sample.loss_mask.sum() for sample in samples], np.float32) + noise.astype(np.float32)


def engine(resources: ResourceManager, model: Path, stack: ExitStack, **training: Any) -> TrainingEngine[PairStep]:
    config = TrainingConfig(optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": EPS}, **training)
    loss = PREFERENCE_LOSSES.get("dpo").Config.model_validate({"type": "dpo", "beta": BETA, "nll_coefficient": 0.3})
    spec = cpu_rank(PairedObjective(settings=config, loss_config=loss), model)
    return start_engine("training", spec, resources, DeviceRange.model_validate("0-1"), stack=stack)


@pytest.fixture(scope="module")
def plain(float_model: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and weights after one AdamW step in plain PyTorch, written from the paper's formula (arXiv:2305.18290)."""
    model = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    samples = pairs()
    reference = reference_of(samples)
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples[::2])
    loss = torch.tensor(0.0)
    for at in range(0, len(samples), 2):
        chosen, rejected = (answer_logprobs(model, samples[at + side]).sum() for side in (0, 1))
        margin = (chosen - float(reference[at])) - (rejected - float(reference[at + 1]))
        loss = loss - torch.nn.functional.logsigmoid(BETA * margin) / (len(samples) // 2) - 0.3 * chosen / tokens
    loss.backward()
    optimizer.step()
    return float(loss.detach()), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_stage": 3, "max_tokens_per_micro_batch": 48},
        {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 48, "backend": "fsdp2"},
        pytest.param({"workers": 2, "zero_stage": 1, "max_tokens_per_micro_batch": 32}, marks=pytest.mark.slow),
        pytest.param({"workers": 2, "zero_stage": 2, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"workers": 2, "zero_stage": 1, "sequence_parallel": 2, "max_tokens_per_micro_batch": 24},
    ],
)
def test_an_update_is_that_of_a_plain_loop(
    resources: ResourceManager,
    float_model: Path,
    plain: tuple[float, dict[str, torch.Tensor]],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    loss, weights = plain
    samples = pairs()
    step = PairStep(pairs=pairs_of(samples), reference=reference_of(samples))
    with ExitStack() as stack:
        trainer = engine(resources, float_model, stack, **options)
        trainer.save(tmp_path)
        trainer.train_step(step)  # away from where the checkpoint was taken, and back
        trainer.load(tmp_path)
        measured = reduce(trainer.measure(step))
        report = reduce(trainer.train_step(step))
        found = trained_weights(trainer.cluster)
        sums = whole_logprobs(trainer, samples)
        narrow = replace(trainer.objective, settings=TrainingConfig(max_tokens_per_micro_batch=10))
        with pytest.raises(EngineError, match="a row 10 at most"):
            TrainingEngine(trainer.cluster, narrow).measure(step)
    assert measured["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert report["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert (report["preference/pairs"], report["train/updates"]) == (5, 1)
    for name, parameter in weights.items():
        assert found[name].sub(parameter).abs().max() < 2e-6, name
    model = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        expected = [float(answer_logprobs(model, sample).sum()) for sample in samples]
    assert sums.tolist() == pytest.approx(expected, abs=1e-3)
