"""Which models' matrices ranks can divide among themselves: tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_like.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Families (`model_type`) that have a plan in `roll_like.training.tensor_parallel`.
FAMILIES = ("llama", "qwen2", "qwen3")


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
    text: Any = config
    sizes = {
        "query heads": int(text.num_attention_heads),
        "key heads": int(text.num_key_value_heads),
        "inner units of a feed-forward layer (intermediate_size)": int(text.intermediate_size),
        "tokens in the vocabulary (vocab_size)": int(text.vocab_size),
    }
    for what, size in sizes.items():
        if size % ranks:
            possible = [n for n in range(1, sizes["query heads"] + 1) if not any(each % n for each in sizes.values())]
            raise ConfigError(
                f"tensor_parallel: {ranks} divides a model among {ranks} ranks, and this one has {size} {what}",
                fix=f"set it to one of {', '.join(map(str, possible))}",
            )
