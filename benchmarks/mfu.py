"""Measures the machine's rate of matrix products: with model FLOPs (`roll_like/models/flops.py`), utilisation (MFU).

Both sides of a comparison are divided by the same rate. A side that computes more than it needs to has a lower MFU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import Peer, serve
from torch import Tensor
from torch.nn import functional

from roll_like.models.shape import load_model_shape

#: Name of the matrix products among the sides of a comparison, and what one turn of theirs takes the seconds of.
PRODUCTS = "10^9 FLOPs of matrix products"
#: Layers whose matrices are multiplied: more than caches hold, less than fills the memory beside a large model.
_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Which matrix products are timed: those of a model's linear layers.

    Attributes:
        model: Directory of the model; its layers are taken to have gated MLPs.
        dtype: Precision.
        device: `cpu` or `cuda`.
        rows: Tokens of one product.
        targets: Tokens of one product of the output layer.
        backward: Whether the gradients' products are timed too.
        seconds: How long a measurement takes at least.
    """

    model: str
    dtype: str
    device: str
    rows: int
    targets: int
    backward: bool
    seconds: float = 1.0


class ProductTimer:
    """Times matrix products.

    Args:
        products: Which.
    """

    def __init__(self, products: Products) -> None:
        shape = load_model_shape(Path(products.model))
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        hidden, mlp = shape.hidden_size, shape.intermediate_size
        layer = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        layer += [(hidden, mlp), (hidden, mlp), (mlp, hidden)]
        kept = min(shape.layers, _LAYERS)
        self._products = products
        #: Each with how many times the model has it.
        self._parts = [
            (shape.layers / kept, [self._operands(products.rows, sizes) for _ in range(kept) for sizes in layer]),
            (1.0, [self._operands(products.targets, (hidden, shape.vocab_size))]),
        ]

    def seconds_per_flop(self) -> float:
        """Multiply for a while; return the seconds of a floating-point operation, layers weighted as in the model."""
        flops = seconds = elapsed = 0.0
        while elapsed < self._products.seconds:
            for times, operands in self._parts:
                took = self._multiply(operands)
                elapsed += took
                seconds += times * took
                flops += times * self._flops(operands)
        return seconds / flops

    def _operands(self, rows: int, sizes: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        inputs, outputs = sizes
        options: dict[str, Any] = {"dtype": getattr(torch, self._products.dtype), "device": self._products.device}
        return (
            torch.randn(rows, inputs, **options),
            torch.randn(outputs, inputs, **options),
            torch.randn(rows, outputs, **options),
        )

    def _flops(self, operands: Sequence[tuple[Tensor, Tensor, Tensor]]) -> int:
        forward = sum(2 * len(inputs) * weights.numel() for inputs, weights, _ in operands)
        return forward * (3 if self._products.backward else 1)

    @torch.inference_mode()
    def _multiply(self, operands: Sequence[tuple[Tensor, Tensor, Tensor]]) -> float:
        self._synchronize()
        began = time.perf_counter()
        for inputs, weights, gradients in operands:
            functional.linear(inputs, weights)
            if self._products.backward:
                gradients @ weights
                gradients.T @ inputs
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._products.device == "cuda":
            torch.cuda.synchronize()


def matrix_products(products: Products, environment: Mapping[str, str]) -> Peer:
    """Start a process that times matrix products, in turns with the sides of a comparison.

    Each call returns the seconds of 10^9 floating-point operations.

    Args:
        products: Which.
        environment: Of the process, as the sides have it.
    """
    return Peer(Path(__file__), [json.dumps(asdict(products))], environment)


def utilisation(rates: Mapping[str, float], matmul: float) -> dict[str, float]:
    """Return what is printed: the matrix products' GFLOP/s, and GFLOP/s and MFU of each side.

    Args:
        rates: Name of a side → model FLOPs a second.
        matmul: Measured FLOPs a second of matrix products.
    """
    figures = {"matmul_gflops_per_second": matmul / 1e9}
    for name, rate in rates.items():
        figures |= {f"{name}_gflops_per_second": rate / 1e9, f"{name}_mfu": rate / matmul}
    return figures


if __name__ == "__main__":
    timer = ProductTimer(Products(**json.loads(sys.argv[4])))
    serve(int(sys.argv[2]), int(sys.argv[3]), lambda message: timer.seconds_per_flop() * 1e9)
