"""What vLLM computes wrongly on CPU, replaced in its processes: rotary positions, checks of guessed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

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


def check_guesses_as_sampled() -> None:
    """Let vLLM's CPU engines of this process check guessed tokens with the temperature and bounds of their request.

    vLLM's CPU build (0.32) expands `temperature`, `top_k` and `top_p` from requests to tokens with a kernel for whole
    numbers, and drops what the kernel wrote: tokens would be checked with whatever was in memory (vllm#55005).
    """
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return the value of each token's request, shape [num_tokens], with one value replaced by another.

    Args:
        x: Values of requests, shape [requests].
        cu_num_tokens: Tokens of all requests up to and including each.
        replace_from: The value that is replaced: temperature 0 of greedy requests.
        replace_to: By what.

    >>> expand_batch_to_tokens(torch.tensor([0.7, 0.0]), torch.tensor([2, 3]), 3, 0, 1)
    tensor([0.7000, 0.7000, 1.0000])
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)
