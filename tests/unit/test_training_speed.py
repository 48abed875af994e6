"""A rank's speed is what its micro-batches need, over the time that it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.gpus import GPU_KINDS, gpu_named
from roll_like.config.training import TrainingConfig
from roll_like.models.flops import ForwardPass, training_pass
from roll_like.models.shape import load_model_shape
from roll_like.training.layout import micro_batches
from roll_like.training.speed import Speed, pass_of
from roll_like.values import Mean


@pytest.mark.parametrize("joined", [False, True])
def test_micro_batches_need_what_their_samples_need(joined: bool) -> None:
    """Prompts once a group, padding never; by a count that knows neither rows nor micro-batches."""
    samples = ragged_policy_samples()
    shards = micro_batches(samples, ranks=2, max_tokens=64, share_prompts=True, joined=joined)
    found = sum((pass_of(batch) for shard in shards for batch in shard), ForwardPass(0, 0, 0))
    assert found == training_pass(samples)


def test_a_micro_batch_that_only_fills_up_needs_nothing() -> None:
    samples = ragged_policy_samples()
    weights = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    ((batch, *_),) = micro_batches(samples, weights, ranks=1, max_tokens=4096, share_prompts=True)
    assert pass_of(batch) == ForwardPass(0, 0, 0)


def test_the_rate_is_that_since_the_last_call(tiny_model: Path) -> None:
    samples = ragged_policy_samples()
    shape = load_model_shape(tiny_model)
    ((batch, *_),) = micro_batches(samples, ranks=1, max_tokens=4096, share_prompts=True)
    speed = Speed(shape=shape, adapters=None, peak=1e9)
    flops = pass_of(batch).training_flops(shape)
    speed.add(1.5, [batch, batch])
    speed.add(0.5)  # an optimizer step
    assert speed.metrics("trainer") == {
        "throughput/trainer_tflops": Mean(flops / 1e12, 2.0),
        "util/trainer_mfu": Mean(flops / 1e9, 2.0),
    }
    assert speed.metrics("trainer") == {}
    shared = Speed(shape=shape, adapters=None, peak=None, sharing=2)
    shared.add(1.0, [batch])
    assert shared.metrics("critic") == {"throughput/critic_tflops": Mean(flops / 2 / 1e12, 1.0)}


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [("cuda", "bfloat16", 989.5e12), ("cuda", "float32", 67e12), ("cpu", "bfloat16", None)],
)
def test_only_documented_peaks_are_compared_with(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, device: str, dtype: Any, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    spec = cpu_rank(
        SupervisedObjective(settings=TrainingConfig()), tiny_model, dtype=dtype, device=device, total_updates=1
    )
    found = Speed.of(torch.nn.Linear(1, 1), spec)
    assert (found.peak, found.adapters) == (peak, None)


def test_device_names_mean_one_kind_or_none() -> None:
    names = [name for kind in GPU_KINDS.values() for name in kind.device_names]
    assert len(names) == len(set(names))
    assert [gpu_named(name) for kind in GPU_KINDS.values() for name in kind.device_names[:1]] == list(GPU_KINDS)
    assert gpu_named("NVIDIA A10G") is None
