"""Attention over joined rows by torch's flex attention: also with soft-capped scores, sinks and wide heads.

The kernel is compiled with Triton for the GPU; on CPU torch has a forward pass only. What a token sees is a `BlockMask`
of tiles, one for each width of window, and never a mask of T × T.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from roll_like.training.rows import PREFIX_STRIDE
from roll_like.training.segments import RowSegments, Scores

#: Variants of a compiled function that a process may have: one for each precision, width of heads and window, with and
#: without gradients, for the first length and for any other. A model with two windows has as many as torch's default
#: allows, 8, and then one more for a length of 1, or for another model of the process.
MAX_VARIANTS = 64


def flex_attention(
    query_THD: Tensor, key_TGD: Tensor, value_TGE: Tensor, segments: RowSegments, scores: Scores
) -> Tensor:
    """Return the attention output of joined rows, shape [T, H, E]."""
    from torch.nn.attention.flex_attention import AuxRequest
    from torch.nn.attention.flex_attention import flex_attention as kernel

    if scores.window not in segments.block_masks:
        segments.block_masks[scores.window] = block_mask(segments, scores.window)
    cap = scores.softcap

    def bounded(score: Tensor, *_: Tensor) -> Tensor:
        assert cap is not None, "not called without a bound"
        return cap * torch.tanh(score / cap)

    output_1HTE, auxiliary = _compiled(kernel, query_THD.device.type)(
        *(each.transpose(0, 1)[None] for each in (query_THD, key_TGD, value_TGE)),
        score_mod=None if cap is None else bounded,
        block_mask=segments.block_masks[scores.window],
        scale=scores.scale,
        enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if scores.sinks_H is not None:
        # exp s / (exp sink + Σ exp s) is the softmax times Σ exp s / (exp sink + Σ exp s)
        share_1HT = torch.sigmoid(auxiliary.lse - scores.sinks_H.float()[:, None])
        output_1HTE = output_1HTE * share_1HT[..., None].to(output_1HTE.dtype)
    output_THE: Tensor = output_1HTE[0].transpose(0, 1)
    return output_THE


@torch.no_grad()
def block_mask(segments: RowSegments, window: int | None) -> Any:
    """Return torch's `BlockMask` of what each of the T joined tokens sees, as `RowSegments.mask` says for rows."""
    from torch.nn.attention.flex_attention import create_block_mask

    kept_T = segments.sequences.kept_T
    row_T = kept_T // segments.segment_ids_BL.shape[1]
    segment_T, position_T = (each.reshape(-1)[kept_T] for each in (segments.segment_ids_BL, segments.positions_BL))

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        segment, of_key = segment_T[query], segment_T[key]
        own = (of_key == 0) | (of_key == segment) | (of_key == segment // PREFIX_STRIDE)
        seen = own & (row_T[query] == row_T[key]) & (key <= query)
        return seen if window is None else seen & (position_T[key] > position_T[query] - window)

    tokens, device = len(kept_T), kept_T.device
    # without compilation it would make a mask of T × T first
    return _compiled(create_block_mask, device.type)(sees, None, None, tokens, tokens, device=str(device))


@cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return a function of flex attention as a device computes it: compiled on a GPU.

    Beyond the number of variants torch would go on without compiling, and with T × T numbers in memory; for a full
    graph it raises instead.
    """
    if device != "cuda":
        return function
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True)

    @wraps(function)
    def within_limit(*arguments: Any, **more: Any) -> Any:
        # torch.compile takes the limit itself since torch 2.12
        with torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS):
            return compiled(*arguments, **more)

    return within_limit
