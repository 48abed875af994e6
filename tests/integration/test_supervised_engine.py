"""The real DeepSpeed engine on given answers: its updates are those of a plain loop, however they are computed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]
from trained_weights import trained_weights
from transformers import AutoModelForCausalLM

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective, likelihood_metrics
from roll_like.cluster import ResourceManager
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.training.engine import TrainingEngine
from roll_like.training.start import start_engine
from roll_like.types import TrainingSample
from roll_like.values import reduce

pytestmark = pytest.mark.integration
LR, EPS = 1e-2, 1e-2  # the large eps keeps Adam's first step from being the sign of the gradient's last bits


def batches() -> list[list[TrainingSample]]:
    """Two steps; all samples of the second begin alike, as with a chat template."""
    beginning = np.array([7, 8, 9, 10, 11, 12], np.int32)
    alike = [
        TrainingSample(
            group_id=sample.group_id,
            token_ids=np.concatenate([beginning, sample.token_ids]),
            prompt_length=0,
            loss_mask=np.concatenate([np.zeros(len(beginning), np.bool_), sample.loss_mask]),
        )
        for sample in ragged_policy_samples(seed=1)
    ]
    return [ragged_policy_samples(seed=0), alike]


def engine(
    resources: ResourceManager, model: Path, stack: ExitStack, *, packing: bool, **training: Any
) -> TrainingEngine[Any]:
    config = TrainingConfig(optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": EPS}, **training)
    spec = cpu_rank(SupervisedObjective(settings=config, packing=packing), model)
    return start_engine("training", spec, resources, DeviceRange.model_validate("0-1"), stack=stack)


@pytest.fixture(scope="module")
def plain(float_model: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of two AdamW steps in plain PyTorch, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    losses = []
    for samples in batches():
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        optimizer.zero_grad()
        total = 0.0
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids).long()
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            loss = -logprobs[torch.from_numpy(sample.loss_mask[1:])].sum() / tokens
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("packing", "options"),
    [
        (False, {}),
        (True, {"zero_stage": 2, "max_tokens_per_micro_batch": 64}),
        (True, {"workers": 2, "zero_stage": 1, "max_tokens_per_micro_batch": 48}),
        (True, {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 64, "gradient_checkpointing": True}),
        (True, {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 64, "backend": "fsdp2"}),
    ],
)
def test_updates_are_those_of_a_plain_loop(
    resources: ResourceManager,
    float_model: Path,
    plain: tuple[list[float], dict[str, torch.Tensor]],
    packing: bool,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    losses, weights = plain
    first, second = batches()
    with ExitStack() as stack:
        trainer = engine(resources, float_model, stack, packing=packing, **options)
        assert reduce(trainer.train_step(first))["train/loss"] == pytest.approx(losses[0], rel=1e-5)
        trainer.save(tmp_path)
        trainer.train_step(first)  # away from where the checkpoint was taken, and back
        trainer.load(tmp_path)
        assert reduce(trainer.train_step(second))["train/loss"] == pytest.approx(losses[1], rel=1e-5)
        found = trained_weights(trainer.cluster)
        logprobs = trainer.logprobs(first)
    for name, parameter in weights.items():
        assert found[name].sub(parameter).abs().max() < 2e-6, name
    model = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    ids = torch.from_numpy(first[0].token_ids).long()
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    mask = first[0].loss_mask
    assert torch.from_numpy(logprobs[0][mask]).sub(expected[torch.from_numpy(mask[1:])]).abs().max() < 1e-4
    values = reduce(likelihood_metrics(first, logprobs, ["all"] * len(first)))
    tokens = sum(int(sample.loss_mask.sum()) for sample in first)
    assert values["eval/loss"] == pytest.approx(-sum(float(each.sum()) for each in logprobs) / tokens, rel=1e-5)
