"""A language model of a few hundred kilobytes, made on the fly: no network, the same every time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Literal

SPECIAL_TOKENS = ("<pad>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    directory: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    seed: int = 0,
    layers: int = 2,
    width: int = 64,
) -> Path:
    """Write a random Llama and its tokenizer as a Hugging Face directory and return its path.

    Hidden size `width`, 4 heads of 32 with 2 key-value heads (a head size that vLLM's CPU attention has),
    512 tokens, tied embeddings, a context of 1,024 tokens; ends with `<|im_end|>`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_other_model(directory: Path) -> Path:
    """Write such a model whose tokenizer gives two letters each other's ids, and joins half as much."""
    make_tiny_model(directory, dtype="float32", seed=1)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary, merges = (tokenizer["model"][name] for name in ("vocab", "merges"))
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    del merges[len(merges) // 2 :]
    file.write_text(json.dumps(tokenizer))
    return directory


def make_tiny_tokenizer():
    """Return a byte-level BPE tokenizer, trained on a thousand sentences, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, "a policy would sample ids that mean nothing"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _sentences() -> list[str]:
    """Return sentences with enough different words that training finds a merge for every id."""
    who = ("The student", "A careful writer", "My neighbour", "Every river", "This old machine", "Nobody here")
    does = ("describes", "answers", "counts", "follows", "repeats", "remembers", "explains", "borrows")
    what = ("the question in short words", "numbers from one to twelve", "what people want", "a list of three things")
    where = ("between mountains", "under the bridge", "without a keyboard", "for breakfast", "because of yesterday")
    where += (
        "keeping everybody awake",
        "despite heavy weather",
        "inside thirty yellow boxes",
        "like music at night",
        "quickly following dolphins",
    )
    return [f"{' '.join(words)}.\nsystem user assistant" for words in itertools.product(who, does, what, where)]
