"""How large a model is, read from its files without loading it: what the planner divides among devices."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_like.errors import ConfigError
from roll_like.models.attention import RECURRENT
from roll_like.models.stored import stated_json, stored_tensors
from roll_like.models.vision import FAMILIES

#: `model_type`s whose attention normalises queries and keys; config.json does not say so otherwise.
_QUERY_NORMS = {"qwen3", "qwen3_moe", "qwen3_next", "olmo2", "olmo3", "gemma3_text", "gemma3"}
#: Layers with a state, as `layer_types` and keys of configurations tell: `AttentionLayers` sees them in a loaded model.
_STATE_KEYS = ("linear_num_value_heads", "conv_L_cache", "mamba_d_state")
#: What configurations call the number of experts that a layer chooses from.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
        adapted_width: Inputs plus outputs of all layers that get adapters in the policy; 0 without adapters.
        critic_adapted_width: The same of the critic.
        quantized_parameters: Parameters that the policy's trainer keeps in 4 bits; 0 without quantisation.
        critic_quantized_parameters: The same of the critic's.
        query_norm: Whether queries and keys are normalised before attention.
        experts: Experts of a layer that one token goes to; 0 without a mixture.
        idle_parameters: Parameters of the experts that one token does not go to.
        expert_parameters: Parameters of the experts of one layer that its router chooses from.
        masked: Whether attention has masks in every precision: no rows can be joined, or weights are dropped.
        masks: Masks of a row: one of windows beside that of all tokens.
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
    critic_adapted_width: int = 0
    quantized_parameters: int = 0
    critic_quantized_parameters: int = 0
    query_norm: bool = False
    experts: int = 0
    idle_parameters: int = 0
    expert_parameters: int = 0
    masked: bool = False
    masks: int = 1

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


def load_model_shape(path: Path, *, weights: bool = True) -> ModelShape:
    """Return the sizes stated in `path/config.json`.

    Parameters are counted exactly from the headers of `*.safetensors` where those are there, and
    otherwise estimated for a decoder with gated MLPs (of one or of many experts).

    Args:
        path: The model's directory.
        weights: Whether to count; without, its files may be incomplete.

    Raises:
        ConfigError: config.json is missing, is not JSON, or lacks a size or has a wrong one; or a file of weights is
            missing or damaged.
    """
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", fix="set model.path to a complete model") from error
    # models that also see images keep the decoder's sizes here
    config = raw.get("text_config", raw) if isinstance(raw, dict) else raw
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object", fix="set model.path to a complete model")

    def optional(*names: str) -> int | None:
        for name in names:
            value = config.get(name)
            if value is None or (value == 0 and value is not False):
                continue  # as some files say that there is none
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(
                    f"{file}: {name} is {value!r}; expected a whole number above 0",
                    fix="set model.path to a complete model",
                )
            return value
        return None

    def size(*names: str) -> int:
        value = optional(*names)
        if value is None:
            raise ConfigError(
                f"{file} states none of {', '.join(names)}", fix="set model.path to a decoder-only language model"
            )
        return value

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    tied = bool(config.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)))
    shape = ModelShape(
        parameters=0,
        layers=size("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        intermediate_size=optional("moe_intermediate_size", "intermediate_size", "n_inner") or 4 * hidden,
        vocab_size=size("vocab_size"),
        heads=heads,
        kv_heads=optional("num_key_value_heads") or heads,
        head_dim=optional("head_dim") or max(1, hidden // heads),
        max_positions=optional("max_position_embeddings", "n_positions"),
        tied_embeddings=tied,
        query_norm=str(config.get("model_type")) in _QUERY_NORMS,
        masked=bool(
            raw.get("model_type") in FAMILIES
            or config.get("attention_dropout")
            or RECURRENT & set(config.get("layer_types") or ())
            or any(config.get(key) for key in _STATE_KEYS)
        ),
        masks=2 if _has_windows(config) else 1,
    )
    shared = optional("n_shared_experts") or 0
    experts = (optional(*_EXPERT_COUNTS) or 1) + shared
    if experts > 1:
        active = (optional("num_experts_per_tok") or 1) + shared
        of_one = 3 * hidden * shape.intermediate_size
        idle, chosen_from = shape.layers * of_one * max(experts - active, 0), of_one * (experts - shared)
        shape = replace(shape, experts=active, idle_parameters=idle, expert_parameters=chosen_from)
    counted = sum(each.numel for each in stored_tensors(path).values()) if weights else 0
    return replace(shape, parameters=counted or _estimate(shape, experts))


def embedding_rows(path: Path) -> int | None:
    """Return how many tokens the model in a directory knows, as its config.json states; None where it does not."""
    raw = stated_json(path / "config.json")
    config = raw.get("text_config", raw)
    rows = config.get("vocab_size") if isinstance(config, dict) else None
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of a mixture.

    Attributes:
        layers: Decoder layers, also those without experts.
        choice: Experts that a layer chooses from.
        active: Experts that it takes for a token.
    """

    layers: int
    choice: int
    active: int

    @classmethod
    def of(cls, config: Any) -> Experts | None:
        """Return the sizes from transformers' configuration of a language model; None without experts."""
        choice = next((int(value) for name in _EXPERT_COUNTS if (value := getattr(config, name, None))), 1)
        active = getattr(config, "num_experts_per_tok", None)
        return cls(layers=config.num_hidden_layers, choice=choice, active=active) if choice > 1 and active else None


def _has_windows(config: dict[str, Any]) -> bool:
    types = config.get("layer_types")
    if types is not None:
        return "sliding_attention" in types
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def _estimate(shape: ModelShape, experts: int) -> int:
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.heads + shape.kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size * experts
    router = shape.hidden_size * experts if experts > 1 else 0
    norms = 2 * shape.hidden_size
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return shape.layers * (attention + mlp + router + norms) + embeddings + shape.hidden_size
