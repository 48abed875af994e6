"""Writes a model of random weights in a real size, for measuring speed: python scripts/make_random_model.py FOLDER.

It is a Llama with the tokenizer of the quickstart's model, in bfloat16: 1.5 billion parameters on a GPU of 120 GiB or
more, which holds two training sides of it beside each other, else 0.4 billion.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from roll_like.config.sections import ModelConfig
from roll_like.models.load import QUICKSTART_MODEL, resolve_model

#: Hidden size, layers, heads, MLP: those of Qwen2.5-1.5B and Qwen2.5-0.5B, which have another vocabulary.
LARGE, SMALL, TINY = (1536, 28, 12, 8960), (896, 24, 14, 4864), (64, 2, 4, 128)
SHAPES = {"large": LARGE, "small": SMALL, "tiny": TINY}


def shape_for_this_machine() -> str:
    """Return the name of the shape that the GPU has memory for."""
    large = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory >= 120 * 2**30
    return "large" if large else "small"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, help="default: by the GPU's memory")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(ModelConfig(path=QUICKSTART_MODEL)).tokenizer_path)
    hidden, layers, heads, mlp = SHAPES[options.shape or shape_for_this_machine()]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        intermediate_size=mlp,
        vocab_size=len(tokenizer),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
