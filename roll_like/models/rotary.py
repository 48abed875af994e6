"""Rotary frequencies that transformers chooses in each forward pass by its longest sequence: LongRoPE.

Phi-3's long versions and Phi-4-mini have two sets of factors: for passes of at most `original_max_position_embeddings`
tokens, and for longer ones. What a sequence is computed with would depend on what else is in its micro-batch. vLLM
chooses once, by its context window (`max_model_len`), and so does everything here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def fix_frequencies(model: nn.Module, window: int) -> None:
    """Let a model compute every sequence with the frequencies of one that fills the window.

    Args:
        window: Longest sequence of the run. Tokens.
    """
    for module in model.modules():
        # PhiMoE's chooses a scale by the length, but no factors
        if _chooses(getattr(module, "rope_type", None)) and not type(module).__name__.startswith("Phimoe"):
            # one more position makes every pass as long as the window
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _lengthened(args, kwargs, window), with_kwargs=True
            )
            module.register_forward_hook(lambda _, __, waves: _shortened(waves))


def _chooses(kind: Any) -> bool:
    """Return whether a `rope_type`, or one of those of several types of layers, depends on lengths."""
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(each == "longrope" for each in kinds)


def _shortened(waves: Any) -> Any:
    """Return what a rotary embedding gives without its last position: cosines and sines, or complex numbers."""
    return waves[..., :-1, :] if not isinstance(waves, tuple) else tuple(wave[..., :-1, :] for wave in waves)


def _lengthened(args: tuple[Any, ...], kwargs: dict[str, Any], window: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a rotary embedding (hidden states and positions) with one more position, the last."""
    import torch

    hidden, *rest = args
    positions: Tensor = rest.pop(0) if rest else kwargs.pop("position_ids")
    last = positions.new_full((*positions.shape[:-1], 1), window - 1)
    return (hidden, torch.cat([positions, last], dim=-1), *rest), kwargs
