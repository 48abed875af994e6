"""Tokenizers with chat templates of every habit that a conversation has to cope with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from roll_like.data.chat import Renderer

FETCHED = Path(__file__).resolve().parents[1] / ".tokenizers"

_GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _chatml(content: str, end: str = "<|im_end|>\n") -> str:
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}" + content + "{% else %}{{ message.content }}{% endif %}"
        + end + "{% endfor %}" + _GENERATION
    )  # fmt: skip


#: Templates on the tiny tokenizer, by what is special about them.
WRITTEN = {
    "chatml": CHAT_TEMPLATE,
    "trims": _chatml("{{ message.content | trim }}"),
    "drops reasoning": _chatml("{{ message.content.split('</think>')[-1] }}"),
    "newline before the end": _chatml("{{ message.content }}", end="\n<|im_end|>\n"),
    "no newline after the end": _chatml("{{ message.content }}", end="<|im_end|>"),
    "headers only": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}"
    + _GENERATION,
    "no special token": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "moves system messages": "{% for message in messages if message.role == 'system' %}<|im_start|>system\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% for message in messages if message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}" + _GENERATION,
    "opens reasoning": _chatml("{{ message.content }}") + "{% if add_generation_prompt %}<think>\n{% endif %}",
    "ignores answers": _chatml("(an answer)"),
    "repeats answers": _chatml("{{ message.content }}|{{ message.content }}"),
    "wants tool calls": "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a tool answered that was not called') }}{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}" + _GENERATION,
}

#: Real ones: name → folder of `.tokenizers` and variables of the template.
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2": ("smollm2", {}),
    "Qwen2.5": ("qwen2_5", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3, thinking off": ("qwen3", {"enable_thinking": False}),
}


#: Tokenizers that put a space before a text; the latter two do so behind special tokens as well.
SENTENCEPIECE = ("sentencepiece", "sentencepiece, always", "Llama 2")


@cache
def _tokenizer(folder: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FETCHED / folder, local_files_only=True)


@cache
def renderer(name: str) -> Renderer:
    """The renderer of a template; skips the test where a real one has not been fetched."""
    if name in WRITTEN:
        tokenizer = make_tiny_tokenizer()
        tokenizer.chat_template = WRITTEN[name]
        return Renderer(tokenizer)
    if name in SENTENCEPIECE:
        return Renderer(_sentencepiece(name))
    folder, options = REAL[name]
    if not (FETCHED / folder / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer of {name} is not there; run `make tokenizers`")
    return Renderer(_tokenizer(folder), template_options=options)


def _sentencepiece(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes spaces as ▁ and puts one before a text, with a template like Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    words = "the quick brown fox [INST] [/INST] jumps over a lazy dog and answers every question with a number"
    tokenizer.train_from_iterator([words, words.title(), "0 1 2 3 4 5 6 7 8 9"], trainer)
    if name == "sentencepiece, always":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    elif name == "Llama 2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
        space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(space)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = (
        "<s>{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}</s>"
        "{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}"
    )
    return fast
