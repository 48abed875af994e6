"""Guessed tokens on CPU are checked with the temperature, `top_k` and `top_p` of their request.

vLLM's CPU build (0.32) expands these from requests to tokens with a kernel for whole numbers, and drops what the kernel
wrote: guessed tokens would be checked with whatever was in memory (vllm#55005).
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


def check_guesses_as_sampled() -> None:
    """Let vLLM's CPU engines of this process check guessed tokens with their request's own settings."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
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
