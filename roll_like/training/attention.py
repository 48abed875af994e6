"""Attention with masks: one for each width of window, and a fast way for short rows on CPU.

Masks come with the rows (`segments.py`), because transformers gives every layer the mask that it is given, whatever
the layer's window. Which function computes: `attention_forward`.

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

from roll_like.models.vision import language_model
from roll_like.training.segments import RowSegments, Scores

#: Probabilities are kept, B·H·L·L numbers a layer: beyond this length they outweigh all other activations.
MAX_DENSE_TOKENS = 1024
NAME = "roll_like_dense"


def use_dense_attention(causal_lm: Any) -> None:
    """Let a Hugging Face model, loaded with `sdpa`, compute attention as this module describes."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    language_model(causal_lm).set_attn_implementation(NAME)


def attention_forward(
    module: torch.nn.Module,
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_segments: RowSegments | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention output, shape [B, L, H, D], as transformers' attention functions do.

    With `row_segments`, the mask is theirs for the layer's window; else it is `attention_mask` as it is. Bounded scores
    and sinks go to `explicit_attention`. What `dense_attention` is not for (long rows, dropout, a cache, no bool mask,
    another device) goes to torch's scaled-dot-product attention.
    """
    scale = query_BHLD.shape[-1] ** -0.5 if scaling is None else scaling
    if row_segments is not None:
        scores = Scores(scale=scale, window=sliding_window, softcap=softcap, sinks_H=s_aux)
        row_segments.note(query_BHLD, scores, attention_mask)
        attention_mask = row_segments.mask(sliding_window)
    if softcap is not None or s_aux is not None:
        capped = explicit_attention(
            query_BHLD, key_BGLD, value_BGLD, attention_mask, scale, softcap=softcap, sinks_H=s_aux, dropout=dropout
        )
        return capped.transpose(1, 2).contiguous(), None
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
    return dense_attention(query_BHLD, key_BGLD, value_BGLD, attention_mask, scale).transpose(1, 2).contiguous(), None


def explicit_attention(
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    mask_B1LL: Tensor | None,
    scale: float,
    *,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention with bounded scores (Gemma 2) or sinks (gpt-oss), shape [B, H, L, D]; softmax is float32.

        scores  s = softcap · tanh(scale · q·kᵀ / softcap)
        weights w_j = exp s_j / (exp sink + Σ_k exp s_k)

    Args:
        query_BHLD: Queries of H heads.
        key_BGLD: Keys of G heads; consecutive query heads share one.
        value_BGLD: Values of the same heads.
        mask_B1LL: Which key each query sees; None: all before it.
        softcap: Largest score; None: no bound.
        sinks_H: A score of each head that takes weight and has no value.
        dropout: Share of the weights that are dropped.
    """
    share = query_BHLD.shape[1] // key_BGLD.shape[1]
    key_BHLD, value_BHLD = key_BGLD.repeat_interleave(share, 1), value_BGLD.repeat_interleave(share, 1)
    scores_BHLL = (query_BHLD.float() * scale) @ key_BHLD.float().transpose(2, 3)
    if softcap is not None:
        scores_BHLL = softcap * torch.tanh(scores_BHLL / softcap)
    if mask_B1LL is None:
        mask_B1LL = torch.ones(scores_BHLL.shape[2:], dtype=torch.bool, device=scores_BHLL.device).tril()
    scores_BHLL = scores_BHLL.masked_fill(~mask_B1LL, float("-inf"))
    if sinks_H is not None:
        sinks_BHL1 = sinks_H.float().view(1, -1, 1, 1).expand(*scores_BHLL.shape[:3], 1)
        scores_BHLL = torch.cat([scores_BHLL, sinks_BHL1], -1)
    weights_BHLL = torch.softmax(scores_BHLL, -1)[..., : key_BHLD.shape[2]].to(query_BHLD.dtype)
    return torch.nn.functional.dropout(weights_BHLL, dropout) @ value_BHLD


def dense_attention(
    query_BHLD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, mask_B1LL: Tensor, scale: float
) -> Tensor:
    """Return softmax(scale·q·kᵀ, where the mask is True)·v, shape [B, H, L, D].

    Args:
        query_BHLD: Queries of H heads.
        key_BGLD: Keys of G heads; H is a multiple of G, and consecutive query heads share a key head.
        value_BGLD: Values of the same heads; their width may differ.
        mask_B1LL: Which key each query sees; every query sees at least one.
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
