"""Runs with adapters from their YAML: the reference without them, vLLM with merged weights, what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hygiene import nothing_left
from peft import LoraConfig, PeftModel, get_peft_model
from run_config import evaluated, exported, read_lines, run_here, write_dpo_run, write_run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from roll_like.config.training import LoRAConfig
from roll_like.models.lora import quantized_layers
from roll_like.models.modules import load_causal_lm
from roll_like.models.quantized import quantize

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]
LORA = {"rank": 8, "alpha": 16}


@pytest.mark.slow
def test_the_reference_without_adapters_is_the_one_that_was_asked_before(tmp_path: Path, tiny_model: Path) -> None:
    figures = {}
    for mode in ("adapter_off", "precomputed"):
        folder = tmp_path / mode
        folder.mkdir()
        config = write_dpo_run(
            folder,
            tiny_model,
            steps=3,
            training={"lora": LORA, "optimizer": {"lr": 2.0e-2}, "max_tokens_per_micro_batch": 256, "zero_stage": 2},
            reference={"mode": mode},
            checkpoint={"export": mode == "adapter_off"},
        )
        with nothing_left():
            code, output = run_here(config)
        assert code == 0, output
        run = folder / "runs" / "tiny"
        assert (run / "reference_logprobs.npz").exists() == (mode == "precomputed")
        steps = read_lines(run / "metrics.jsonl") + read_lines(run / "evaluations.jsonl")
        figures[mode] = [line.get("train/loss", line.get("eval/loss")) for line in steps]
    assert figures["adapter_off"] == pytest.approx(figures["precomputed"], rel=1e-4)
    assert figures["adapter_off"][0] == pytest.approx(0.6931, abs=1e-3)
    assert figures["adapter_off"][2] < 0.68  # the policy has left its reference

    run = tmp_path / "adapter_off" / "runs" / "tiny"
    written, again = run / "model", tmp_path / "again"
    exported(run / "checkpoints/step_000003", again)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = load_file(written / file), load_file(again / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    assert evaluated(config, written)["eval/loss"] == pytest.approx(figures["adapter_off"][-1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["adapters alone", "merged weights"])
def test_vllm_samples_with_the_adapters_and_kl_is_measured_without_them(
    tmp_path: Path, tiny_model: Path, alone: bool
) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=3,
        inference={"type": "vllm", "kv_cache_gib": 0.2, "max_running": 32, **({} if alone else {"lora": False})},
        training={"lora": LORA, "optimizer": {"lr": 2.0e-2}, "max_tokens_per_micro_batch": 512, "zero_stage": 1},
        algorithm={"kl": {"use": "loss", "coefficient": 0.01}, "advantage": "rloo"},
        reference={"mode": "adapter_off"},
        checkpoint={"export": True},
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    first, second, third = read_lines(run / "metrics.jsonl")
    assert abs(first["train/kl"]) < 1e-6  # the policy is its reference
    assert third["train/kl"] > second["train/kl"] / 2 > 1e-3
    # every tensor of the frozen model is compared once, with the first push; adapters at each
    weights = {step["step"]: step["sync/tensors_checked"] for step in (first, second, third)}
    tensors = len(load_file(tiny_model / "model.safetensors"))
    assert weights == dict.fromkeys((1, 2, 3), 2 * 7 * 2 if alone else tensors)
    # the trainer computes with adapters beside the matrices, as the engine does, or with what they were merged to
    assert all(step["mismatch/logprob_difference"] < 1e-3 for step in (first, second, third))
    prompt = torch.arange(20, 60)[None]
    merged = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        untrained = base(prompt).logits
        expected = merged(prompt).logits
        found = PeftModel.from_pretrained(base, run / "model" / "adapter")(prompt).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert float((untrained - expected).abs().max()) > 0.05


QUANTISED = {
    "training": {
        "lora": {**LORA, "quantization": "nf4"},
        "optimizer": {"lr": 2.0e-2},
        "max_tokens_per_micro_batch": 512,
        "zero_stage": 1,
    },
    "algorithm": {"kl": {"use": "loss", "coefficient": 0.01}, "advantage": "rloo"},
    "reference": {"mode": "adapter_off"},
    "checkpoint": {"every": 1, "export": True},
}


@pytest.mark.parametrize(
    "engine",
    [
        {"type": "hf"},
        pytest.param({"type": "vllm", "kv_cache_gib": 0.2, "max_running": 32}, marks=pytest.mark.slow),
    ],
    ids=["hf", "vllm"],
)
def test_engines_sample_with_the_dequantised_base_and_a_resumed_run_quantises_it_again(
    tmp_path: Path, tiny_model: Path, engine: dict[str, Any]
) -> None:
    config = write_run(tmp_path, tiny_model, steps=3, inference=engine, **QUANTISED)
    with nothing_left():
        code, output = run_here(config, "steps=2", "checkpoint.export=false")
        assert code == 0, output
        code, output = run_here(config, "--resume")
        assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    steps = read_lines(run / "metrics.jsonl")
    assert len(steps) == 3
    assert abs(steps[0]["train/kl"]) < 1e-6  # the policy is its reference, both with the quantised base
    assert steps[2]["train/kl"] > 1e-3
    # whole weights are compared at each push
    tensors = len(load_file(tiny_model / "model.safetensors"))
    assert [step["sync/tensors_checked"] for step in steps] == [tensors] * 3
    assert all(step["mismatch/logprob_difference"] < 1e-5 for step in steps)

    again = tmp_path / "again"
    exported(run / "checkpoints/step_000003", again)
    one, other = (load_file(folder / "model.safetensors") for folder in (run / "model", again))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    base = load_causal_lm(tiny_model, "float32")
    quantize(base, quantized_layers(base, LoRAConfig(quantization="nf4")), "nf4")
    merged = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    prompt = torch.arange(20, 60)[None]
    with torch.no_grad():
        expected = merged(prompt).logits
        without = base(prompt).logits
        found = PeftModel.from_pretrained(base, run / "model" / "adapter")(prompt).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert float((without - expected).abs().max()) > 0.05


@pytest.mark.slow
def test_a_resumed_run_with_a_quantised_base_has_the_series_of_a_whole_one(tmp_path: Path, tiny_model: Path) -> None:
    series = {}
    for folder, parts in {"whole": [()], "halves": [("steps=2",), ("--resume",)]}.items():
        (tmp_path / folder).mkdir()
        config = write_run(tmp_path / folder, tiny_model, steps=3, **QUANTISED)
        for part in parts:
            code, output = run_here(config, *part)
            assert code == 0, output
        lines = read_lines(tmp_path / folder / "runs" / "tiny" / "metrics.jsonl")
        series[folder] = [(line["train/loss"], line["train/grad_norm"], line["rollout/reward/mean"]) for line in lines]
    assert series["halves"] == series["whole"]


@pytest.mark.slow
def test_the_base_model_judges_and_is_measured_with_a_further_adapter(tmp_path: Path, tiny_model: Path) -> None:
    model = get_peft_model(load_causal_lm(tiny_model, "bfloat16"), LoraConfig(task_type="CAUSAL_LM", r=12))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(str(tmp_path / "other"))
    judge = {
        "type": "llm_judge",
        "judges": [{"url": "base", "model": "base", "max_tokens": 256}],
        "template": "$prompt $response $rubric $lowest $highest",
        "weight": 1.0e-3,
    }
    config = write_run(
        tmp_path,
        tiny_model,
        steps=2,
        inference={"type": "vllm", "kv_cache_gib": 0.2, "max_running": 32, "max_model_len": 1024},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 4, "max_response_tokens": 12},
        training={"lora": LORA, "optimizer": {"lr": 2.0e-2}, "max_tokens_per_micro_batch": 512},
        rewards={"use": [{"type": "letter_e"}, judge]},
        evaluation={
            "sources": [{"path": str(tmp_path / "eval.jsonl")}],
            "every": 1,
            "samples_per_prompt": 4,
            "base_model": True,
            "adapters": {"other": str(tmp_path / "other")},
        },
        checkpoint={"at_end": False, "export": False},
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    steps = read_lines(run / "metrics.jsonl")
    assert all(step["rollout/failures"] == 0 for step in steps)
    assert all(0 <= step["rollout/reward/llm_judge"] <= 1 for step in steps)
    start, *later = read_lines(run / "evaluations.jsonl")
    figures = ("reward/letter_e", "response_length")
    for name in figures:  # the policy begins as the base model, and both get the same random numbers
        assert start[f"eval/{name}"] == pytest.approx(start[f"eval/base/{name}"], rel=0.02)
    assert any(start[f"eval/adapter/other/{name}"] != start[f"eval/base/{name}"] for name in figures)
    for line in later:
        beside = {name: value for name, value in line.items() if name.startswith(("eval/base/", "eval/adapter/"))}
        assert beside == {name: start[name] for name in beside}
        assert any(line[f"eval/{name}"] != line[f"eval/base/{name}"] for name in figures)
