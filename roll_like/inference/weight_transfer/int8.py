"""8-bit weights, the same numbers wherever they are computed: engines quantise what they get, and trainers compare.

A row of a matrix has one scale: its largest absolute value is 127 steps. Numbers are rounded to the nearest step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll_like.inference.weight_transfer.fingerprint import checked_columns, digest

#: The largest whole number, on both sides of 0.
MOST = 127


def quantise_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a matrix in steps, int8, and the size of each row's step, float32, shape [O, 1].

    >>> quantise_rows(torch.tensor([[1.27, -0.5], [0.0, 0.0]]))
    (tensor([[127, -50],
            [  0,   0]], dtype=torch.int8), tensor([[0.0100],
            [1.0000]]))
    """
    plain = weight_OI.float()
    scale = plain.abs().amax(1, keepdim=True) / MOST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (plain / scale).round_().clamp_(-MOST, MOST).to(torch.int8), scale


def int8_fingerprint(weight_OI: Tensor, seed: int) -> str:
    """Return the fingerprint of a matrix in 8 bits: of some columns in steps, and of all scales."""
    quantised, scale = quantise_rows(weight_OI.detach())
    columns = quantised[:, checked_columns(weight_OI.shape[1], seed).to(weight_OI.device)]
    return digest(torch.cat([columns.float(), scale], 1))
