"""Replayed experts where ranks divide the model: its backends' hooks and ours are at the same layers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from megatron_installed import FOLDER, INSTALLED
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples
from tiny_families import make_family

from roll_like.config.training import TrainingConfig
from roll_like.models.modules import load_causal_lm
from roll_like.models.router import RouterReplay
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import micro_batches, per_sample
from roll_like.training.rank import TrainingRank
from roll_like.types import PolicySample

pytestmark = pytest.mark.integration
EXPERTS, LAYERS, ACTIVE = 4, 2, 2


def routed_samples(among: int = EXPERTS) -> list[PolicySample]:
    """Samples with random experts, the first ones only; those of a group's prompt are the same."""
    random = np.random.default_rng(1)
    samples = ragged_policy_samples()
    longest = max(len(sample.token_ids) for sample in samples)
    chosen = [random.permutation(among)[:ACTIVE] for _ in range((len(samples) + 5) * longest * LAYERS)]
    tables = np.array(chosen, np.uint8).reshape(-1, longest, LAYERS, ACTIVE)
    found = []
    for index, sample in enumerate(samples):
        routes = tables[index, : len(sample.token_ids)].copy()
        routes[: sample.prompt_length] = tables[len(samples) + int(sample.group_id), : sample.prompt_length]
        found.append(replace(sample, routes=routes))
    return found


def computed(
    rank: int, ranks: int, address: Any, model: str, settings: dict[str, Any], among: int
) -> tuple[list[Any], float]:
    """Log-probabilities of a rank's targets, and the norm of the gradient of their sum over all ranks."""
    if settings.get("backend") == "megatron":
        sys.path.append(str(FOLDER))
    training = TrainingConfig(workers=ranks, **settings)
    objective: Any = LanguageModelObjective(settings=training, replays_routes=True)
    trainer = TrainingRank(cpu_rank(objective, model), rank, ranks)
    trainer.start(address)
    shards = micro_batches(routed_samples(among), **{**objective.layout(ranks), "joined": trainer.joins_rows()})
    own = shards[rank * len(shards) // ranks]
    logprobs = trainer.forward(own)
    backend, held = trainer._backend, trainer._model
    backend.forward_backward(own, lambda batch: (held(batch, 1.0)[0] * torch.from_numpy(batch.weights)).sum())
    norm = backend.optimizer_step(1e-3)
    trainer.close()
    return logprobs, norm


@pytest.mark.parametrize(
    ("settings", "among"),
    [
        ({"backend": "fsdp2", "zero_stage": 3, "gradient_checkpointing": True}, EXPERTS),
        pytest.param(
            {"backend": "fsdp2", "zero_stage": 3, "gradient_checkpointing": True, "expert_parallel": 2},
            EXPERTS,
            marks=pytest.mark.slow,
        ),
        # the second rank has no expert that any token goes to
        ({"backend": "fsdp2", "zero_stage": 3, "expert_parallel": 2}, EXPERTS // 2),
        pytest.param(
            {"backend": "deepspeed", "zero_stage": 3, "gradient_checkpointing": True},
            EXPERTS,
            marks=pytest.mark.slow,
        ),
        pytest.param({"backend": "deepspeed", "zero_stage": 1}, EXPERTS, marks=pytest.mark.slow),
        pytest.param({"attention": "varlen", "sequence_parallel": 2}, EXPERTS, marks=pytest.mark.slow),
        *(
            pytest.param(
                {"backend": "megatron", "attention": "varlen", "gradient_checkpointing": True, f"{kind}_parallel": 2},
                EXPERTS,
                marks=[pytest.mark.slow, INSTALLED],
            )
            for kind in ("pipeline", "tensor")
        ),
    ],
    ids=[
        *("fsdp2", "divided experts", "a rank without tokens", "ZeRO-3", "ZeRO-1", "sequence parallel"),
        *("megatron pipeline", "megatron tensor"),
    ],
)
def test_two_ranks_compute_with_the_given_experts(tmp_path: Path, settings: dict[str, Any], among: int) -> None:
    path = make_family("qwen3_moe", tmp_path)
    found = on_ranks(computed, str(path), settings, among)
    samples, model = routed_samples(among), load_causal_lm(path, "float32")
    router, total = RouterReplay(model, "the test"), torch.zeros(())
    expected = []
    for sample in samples:
        assert sample.routes is not None
        router.give(torch.from_numpy(sample.routes[:-1].astype(np.int64)))
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
        logprobs = torch.log_softmax(model(tokens[None, :-1], use_cache=False).logits[0], -1)
        sampled = logprobs.gather(1, tokens[1:, None])[:, 0] * torch.from_numpy(sample.loss_mask[1:])
        total = total + sampled.sum()
        expected.append(np.concatenate([[0.0], sampled.detach().numpy()]))
    total.backward()
    norm = float(torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm())
    training = TrainingConfig(workers=2, **settings)
    joined = training.attention == "varlen"
    layout = LanguageModelObjective[Any, Any](settings=training).layout(2)
    shards = micro_batches(samples, **{**layout, "joined": joined})
    results = [logprobs for logprobs, _ in found][: len(shards)]
    for mine, theirs in zip(per_sample(samples, shards, results), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    for _, mine in found:
        assert mine == pytest.approx(norm, rel=1e-3)
