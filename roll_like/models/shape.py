"""How large a model is, read from its files without loading it: what the planner divides among devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from roll_like.errors import ConfigError
from roll_like.models.attention import RECURRENT
from roll_like.models.mtp import COUNTS, mtp_tensors
from roll_like.models.stored import stated_json, stored_tensors
from roll_like.models.vision import FAMILIES

#: Folders with the config.json of published models.
PUBLISHED = Path(__file__).parent / "published"
#: `model_type`s whose attention normalises queries and keys; config.json does not say so otherwise.
_QUERY_NORMS = {"qwen3", "qwen3_moe", "qwen3_next", "olmo2", "olmo3", "gemma3_text", "gemma3"}
#: Layers with a state, as `layer_types` and keys of configurations tell: `AttentionLayers` sees them in a loaded model.
_STATE_KEYS = ("linear_num_value_heads", "conv_L_cache", "mamba_d_state")
#: `model_type`s whose checkpoints have the experts of a layer in one tensor; others have tensors of each.
_JOINED_EXPERTS = {"gpt_oss", "llama4_text", "qwen3_vl_moe_text"}
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
        joined_experts: Whether a checkpoint has the experts of a layer in one tensor.
        dense_layers: Layers without experts of a mixture, taken for the first ones.
        dense_layer_parameters: Parameters of one of these.
        value_dim: Width of a head's values, where it is not `head_dim`; else 0.
        latent: Width of the compressed keys and values that a token has in a layer, in place of heads; else 0.
        rotated: How much of that carries positions, which all heads share.
        query_rank: Width of compressed queries; 0 where they are not compressed.
        undivided_parameters: Parameters of a layer that ranks hold whole which divide its matrices: norms, router and
            what compresses.
        further_layers: Layers in the files that predict further tokens.
        further_parameters: Their parameters, without copies of the embeddings; no trainer holds them.
        further_copies: Parameters of these copies in the files.
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
    joined_experts: bool = False
    masked: bool = False
    masks: int = 1
    dense_layers: int = 0
    dense_layer_parameters: int = 0
    value_dim: int = 0
    latent: int = 0
    rotated: int = 0
    query_rank: int = 0
    undivided_parameters: int = 0
    further_layers: int = 0
    further_parameters: int = 0
    further_copies: int = 0

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
        """Parameters of one decoder layer; of a mixture, of one with experts."""
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        dense = self.dense_layers * self.dense_layer_parameters
        return (self.parameters - embeddings - dense) // (self.layers - self.dense_layers)

    @property
    def head_widths(self) -> int:
        """Widths of a head's keys and values together."""
        return self.head_dim + (self.value_dim or self.head_dim)

    def kv_bytes_per_token(self, bytes_per_value: int = 2, gpus: int = 1) -> int:
        """Return the size of one token's keys and values in all layers, in bytes.

        Args:
            gpus: Of an engine, which divide the heads; one head is whole, and so are compressed keys and values. Bytes
                of each of them.
        """
        width = self.latent or -(-self.kv_heads // gpus) * self.head_widths
        return self.layers * width * bytes_per_value


def load_model_shape(path: Path, *, weights: bool = True) -> ModelShape:
    """Return the sizes stated in `path/config.json`.

    Parameters are counted exactly from the headers of `*.safetensors` where those are there (without layers that
    predict further tokens, which are not loaded), and otherwise follow from
    the sizes for a decoder with gated MLPs (of one or of many experts), as llama, Qwen and DeepSeek-V3 are.

    Args:
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
    listed = config.get("layers_block_type")  # of Nemotron-H, which need not state how many
    tied = bool(config.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)))
    shape = ModelShape(
        parameters=0,
        layers=len(listed) if isinstance(listed, list) else size("num_hidden_layers", "n_layer"),
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
    shape = _compressed(shape, optional)
    shared = optional("n_shared_experts") or 0
    experts = (optional(*_EXPERT_COUNTS) or 1) + shared
    sizes = SimpleNamespace(**{**config, "num_hidden_layers": shape.layers})
    sizes.first_k_dense_replace = optional("first_k_dense_replace")
    dense = layers_with_experts(sizes).count(False)
    if dense == shape.layers:  # none has experts
        experts = 1
        shape = replace(shape, intermediate_size=optional("intermediate_size") or shape.intermediate_size)
    query_bias = config.get("model_type") == "qwen2" or bool(config.get("attention_bias"))
    attention = _attention_parameters(shape) + (shape.head_dim * (heads + 2 * shape.kv_heads) if query_bias else 0)
    norms = 2 * hidden + (2 * shape.head_dim if shape.query_norm else 0)
    whole = norms + _compressing_parameters(shape)
    of_one, router = 3 * hidden * shape.intermediate_size, 0
    layer = attention + norms + of_one
    if experts > 1:
        active = (optional("num_experts_per_tok") or 1) + shared
        inner = optional("intermediate_size") or shape.intermediate_size
        router = hidden * (experts - shared)
        layer = attention + norms + router + of_one * experts
        shape = replace(
            shape,
            experts=active,
            idle_parameters=(shape.layers - dense) * of_one * max(experts - active, 0),
            expert_parameters=of_one * (experts - shared),
            joined_experts=config.get("model_type") in _JOINED_EXPERTS,
            dense_layers=dense,
            dense_layer_parameters=attention + norms + 3 * hidden * inner if dense else 0,
        )
    stored = stored_tensors(path) if weights else {}
    further = [stored[name] for name in mtp_tensors(stored)]
    counted = sum(each.numel for each in stored.values()) - sum(each.numel for each in further)
    embeddings, dense = shape.embedding_parameters * (1 if tied else 2), shape.dense_layers
    estimated = (shape.layers - dense) * layer + dense * shape.dense_layer_parameters + embeddings + hidden
    copies = sum(each.numel for each in further if each.shape[:1] == (shape.vocab_size,))
    return replace(
        shape,
        parameters=counted or estimated,
        undivided_parameters=whole + router,
        further_layers=(optional(*COUNTS) or 1) if further else 0,
        further_parameters=sum(each.numel for each in further) - copies,
        further_copies=copies,
    )


def _compressed(shape: ModelShape, optional: Callable[[str], int | None]) -> ModelShape:
    """Return the sizes of attention over compressed keys and values (DeepSeek-V2, arXiv:2405.04434), if it is that."""
    latent = optional("kv_lora_rank")
    if latent is None:
        return shape
    rotated = optional("qk_rope_head_dim") or 0
    return replace(
        shape,
        head_dim=(optional("qk_nope_head_dim") or 0) + rotated,
        value_dim=optional("v_head_dim") or shape.head_dim,
        latent=latent + rotated,
        rotated=rotated,
        query_rank=optional("q_lora_rank") or 0,
        kv_heads=shape.heads,
    )


def _attention_parameters(shape: ModelShape) -> int:
    """Return the parameters of a layer's attention, without norms of heads."""
    hidden = shape.hidden_size
    if not shape.latent:
        return 2 * hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    values, keys = shape.latent - shape.rotated, shape.head_dim - shape.rotated
    queries = (shape.query_rank or hidden) * shape.heads * shape.head_dim
    expanded = values * shape.heads * (keys + shape.value_dim)
    return queries + expanded + shape.heads * shape.value_dim * hidden + _compressing_parameters(shape)


def _compressing_parameters(shape: ModelShape) -> int:
    """Return the parameters of what compresses queries, keys and values, with its norms."""
    if not shape.latent:
        return 0
    compressing = shape.hidden_size * (shape.query_rank + shape.latent)
    return compressing + shape.query_rank + shape.latent - shape.rotated


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
        if choice == 1 or not active or not any(layers_with_experts(config)):
            return None
        return cls(layers=config.num_hidden_layers, choice=choice, active=active)


def layers_with_experts(config: Any) -> tuple[bool, ...]:
    """Return which layers of a mixture have experts; the others are dense.

    Args:
        config: transformers' configuration of a language model with experts.
    """
    first = getattr(config, "first_k_dense_replace", None) or 0
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = getattr(config, "mlp_only_layers", None) or ()
    return tuple(
        layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers)
    )


def _has_windows(config: dict[str, Any]) -> bool:
    types = config.get("layer_types")
    if types is not None:
        return "sliding_attention" in types
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
