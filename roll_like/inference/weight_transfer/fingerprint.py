"""Fingerprints of weight tensors: what a sync compares between trainer and inference engine.

A fingerprint hashes some columns of a matrix, number by number, and the whole of a vector. Columns, because an
engine that keeps a matrix packed in a layout of its own can still compute a column, by multiplying it
with a unit vector, and in any precision that gives the column's numbers exactly. So the fingerprint is of
the numbers that the engine computes with, not of a copy beside them. The columns change with the seed:
over a few syncs a difference has nowhere to hide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

#: Columns of every matrix that one check looks at.
CHECKED_COLUMNS = 16


def checked_columns(width: int, seed: int) -> Tensor:
    """Return which columns of a matrix with `width` of them are looked at, ascending, shape [C]."""
    if width <= CHECKED_COLUMNS:
        return torch.arange(width)
    chosen = np.random.default_rng([seed, width]).choice(width, CHECKED_COLUMNS, replace=False)
    return torch.from_numpy(np.sort(chosen))


def fingerprint(tensor: Tensor, seed: int) -> str:
    """Return the fingerprint of a whole tensor; more than two dimensions count as [first, rest]."""
    if tensor.ndim < 2:
        return digest(tensor)
    matrix = tensor.flatten(1)
    return digest(matrix[:, checked_columns(matrix.shape[1], seed).to(matrix.device)])


def digest(numbers: Tensor) -> str:
    """Return a hash of shape and numbers, whatever precision they are held in; 0 and −0 are the same number.

    Engines hold some vectors in float32 that are sent in bfloat16.

    >>> digest(torch.tensor([0.5, -0.0])) == digest(torch.tensor([0.5, 0.0], dtype=torch.bfloat16))
    True
    """
    plain = numbers.detach().to("cpu", torch.promote_types(numbers.dtype, torch.float32)).contiguous() + 0.0
    head = f"{tuple(plain.shape)} "
    return xxhash.xxh3_64_hexdigest(head.encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes())


def checksum(tensor: Tensor) -> str:
    """Return a hash of all bytes of a contiguous tensor in host memory."""
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # hashed in place, not copied
    return xxhash.xxh3_64_hexdigest(data)
