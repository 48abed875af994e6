"""Ranks that divide the weights of layers with a state compute what one rank does, whatever was computed before.

Such layers read weights of parts that they do not call, and DeepSpeed gathers those of what is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import on_ranks
from rank_specs import cpu_rank
from test_training_fsdp2 import Weights, largest_difference, learn, weights_of
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]
from tiny_families import make_family

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.training import TrainingConfig
from roll_like.training.layout import micro_batches
from roll_like.training.rank import TrainingRank

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def taught(rank: int, ranks: int, address: Any, model: str, options: dict[str, Any]) -> Weights:
    """Weights after two updates, with log-probabilities of other rows before and between."""
    optimizer = {"lr": 1e-2, "eps": 1e-2}
    settings = TrainingConfig(workers=ranks, max_tokens_per_micro_batch=64, optimizer=optimizer, **options)
    objective: Any = SupervisedObjective(settings=settings, packing=True)
    trainer = TrainingRank(cpu_rank(objective, model), rank, ranks)
    trainer.start(address)
    for seed in (0, 1):
        rows = micro_batches(ragged_policy_samples(seed=7), ranks=ranks, max_tokens=64, share_prompts=True)
        trainer.forward(rows[rank])
        learn(trainer, seed)
    found = weights_of(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize("family", ["qwen3_next", "granite_hybrid", "lfm2"])
@pytest.mark.parametrize("options", [{"zero_stage": 3}, {"zero_stage": 3, "backend": "fsdp2"}], ids=["zero3", "fsdp2"])
def test_divided_weights_are_trained_as_whole_ones(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = str(make_family(family, tmp_path))
    (expected,) = on_ranks(taught, model, {"zero_stage": 0}, ranks=1)
    found, _ = on_ranks(taught, model, options, ranks=2)
    assert largest_difference(found, expected) < 2e-4
