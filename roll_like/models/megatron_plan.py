"""Which models the training backend `megatron` converts, and how its ranks can divide them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from roll_like.errors import ConfigError
from roll_like.models.attention import AttentionLayers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from roll_like.config.training import TrainerConfig

#: Families (`model_type`) that `roll_like.training.megatron_weights` converts.
CONVERTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
_ELSEWHERE = "use training.backend: fsdp2"


def head_width(config: Any) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def refuse_no_converter(config: PretrainedConfig, settings: TrainerConfig) -> None:
    """Raise a ConfigError for a model that Megatron-Core's layers do not compute here, or that ranks cannot divide."""
    text: Any = config
    if config.model_type not in CONVERTED:
        raise ConfigError(
            f"the training backend megatron has converters for {', '.join(CONVERTED)} models, and this one is "
            f"{config.model_type}",
            fix=_ELSEWHERE,
        )
    for what in _not_computed(text):
        raise ConfigError(f"the training backend megatron does not compute {what} of this model", fix=_ELSEWHERE)
    heads, layers = settings.tensor_parallel * settings.sequence_parallel, settings.pipeline_parallel
    sizes = [
        ("tensor_parallel", settings.tensor_parallel, "key heads", int(text.num_key_value_heads)),
        ("tensor_parallel", settings.tensor_parallel, "inner units (intermediate_size)", int(text.intermediate_size)),
        ("tensor_parallel times sequence_parallel", heads, "query heads", int(text.num_attention_heads)),
        (
            "pipeline_parallel times virtual_pipeline",
            layers * settings.virtual_pipeline,
            "layers",
            int(text.num_hidden_layers),
        ),
    ]
    experts = getattr(text, "num_experts", 0) or 0
    if experts:
        inner = int(text.moe_intermediate_size)
        sizes += [
            ("expert_parallel", settings.expert_parallel, "experts in a layer", int(experts)),
            ("expert_tensor_parallel", settings.expert_tensor_parallel, "inner units of an expert", inner),
        ]
    elif settings.expert_parallel > 1 or settings.expert_tensor_parallel > 1:
        raise ConfigError(
            f"expert_parallel: {settings.expert_parallel} and expert_tensor_parallel: "
            f"{settings.expert_tensor_parallel} divide experts, and the model has none",
            fix="remove the keys",
        )
    for key, ranks, what, count in sizes:
        if count % ranks:
            possible = ", ".join(str(n) for n in range(1, min(count, 64) + 1) if count % n == 0)
            raise ConfigError(
                f"{key}: {ranks} divides a model among {ranks} ranks, and this one has {count} {what}",
                fix=f"set it to one of {possible}",
            )


def _not_computed(config: Any) -> Iterator[str]:
    """Yield what the converted layers lack of what the families can have."""
    if AttentionLayers.of(config).windows:
        yield "the sliding windows"
    if getattr(config, "attention_dropout", 0.0):
        yield "the dropout of attention weights (attention_dropout)"
    if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        yield "the biases (attention_bias)"
    if getattr(config, "mlp_bias", False):
        yield "the biases (mlp_bias)"
    if config.hidden_act != "silu":
        yield f"the activation (hidden_act: {config.hidden_act})"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        yield f"the rotary embeddings (rope_type: {kind})"
    if getattr(config, "num_experts", 0) and (config.decoder_sparse_step != 1 or config.mlp_only_layers):
        yield "the layers without experts between those with them"
