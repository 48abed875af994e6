"""Whole runs on Ray whose ranks divide matrices go as those of one rank, also with a critic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hygiene import nothing_left
from run_config import (
    read_lines,
    run_here,
    write_dpo_run,
    write_reward_model_run,
    write_run,
    write_sft_run,
)
from safetensors.torch import load_file
from tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("warm_ray")]
#: Adam's first steps are the signs of gradients whose last bits differ, but for a large eps.
SHARDED = {"backend": "fsdp2", "zero_stage": 3, "optimizer": {"lr": 1.0e-2, "eps": 1.0e-2}}
BATCHES = {"max_tokens_per_micro_batch": 256}


def rlvr(folder: Path, model: Path, **changes: Any) -> Path:
    """PPO, with an engine of vLLM, a critic and a reference model."""
    return write_run(
        folder,
        model,
        **{
            "inference": {"type": "vllm", "kv_cache_gib": 0.1, "max_running": 16},
            "critic": changes["training"],
            "reference": {"workers": changes["training"]["workers"]},
            "algorithm": {"advantage": "gae", "kl": {"use": "loss", "coefficient": 0.01}},
            **changes,
        },
    )


RUNS: dict[str, Callable[..., Path]] = {
    "rlvr": rlvr,
    "sft": write_sft_run,
    "dpo": write_dpo_run,
    "reward_model": write_reward_model_run,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_as_on_one_rank(tmp_path: Path, name: str) -> None:
    model = make_tiny_model(tmp_path / "model", dtype="float32")
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        training = {**SHARDED, **BATCHES, "workers": ranks, "tensor_parallel": ranks}
        config = RUNS[name](folder, model, steps=3, training=training, checkpoint={"every": 0, "export": True})
        with nothing_left():
            code, output = run_here(config)
        assert code == 0, output
        run = folder / "runs" / "tiny"
        found.append((read_lines(run / "metrics.jsonl"), load_file(run / "model" / "model.safetensors")))
    (alone, expected), (series, weights) = found
    assert len(series) == 3
    for one, two in zip(alone, series, strict=True):
        figures = {key for key in one if key.startswith(("train/", "critic/", "rollout/reward/", "sync/sent_bytes"))}
        assert figures & {"train/loss", "train/grad_norm"} == {"train/loss", "train/grad_norm"}
        for key in figures - {"train/padding_fraction", "train/padding_tokens", "train/computed_tokens"}:
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-5)
