"""Adapters on a model without an engine around it: where they go, what they compute, how they merge."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel

from roll_like.builtin.pipelines.reward_model.objective import ScoreModule
from roll_like.config.model import ModelConfig
from roll_like.config.training import LoRAConfig
from roll_like.errors import CheckpointError, ConfigError
from roll_like.models.classifier import load_classifier
from roll_like.models.export import save_hf_directory
from roll_like.models.load import from_anywhere, load_tokenizer
from roll_like.models.lora import (
    Adapter,
    adapted_width,
    adapter_names,
    adapter_parameters,
    adapters_off,
    add_adapters,
    linear_layers,
    load_adapters,
    named_weights,
    targets,
)
from roll_like.models.modules import load_causal_lm

IDS = torch.arange(3, 40)[None]
Q = "model.layers.0.self_attn.q_proj"


def model_of(directory: Path) -> Any:
    return load_causal_lm(directory, "float32")


def adapted(directory: Path, *, trained: bool = True, **settings: Any) -> Any:
    """The tiny model with adapters, which have moved away from nothing where they are trained."""
    model = model_of(directory)
    add_adapters(model, LoRAConfig(**settings), seed=3)
    if trained:
        move(model)
    return model.eval()


@torch.no_grad()
def move(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(IDS).logits
    return result


def merged_into(fresh: Any, model: Any) -> Any:
    weights = {weight.name: weight.merged(torch.float32) for weight in named_weights(model)}
    assert list(weights) == [name for name, _ in fresh.named_parameters()]
    fresh.load_state_dict(weights, strict=False)
    return fresh.eval()


def test_all_linear_layers_of_the_blocks_get_adapters_and_nothing_else_is_trained(tiny_model: Path) -> None:
    plain, model = model_of(tiny_model), adapted(tiny_model, rank=3)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = {f"{name}.lora_{side}.default.weight" for name in linear_layers(plain) for side in "AB"}
    assert set(trained) == layers
    assert len(layers) == 2 * 2 * 7  # two sides, two blocks: q, k, v, o, gate, up, down
    assert sum(map(torch.Tensor.numel, trained.values())) == 3 * adapted_width(plain, LoRAConfig(rank=3))
    assert linear_layers(plain)[Q] == (64, 128)


@pytest.mark.parametrize(
    ("settings", "scale"), [({"rank": 4, "alpha": 6}, 1.5), ({"rank": 4, "alpha": 6, "rslora": True}, 3.0)]
)
def test_a_merged_weight_is_w_and_the_scaled_product(tiny_model: Path, settings: dict[str, Any], scale: float) -> None:
    model = adapted(tiny_model, target_modules=["q_proj"], **settings)
    parts = dict(model.named_parameters())
    weight, down, up = (parts[f"{Q}.{part}.weight"] for part in ("base_layer", "lora_A.default", "lora_B.default"))
    by_hand = weight.double() + scale * up.double() @ down.double()
    found = {each.name: each for each in named_weights(model)}
    torch.testing.assert_close(found[f"{Q}.weight"].merged(torch.float32).double(), by_hand, rtol=0, atol=1e-6)
    assert torch.equal(found[f"{Q}.weight"].merged(torch.bfloat16), by_hand.float().bfloat16())
    untouched = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(found[untouched].merged(torch.float32), parts[untouched])
    torch.testing.assert_close(logits(merged_into(model_of(tiny_model), model)), logits(model), rtol=0, atol=1e-4)


def test_an_adapter_alone_is_rounded_as_a_forward_pass_rounds_it(tiny_model: Path) -> None:
    model = adapted(tiny_model, rank=4, alpha=6)  # a scale of 1.5, which rounds
    weight = next(each for each in named_weights(model) if each.name == f"{Q}.weight")
    down, up = weight.parts[1:]
    sent_down, sent_up = weight.adapter(torch.bfloat16)
    assert torch.equal(sent_down, down.to(torch.bfloat16))
    assert torch.equal(sent_up, (up.to(torch.bfloat16).float() * 1.5).to(torch.bfloat16))
    assert adapter_names(weight.name) == (f"{Q}.lora_A.weight", f"{Q}.lora_B.weight")
    whole_down, whole_up = weight.adapter(torch.float32)
    torch.testing.assert_close(
        weight.frozen.merged(torch.float32) + whole_up @ whole_down, weight.merged(torch.float32)
    )
    assert weight.frozen.parts == [weight.parameter]
    assert weight.adapter(torch.float32)[0].data_ptr() == down.data_ptr()
    assert weight.adapter(torch.float32, copy=True)[0].data_ptr() != down.data_ptr()


def test_16_bit_weights_are_merged_in_float32(tiny_model: Path) -> None:
    model = load_causal_lm(tiny_model, "bfloat16")
    add_adapters(model, LoRAConfig(rank=8, alpha=8), seed=0)
    move(model)
    found = next(weight for weight in named_weights(model) if weight.name == f"{Q}.weight")
    weight, down, up = (part.detach().double() for part in found.parts)
    exact = (weight + up @ down).float()
    merged = found.merged(torch.bfloat16)
    assert merged.dtype == torch.bfloat16
    # half a unit in the last place of the result, and not the sum of two roundings
    assert float(((merged.float() - exact).abs() / exact.abs().clamp_min(1e-6)).max()) <= 2**-8 * 1.01


def test_switched_off_a_model_computes_as_it_did_before(tiny_model: Path) -> None:
    base, model = logits(model_of(tiny_model).eval()), adapted(tiny_model)
    before = logits(model)
    assert float((before - base).abs().max()) > 0.1
    with adapters_off(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), before)
    model(IDS).logits.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)
    assert all(p.grad is None for name, p in model.named_parameters() if "lora_" not in name)


def test_untrained_adapters_change_nothing_and_come_from_the_seed_alone(tiny_model: Path) -> None:
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    kaiming, again = adapted(tiny_model, trained=False), adapted(tiny_model, trained=False)
    assert torch.equal(torch.rand(1), first)  # whoever draws next draws what it would have
    assert torch.equal(logits(kaiming), logits(model_of(tiny_model).eval()))
    for (name, one), (_, other) in zip(adapter_parameters(kaiming), adapter_parameters(again), strict=True):
        assert torch.equal(one, other)
        assert bool(one.any()) == ("lora_A" in name)
    gaussian = adapted(tiny_model, trained=False, init="gaussian", rank=8)
    numbers = torch.cat([each.flatten() for name, each in adapter_parameters(gaussian) if "lora_A" in name])
    assert float(numbers.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    uniform = torch.cat([each.flatten() for name, each in adapter_parameters(kaiming) if ".q_proj.lora_A" in name])
    assert float(uniform.detach().abs().max()) == pytest.approx(1 / math.sqrt(64), rel=0.05)


def test_names_of_layers_that_are_not_there(tiny_model: Path) -> None:
    model = model_of(tiny_model)
    assert targets(model, LoRAConfig()) == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert targets(model, LoRAConfig(target_modules=("0.self_attn.q_proj", "v_proj"))) == (
        "0.self_attn.q_proj",
        "v_proj",
    )
    with pytest.raises(
        ConfigError, match=r"no linear layer 'q_prj' .*it has down_proj, gate_proj, .*\n  fix: use 'q_proj'"
    ):
        add_adapters(model, LoRAConfig(target_modules=("v_proj", "q_prj")), seed=0)
    for outside in ("lm_head", "embed_tokens", "input_layernorm"):
        with pytest.raises(ConfigError, match=f"no linear layer '{outside}' in its blocks"):
            targets(model, LoRAConfig(target_modules=(outside,)))


def test_transposed_layers_merge_too() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
        model, fresh = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fresh.load_state_dict(weights, strict=False)
    assert linear_layers(model)["transformer.h.0.attn.c_attn"] == (32, 96)
    add_adapters(model, LoRAConfig(rank=2), seed=0)
    move(model.eval())
    torch.testing.assert_close(logits(merged_into(fresh, model)), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"target_modules": ["q_proj", "0.mlp.up_proj"], "rslora": True, "alpha": 3}])
def test_peft_loads_the_adapter_beside_the_merged_model(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config, model = LoRAConfig(**settings), adapted(tiny_model, **settings)
    adapter = Adapter.of(
        model,
        config,
        dict(adapter_parameters(model)),
        base=from_anywhere("org/name", tiny_model),
        task="text-generation",
    )
    weights = {weight.name: weight.merged(torch.float32) for weight in named_weights(model)}
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    out = save_hf_directory(weights, model.config, tokenizer, tmp_path / "model", adapter=adapter)
    expected = logits(model)
    torch.testing.assert_close(logits(model_of(out).eval()), expected, rtol=0, atol=1e-4)
    theirs = PeftModel.from_pretrained(model_of(tiny_model), out / "adapter").eval()
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-5)
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/name"
    assert from_anywhere(str(tiny_model), tiny_model) == str(tiny_model)


def test_adapters_of_other_layers_are_refused(tiny_model: Path) -> None:
    model, other = adapted(tiny_model), adapted(tiny_model, target_modules=["q_proj"])
    again = adapted(tiny_model, trained=False)
    load_adapters(again, dict(model.named_parameters()))
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(CheckpointError, match=r"holds 4 tensors of adapters and the model has 28; .*layers\.0\."):
        load_adapters(model, dict(other.named_parameters()))


def test_a_reward_model_trains_its_output_as_a_whole_and_peft_loads_both(tiny_model: Path, tmp_path: Path) -> None:
    base = load_classifier(tiny_model, "float32", seed=0).eval()
    scores = base(IDS).logits.detach()
    model = load_classifier(tiny_model, "float32", seed=0)
    config = LoRAConfig(rank=4, alpha=4)
    add_adapters(model, config, seed=3)
    module = ScoreModule(model).eval()
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"classifier.score.weight"}
    assert len(trained) == 28 + 1
    move(model)
    with torch.no_grad():
        model.score.weight.mul_(3)
        expected = module(
            IDS, torch.arange(IDS.shape[1])[None], torch.zeros_like(IDS), torch.tensor([IDS.shape[1] - 1])
        )
    assert float((expected - scores[0]).abs()) > 0.01

    tensors = dict(adapter_parameters(model))
    adapter = Adapter.of(model, config, tensors, base=str(tiny_model), task="text-classification")
    adapter.write(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(load_classifier(tiny_model, "float32", seed=0), tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(IDS).logits[0].detach(), expected, rtol=0, atol=1e-5)

    # as an export from a checkpoint does, which has what was trained by the model's own names
    again = load_classifier(tiny_model, "float32", seed=1)
    add_adapters(again, config, seed=4)
    load_adapters(again, {name: each for name, each in model.named_parameters() if each.requires_grad})
    assert dict(adapter_parameters(again)).keys() == tensors.keys()
    whole = {weight.name: weight.merged(torch.float32) for weight in named_weights(again)}
    base.load_state_dict(whole)
    torch.testing.assert_close(base(IDS).logits[0].detach(), expected, rtol=0, atol=1e-5)
