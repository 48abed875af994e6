"""Rotary positions in vLLM on CPU, for models that hand over heads in a dimension of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

_kernel = RotaryEmbedding.forward_cpu


def rotate_every_head() -> None:
    """Let vLLM's CPU kernel rotate all heads, of models that are made in this process from now on.

    It takes the last dimension for all heads of a token. Of queries of shape [T, heads, size] (LFM2, DeepSeek's latent
    attention) it would rotate the first head only.
    """
    if current_platform.is_cpu():
        RotaryEmbedding.forward_cpu = forward_cpu


def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Rotate queries of shape [T, heads, size] or [T, heads · size], and keys. See `RotaryEmbedding.forward_cpu`."""
    flat_key = None if key is None else key.reshape(*positions.shape, -1)
    rotated_query, rotated_key = _kernel(self, positions, query.reshape(*positions.shape, -1), flat_key)
    if key is None or rotated_key is None:
        return rotated_query.view(query.shape), None
    return rotated_query.view(query.shape), rotated_key.view(key.shape)
