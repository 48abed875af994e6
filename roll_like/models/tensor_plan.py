"""Which models' matrices ranks can divide among themselves: tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_like.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Families (`model_type`) that `roll_like.training.tensor_parallel` divides, and mixtures of experts among them.
DENSE = (
    *("cohere", "cohere2", "gemma2", "gemma3_text", "glm4", "granite", "hyperclovax", "llama", "minicpm3", "mistral"),
    *("nanochat", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "vaultgemma"),
)
MIXTURES = ("deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen3_moe")
FAMILIES = (*DENSE, *MIXTURES)


def refuse_undivided_matrices(config: PretrainedConfig, ranks: int) -> None:
    """Raise a ConfigError for a model whose matrices several ranks cannot divide among themselves evenly."""
    if ranks == 1:
        return
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"tensor_parallel: {ranks} divides the matrices of {', '.join(FAMILIES)} models, and this one is "
            f"{config.model_type}",
            fix="remove the key: the backend fsdp2 shards weights, gradients and optimizer of every model",
        )
    sizes = _sizes(config)
    for what, size in sizes.items():
        if size % ranks:
            possible = [n for n in range(1, sizes["query heads"] + 1) if not any(each % n for each in sizes.values())]
            raise ConfigError(
                f"tensor_parallel: {ranks} divides a model among {ranks} ranks, and this one has {size} {what}",
                fix=f"set it to one of {', '.join(map(str, possible))}",
            )


def _sizes(config: Any) -> dict[str, int]:
    """Return what is divided evenly; the vocabulary need not be, and experts are not."""
    sizes = {"query heads": config.num_attention_heads, "key heads": config.num_key_value_heads}
    mixture = config.model_type in MIXTURES
    if not mixture or getattr(config, "mlp_only_layers", None) or getattr(config, "first_k_dense_replace", 0):
        sizes["inner units of a feed-forward layer (intermediate_size)"] = config.intermediate_size
    shared = getattr(config, "n_shared_experts", None) or 0
    if mixture and shared:
        sizes["inner units of shared experts (moe_intermediate_size · n_shared_experts)"] = (
            config.moe_intermediate_size * shared
        )
    return sizes
