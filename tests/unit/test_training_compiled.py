"""Compiled layers compute what they compute else, and are compiled once for all lengths of rows.

The backend is Dynamo's own, which runs what it has traced: Inductor takes minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_families import make_family
from test_training_families import FORMS, compared
from torch._dynamo.testing import CompileCounter

from roll_like.config.training import LoRAConfig
from roll_like.models.lora import adapters_off, add_adapters
from roll_like.models.renames import recompute_activations
from roll_like.training.backbone import use_row_attention
from roll_like.training.compiled import compile_layers

ROWS = "groups with a common beginning share a row"


@pytest.fixture(autouse=True)
def _forget_what_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, attention: Any = "dense", backend: Any = "eager") -> None:
    use_row_attention(model, attention, row_sharing="training.share_prompts")
    assert compile_layers(model, backend) == model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo3", "phi3", "gpt_oss", "qwen3_next"],
)
def test_values_and_gradients_equal_transformers(family: str) -> None:
    logprobs, gradient = compared(family, ROWS, compiled)
    assert logprobs < 1e-5
    assert gradient < 1e-5


def test_joined_rows_with_checkpointing_are_compiled_once_for_all_layers_and_lengths() -> None:
    counter = CompileCounter()

    def prepare(model: Any) -> None:
        compiled(model, "varlen", counter)
        recompute_activations(model)
        model.train()

    for form in (ROWS, "a prompt's responses share a row", "each alone"):
        assert max(compared("llama", form, prepare)) < 1e-5
        assert form in FORMS
    # before attention and after it
    assert counter.frame_count <= 4


@pytest.mark.slow
def test_adapters_are_compiled_with_the_layers_and_can_be_off() -> None:
    model = make_family("llama")
    add_adapters(model, LoRAConfig(rank=2), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(3, 13)[None]
    expected = model(input_ids=tokens, use_cache=False).logits
    use_row_attention(model, row_sharing=None)
    compile_layers(model, "eager")
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)
    with adapters_off(model):
        without = model(input_ids=tokens, use_cache=False).logits
    assert float((without - expected).detach().abs().max()) > 0.01
