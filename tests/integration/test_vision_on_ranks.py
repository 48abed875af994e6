"""A vision-language model on two ranks, of which one has images where the other has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from rank_specs import cpu_rank
from tiny_vision import make_vision_model, plain_logprobs, samples_of

from roll_like.cluster.address import free_port
from roll_like.config.training import TrainingConfig
from roll_like.models.modules import load_causal_lm
from roll_like.training import deepspeed
from roll_like.training.interface import RankModel
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.training.rank import TrainingRank

pytestmark = pytest.mark.integration

#: Groups of each rank, a micro-batch each: the second has no images in the whole update, the first in two of three.
DEALT = (("0", "2", "1"), ("2", "2", "2"))
#: Settings of `training`, one process a rank for all of a line.
DEEPSPEED = [
    {"zero_stage": 1, "freeze_vision": False},
    {"zero_stage": 3, "freeze_vision": True},
    {"zero_stage": 3, "freeze_vision": False, "gradient_checkpointing": True},
]
FURTHER = [
    {"zero_stage": 0, "freeze_vision": False},
    {"zero_stage": 2, "freeze_vision": False},
    {"zero_stage": 2, "freeze_vision": True},
    {"zero_stage": 3, "freeze_vision": False},
]
FSDP2 = [
    {"backend": "fsdp2", "zero_stage": 3, "freeze_vision": True},
    {"backend": "fsdp2", "zero_stage": 3, "freeze_vision": False, "gradient_checkpointing": True},
]
#: Adam's first step is learning rate · gradient / (|gradient| + eps): with these, a multiple of the gradient.
LEARNING_RATE, EPS = 2e6, 1e8
OPTIMIZER = {"lr": 0.1, "eps": EPS, "max_grad_norm": 1e9}


@dataclass(frozen=True, slots=True)
class Computed:
    """Of one rank: log-probabilities before and after an update, the gradient's norm and all weights after it."""

    before: list[np.ndarray]
    norm: float
    weights: dict[str, np.ndarray]
    after: list[np.ndarray]


def batches_of(folder: str) -> list[list[MicroBatch]]:
    """Each rank's micro-batches."""
    samples = samples_of(Path(folder))
    dealt = []
    for groups in DEALT:
        own = [[each for each in samples if each.group_id == group] for group in groups]
        dealt.append([micro_batches(each, ranks=1, max_tokens=400, share_prompts=True)[0][0] for each in own])
    assert [[bool(batch.images) for batch in own] for own in dealt] == [[True, False, True], [False, False, False]]
    return dealt


def keep_nothing_gathered(*arguments: Any, made: Any = deepspeed.deepspeed_config) -> dict[str, Any]:
    """A configuration with which ZeRO-3 gathers parameters as small as those of a tiny model again and again."""
    found: dict[str, Any] = made(*arguments)
    found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return found


def computed(
    rank: int, ranks: int, address: Any, folder: str, layouts: list[dict[str, Any]], ports: list[int]
) -> list[Computed]:
    """What a rank gives with each layout; the ranks meet at another port each time.

    At the same port one could still reach what another has not closed yet, and wait there for ever.
    """
    deepspeed.deepspeed_config = keep_nothing_gathered
    own, found = batches_of(folder)[rank], []
    for settings, port in zip(layouts, ports, strict=True):
        training = TrainingConfig(workers=ranks, optimizer=OPTIMIZER, **settings)
        # a rate that no run may have, beside an eps that makes of Adam a plain step along the gradient
        steep = training.optimizer.model_copy(update={"lr": LEARNING_RATE})
        training = training.model_copy(update={"optimizer": steep})
        objective: Any = LanguageModelObjective(settings=training)
        trainer = TrainingRank(cpu_rank(objective, folder), rank, ranks)
        trainer.start((address[0], port))
        before = trainer.forward(own)
        trainer._backend.forward_backward(own, partial(loss, trainer._model))
        norm = trainer._backend.optimizer_step(LEARNING_RATE)
        weights = {name: tensor.detach().clone() for name, tensor in trainer._parameters()}
        found.append(
            Computed(before, norm, {name: each.numpy() for name, each in weights.items()}, trainer.forward(own))
        )
        if training.backend == "fsdp2":  # DeepSpeed keeps a process group for good
            trainer.close()
    return found


def loss(model: RankModel, batch: MicroBatch) -> torch.Tensor:
    return (model(batch, 1.0)[0] * torch.from_numpy(signs(batch.sample_ids))).sum()


def signs(sample_ids: np.ndarray) -> np.ndarray:
    """What multiplies the log-probabilities of a micro-batch's samples in the loss."""
    return np.sin(2 * sample_ids + 1).astype(np.float32)


def in_transformers(model: Any, folder: Path) -> tuple[list[list[np.ndarray]], torch.Tensor]:
    """Log-probabilities of each rank's samples, one after the other, and the loss."""
    found, total = [], torch.zeros(())
    for groups in DEALT:
        own = []
        for group in groups:
            for index, sample in enumerate(each for each in samples_of(folder) if each.group_id == group):
                logprobs = plain_logprobs(model, folder, sample.token_ids, sample.images)[sample.loss_mask[1:]]
                total = total + float(signs(np.array(index))) * logprobs.sum()
                own.append(logprobs.detach().numpy())
        found.append(own)
    return found, total


def agree(batches: Sequence[MicroBatch], mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> None:
    """Log-probabilities of a rank's micro-batches are those of its samples."""
    samples = iter(theirs)
    for batch, logprobs in zip(batches, mine, strict=True):
        order = np.lexsort((batch.target_ids, batch.sample_ids))
        expected = np.concatenate([next(samples) for _ in np.unique(batch.sample_ids)])
        np.testing.assert_allclose(logprobs[order], expected, atol=5e-5)
    assert next(samples, None) is None


@pytest.fixture(
    scope="module",
    params=["qwen3_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "qwen3_5"))],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in another precision than it is trained in: ranks that divide it read its layers late."""
    path = make_vision_model(request.param, tmp_path_factory.mktemp("vision"))
    load_causal_lm(path, "bfloat16").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(DEEPSPEED, marks=pytest.mark.slow), FSDP2, pytest.param(FURTHER, marks=pytest.mark.slow)],
    ids=["DeepSpeed", "FSDP2", "further stages"],
)
def test_a_rank_without_images_takes_part(folder: Path, layouts: list[dict[str, Any]]) -> None:
    ranks = on_ranks(computed, str(folder), layouts, [free_port() for _ in layouts])
    batches = batches_of(str(folder))
    for number, settings in enumerate(layouts):
        model = load_causal_lm(folder, "float32").eval()
        model.base_model.visual.requires_grad_(not settings["freeze_vision"])
        before, total = in_transformers(model, folder)
        total.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert any("visual" in name for name in gradients) != settings["freeze_vision"]
        norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
        start = {name: each.detach().clone() for name, each in model.named_parameters()}
        with torch.no_grad():
            for name, gradient in gradients.items():
                model.get_parameter(name).sub_(LEARNING_RATE / EPS * gradient)
            after, _ = in_transformers(model, folder)
        for rank, found in enumerate(each[number] for each in ranks):
            agree(batches[rank], found.before, before[rank])
            agree(batches[rank], found.after, after[rank])
            assert found.norm == pytest.approx(norm, rel=1e-4)
            assert found.weights.keys() == start.keys()
            for name, parameter in model.named_parameters():
                wanted, moved = parameter.detach() - start[name], torch.from_numpy(found.weights[name]) - start[name]
                assert float((moved - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max()), (settings, name)
