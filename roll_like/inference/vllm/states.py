"""Parameters of layers with a state in vLLM, as a weight sync compares them: decay rates and short convolutions.

Of Mamba 2, checkpoints have `A_log`, and vLLM holds −exp(A_log). Rounding hides which A_log that was made of, so the
loader remembers what it was given, and the check computes anew what has to be held.

Weights of convolutions are held up to three times: packed for a kernel on CPUs with bfloat16 instructions, as they were
before packing, and as a view that Mamba 2 computes with. After packing the view is of other memory, which a reload
leaves as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm._custom_ops import causal_conv1d_weight_pack
from vllm.model_executor.layers.mamba import mamba_mixer2

#: vLLM's attributes: of a convolution, and of a Mamba 2 layer.
_UNPACKED, _VIEW = "_cpu_unpacked_conv_weight", "conv_weights"


class ChangedOnLoad:
    """Loads a parameter and changes it, as what vLLM's `composed_weight_loader` returns does.

    Args:
        load: Copies (a rank's share of) a checkpoint's tensor into a parameter.
    """

    #: vLLM looks at the name of loaders.
    __name__: ClassVar[str] = "changed_on_load"

    def __init__(self, load: Callable[[Tensor, Tensor], None], change: Callable[[Tensor], Tensor]) -> None:
        self._load = load
        self._change = change
        self._given: Tensor | None = None

    def __call__(self, param: Tensor, loaded_weight: Tensor) -> None:
        """Load; both names are vLLM's."""
        self._given = loaded_weight.detach().clone()  # it may be a view of memory that is about to be reused
        self._load(param, loaded_weight)
        param.data.copy_(self._change(param))

    def numbers(self, held: Tensor) -> Tensor | None:
        """Return what was given, if that is what a parameter is held of, else the latter."""
        if self._given is None:
            return None
        expected = torch.empty_like(held)
        self(expected, self._given)
        return self._given if torch.equal(expected, held) else held


def remember_decay_rates() -> None:
    """Let layers that are made in this process from now on remember the decay rates that they were given."""
    mamba_mixer2.composed_weight_loader = ChangedOnLoad


def convolves(layer: Any) -> bool:
    """Return whether a layer holds a short convolution, which is no matrix to multiply."""
    weight = getattr(layer, "weight", None)
    return getattr(layer, _UNPACKED, None) is not None or (isinstance(weight, Tensor) and weight.ndim > 2)


def convolution(layer: Any, mixer: Any) -> Tensor | None:
    """Return the weight of a short convolution as it is computed with, shape [D, 1, K]; None where ranks divide it.

    Args:
        mixer: The layer that it is a part of.
    """
    if layer.tp_size > 1:
        return None
    viewed: Tensor | None = getattr(mixer, _VIEW, None)
    if viewed is not None:
        return viewed[:, None]
    unpacked: Tensor | None = getattr(layer, _UNPACKED, None)
    weight: Tensor = layer.weight
    if unpacked is None or not torch.equal(causal_conv1d_weight_pack(unpacked), weight):
        return weight
    return unpacked[:, None]


def renew_convolutions(model: nn.Module) -> None:
    """Let Mamba 2 layers compute with the weights of a reload, where the packed ones are of other memory."""
    for mixer in model.modules():
        unpacked = getattr(getattr(mixer, "conv1d", None), _UNPACKED, None)
        if unpacked is not None and hasattr(mixer, _VIEW):
            getattr(mixer, _VIEW).copy_(unpacked)
