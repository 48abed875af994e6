"""Log-probabilities among kept tokens where ranks share rows or divide the model: those of one process, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples, with_kept
from tiny_families import make_family

from roll_like.config.training import TrainingConfig
from roll_like.models.modules import load_causal_lm
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import micro_batches, per_sample
from roll_like.training.rank import TrainingRank

pytestmark = pytest.mark.integration
TEMPERATURE = 0.8


def computed(rank: int, ranks: int, address: Any, model: str, settings: dict[str, Any]) -> tuple[list[Any], float]:
    """Log-probabilities of a rank's targets, and the norm of the gradient of their sum over all ranks."""
    training = TrainingConfig(workers=ranks, logprob_chunk_tokens=5, logprob_chunk_vocab=30, **settings)
    objective: Any = LanguageModelObjective(settings=training, temperature=TEMPERATURE)
    trainer = TrainingRank(cpu_rank(objective, model), rank, ranks)
    trainer.start(address)
    samples = with_kept(ragged_policy_samples())
    shards = micro_batches(samples, **{**objective.layout(ranks), "joined": trainer.joins_rows()})
    own = shards[rank * len(shards) // ranks]
    logprobs = trainer.forward(own)
    backend, held = trainer._backend, trainer._model
    loss = lambda batch: (objective.logprobs(held, batch)[0] * torch.from_numpy(batch.weights)).sum()  # noqa: E731
    backend.forward_backward(own, loss)
    norm = backend.optimizer_step(1e-3)
    trainer.close()
    return logprobs, norm


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "varlen", "sequence_parallel": 2},
        pytest.param({"backend": "fsdp2", "zero_stage": 3, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"backend": "deepspeed", "zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param({"backend": "fsdp2", "zero_stage": 3, "tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
    ids=["sequence parallel", "FSDP2", "ZeRO-3", "divided matrices"],
)
def test_two_ranks_normalise_over_what_was_kept(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = make_family("qwen3", tmp_path)
    found = on_ranks(computed, str(path), settings)
    samples, model = with_kept(ragged_policy_samples()), load_causal_lm(path, "float32")
    total, expected = torch.zeros(()), []
    for sample in samples:
        assert sample.kept is not None
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = model(tokens[None, :-1], use_cache=False).logits[0] / TEMPERATURE
        ids = np.split(sample.kept.ids, np.cumsum(sample.kept.counts)[:-1])
        for place, of_token in enumerate(ids[1:]):
            if len(of_token):
                out = torch.ones(logits.shape[1], dtype=torch.bool)
                out[torch.from_numpy(of_token).long()] = False
                logits[place] = logits[place].masked_fill(out, -torch.inf)
        sampled = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        sampled = torch.where(torch.from_numpy(sample.loss_mask[1:]), sampled, 0.0)
        total = total + sampled.sum()
        expected.append(np.concatenate([[0.0], sampled.detach().numpy()]))
    total.backward()
    norm = float(torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm())
    training = TrainingConfig(workers=2, **settings)
    layout = LanguageModelObjective[Any, Any](settings=training).layout(2)
    shards = micro_batches(samples, **{**layout, "joined": training.attention == "varlen"})
    results = [logprobs for logprobs, _ in found][: len(shards)]
    for mine, theirs in zip(per_sample(samples, shards, results), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for _, mine in found:
        assert mine == pytest.approx(norm, rel=1e-3)
