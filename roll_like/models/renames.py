"""What transformers has renamed: by one name here, with the versions that have the earlier one and with later ones."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any, kept: Any) -> dict[str, Any]:
    """Return the argument that gives a model its cache: `cache`, earlier `past_key_values`.

    Args:
        model: A Hugging Face model; one with code of its own may keep the earlier name.
        kept: The cache; None to begin one.
    """
    later = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if later else "past_key_values": kept}


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output."""
    return output.cache if hasattr(output, "cache") else output.past_key_values


def recompute_activations(model: Any) -> None:
    """Let a Hugging Face model compute its layers again in the backward pass."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
