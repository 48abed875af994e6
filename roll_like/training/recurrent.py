"""Layers whose state runs through a row, on rows of several samples: each sample begins with a state of its own.

Such a layer is given the row's samples as rows, and what it makes of them goes back to where their tokens are:

    the row      P P A A B B B        a prompt, and its responses A and B
    its samples  P P A A · · ·
                 P P B B B · ·        · is padding

A token that several samples share is computed for each of them and read from the first. So outputs and gradients are
those of one sample a row, whatever the layer's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roll_like.training.segments import RowSegments


def begin_states_anew(causal_lm: Any) -> None:
    """Let the gated delta layers of a Hugging Face model compute each sample of a row by itself."""
    for layer in causal_lm.modules():
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None and not isinstance(mixer.forward, partial):
            mixer.forward = partial(_by_sample, mixer.forward)


def _by_sample(
    compute: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    row_segments: RowSegments | None = None,
    **options: Any,
) -> Tensor:
    """Return a layer's output for rows of samples, shape [B, L, D]; 0 for padding."""
    if row_segments is None:
        return compute(hidden_states, attention_mask=attention_mask, **options)
    samples = row_segments.samples
    tokens_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
    options.pop("position_ids", None)  # of the rows
    mask_SK = (samples.tokens_SK >= 0).long()
    out_SKD = compute(tokens_ND[samples.tokens_SK.clamp(min=0)], attention_mask=mask_SK, **options)
    output_ND = torch.zeros_like(tokens_ND).index_put((samples.tokens_SK[samples.own_SK],), out_SKD[samples.own_SK])
    return output_ND.view(hidden_states.shape)
