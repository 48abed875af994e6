"""The model's layers on rows of several samples: which attention they use, and whether it reaches all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from roll_like.config.training import JOINING, Attention
from roll_like.errors import ConfigError
from roll_like.models.attention import AttentionLayers
from roll_like.models.unread import layer_by_layer
from roll_like.models.vision import SeenTokens, seen_inputs, sees_images
from roll_like.training import varlen
from roll_like.training.attention import use_dense_attention
from roll_like.training.joined import JoinedAttention, joined_attention, use_joined_attention
from roll_like.training.recurrent import begin_states_anew
from roll_like.training.segments import RowSegments, Scores

#: How far an output may move, as a share of the largest, where another sample's token changes: rounding only.
_ROUNDING = {torch.float32: 1e-3}
_COARSE_ROUNDING = 0.1
#: What the forward pass of a model ends with that does not take what is given to it.
_UNLIKE_ITS_FORWARD = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_OTHER_MODEL = "set model.path to a model whose attention layers use transformers' AttentionInterface"


def run_backbone(backbone: Any, token_ids_BL: Tensor | SeenTokens, segments: RowSegments, sources_N: Tensor) -> Tensor:
    """Return the last hidden states, after the final norm, at flat indices `sources_N` of [B·L], shape [N, D].

    Where several ranks share the rows, the indices are of this rank's tokens (`RowSegments.own_targets`).
    """
    if joined_attention(backbone) is not None and isinstance(token_ids_BL, Tensor):
        kept_T = layer_tokens(backbone, segments)
        first = 0 if segments.parallel is None else segments.parallel.own(len(segments.sequences.kept_T)).start
        joined_TD = backbone(
            input_ids=token_ids_BL.reshape(-1)[kept_T][None],
            position_ids=segments.positions_BL.reshape(-1)[kept_T][None],
            attention_mask=None,
            use_cache=False,
            row_segments=segments,
        ).last_hidden_state[0]
        found_ND: Tensor = joined_TD[segments.sequences.place_BL[sources_N] - first]
        return found_ND
    given: AbstractContextManager[dict[str, Tensor]]
    if isinstance(token_ids_BL, SeenTokens):
        given = seen_inputs(backbone, token_ids_BL, segments.mask())
    else:
        given = nullcontext({"input_ids": token_ids_BL})
    # layers with a state take a padding mask; attention layers have their masks from `row_segments`
    recurrent = bool(AttentionLayers.of(backbone.config).recurrent)
    mask = segments.padding_mask() if recurrent else segments.mask()
    with given as inputs:
        hidden_BLD = backbone(
            **{"position_ids": segments.positions_BL, **inputs},
            attention_mask=mask,
            use_cache=False,
            row_segments=segments,
        ).last_hidden_state
    hidden_ND: Tensor = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])[sources_N]
    return hidden_ND


def layer_tokens(backbone: Any, segments: RowSegments) -> Tensor:
    """Return the flat indices of [B·L] of the tokens that layers see, in their order, shape [T]."""
    if joined_attention(backbone) is None:
        return torch.arange(segments.segment_ids_BL.numel(), device=segments.segment_ids_BL.device)
    kept_T = segments.sequences.kept_T
    if segments.parallel is None:
        return kept_T
    own = segments.parallel.own(len(kept_T))
    # all ranks compute equally many: the last ones repeat the token at index 0, and its outputs are not read
    return nn.functional.pad(kept_T, (0, max(own.stop - len(kept_T), 0)))[own]


def joins_rows(module: nn.Module) -> bool:
    """Return whether the rows of a micro-batch are joined, without padding and without masks: `joined.py`."""
    from transformers import PreTrainedModel

    return any(joined_attention(each) is not None for each in module.modules() if isinstance(each, PreTrainedModel))


def use_row_attention(
    causal_lm: Any,
    attention: Attention = "dense",
    *,
    row_sharing: str | None,
    device: str = "cpu",
    joining: bool = False,
) -> None:
    """Let a Hugging Face model compute rows of several samples as if each were alone.

    Args:
        causal_lm: The model on the CPU, in evaluation mode.
        attention: `training.attention`.
        row_sharing: What puts several samples into one row, as `AttentionLayers.refuse_sharing` takes it.
        device: Where it will be trained.
        joining: Whether `auto` is one that joins rows.

    Raises:
        ConfigError: The model has layers that cannot be kept from seeing what they should not see, or that the
            attention is not for.
    """
    layers = AttentionLayers.of(causal_lm.config)
    layers.refuse_sharing(row_sharing)
    automatic = attention == "auto"
    by_length: JoinedAttention = "cudnn" if device == "cuda" and varlen.cudnn_preferred() else "varlen"
    if automatic and joining:
        attention = by_length
    if attention in JOINING:
        layers.refuse_joining(attention, automatic=automatic)
    if attention in ("varlen", "cudnn"):
        use_joined_attention(causal_lm, attention)
        calls = probe_attention(causal_lm.base_model, layers, sharing=row_sharing is not None)
        if automatic and device == "cuda" and _fastest(causal_lm, calls) == "flex":
            use_joined_attention(causal_lm, "flex")
        return
    use_dense_attention(causal_lm)
    if layers.by_sample:
        begin_states_anew(causal_lm, layers.states)
    calls = probe_attention(causal_lm.base_model, layers, sharing=row_sharing is not None)
    if attention == "auto" and device == "cuda" and not layers.recurrent and not sees_images(causal_lm.config):
        attention = _fastest(causal_lm, calls)
    if attention in ("varlen", "flex"):
        use_joined_attention(causal_lm, by_length if attention == "varlen" else "flex")


def _fastest(causal_lm: Any, calls: list[tuple[int, Scores]]) -> Attention:
    """Return the attention on GPUs that computes all layers as they ask."""
    half = causal_lm.dtype in (torch.bfloat16, torch.float16)
    if not half or not calls or getattr(causal_lm.config.get_text_config(), "attention_dropout", False):
        return "dense"
    widths = all(width <= varlen.MAX_FLASH_WIDTH and width % 8 == 0 for width, _ in calls)
    if widths and not any(scores.changed for _, scores in calls):
        return "varlen"
    return "flex" if find_spec("triton") is not None else "dense"


@torch.no_grad()
def probe_attention(backbone: Any, layers: AttentionLayers, *, sharing: bool = True) -> list[tuple[int, Scores]]:
    """Run three rows of four tokens; return what the attention layers asked for (`RowSegments.calls`).

        tokens     4 1 2 3    4 0 2 3    4 2 3 3
        segments   0 1 2 2    0 1 2 2    0 1 1 1
        positions  0 1 1 2    0 1 1 2    0 1 2 3

    The first two differ in a token that their third and fourth do not see. These two are the second and the third of
    the last row, where they stand beside no other sample. (Token 0 may be padding, whose embedding is 0.)

    Args:
        backbone: Without its output layer, with attention that calls back.
        sharing: Whether samples will share rows; where each has one of its own, its place is what the model counts.

    Raises:
        ConfigError: They saw it, or were computed for another place; a layer adds a bias of its own to the scores; or
            layers with a sliding window are not told apart from others.
    """
    tokens_BL = torch.tensor([[4, 1, 2, 3], [4, 0, 2, 3], [4, 2, 3, 3]])
    mixes = bool(layers.recurrent) and not layers.by_sample
    alone = ([0, 1, 1, 1], [0, 1, 2, 3])
    shared = alone if mixes else ([0, 1, 2, 2], [0, 1, 1, 2])
    segments_BL, positions_BL = (torch.tensor([row, row, whole]) for row, whole in zip(shared, alone, strict=True))
    calls: list[tuple[int, Scores]] = []
    segments = RowSegments(segments_BL, positions_BL, calls=calls)
    kind = type(backbone).__name__
    try:
        with layer_by_layer(backbone):
            hidden_ND = run_backbone(backbone, tokens_BL, segments, torch.arange(12)).float()
    except ConfigError:
        raise
    except _UNLIKE_ITS_FORWARD as error:  # it takes no further arguments, or no mask of this shape or kind
        raise ConfigError(
            f"{kind} (model_type {backbone.config.model_type}) cannot be given rows of samples with their own mask and "
            f"positions: {type(error).__name__}: {error}",
            fix=_OTHER_MODEL,
        ) from error
    if not mixes:
        seen, place = (
            float((hidden_ND[2:4] - other).abs().max() / hidden_ND.abs().max())
            for other in (hidden_ND[6:8], hidden_ND[9:11])
        )
        rounding = _ROUNDING.get(backbone.dtype, _COARSE_ROUNDING)
        if seen > rounding:
            raise ConfigError(
                f"{kind} lets a sample see other samples of its row: changing one moved another's hidden states by "
                f"{seen:.0%}",
                fix=_OTHER_MODEL,
            )
        if place > rounding and sharing:
            raise ConfigError(
                f"{kind} does not compute tokens for the positions that it is given: beside another sample of its row "
                f"a sample's hidden states were off by {place:.0%}",
                fix=_OTHER_MODEL,
            )
    windows = [scores.window for _, scores in calls if scores.window is not None]
    if len(windows) != layers.windows or set(windows) - {layers.window}:
        raise ConfigError(
            f"{len(windows)} attention layers of {kind} asked for a sliding window, and config.json has "
            f"{layers.windows}, of {layers.window} tokens",
            fix=_OTHER_MODEL,
        )
    return calls
