"""Runs of a vision-language model, with and without adapters: engine and trainer agree, rollouts name the pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hygiene import nothing_left
from peft import PeftModel
from run_config import command_here, exported, finish_run, read_lines, run_here, write_dpo_run, write_run
from safetensors.torch import load_file
from tiny_vision import TORCHVISION, plain_logprobs, quickstart, samples_of

from roll_like.models.modules import load_causal_lm

LARGEST = "mismatch/logprob_difference_max"
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.usefixtures("warm_ray")
def test_supervised_and_reinforced_runs_see_images(tmp_path: Path) -> None:
    made, root = quickstart(), Path(__file__).resolve().parents[2]
    made.make_model(tmp_path / "vision_quickstart" / "model")
    for name, count, seed in (("sft", 96, 0), ("rl", 32, 1), ("eval", 8, 2)):
        made.make_rows(tmp_path / "vision_quickstart", name, count, seed)
    runs = tmp_path / "runs"
    few = [
        "metrics.console=plain",
        f"output_dir={runs}",
        "resources.devices_per_node=1",
        "resources.device_mapping.training=0",
    ]
    code, output = command_here(
        tmp_path,
        "run",
        "--config",
        str(root / "configs" / "vision_sft.yaml"),
        "epochs=16",
        f"model.path={tmp_path / 'vision_quickstart' / 'model'}",
        *few,
    )
    assert code == 0, output
    losses = [line["train/loss"] for line in read_lines(tmp_path / "runs" / "vision_sft" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / "runs" / "vision_sft" / "model" / "preprocessor_config.json").is_file()
    few += [
        f"model.path={runs / 'vision_sft' / 'model'}",
        "resources.device_mapping.inference=0",
        "steps=2",
        "rollout.prompts_per_step=4",
    ]
    code, output = command_here(
        tmp_path, "run", "--config", str(root / "configs" / "vision_rlvr.yaml"), "rollout.samples_per_step=32", *few
    )
    assert code == 0, output
    run = tmp_path / "runs" / "vision_rlvr"
    assert "[image: vision_quickstart/eval/" in (run / "rollouts" / "eval_000000.jsonl").read_text()
    lines = read_lines(run / "metrics.jsonl")
    assert len(lines) == 2
    # a step whose groups all have equal rewards compares nothing
    differences = [line[LARGEST] for line in lines if LARGEST in line]
    assert differences
    assert max(differences) < 1e-3


LORA = {"rank": 8, "alpha": 16}


def shown(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a model and pictures; return the model, and the `sources` of their rows."""
    quickstart().make_rows(folder, "rows", 16, 0)
    return quickstart().make_model(folder / "vision"), {"sources": [{"path": str(folder / "rows.jsonl")}]}


@pytest.mark.usefixtures("warm_ray")
@pytest.mark.parametrize(
    "engine", [{"type": "hf"}, {"type": "vllm", "kv_cache_gib": 0.1, "max_running": 16}], ids=["hf", "vllm"]
)
def test_a_resumed_run_samples_with_adapters_and_kl_is_measured_without_them(
    tmp_path: Path, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_here
    if engine["type"] == "vllm":
        if not TORCHVISION.is_dir():
            pytest.skip("vLLM needs torchvision for images: make torchvision")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TORCHVISION), os.environ.get("PYTHONPATH", "")]))
        run = finish_run
    model, data = shown(tmp_path)
    config = write_run(
        tmp_path,
        model,
        steps=3,
        data={**data, "max_prompt_tokens": 64},
        inference=engine,
        training={"lora": LORA, "optimizer": {"lr": 2.0e-2}, "max_tokens_per_micro_batch": 512, "zero_stage": 1},
        algorithm={"kl": {"use": "loss", "coefficient": 0.01}, "advantage": "rloo"},
        reference={"mode": "adapter_off"},
        checkpoint={"every": 1, "export": True},
    )
    with nothing_left():
        code, output = run(config, "steps=2", "checkpoint.export=false")
        assert code == 0, output
        code, output = run(config, "--resume")
        assert code == 0, output
    made = tmp_path / "runs" / "tiny"
    steps = read_lines(made / "metrics.jsonl")
    assert len(steps) == 3
    assert abs(steps[0]["train/kl"]) < 1e-6  # the policy is its reference
    assert steps[2]["train/kl"] > 1e-3
    assert all(step[LARGEST] < 1e-3 for step in steps)
    again = tmp_path / "again"
    exported(made / "checkpoints/step_000003", again)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = load_file(made / "model" / file), load_file(again / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    assert all((folder / "preprocessor_config.json").is_file() for folder in (made / "model", again))
    merged, base = (load_causal_lm(folder, "float32").eval() for folder in (made / "model", model))
    sample = samples_of(model)[0]
    with torch.no_grad():
        expected, untrained = (plain_logprobs(each, model, sample.token_ids, sample.images) for each in (merged, base))
        adapted = PeftModel.from_pretrained(base, made / "model" / "adapter").eval().base_model.model
        found = plain_logprobs(adapted, model, sample.token_ids, sample.images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert float((untrained - expected).abs().max()) > 0.05


@pytest.mark.usefixtures("warm_ray")
def test_preferences_are_learned_with_adapters_against_the_model_without(tmp_path: Path) -> None:
    model, data = shown(tmp_path)
    config = write_dpo_run(
        tmp_path,
        model,
        steps=10,
        data={**data, "pairs_per_step": 8, "max_tokens": 128},
        evaluation=data,
        training={"lora": LORA, "optimizer": {"lr": 2.0e-2}, "max_tokens_per_micro_batch": 512},
        reference={"mode": "adapter_off"},
    )
    code, output = run_here(config)
    assert code == 0, output
    losses = [line["train/loss"] for line in read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.68
