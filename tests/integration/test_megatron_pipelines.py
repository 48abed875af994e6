"""Whole runs whose trainer is Megatron-Core on two ranks: the figures of runs on one rank; killed and resumed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from megatron_installed import FOLDER, INSTALLED
from run_config import (
    finish_run,
    kill_run,
    read_lines,
    run_here,
    write_dpo_run,
    write_reward_model_run,
    write_run,
    write_sft_run,
)
from safetensors.torch import load_file
from tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, INSTALLED]
SHARED = {"optimizer": {"lr": 1.0e-2}, "max_tokens_per_micro_batch": 256}
TENSOR = {"backend": "megatron", "workers": 2, "zero_stage": 1, "tensor_parallel": 2}
PIPELINE = {"backend": "megatron", "workers": 2, "pipeline_parallel": 2}
#: What writes a run, its figure, and how Megatron-Core's ranks divide the model.
CASES: dict[str, tuple[Callable[..., Path], str, dict[str, Any]]] = {
    "sft": (write_sft_run, "train/loss", PIPELINE),
    "dpo": (write_dpo_run, "train/loss", TENSOR),
    "reward_model": (write_reward_model_run, "train/loss", PIPELINE),
    "rlvr": (write_run, "train/grad_norm", TENSOR),
}


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(FOLDER)]))


@pytest.mark.parametrize("name", CASES)
def test_a_run_on_two_ranks_is_that_on_one(tmp_path: Path, name: str) -> None:
    write, figure, sizes = CASES[name]
    model = make_tiny_model(tmp_path / "model", dtype="float32")
    found = {}
    for backend, training in {"deepspeed": {}, "megatron": sizes}.items():
        folder = tmp_path / backend
        folder.mkdir()
        changes: dict[str, Any] = {
            "steps": 3,
            "training": {**SHARED, **training},
            "checkpoint": {"every": 1, "keep": 1, "export": True},
        }
        if name == "rlvr":
            changes["inference"] = {"type": "hf"}
        config = write(folder, model, **changes)
        if name == "sft" and backend == "megatron":
            kill_run(config, "step 2/3")
            code, output = finish_run(config, "--resume")
        else:
            code, output = finish_run(config)
        assert code == 0, output
        run = folder / "runs" / "tiny"
        found[backend] = [step[figure] for step in read_lines(run / "metrics.jsonl")]
        assert (run / "model" / "model.safetensors").exists()
    assert found["megatron"] == pytest.approx(found["deepspeed"], rel=1e-3)


def test_four_ranks_learn_what_one_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of two ranks that divide matrices, and one rank of another backend, from the same samples."""
    monkeypatch.setattr(psutil, "cpu_count", lambda *_, **__: 5)  # ranks without a core of their own take turns
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    model = make_tiny_model(tmp_path / "model", dtype="float32")
    # a large eps: Adam's first steps are the signs of gradients whose last bits differ
    shared = {"optimizer": {"lr": 3.0e-2, "eps": 1.0e-2}, "max_tokens_per_micro_batch": 256}
    four = {"backend": "megatron", "workers": 4, "zero_stage": 1, "tensor_parallel": 2, "pipeline_parallel": 2}
    series, weights = [], []
    for name, sizes in {"one": {}, "four": four}.items():
        folder = tmp_path / name
        folder.mkdir()
        config = write_run(
            folder,
            model,
            steps=10,
            training={**shared, **sizes},
            resources={
                "device": "cpu",
                "devices_per_node": 5,
                "device_mapping": {"training": "0-3" if sizes else "0", "inference": "4"},
            },
            checkpoint={"every": 0, "export": True},
        )
        code, output = run_here(config)
        assert code == 0, output
        run = folder / "runs" / "tiny"
        series.append(read_lines(run / "metrics.jsonl"))
        weights.append(load_file(run / "model" / "model.safetensors"))
    one, of_four = series
    for key in ("rollout/reward/mean", "train/loss", "train/grad_norm"):
        assert [step[key] for step in of_four] == pytest.approx([step[key] for step in one], rel=1e-3, abs=1e-5), key
    rewards = [step["rollout/reward/mean"] for step in of_four]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert max(float((weights[0][name] - each).abs().max()) for name, each in weights[1].items()) < 1e-3
    start = load_file(model / "model.safetensors")
    assert max(float((start[name] - each).abs().max()) for name, each in weights[1].items()) > 1e-2
