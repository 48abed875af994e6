"""Tiny models with a layer that predicts further tokens, in the form that published checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_families import make_family
from tiny_model import make_tiny_model
from torch import Tensor

FILE = "model.safetensors"
#: The layer behind the two of `glm4_moe` and `deepseek_v3`.
LAYER = "model.layers.2."
#: Its copies of the embeddings and of the output head.
COPIES = {
    f"{LAYER}embed_tokens.weight": "model.embed_tokens.weight",
    f"{LAYER}shared_head.head.weight": "lm_head.weight",
}
NORMS = ("enorm", "hnorm", "shared_head.norm")


def make_mtp_family(name: str, directory: Path, **changes: Any) -> Path:
    """Write a family of two layers with one more behind them that predicts further tokens, all random."""
    if name == "deepseek_v3":
        # what vLLM asks for, and sizes that it has kernels for
        changes |= {"topk_method": "noaux_tc", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        changes |= {"v_head_dim": 128, "head_dim": 64}
    make_family(name, directory, **changes)
    deeper = load_file(make_family(name, directory.with_name(f"{directory.name}-deeper"), layers=3, **changes) / FILE)
    weights = load_file(directory / FILE)
    hidden = weights["model.embed_tokens.weight"].shape[1]
    noise = torch.Generator().manual_seed(1)
    weights |= {key: each for key, each in deeper.items() if key.startswith(LAYER)}
    weights |= {f"{LAYER}{norm}.weight": 1 + 0.1 * torch.randn(hidden, generator=noise) for norm in NORMS}
    weights[f"{LAYER}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=noise) / hidden**0.5
    weights |= {copy: weights[whole].clone() for copy, whole in COPIES.items()}
    return _written(directory, weights)


def make_guessing_model(directory: Path, name: str = "glm4_moe") -> Path:
    """Write one whose guesses are right nearly always: a token says what follows it, and layers add next to nothing."""
    weights = load_file(make_mtp_family(name, directory) / FILE)
    for key, tensor in weights.items():
        if key.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            weights[key] = tensor * (0.0 if key.startswith(LAYER) else 0.01)
    hidden = len(weights[f"{LAYER}enorm.weight"])
    weights[f"{LAYER}eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], -1)
    weights[f"{LAYER}enorm.weight"] = torch.ones(hidden)
    weights[f"{LAYER}shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    return _written(directory, weights)


def _written(directory: Path, weights: dict[str, Tensor]) -> Path:
    save_file(weights, directory / FILE, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_eagle3_head(directory: Path) -> Path:
    """Write a random EAGLE-3 head of the tiny model, which knows every other token."""
    policy = json.loads((make_tiny_model(directory.with_name("policy-of-head")) / "config.json").read_text())
    hidden, inner, vocabulary = policy["hidden_size"], policy["intermediate_size"], policy["vocab_size"]
    heads, width = policy["num_attention_heads"], policy.get("head_dim") or hidden // policy["num_attention_heads"]
    keys = policy["num_key_value_heads"] * width
    layers = [0, 1]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(layers) * hidden),
        "midlayer.self_attn.q_proj.weight": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * width),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (vocabulary // 2, hidden),
        **dict.fromkeys(("norm.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"), (hidden,)),
        "midlayer.post_attention_layernorm.weight": (hidden,),
    }
    noise = torch.Generator().manual_seed(2)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=noise) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    weights["d2t"] = torch.arange(vocabulary // 2)  # what to add to get to the policy's numbers
    directory.mkdir()
    save_file(weights, directory / FILE, metadata={"format": "pt"})
    own: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": vocabulary // 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
    (directory / "config.json").write_text(json.dumps(policy | own))
    return directory
