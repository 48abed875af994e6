"""Attention without masks, over the sequences of joined rows (`sequences.py`).

On GPUs torch's variable-length flash attention computes all sequences at once; elsewhere, and for what that kernel has
no code for, torch's scaled-dot-product attention computes one after the other. On an H100 and its successors that can
be faster for long sequences, too: cuDNN's kernel takes half the time of torch's, which was written for an A100.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from roll_like.training.attention import explicit_attention
from roll_like.training.segments import RowSegments, Scores
from roll_like.training.sequences import Sequences

#: Queries of a sequence for which a mask exists at a time, where one is needed.
MASKED_QUERIES = 512
#: Widest head that the flash kernel computes, and cuDNN's.
MAX_FLASH_WIDTH, MAX_CUDNN_WIDTH = 256, 128
#: Tokens of a sequence, on average, from which on cuDNN's kernel is called once for each.
LONG_SEQUENCES = 4096
#: cuDNN makes a plan for each length that it has not seen, for tens of milliseconds: lengths are rounded up to
#: multiples of this. They are multiples of 128 then, too, the only ones that all versions of cuDNN compute right.
LENGTH_STEP = 512
#: Most keys per token with which prompts that responses share are computed again for each of them.
MOST_KEYS = 1.25
#: The version from which on torch itself prefers cuDNN's kernel on an H100 or B200 (`check_prefer_cudnn_attention` in
#: its sources): earlier ones computed some lengths wrong.
TRUSTED_CUDNN = 91501
#: In this order; cuDNN may be missing.
LONG_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def varlen_attention(
    query_THD: Tensor, key_TGD: Tensor, value_TGE: Tensor, segments: RowSegments, scores: Scores
) -> Tensor:
    """Return the attention output of joined rows, shape [T, H, E]."""
    sequences = segments.sequences
    key_KGD, value_KGE = sequences.gathered(key_TGD), sequences.gathered(value_TGE)
    if flash_computes(query_THD) and not scores.changed:
        return _flash(query_THD, key_KGD, value_KGE, sequences, scores.scale, scores.window)
    return _one_by_one(query_THD, key_KGD, value_KGE, sequences, scores)


def cudnn_attention(
    query_THD: Tensor, key_TGD: Tensor, value_TGE: Tensor, segments: RowSegments, scores: Scores
) -> Tensor:
    """Return the same; long sequences on an H100 and newer are computed by cuDNN, one after the other."""
    sequences = segments.sequences
    plain = scores.window is None and not scores.changed
    if plain and flash_computes(query_THD) and cudnn_computes(query_THD, value_TGE, sequences):
        key_KGD, value_KGE = sequences.gathered(key_TGD), sequences.gathered(value_TGE)
        return _long_sequences(query_THD, key_KGD, value_KGE, sequences, scores.scale)
    return varlen_attention(query_THD, key_TGD, value_TGE, segments, scores)


def flash_computes(query_THD: Tensor) -> bool:
    """Return whether torch's variable-length flash attention has a kernel for these queries."""
    width = query_THD.shape[-1]
    half = query_THD.dtype in (torch.bfloat16, torch.float16)
    return query_THD.is_cuda and half and width <= MAX_FLASH_WIDTH and width % 8 == 0


def cudnn_computes(query_THD: Tensor, value_TGE: Tensor, sequences: Sequences) -> bool:
    """Return whether cuDNN's kernel is there for these sequences, and faster: long ones that share little."""
    tokens, width, count, keys = (
        query_THD.shape[0],
        query_THD.shape[-1],
        len(sequences.query_ends) - 1,
        sequences.key_ends[-1],
    )
    return (
        value_TGE.shape[-1] == width <= MAX_CUDNN_WIDTH
        and tokens >= LONG_SEQUENCES * count
        and keys <= MOST_KEYS * tokens
        and torch.cuda.get_device_capability(query_THD.device) >= (9, 0)
    )


def cudnn_preferred() -> bool:
    """Return whether cuDNN's kernel is one that torch itself would choose on this process's GPU."""
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return (
        version is not None
        and version >= TRUSTED_CUDNN
        and torch.cuda.get_device_capability() in ((9, 0), (10, 0))
        and not os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED")
    )


