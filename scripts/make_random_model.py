"""Writes a model of random weights in a real size, for measuring speed: python scripts/make_random_model.py FOLDER.

It is a Llama, a Qwen3, or a small mixture of many experts, with the tokenizer of the quickstart's model, in bfloat16.
Without `--shape`: 1.5 billion parameters on a GPU of 120 GiB or more, which holds two training sides of it beside each
other, else 0.4 billion.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from roll_like.config.model import ModelConfig
from roll_like.models.load import QUICKSTART_MODEL, resolve_model

#: Hidden size, layers, heads, MLP: those of Qwen2.5-1.5B and Qwen2.5-0.5B, which have another vocabulary.
LARGE, SMALL, TINY = (1536, 28, 12, 8960), (896, 24, 14, 4864), (64, 2, 4, 128)
SHAPES = {"large": LARGE, "small": SMALL, "tiny": TINY}
#: Qwen3-0.6B as it is published, its vocabulary too: prime-rl measures its trainer with it.
QWEN3 = "qwen3-0.6b"
#: 128 small experts in each of 8 layers; Qwen3-30B-A3B has 48 of them. 3,146 tensors show what a sync costs for each.
EXPERTS = "experts"
#: Longest row of a benchmark.
CONTEXT = 65_536


def shape_for_this_machine() -> str:
    """Return the name of the shape that the GPU has memory for."""
    large = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory >= 120 * 2**30
    return "large" if large else "small"


def config_of(shape: str, tokens: dict[str, int]) -> PretrainedConfig:
    """Return a model's configuration.

    Args:
        shape: One of `SHAPES`, or `QWEN3`, or `EXPERTS`.
        tokens: Size of the tokenizer's vocabulary and numbers of its special tokens.
    """
    if shape == QWEN3:
        return Qwen3Config(
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            **{**tokens, "vocab_size": 151_936},
        )
    if shape == EXPERTS:
        return Qwen3MoeConfig(
            hidden_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=64,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            **tokens,
        )
    hidden, layers, heads, mlp = SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        intermediate_size=mlp,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=(*SHAPES, QWEN3, EXPERTS), help="default: by the GPU's memory")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(ModelConfig(path=QUICKSTART_MODEL)).tokenizer_path)
    tokens = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    config = config_of(options.shape or shape_for_this_machine(), {"vocab_size": len(tokenizer), **tokens})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
