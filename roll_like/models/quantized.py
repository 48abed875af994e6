"""Frozen linear layers with 4-bit weights (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), by bitsandbytes.

Each block of 64 weights has a scale, and scales are 8-bit numbers (double quantisation): 4.13 bits a weight. A layer
computes with weights that it dequantises for each pass, in the precision that they had.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from roll_like.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

#: Scales that share one scale of their own.
_SCALES = 256


def require_bitsandbytes(section: str) -> None:
    """Raise a ConfigError where bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{section}.lora.quantization needs the package bitsandbytes, which is not installed",
            fix="run `pip install 'roll-like[qlora]'`, or remove the key",
        )


@contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """Keep bitsandbytes from warning, when it is imported, of a kernel for inference on CPUs that is not used here.

    peft imports it wherever it is installed.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def quantize(causal_lm: Any, names: Sequence[str], kind: str, section: str = "training") -> None:
    """Give layers frozen 4-bit weights, in place, one after the other.

    The same weights give the same bits: it is always done on the CPU, and does not depend on the number of threads.

    Args:
        causal_lm: A model on the CPU, perhaps with parameters that are still in the files (`models.unread`); afterwards
            none is.
        names: Of linear layers without adapters.
        kind: `nf4` or `fp4`.
        section: Of the model, for messages.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    require_bitsandbytes(section)
    from roll_like.models.unread import materialise

    for name in names:
        layer = causal_lm.get_submodule(name)
        for parameter in layer.parameters():
            materialise(parameter)
        causal_lm.set_submodule(name, _quantized(layer, kind))
    for parameter in causal_lm.parameters():
        materialise(parameter)
    causal_lm.is_loaded_in_4bit = True  # what peft chooses its layers by


def _quantized(layer: nn.Linear, kind: str) -> nn.Module:
    import torch

    with quiet_bitsandbytes():
        from bitsandbytes.functional import quantize_4bit, quantize_blockwise
        from bitsandbytes.nn import Linear4bit, Params4bit

    packed, state = quantize_4bit(layer.weight.detach(), quant_type=kind)
    # as quantize_4bit would, with `compress_statistics`; but torch's mean depends on the number of threads
    state.offset = torch.tensor(state.absmax.numpy().mean(dtype="float64"), dtype=torch.float32)
    state.absmax, state.state2 = quantize_blockwise(state.absmax - state.offset, blocksize=_SCALES)
    state.nested = True
    made: Any = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        compute_dtype=layer.weight.dtype,
        quant_type=kind,
        device="meta",
    )
    made.weight = Params4bit(packed, quant_state=state, quant_type=kind, bnb_quantized=True, module=made)
    made.quant_state = state
    made.bias = layer.bias
    # without gradients it would round weights and inputs to bfloat16, for a faster kernel
    made.support_avx512bf16_for_cpu = False
    return cast("nn.Module", made.train(layer.training))


def shape_and_dtype(parameter: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the precision of a parameter, or of what 4 bits stand for."""
    state = getattr(parameter, "quant_state", None)
    described = parameter if state is None else state
    return tuple(described.shape), described.dtype


def dequantized(parameter: Tensor) -> Tensor:
    """Return what a layer computes with: a quantised parameter in its former shape and precision, others as is."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(parameter.data, state)
    return weight


def scales(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that quantised parameters need and that are no parameters themselves."""
    for parameter in module.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
