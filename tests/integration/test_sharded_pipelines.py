"""Every pipeline with all at once: adapters, weights sharded over two ranks, checkpointing; killed and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hygiene import nothing_left
from run_config import (
    evaluated,
    kill_run,
    labelled_rows,
    read_lines,
    run_here,
    write_distill_run,
    write_dpo_run,
    write_on_policy_distill_run,
    write_online_dpo_run,
    write_reward_model_run,
    write_sft_run,
)
from safetensors.torch import load_file
from tiny_model import make_tiny_model

from roll_like import cli

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("warm_ray")]
TRAINING = {
    "lora": {"rank": 8, "alpha": 16},
    "workers": 2,
    "zero_stage": 3,
    "gradient_checkpointing": True,
    "max_tokens_per_micro_batch": 256,
    "optimizer": {"lr": 1.0e-2},
}


@dataclass(frozen=True)
class Case:
    """A pipeline, and what says that it has learned.

    Attributes:
        write: Writes a run into a folder.
        series: The figure that two runs are compared by, step by step.
        evaluation: A figure of evaluations that falls; None where there is none.
        repeatable: Whether `roll-like eval` of what is exported gives the last evaluation again.
        backend: Training backend.
    """

    write: Callable[..., Path]
    series: str
    evaluation: str | None = "eval/loss"
    repeatable: bool = True
    backend: str = "deepspeed"


def kto(folder: Path, model: Path, **changes: Any) -> Path:
    config = write_dpo_run(folder, model)
    assert config.exists()  # with the rows that are taken apart
    return write_dpo_run(
        folder, model, data=labelled_rows(folder), algorithm={"loss": {"type": "kto", "beta": 0.5}}, **changes
    )


CASES = {
    "sft": Case(write_sft_run, "train/loss"),
    "sft_fsdp2": Case(write_sft_run, "train/loss", backend="fsdp2"),
    "kto": Case(kto, "train/loss"),
    "reward_model": Case(write_reward_model_run, "train/loss"),
    "distill": Case(write_distill_run, "train/loss"),
    "on_policy_distill": Case(write_on_policy_distill_run, "distill/reverse_kl", "eval/reverse_kl", repeatable=False),
    "iterations": Case(write_online_dpo_run, "train/loss", None),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_sharded_over_two_ranks(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    models = [make_tiny_model(tmp_path / "student", dtype="float32")]
    if "distill" in name:
        models.append(make_tiny_model(tmp_path / "teacher", dtype="float32", seed=1, layers=3))
    settings = {
        "steps": 4,
        "training": {**TRAINING, "backend": case.backend},
        "checkpoint": {"every": 1, "keep": 1, "export": True},
        "metrics": {"trackers": ["mlflow"], "console": "plain"},
    }
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    config = case.write(whole, *models, **settings)
    with nothing_left():
        code, output = run_here(config, curves=True)
    assert code == 0, output
    run = whole / "runs" / "tiny"
    series = [step[case.series] for step in read_lines(run / "metrics.jsonl")]
    if case.evaluation is not None:
        evaluations = [line[case.evaluation] for line in read_lines(run / "evaluations.jsonl")]
        assert evaluations[-1] < evaluations[0]
    assert (run / "curves.png").stat().st_size > 10_000
    adapter = load_file(run / "model" / "adapter" / "adapter_model.safetensors")
    assert all(float(tensor.abs().max()) > 0 for key, tensor in adapter.items() if "lora_B" in key)
    if case.write is write_sft_run:  # adapters of the shards are merged as those of the ranks were
        checkpoint, merged_into = run / "checkpoints" / "step_000004", tmp_path / "merged"
        assert cli.main(["export", "--checkpoint", str(checkpoint), "--output", str(merged_into)]) == 0
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            merged, exported = load_file(merged_into / file), load_file(run / "model" / file)
            assert merged.keys() == exported.keys()
            for key, tensor in exported.items():
                torch.testing.assert_close(merged[key], tensor)
    if case.repeatable:
        assert evaluated(config, run / "model")["eval/loss"] == pytest.approx(evaluations[-1], rel=1e-3)

    again = case.write(halves, *models, **settings)
    with nothing_left():
        kill_run(again, "step 2/4")
    code, output = run_here(again, "--resume")
    assert code == 0, output
    resumed = [step[case.series] for step in read_lines(halves / "runs" / "tiny" / "metrics.jsonl")]
    assert resumed == pytest.approx(series, rel=1e-4)
