"""A frozen base in 4 bits without an engine around it: which layers, which numbers, and what is merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import make_family
from transformers import GPT2Config, GPT2LMHeadModel

from roll_like.config.training import QUANTIZED_BYTES, LoRAConfig
from roll_like.errors import ConfigError
from roll_like.models import quantized
from roll_like.models.lora import (
    adapters_off,
    add_adapters,
    named_weights,
    quantized_layers,
    quantized_width,
)
from roll_like.models.modules import load_causal_lm
from roll_like.models.quantized import dequantized, quantize, scales

IDS = torch.arange(3, 40)[None]
Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")


def adapted(directory: Path, dtype: Any = "float32", *, late: bool = False, **settings: Any) -> Any:
    """The tiny model with a base in 4 bits and adapters that have moved away from nothing."""
    model = load_causal_lm(directory, dtype, late=late)
    add_adapters(model, LoRAConfig(**{"quantization": "nf4", **settings}), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(IDS).logits
    return result


def with_weights(directory: Path, dtype: Any, model: Any, *, merged: bool) -> Any:
    """The plain model with the weights of another, with its adapters merged or without them."""
    plain = load_causal_lm(directory, dtype)
    weights = {
        each.name: (each if merged else each.frozen).merged(getattr(torch, dtype)) for each in named_weights(model)
    }
    assert {name: each.shape for name, each in weights.items()} == {
        name: each.shape for name, each in plain.named_parameters()
    }
    plain.load_state_dict(weights, strict=False)
    return plain.eval()


def in_four_bits(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The nearest of 16 values times the largest of each block of 64, in float64 and without rounding of scales."""
    from bitsandbytes.functional import get_4bit_type

    values = get_4bit_type(kind, device=torch.device("cpu")).double()
    blocks = weight.double().reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / largest[..., None] - values).abs().argmin(-1)
    return (values[nearest] * largest).reshape(weight.shape)


def test_linear_layers_of_the_blocks_are_in_4_bits_and_the_rest_is_not(tiny_model: Path) -> None:
    plain, model = load_causal_lm(tiny_model, "bfloat16"), adapted(tiny_model, "bfloat16", target_modules=["q_proj"])
    small = {name for name, each in model.named_parameters() if each.dtype == torch.uint8}
    layers = quantized_layers(plain, LoRAConfig(quantization="nf4"))
    assert len(layers) == 2 * 7
    assert small == {f"{name}.weight".replace("q_proj", "q_proj.base_layer") for name in layers}
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(trained) == 2 * 2
    assert {each.dtype for each in model.parameters() if each.dtype != torch.uint8} == {torch.bfloat16}
    assert quantized_layers(plain, LoRAConfig()) == []


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_merged_weight_is_the_dequantised_one_and_the_scaled_product(tiny_model: Path, kind: str) -> None:
    plain = dict(load_causal_lm(tiny_model, "float32").named_parameters())
    model = adapted(tiny_model, rank=4, alpha=6, quantization=kind, target_modules=["q_proj"])
    found = {weight.name: weight for weight in named_weights(model)}
    assert list(found) == list(plain)
    down, up = (part.double() for part in found[f"{Q}.weight"].parts[1:])
    for name, product in ((Q, 1.5 * up @ down), (K, 0.0)):
        weight = plain[f"{name}.weight"].detach()
        expected = in_four_bits(weight, kind)
        base = found[f"{name}.weight"].frozen.merged(torch.float32).double()
        # scales have 8 bits, and a few weights lie where bitsandbytes rounds to the other neighbour
        elsewhere = (base - expected).abs() > 0.05 * expected.abs() + 1e-6
        assert float(elsewhere.double().mean()) < 0.002
        assert float((base - weight).abs().mean()) > 1e-3
        merged = found[f"{name}.weight"].merged(torch.float32).double()
        torch.testing.assert_close(merged, base + product, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_the_model_computes_what_engines_compute_with_its_merged_weights(
    tiny_model: Path, dtype: str, tolerance: float
) -> None:
    model = adapted(tiny_model, dtype)
    found = logits(model)
    torch.testing.assert_close(
        found, logits(with_weights(tiny_model, dtype, model, merged=True)), rtol=0, atol=tolerance
    )
    assert torch.equal(model.train()(IDS).logits, found), "with gradients it computes the same bits"
    with adapters_off(model):
        assert torch.equal(logits(model), logits(with_weights(tiny_model, dtype, model, merged=False)))
    base = logits(load_causal_lm(tiny_model, dtype).eval())
    assert float((found - base).abs().max()) > 3 * tolerance


def test_gradients_of_adapters_are_those_beside_the_dequantised_weights(tiny_model: Path) -> None:
    model = adapted(tiny_model)
    plain = with_weights(tiny_model, "float32", model, merged=False)
    add_adapters(plain, LoRAConfig(), seed=3)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    plain.load_state_dict(trained, strict=False)
    for each in (model, plain):
        each(IDS).logits.log_softmax(-1)[..., 5].sum().backward()
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(trained[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_layers_that_are_read_late_have_the_same_bits(tiny_model: Path) -> None:
    late, whole = adapted(tiny_model, late=True), adapted(tiny_model)
    assert all(each.untyped_storage().nbytes() for each in late.parameters())
    assert torch.equal(logits(late), logits(whole))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_bits_do_not_depend_on_threads_and_take_what_is_planned() -> None:
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    found = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        model = torch.nn.Sequential(torch.nn.Linear(2048, 2048, bias=False))
        model[0].weight.data = weight
        quantize(model, ["0"], "nf4")
        parameter = model[0].weight
        found.append(dequantized(parameter))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    held = sum(each.nbytes for each in (parameter, *scales(model)))
    assert held == pytest.approx(QUANTIZED_BYTES * weight.numel(), rel=1e-3)


def test_routers_and_layers_of_other_kinds_stay_as_they_are() -> None:
    config = LoRAConfig(quantization="nf4")
    kinds = {name.rpartition(".")[2] for name in quantized_layers(make_family("qwen3_next"), config)}
    assert "shared_expert_gate" not in kinds
    assert {"gate_proj", "q_proj", "out_proj"} <= kinds
    routed = quantized_layers(make_family("llama4_text"), config)
    assert routed
    assert not [name for name in routed if "router" in name]

    small = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(ConfigError, match=r"critic\.lora\.quantization: GPT2LMHeadModel has no nn\.Linear in"):
        quantized_width(small, config, "critic")


def test_without_bitsandbytes_the_message_names_what_to_install(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda _: None)
    model = load_causal_lm(tiny_model, "float32")
    with pytest.raises(ConfigError, match=r"training\.lora\.quantization needs the package bitsandbytes") as caught:
        add_adapters(model, LoRAConfig(quantization="nf4"), seed=0)
    assert "pip install 'roll-like[qlora]'" in str(caught.value.fix)
    add_adapters(model, LoRAConfig(), seed=0)
