"""A random model with a vocabulary as large as any tokenizer's, which says only what every tokenizer can read."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

#: One channel of the residual stream holds this at every token, so that the output layer has a bias to read there.
CONSTANT = 8.0
#: Weights of that channel in the output layer: for what is never said, and for what is said ten times as often.
SILENT, FAVOURED = -15.0, 1.1
#: Standard deviation of weights. What a layer adds to the stream is about as large as an embedding, so that a
#: log-probability follows from the whole context.
EMBEDDED, WRITTEN, OUTPUT, OTHERS = 1.0, 0.1, 0.15, 0.25


def make_talkative_model(
    directory: Path, *, vocabulary: int, spoken: Collection[int], favoured: Collection[int], ends: Collection[int]
) -> Path:
    """Write a random float32 Llama as a Hugging Face directory and return its path.

    Args:
        directory: Where to; a tokenizer has to be put beside it.
        vocabulary: Number of token ids that prompts may hold.
        spoken: Ids that it samples; the others have probabilities below 1e-6 together.
        favoured: Some of `spoken`, sampled about ten times as often as the others.
        ends: Ids that end a response.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, _deviation(name), generator=generator)
        model.model.embed_tokens.weight[:, 0] = CONSTANT
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for written in (attention.o_proj, mlp.down_proj):
                written.weight[0] = 0  # nothing changes the channel
            for read in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                read.weight[:, 0] = 0  # and it drowns nothing else
        model.lm_head.weight[:, 0] = SILENT
        model.lm_head.weight[sorted(spoken), 0] = 0
        model.lm_head.weight[sorted(favoured), 0] = FAVOURED
    model.generation_config = GenerationConfig(eos_token_id=sorted(ends))
    model.save_pretrained(directory)
    return directory


def _deviation(name: str) -> float:
    kinds = {"embed_tokens": EMBEDDED, "o_proj": WRITTEN, "down_proj": WRITTEN, "lm_head": OUTPUT}
    return next((deviation for kind, deviation in kinds.items() if kind in name), OTHERS)
