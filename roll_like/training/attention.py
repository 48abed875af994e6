"""Attention of short rows on CPU, several times faster than torch's flash kernel there.

Rows of a few hundred tokens are what training on CPU sees. Torch's tiled kernel, made for long rows,
spends more time on them than the model's projections. Plain matrix products do not: here the query
heads of one key head are stacked into one product, keys and values are not repeated, and the mask is
added in place. Scores and softmax are float32, as in the flash kernel; what is kept for the backward
pass are the probabilities, in the model's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Probabilities are kept, B·H·L·L numbers a layer: beyond this length they outweigh all other activations.
MAX_DENSE_TOKENS = 1024
NAME = "roll_like_dense"


def use_dense_attention(causal_lm: Any) -> None:
    """Let a Hugging Face model, loaded with `sdpa`, compute attention as this module describes."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    causal_lm.set_attn_implementation(NAME)


def attention_forward(
    module: torch.nn.Module,
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention output, shape [B, L, H, D], as transformers' attention functions do.

    What `dense_attention` is not for (long rows, dropout, a cache, no bool mask, another device) goes to
    torch's scaled-dot-product attention.
    """
    dense = (
        query_BHLD.device.type == "cpu"
        and key_BGLD.shape[2] == query_BHLD.shape[2] <= MAX_DENSE_TOKENS
        and attention_mask is not None
        and attention_mask.dtype == torch.bool
        and dropout == 0.0
        and options.get("position_bias") is None
        and options.get("cache") is None
    )
    if not dense or attention_mask is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: Tensor = sdpa_attention_forward(
            module, query_BHLD, key_BGLD, value_BGLD, attention_mask, dropout=dropout, scaling=scaling, **options
        )[0]
        return output, None
    scale = query_BHLD.shape[-1] ** -0.5 if scaling is None else scaling
    return dense_attention(query_BHLD, key_BGLD, value_BGLD, attention_mask, scale).transpose(1, 2).contiguous(), None


def dense_attention(
    query_BHLD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, mask_B1LL: Tensor, scale: float
) -> Tensor:
    """Return softmax(scale·q·kᵀ, where the mask is True)·v, shape [B, H, L, D].

    Args:
        query_BHLD: Queries of H heads.
        key_BGLD: Keys of G heads; H is a multiple of G, and consecutive query heads share a key head.
        value_BGLD: Values of the same heads; their width may differ.
        mask_B1LL: Which key each query sees; every query sees at least one.
        scale: Factor of the scores.
    """
    batch, heads, length, _ = query_BHLD.shape
    groups = key_BGLD.shape[1]
    stacked = query_BHLD.reshape(batch, groups, heads // groups * length, -1)
    bias_B11LL = torch.zeros(mask_B1LL.shape).masked_fill_(~mask_B1LL, float("-inf"))[:, None]
    output: Tensor = _DenseAttention.apply(stacked, key_BGLD, value_BGLD, bias_B11LL, scale)  # type: ignore[no-untyped-call]
    return output.view(batch, heads, length, -1)


class _DenseAttention(torch.autograd.Function):
    """Attention of stacked queries [B, G, M, D] with M = heads of a group × L."""

    @staticmethod
    def forward(
        ctx: Any, query_BGMD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, bias_B11LL: Tensor, scale: float
    ) -> Tensor:
        scores_BGML = (query_BGMD.float() * scale) @ key_BGLD.float().transpose(2, 3)
        length = key_BGLD.shape[2]
        scores_BGML.view(*scores_BGML.shape[:2], -1, length, length).add_(bias_B11LL)
        weights_BGML = torch.softmax(scores_BGML, -1).to(query_BGMD.dtype)
        ctx.save_for_backward(query_BGMD, key_BGLD, value_BGLD, weights_BGML)
        ctx.scale = scale
        return weights_BGML @ value_BGLD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BGMD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query_BGMD, key_BGLD, value_BGLD, weights_BGML = ctx.saved_tensors
        grad_value_BGLD = weights_BGML.transpose(2, 3) @ grad_BGMD
        grad_weights_BGML = grad_BGMD @ value_BGLD.transpose(2, 3)
        grad_scores_BGML = torch._softmax_backward_data(grad_weights_BGML, weights_BGML, -1, weights_BGML.dtype)
        grad_query_BGMD = (grad_scores_BGML @ key_BGLD) * ctx.scale
        grad_key_BGLD = (grad_scores_BGML.transpose(2, 3) @ query_BGMD) * ctx.scale
        return grad_query_BGMD, grad_key_BGLD, grad_value_BGLD, None, None
