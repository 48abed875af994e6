"""How large a model is, read from its files without loading it: what the planner divides among devices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_like.errors import ConfigError

#: `model_type`s whose attention normalises queries and keys; config.json does not say so otherwise.
_QUERY_NORMS = {"qwen3", "qwen3_moe", "qwen3_next", "olmo2", "olmo3", "gemma3_text", "gemma3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        parameters: Number of parameters; tied embeddings count once.
        layers: Decoder layers.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside an MLP (of one expert, in a mixture).
        vocab_size: Rows of the embedding.
        heads: Attention heads.
        kv_heads: Key-value heads; fewer than `heads` in grouped-query attention.
        head_dim: Width of one head.
        max_positions: Longest context that the model was made for, in tokens; None when not stated.
        tied_embeddings: Whether the output layer is the embedding.
        adapted_width: Inputs plus outputs of all layers that get adapters; 0 without adapters.
        query_norm: Whether queries and keys are normalised before attention.
        experts: Experts of a layer that one token goes to; 0 without a mixture.
        idle_parameters: Parameters of the experts that one token does not go to.
    """

    parameters: int
    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    tied_embeddings: bool
    adapted_width: int = 0
    query_norm: bool = False
    experts: int = 0
    idle_parameters: int = 0

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is computed with."""
        return self.parameters - self.idle_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, or of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return (self.parameters - embeddings) // self.layers

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Return the size of one token's keys and values in all layers, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value


def load_model_shape(path: Path) -> ModelShape:
    """Return the sizes stated in `path/config.json`.

    Parameters are counted exactly from the headers of `*.safetensors` where those are there, and
    otherwise estimated for a decoder with gated MLPs (of one or of many experts).

    Raises:
        ConfigError: config.json is missing, is not JSON, or lacks a size.
    """
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", fix="set model.path to a complete model") from error
    config = raw.get("text_config", raw)  # models that also see images keep the decoder's sizes here

    def size(*names: str) -> int:
        for name in names:
            if isinstance(config.get(name), int):
                return int(config[name])
        raise ConfigError(
            f"{file} states none of {', '.join(names)}", fix="set model.path to a decoder-only language model"
        )

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    tied = bool(config.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)))
    shape = ModelShape(
        parameters=0,
        layers=size("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        intermediate_size=int(
            config.get("moe_intermediate_size")
            or config.get("intermediate_size")
            or config.get("n_inner")
            or 4 * hidden
        ),
        vocab_size=size("vocab_size"),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        max_positions=config.get("max_position_embeddings") or config.get("n_positions"),
        tied_embeddings=tied,
        query_norm=config.get("model_type") in _QUERY_NORMS,
    )
    experts = _experts(config)
    if experts > 1:
        active = int(config.get("num_experts_per_tok") or 1) + int(config.get("n_shared_experts") or 0)
        idle = shape.layers * 3 * hidden * shape.intermediate_size * max(experts - active, 0)
        shape = replace(shape, experts=active, idle_parameters=idle)
    return replace(shape, parameters=_count_safetensors(path) or _estimate(shape, config))


def _experts(config: Mapping[str, Any]) -> int:
    routed = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 1
    return int(routed) + int(config.get("n_shared_experts") or 0)


def _estimate(shape: ModelShape, config: Mapping[str, Any]) -> int:
    experts = _experts(config)
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.heads + shape.kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size * experts
    router = shape.hidden_size * experts if experts > 1 else 0
    norms = 2 * shape.hidden_size
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return shape.layers * (attention + mlp + router + norms) + embeddings + shape.hidden_size


def _count_safetensors(path: Path) -> int:
    from safetensors import SafetensorError, safe_open

    count = 0
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as tensors:
                count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} is not a safetensors file, or a damaged one: {error}",
                fix="download or export the model again",
            ) from error
    return count
