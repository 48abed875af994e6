"""The model's layers on rows of several samples: which attention they use, and whether it reaches all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roll_like.errors import ConfigError
from roll_like.models.attention import AttentionLayers
from roll_like.training.attention import use_dense_attention
from roll_like.training.segments import AttentionCall, RowSegments

#: How far an output may move, as a share of the largest, where another sample's token changes: rounding only.
_ROUNDING = {torch.float32: 1e-3}
_COARSE_ROUNDING = 0.1


def run_backbone(backbone: Any, token_ids_BL: Tensor, segments: RowSegments) -> Tensor:
    """Return the last hidden states of rows, after the final norm, shape [B, L, D]."""
    # layers with a state take a padding mask; attention layers have their masks from `row_segments`
    recurrent = bool(AttentionLayers.of(backbone.config).recurrent)
    hidden_BLD: Tensor = backbone(
        input_ids=token_ids_BL,
        position_ids=segments.positions_BL,
        attention_mask=segments.padding_mask() if recurrent else segments.mask(),
        use_cache=False,
        row_segments=segments,
    ).last_hidden_state
    return hidden_BLD


def use_row_attention(causal_lm: Any, *, row_sharing: str | None) -> None:
    """Let a Hugging Face model on the CPU compute rows of several samples as if each were alone.

    Args:
        causal_lm: The model, in evaluation mode.
        row_sharing: What puts several samples into one row, as `AttentionLayers.refuse_sharing` takes it.

    Raises:
        ConfigError: The model has layers that cannot be kept from seeing what they should not see.
    """
    layers = AttentionLayers.of(causal_lm.config)
    layers.refuse_sharing(row_sharing)
    use_dense_attention(causal_lm)
    probe(causal_lm.base_model, layers)


@torch.no_grad()
def probe(backbone: Any, layers: AttentionLayers) -> list[AttentionCall]:
    """Run two rows of four tokens; return what the attention layers asked for.

        tokens    0 1 2 3    0 4 2 3
        segments  0 1 2 2    0 1 2 2

    The rows differ in a token that the third and the fourth do not see.

    Raises:
        ConfigError: They saw it, or layers with a sliding window are not told apart from others.
    """
    tokens_BL = torch.tensor([[0, 1, 2, 3], [0, 4, 2, 3]])
    rows = ([0, 1, 1, 1], [0, 1, 2, 3]) if layers.recurrent else ([0, 1, 2, 2], [0, 1, 1, 2])
    segments_BL, positions_BL = (torch.tensor([row, row]) for row in rows)
    calls: list[AttentionCall] = []
    segments = RowSegments(segments_BL, positions_BL, calls=calls)
    kind = type(backbone).__name__
    try:
        hidden_BLD = run_backbone(backbone, tokens_BL, segments).float()
    except TypeError as error:  # its forward pass takes no further arguments
        raise ConfigError(
            f"{kind} cannot be trained on rows of several samples: {error}", fix="set model.path to another model"
        ) from error
    if not layers.recurrent:
        moved = (hidden_BLD[0, 2:] - hidden_BLD[1, 2:]).abs().max() / hidden_BLD.abs().max()
        if moved > _ROUNDING.get(backbone.dtype, _COARSE_ROUNDING):
            raise ConfigError(
                f"{kind} lets a sample see other samples of its row: changing one moved another's hidden states by "
                f"{float(moved):.0%}",
                fix="set model.path to a model whose attention layers use transformers' AttentionInterface",
            )
    windows = sum(call.window is not None for call in calls)
    if windows != layers.windows or any(call.window not in (None, layers.window) for call in calls):
        raise ConfigError(
            f"{windows} attention layers of {kind} asked for a sliding window, and {layers.windows} of "
            f"{layers.window} tokens are in config.json",
            fix="set model.path to a model whose attention layers use transformers' AttentionInterface",
        )
    return calls
