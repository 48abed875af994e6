"""Megatron-Core on ranks without a GPU: what it asks of CUDA, answered by the CPU.

Megatron-Core names CUDA in nearly every module: the device of its buffers, streams, random states. In a rank's process
on a CPU those questions have the CPU's answers from `install` on. Its own computations stay as they are.
"""

from __future__ import annotations

import logging
import os
import sys
import types
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import functorch.compile  # noqa: F401 - what asks for triton by itself has to find that it is not there
import torch
import torch._dynamo  # before functions of torch.cuda are replaced: its tables do not take one function twice
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A stream, an event or a context of a device on which everything happens at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_: Any, **__: Any) -> _Nothing:
    return _Nothing()


class OnCPU(TorchFunctionMode):
    """Takes `device="cuda"` for the CPU; `tensor.type()` is torch.cuda.FloatTensor, by which optimizers sort."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and "cuda" in str(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class _Kernels(types.ModuleType):
    """In the place of triton, which Megatron-Core imports without asking: kernels can be defined, not run."""

    __version__ = "3.7.1"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _defined if name in ("jit", "autotune", "heuristics") else _Nothing


def _defined(*args: Any, **_: Any) -> Any:
    return args[0] if args and callable(args[0]) else lambda kernel: kernel


@cache
def install() -> None:
    """Answer for CUDA in this process from now on; before anything of Megatron-Core is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron-Core compiles parts of its layers: here that takes minutes
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    if find_spec("triton") is None:
        triton: Any = _Kernels("triton")
        triton.language = _Kernels("triton.language")
        sys.modules.update({"triton": triton, "triton.language": triton.language})
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = _nothing
    cuda.stream = lambda _: nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    with OnCPU():
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import token_dispatcher
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # counts of an all-to-all become lists only where they come from a GPU
    token_dispatcher.maybe_move_tensor_to_cpu = _counts


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