def _long_sequences(
    query_THD: Tensor, key_KGD: Tensor, value_KGE: Tensor, sequences: Sequences, scale: float
) -> Tensor:
    """Return the output of sequences without a window, shape [T, H, E].

    A kernel's first query stands at its first key, so queries of zeros stand at keys that only precede; those that
    round a length up follow all others, which do not see them.
    """
    grouped = query_THD.shape[1] > key_KGD.shape[1]
    outputs: list[Tensor] = []
    with sdpa_kernel(LONG_BACKENDS, set_priority=True):
        for queries, keys in sequences:
            length = keys.stop - keys.start
            before, after = length - (queries.stop - queries.start), -length % LENGTH_STEP
            query_1HLD, key_1GLD, value_1GLD = (
                functional.pad(each, (0, 0, 0, 0, ahead, after)).transpose(0, 1)[None]
                for each, ahead in ((query_THD[queries], before), (key_KGD[keys], 0), (value_KGE[keys], 0))
            )
            output_HLE = functional.scaled_dot_product_attention(
                query_1HLD, key_1GLD, value_1GLD, is_causal=True, scale=scale, enable_gqa=grouped
            )[0]
            outputs.append(output_HLE[:, before:length].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _flash(
    query_THD: Tensor, key_KGD: Tensor, value_KGE: Tensor, sequences: Sequences, scale: float, window: int | None
) -> Tensor:
    """Return the output of all sequences, shape [T, H, E]."""
    from torch.nn.attention.varlen import varlen_attn

    width, value_width = query_THD.shape[-1], value_KGE.shape[-1]
    if value_width < width:  # the kernel has one width; columns of zeros change nothing
        value_KGE = functional.pad(value_KGE, (0, width - value_width))
    groups = query_THD.shape[1] // key_KGD.shape[1]
    more: dict[str, Any] = {}
    if groups > 1 and "enable_gqa" in signature(varlen_attn).parameters:
        more["enable_gqa"] = True
    elif groups > 1:  # torch 2.11 promises nothing about fewer key heads
        key_KGD, value_KGE = (each.repeat_interleave(groups, dim=1) for each in (key_KGD, value_KGE))
    output = varlen_attn(
        query_THD,
        key_KGD,
        value_KGE,
        sequences.query_ends_S,
        sequences.key_ends_S,
        *sequences.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **more,
    )
    assert isinstance(output, Tensor), "no auxiliary output was asked for"
    return output[..., :value_width]


def _one_by_one(query_THD: Tensor, key_KGD: Tensor, value_KGE: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    """Return the same, one sequence after the other, in blocks of queries where a mask is needed."""
    outputs: list[Tensor] = []
    for queries, keys in sequences:
        query_HQD, key_GLD, value_GLE = (
            each.transpose(0, 1) for each in (query_THD[queries], key_KGD[keys], value_KGE[keys])
        )
        outputs += _blocks(query_HQD, key_GLD, value_GLE, scores)
    return torch.cat(outputs, 1).transpose(0, 1)


def _blocks(query_HQD: Tensor, key_GLD: Tensor, value_GLE: Tensor, scores: Scores) -> Iterator[Tensor]:
    """Yield the outputs of one sequence, shape [H, up to Q, E]; its last query stands at its last key."""
    length, before, window = key_GLD.shape[1], key_GLD.shape[1] - query_HQD.shape[1], scores.window
    if before == 0 and (window is None or window >= length) and not scores.changed:
        yield _product(query_HQD, key_GLD, value_GLE, scores.scale, None)
        return
    for start in range(before, length, MASKED_QUERIES):
        end = min(start + MASKED_QUERIES, length)
        first = 0 if window is None else max(start - window + 1, 0)
        tensors = (query_HQD[:, start - before : end - before], key_GLD[:, first:end], value_GLE[:, first:end])
        # computed again in the backward pass: the masks of all blocks would be as large as that of the row
        yield checkpoint(_masked, *tensors, scores, use_reentrant=False, preserve_rng_state=False)


def _masked(query_HCD: Tensor, key_GLD: Tensor, value_GLE: Tensor, scores: Scores) -> Tensor:
    """Return the output of the queries that stand at the last keys, shape [H, C, E]."""
    at_L = torch.arange(key_GLD.shape[1], device=key_GLD.device)
    distance_CL = at_L[-query_HCD.shape[1] :, None] - at_L
    mask_CL = distance_CL >= 0
    if scores.window is not None:
        mask_CL &= distance_CL < scores.window
    if not scores.changed:
        return _product(query_HCD, key_GLD, value_GLE, scores.scale, mask_CL)
    return explicit_attention(
        query_HCD[None],
        key_GLD[None],
        value_GLE[None],
        mask_CL,
        scores.scale,
        softcap=scores.softcap,
        sinks_H=scores.sinks_H,
    )[0]


def _product(query_HQD: Tensor, key_GLD: Tensor, value_GLE: Tensor, scale: float, mask_QL: Tensor | None) -> Tensor:
    share = query_HQD.shape[0] // key_GLD.shape[0]
    if share > 1:
        key_GLD, value_GLE = key_GLD.repeat_interleave(share, 0), value_GLE.repeat_interleave(share, 0)
    output: Tensor = functional.scaled_dot_product_attention(
        query_HQD[None], key_GLD[None], value_GLE[None], attn_mask=mask_QL, is_causal=mask_QL is None, scale=scale
    )
    return output[0]
