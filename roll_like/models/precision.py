"""What `model.dtype: auto` means on the hardware of a run."""

from __future__ import annotations

import datetime
import time
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from roll_like.config.model import Precision
from roll_like.config.run import RunConfig

if TYPE_CHECKING:
    import torch

RunConfigT = TypeVar("RunConfigT", bound=RunConfig)

#: Rows, inputs and outputs of the measured product: a decoding step of many sequences, a layer of a small model.
_SHAPE = (256, 576, 1536)
#: How often it is measured: at least, and for how long. Seconds.
_REPEATS, _SECONDS = 2, 0.25
#: bfloat16 takes half the memory, so it is taken where it is about as fast.
_FAST_ENOUGH = 0.9


@lru_cache(maxsize=1)
def bfloat16_speed() -> float:
    """Return how many times as fast as in float32 this CPU computes a linear layer and its gradients in bfloat16.

    Measured, in a quarter of a second (one, where it is slow): flags do not say it. CPUs with AVX-512 but without its
    bfloat16 take two to five times as long as in float32, those with AVX2 alone up to fifty times (the gradients),
    others half as long. By turns and on one thread, and the best of each counts, so that what else runs on the machine
    does not.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = dict.fromkeys((torch.float32, torch.bfloat16), float("inf"))
        until, repeats = time.monotonic() + _SECONDS, 0
        while repeats < _REPEATS or time.monotonic() < until:
            repeats += 1
            for dtype in best:
                best[dtype] = min(best[dtype], _seconds(dtype))
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]


def _seconds(dtype: torch.dtype) -> float:
    import torch

    rows, inputs, outputs = _SHAPE
    hidden_BD = torch.ones(rows, inputs, dtype=dtype, requires_grad=True)
    weight_FD = torch.ones(outputs, inputs, dtype=dtype, requires_grad=True)
    began = time.perf_counter()
    out_BF = torch.nn.functional.linear(hidden_BD, weight_FD)
    torch.autograd.backward(out_BF, out_BF.detach())
    return time.perf_counter() - began


def slow_bfloat16() -> bool:
    """Return whether this CPU computes slower in bfloat16 than in float32."""
    return bfloat16_speed() < _FAST_ENOUGH


def precision_of(config: RunConfig) -> Precision:
    """Return the precision of a run's forward passes."""
    dtype = config.model.dtype
    if dtype != "auto":
        return dtype
    return "bfloat16" if config.resources.device == "cuda" or not slow_bfloat16() else "float32"


def settled(config: RunConfigT) -> RunConfigT:
    """Return the configuration with the precision that it has here, instead of `auto`, and with today's date."""
    values = {"dtype": precision_of(config), "date": config.model.date or datetime.date.today()}
    return config.model_copy(update={"model": config.model.model_copy(update=values)})


def auto_precision(config: RunConfig) -> str | None:
    """Return what `auto` chose on a CPU and why, as one line of a plan; None where there was nothing to measure."""
    if config.model.dtype != "auto" or config.resources.device == "cuda":
        return None
    return (
        f"model.dtype: auto is {precision_of(config)} here: bfloat16 measured {bfloat16_speed():.2g} times as fast as "
        "float32"
    )
