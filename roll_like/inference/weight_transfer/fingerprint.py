"""Fingerprints of weight tensors: what a sync compares between trainer and inference engine.

A fingerprint hashes some columns of a matrix, number by number, and the whole of a vector. Columns, because an
engine that keeps a matrix packed in a layout of its own can still compute a column, by multiplying it
with a unit vector, and in any precision that gives the column's numbers exactly. So the fingerprint is of
the numbers that the engine computes with, not of a copy beside them. The columns change with the seed:
over a few syncs a difference has nowhere to hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

#: Columns of every matrix that one check looks at.
CHECKED_COLUMNS = 16
#: What waits on a GPU at most until it is copied to host memory together.
_WAITING_BYTES = 32 << 20


@lru_cache(maxsize=64)
def checked_columns(width: int, seed: int) -> Tensor:
    """Return which columns of a matrix with `width` of them are looked at, ascending, shape [C]."""
    if width <= CHECKED_COLUMNS:
        return torch.arange(width)
    chosen = np.random.default_rng([seed, width]).choice(width, CHECKED_COLUMNS, replace=False)
    return torch.from_numpy(np.sort(chosen))


def fingerprint(tensor: Tensor, seed: int) -> str:
    """Return the fingerprint of a whole tensor; more than two dimensions count as [first, rest]."""
    return digest(checked_numbers(tensor, seed))


def checked_numbers(tensor: Tensor, seed: int) -> Tensor:
    """Return what the fingerprint of a whole tensor is of."""
    if tensor.ndim < 2:
        return tensor
    matrix = tensor.detach().flatten(1)
    return matrix[:, _columns_on(matrix.device, matrix.shape[1], seed)]


@lru_cache(maxsize=64)
def _columns_on(device: torch.device, width: int, seed: int) -> Tensor:
    return checked_columns(width, seed).to(device)


def digest(numbers: Tensor) -> str:
    """Return a hash of shape and numbers, whatever precision they are held in; 0 and −0 are the same number.

    Engines hold some vectors in float32 that are sent in bfloat16.

    >>> digest(torch.tensor([0.5, -0.0])) == digest(torch.tensor([0.5, 0.0], dtype=torch.bfloat16))
    True
    """
    return _hash(tuple(numbers.shape), _on_host(_plain(numbers).flatten()))


def _hash(shape: tuple[int, ...], numbers: NDArray[Any]) -> str:
    found = xxhash.xxh3_64(f"{shape} ".encode())
    found.update(numbers.data)
    return found.hexdigest()


def _on_host(flat: Tensor) -> NDArray[Any]:
    numbers: NDArray[Any] = flat.to("cpu").numpy() + 0.0
    return numbers


def _plain(numbers: Tensor) -> Tensor:
    return numbers.detach().to(torch.promote_types(numbers.dtype, torch.float32))


class Digests:
    """Digests of many tensors. Those of a device are copied to host memory together: each copy waits for a GPU."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0

    def add(self, name: str, numbers: Tensor, *, own: bool = False) -> None:
        """Take in a tensor. `own` says that the caller does not write to it again: then it is not copied."""
        held = _plain(numbers)
        self._waiting[name] = held.clone() if not own and held.data_ptr() == numbers.data_ptr() else held
        self._bytes += held.numel() * held.element_size()
        if self._bytes >= _WAITING_BYTES:
            self._take()

    def found(self) -> Mapping[str, str]:
        """Return the digest of every tensor so far, by name."""
        self._take()
        return self._found

    def _take(self) -> None:
        for kind in {(held.dtype, held.device) for held in self._waiting.values()}:
            together = {name: held for name, held in self._waiting.items() if (held.dtype, held.device) == kind}
            flat = _on_host(torch.cat([held.flatten() for held in together.values()]))
            start = 0
            for name, held in together.items():
                self._found[name] = _hash(tuple(held.shape), flat[start : start + held.numel()])
                start += held.numel()
        self._waiting, self._bytes = {}, 0


def checksum(tensor: Tensor) -> str:
    """Return a hash of all bytes of a contiguous tensor in host memory."""
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # hashed in place, not copied
    return xxhash.xxh3_64_hexdigest(data)
