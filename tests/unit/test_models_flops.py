"""Model FLOPs are those of a hand count and of PyTorch's own counter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from roll_like.config.training import LoRAConfig
from roll_like.models.flops import ForwardPass, generation_pass, training_pass
from roll_like.models.lora import adapted_width, add_adapters
from roll_like.models.modules import empty_model
from roll_like.models.shape import ModelShape, load_model_shape
from roll_like.types import TrainingSample

#: 100 parameters without the embeddings, 40 in the output layer, 24 multiplications a pair of query and key.
SHAPE = ModelShape(
    parameters=140,
    layers=2,
    hidden_size=4,
    intermediate_size=5,
    vocab_size=10,
    heads=2,
    kv_heads=1,
    head_dim=3,
    max_positions=None,
    tied_embeddings=True,
)


def sample(*token_ids: int, prompt: int) -> TrainingSample:
    return TrainingSample(
        group_id="g",
        token_ids=np.array(token_ids, np.int32),
        prompt_length=prompt,
        loss_mask=np.arange(len(token_ids)) >= prompt,
    )


def test_training_computes_a_common_prefix_once_and_no_last_token() -> None:
    """1 2 3 of both and 4 of the first: 4 tokens that see 1, 2, 3 and 4; targets 4, 5 and 6."""
    needed = training_pass([sample(1, 2, 3, 4, 5, prompt=3), sample(1, 2, 3, 6, prompt=3)])
    assert (needed.tokens, needed.pairs, needed.targets) == (4, 10, 3)
    assert needed.flops(SHAPE) == 2 * (4 * 100 + 3 * 40 + 10 * 24)


def test_sequences_without_a_common_prefix_are_counted_one_by_one() -> None:
    needed = training_pass([sample(1, 2, 3, prompt=1), sample(2, 2, 3, prompt=1), sample(1, 3, 3, prompt=1)])
    assert (needed.tokens, needed.pairs, needed.targets) == (5, 3 + 3 + 2, 6)


def test_generation_computes_a_prompt_once_and_never_feeds_the_last_token() -> None:
    """The prompt's 3 tokens see 1, 2 and 3; of 2 and 1 sampled tokens one is fed, and sees 4."""
    needed = generation_pass([([1, 2, 3], 2), ([1, 2, 3], 1)])
    assert (needed.tokens, needed.pairs, needed.targets) == (4, 10, 3)


def test_an_output_layer_of_its_own_changes_nothing() -> None:
    needed = ForwardPass(tokens=7, pairs=28, targets=7)
    assert needed.flops(replace(SHAPE, parameters=180, tied_embeddings=False)) == needed.flops(SHAPE)


def test_forward_and_backward_cost_what_pytorch_counts(tiny_model: Path) -> None:
    """Up to the weights of norms; PyTorch also counts pairs that the causal mask leaves out."""
    length = 24
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(100, 100 + length)[None]
    with FlopCounterMode(display=False) as forward:
        loss = model(ids).logits.logsumexp(-1).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    needed = ForwardPass(tokens=length, pairs=length * length, targets=length)
    expected = needed.flops(load_model_shape(tiny_model))
    together = needed.training_flops(load_model_shape(tiny_model))
    assert forward.get_total_flops() == pytest.approx(expected, rel=0.005)
    assert together == 3 * expected
    assert forward.get_total_flops() + backward.get_total_flops() == pytest.approx(together, rel=0.005)


def test_adapters_cost_what_pytorch_counts(tiny_model: Path) -> None:
    """Frozen weights get no gradient: their products count twice, those of adapters and attention three times."""
    length, rank = 24, 4
    config = AutoConfig.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    lora = LoRAConfig(rank=rank)
    width = adapted_width(empty_model(config, trust_remote_code=False), lora)
    add_adapters(model, lora, seed=0)
    model.get_input_embeddings().weight.requires_grad_(False)
    with FlopCounterMode(display=False) as counted:
        model(torch.arange(100, 100 + length)[None]).logits.logsumexp(-1).sum().backward()
    needed = ForwardPass(tokens=length, pairs=length * length, targets=length)
    expected = needed.training_flops(load_model_shape(tiny_model), adapters=rank * width)
    inputs_of_the_first_layer = 2 * length * 64 * (128 + 64 + 64 + 3 * rank)  # they get no gradient
    norms = 2 * 2 * length * 5 * 64  # no matrix products
    # exactly these; transformers before 5.19 multiplies matrices for rotary embeddings, too
    assert counted.get_total_flops() == pytest.approx(expected - inputs_of_the_first_layer - norms, rel=1e-4)


def test_of_a_mixture_those_experts_count_that_a_token_goes_to(tmp_path: Path) -> None:
    """Qwen3-30B-A3B has 30.5 billion parameters, of which 3.3 billion compute a token (Qwen3 report, table 2)."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_model_shape(tmp_path)
    assert shape.parameters / 1e9 == pytest.approx(30.5, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(3.3, rel=0.02)
    assert (shape.query_norm, shape.experts) == (True, 8)
    one = ForwardPass(tokens=1, pairs=0, targets=1)
    assert one.flops(shape) == 2 * (shape.active_parameters - 151936 * 2048)


def test_passes_add_up() -> None:
    assert ForwardPass(1, 2, 3) + ForwardPass(10, 20, 30) == ForwardPass(11, 22, 33)
