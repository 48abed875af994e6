"""Whole runs whose trainer is Megatron-Core on two ranks: the figures of runs on one rank; killed and resumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_installed import FOLDER, INSTALLED
from run_config import (
    finish_run,
    kill_run,
    read_lines,
    write_dpo_run,
    write_reward_model_run,
    write_run,
    write_sft_run,
)
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
