"""Attention over joined rows: what `varlen` and `flex` have in common.

Rows of a micro-batch are joined without padding to T tokens, so memory grows with their number, and not with its
square. The ranks of a sequence-parallel group divide the tokens; in attention each has all tokens of some heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from roll_like.errors import ConfigError
from roll_like.training.flex import flex_attention
from roll_like.training.segments import RowSegments, Scores
from roll_like.training.varlen import cudnn_attention, varlen_attention

JoinedAttention: TypeAlias = Literal["varlen", "flex", "cudnn"]
#: Takes queries [T, H, D], keys [T, G, D], values [T, G, E], what they may see and how keys are scored; [T, H, E].
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, RowSegments, Scores], Tensor]
KERNELS: dict[JoinedAttention, Kernel] = {
    "varlen": varlen_attention,
    "flex": flex_attention,
    "cudnn": cudnn_attention,
}
_NAMES = {f"roll_like_{attention}": attention for attention in KERNELS}


def use_joined_attention(causal_lm: Any, attention: JoinedAttention) -> None:
    """Let a Hugging Face model compute attention over joined rows; transformers then makes no masks."""
    from transformers import AttentionInterface

    name = f"roll_like_{attention}"
    AttentionInterface.register(name, partial(joined_attention_forward, KERNELS[attention]))
    causal_lm.set_attn_implementation(name)


def joined_attention(model: Any) -> JoinedAttention | None:
    """Return how a Hugging Face model computes attention over joined rows; None if its rows are not joined."""
    return _NAMES.get(model.config.get_text_config()._attn_implementation)


def joined_attention_forward(
    kernel: Kernel,
    module: torch.nn.Module,  # noqa: ARG001 - of transformers' attention functions
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTE: Tensor,
    attention_mask: Tensor | None,
    *,
    row_segments: RowSegments,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention output, shape [1, T, H, E], as transformers' attention functions do.

    Raises:
        ConfigError: The layer drops attention weights, or asks for what the kernel does not compute.
    """
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale=scale, window=sliding_window, softcap=softcap, sinks_H=s_aux)
    row_segments.note(query_1HTD, scores, attention_mask)
    if dropout:
        raise ConfigError(
            "training.attention: varlen, flex and cudnn do not drop attention weights, and the model's config.json has "
            f"attention_dropout: {dropout}",
            fix="set training.attention: dense, or attention_dropout: 0.0",
        )
    query_THD, key_TGD, value_TGE = (each[0].transpose(0, 1) for each in (query_1HTD, key_1GTD, value_1GTE))
    parallel = row_segments.parallel
    if parallel is None:
        return kernel(query_THD, key_TGD, value_TGE, row_segments, scores)[None], None
    tokens, heads = len(row_segments.sequences.kept_T), parallel.heads(query_THD.shape[1])
    query_THD, key_TGD, value_TGE = (parallel.to_heads(each, tokens) for each in (query_THD, key_TGD, value_TGE))
    output_THE = kernel(query_THD, key_TGD, value_TGE, row_segments, scores.of_heads(heads))
    return parallel.to_tokens(output_THE)[None], None
