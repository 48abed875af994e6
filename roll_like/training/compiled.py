"""`training.compile`: the model's layers through torch.compile, which fuses what lies between their matrix products.

Each layer is compiled by itself, so that one compilation serves all layers of a kind, and rows of any length after the
first. Attention stays as it is, between two compiled parts: its kernels are made for it, and what rows see is Python.
What wraps layers from outside goes on to work on their calls: gradient checkpointing, FSDP2's gathering, adapters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from roll_like.models.vision import language_model
from roll_like.training.recurrent import state_mixers

#: Variants of a function that a process may have: with and without gradients, with and without a window, in two modes.
MAX_VARIANTS = 64


def compile_layers(model: Any, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile each layer of a Hugging Face model on its first call; return how many layers there are.

    Args:
        model: The model with its attention, its adapters and its checkpointing; of one that sees images, what sees
            tokens.
    """
    from transformers import AttentionInterface
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = language_model(model)
    # Dynamo looks at every attribute of what it is given
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    name = model.config.get_text_config()._attn_implementation
    attention = AttentionInterface()[name]
    AttentionInterface.register(name, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    layers: list[Any] = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    for _, mixer in state_mixers(model):  # which samples it begins anew for is Python too
        mixer.forward = torch.compiler.disable(mixer.forward)  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
    return len(layers)
