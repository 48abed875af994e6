"""Which special tokens a response keeps."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_model import make_tiny_tokenizer
from transformers import AddedToken

from roll_like.data.chat import Renderer
from roll_like.inference.stops import ResponseDecoder


def tokenizer_with(*special: str, plain: tuple[str, ...] = ()) -> Any:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    return tokenizer


@pytest.mark.parametrize(
    ("special", "plain", "sampled", "text"),
    [
        (("[TOOL_CALLS]", "[ARGS]"), (), "Well.[TOOL_CALLS]f[ARGS]{}<|im_end|>", "Well.[TOOL_CALLS]f[ARGS]{}"),
        (
            ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"), (),
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|call|>",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        ),
        (("<|end|>", "<|start|>"), (), "four<|end|>", "four"),  # ends turns of Phi
        (("<|other|>",), ("<tool_call>",), "<tool_call>x<|other|>", "<tool_call>x"),
        (("[THINK]", "[/THINK]"), (), "[THINK]a[/THINK]b", "[THINK]a[/THINK]b"),
        ((), (), "größe 😀 <|im_end|>", "größe 😀 "),
    ],
)  # fmt: skip
def test_special_tokens_that_mark_calls_and_reasoning_are_kept(
    special: tuple[str, ...], plain: tuple[str, ...], sampled: str, text: str
) -> None:
    tokenizer = tokenizer_with(*special, plain=plain)
    ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    assert ResponseDecoder(tokenizer, Renderer(tokenizer).kept_tokens)(ids) == text
