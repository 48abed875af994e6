"""Layers whose state runs through a row, on rows of several samples: each sample begins with a state of its own.

Such a layer is given the row's samples as rows, and what it makes of them goes back to where their tokens are:

    the row      P P A A B B B        a prompt, and its responses A and B
    its samples  P P A A · · ·
                 P P B B B · ·        · is padding

A token that several samples share is computed for each of them and read from the first. So outputs and gradients are
those of one sample a row, whatever the layer's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from roll_like.errors import ConfigError
from roll_like.training.segments import RowSegments


@dataclass(slots=True)
class _Rows:
    """The rows that a layer is computing."""

    segments: RowSegments | None = None


def state_mixers(causal_lm: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each layer of a Hugging Face model that has a state, and the part of it that keeps the state."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in causal_lm.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for part in layer.children():
                # gated delta nets, state-space mixers and short convolutions have a convolution over the row; that of
                # attention with one (Zaya) is deeper within
                convolves = any(isinstance(each, nn.Conv1d) for each in part.children())
                if convolves and not isinstance(part, GradientCheckpointingLayer):
                    yield layer, part


def begin_states_anew(causal_lm: Any, count: int) -> None:
    """Let the layers of a Hugging Face model that have a state compute each sample of a row by itself.

    Raises:
        ConfigError: It has more or fewer.
    """
    found = list(state_mixers(causal_lm))
    if len(found) != count:
        raise ConfigError(
            f"{type(causal_lm).__name__} has {len(found)} layers of a known kind that keep a state, and config.json "
            f"has {count}: samples of a row could not be kept apart",
            fix="set model.trust_remote_code: false, if the model brings code of its own; otherwise set model.path to "
            "a model without such layers",
        )
    for layer, mixer in found:
        if not isinstance(mixer.forward, partial):
            rows = _Rows()
            # not every layer passes on to its mixer what it is given
            layer.register_forward_pre_hook(partial(_note, rows), with_kwargs=True)
            mixer.forward = partial(_by_sample, mixer.forward, rows)


def _note(rows: _Rows, layer: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Write down the rows that a layer is about to compute; checkpointed layers are called again."""
    del layer, positional
    rows.segments = named.get("row_segments")


def _by_sample(
    compute: Callable[..., Tensor],
    rows: _Rows,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return a mixer's output for rows of samples, shape [B, L, D]; 0 for padding."""
    if rows.segments is None:
        return compute(hidden_states, attention_mask=attention_mask, **options)
    samples = rows.segments.samples
    tokens_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
    of_samples = {name: value for name, value in options.items() if name not in ("position_ids", "row_segments")}
    mask_SK = (samples.tokens_SK >= 0).long()
    out_SKD = compute(tokens_ND[samples.tokens_SK.clamp(min=0)], attention_mask=mask_SK, **of_samples)
    out_ND = out_SKD.new_zeros(len(tokens_ND), out_SKD.shape[-1])
    out_ND = out_ND.index_put((samples.tokens_SK[samples.own_SK],), out_SKD[samples.own_SK])
    return out_ND.view(*hidden_states.shape[:2], -1)
