"""What two ranks of vLLM tell of layers that they divide: the fingerprint of a checkpoint's tensor, or nothing."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from torch import Tensor, nn

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SEED, WIDTH = 3, 64


def tell(rank: int, ranks: int, address: Any) -> dict[str, tuple[str | None, str]]:
    """Load each kind of layer; return what is told of its weight, and the fingerprint of what was loaded."""
    warnings.simplefilter("ignore")
    os.environ["VLLM_DIST_IDENT"] = str(address[1])  # names the memory that ranks share
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
    from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader

    from roll_like.inference.vllm.places import LayerPlace
    from roll_like.inference.vllm.worker_extension import _held_numbers
    from roll_like.inference.weight_transfer.fingerprint import digest, fingerprint

    found = {}
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(ranks, rank, f"tcp://{address[0]}:{address[1]}", rank, backend="gloo")
        initialize_model_parallel(ranks)
        random = torch.Generator().manual_seed(0)

        def told(name: str, layer: Any, given: Tensor, leaf: str = "weight") -> None:
            parameter = getattr(layer, leaf)
            parameter.weight_loader(parameter, given)
            if leaf == "weight":
                layer._cpu_skip_gemm_dispatch = True  # the weight stays where it is, as on a GPU
                layer.quant_method.process_weights_after_loading(layer)
            place = LayerPlace(layer, leaf, None, None)
            numbers = _held_numbers(place, f"{name}.{leaf}", SEED, {})
            found[name] = (None if numbers is None else digest(numbers), fingerprint(given, SEED))

        def matrix(rows: int) -> Tensor:
            return torch.randn(rows, WIDTH, generator=random)

        told("column", linear.ColumnParallelLinear(WIDTH, 32, bias=False), matrix(32))
        told("row", linear.RowParallelLinear(WIDTH, 32, bias=False), matrix(32))
        told("merged", linear.MergedColumnParallelLinear(WIDTH, [32, 16], bias=False), matrix(48))
        told("router", linear.ReplicatedLinear(WIDTH, 8, bias=False), matrix(8))
        mamba = linear.ColumnParallelLinear(WIDTH, 48, bias=False)
        loader = mamba_v2_sharded_weight_loader([(32, 0, False), (16, 8, True)], ranks, rank)
        mamba.weight.weight_loader = loader
        told("mamba with one group", mamba, matrix(40))
        mixer: Any = nn.Module()  # of Mamba 1, whose loader is not known
        mixer.D = nn.Parameter(torch.empty(8))
        mixer.D.weight_loader = lambda held, given: held.data.copy_(given.chunk(ranks)[rank])
        told("mamba 1", mixer, torch.randn(16, generator=random), leaf="D")
        mixer.D.weight_loader = sharded_weight_loader(0)
        told("mamba 2", mixer, torch.randn(16, generator=random), leaf="D")
    return found


def test_two_ranks_tell_what_a_checkpoint_has_or_nothing() -> None:
    for found in on_ranks(tell):
        for name, (told, given) in found.items():
            assert told == (None if name in ("mamba with one group", "mamba 1") else given), name
