"""The critic's loss (squared error, clipped) and the explained variance of its values."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from roll_like.types import FloatArray


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return the loss of each value, and whether it was clipped, shape [N] each.

    0.5·max((V − R)², (clip(V, V_old − c, V_old + c) − R)²): a value that has moved towards its target by more than c
    since the start of the step has no gradient (the implementation of Schulman et al. 2017; Engstrom et al. 2020,
    arXiv:2005.12729).

    Args:
        values_N: With gradient.
        old_values_N: Before the step.
        returns_N: Targets.
        clip: c; None clips nothing.
    """
    losses_N = (values_N - returns_N).square()
    if clip is None:
        return 0.5 * losses_N, torch.zeros_like(losses_N, dtype=torch.bool)
    bounded_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    bounded_losses_N = (bounded_N - returns_N).square()
    return 0.5 * torch.maximum(losses_N, bounded_losses_N), (bounded_losses_N > losses_N).detach()


def explained_variance(values: FloatArray, returns: FloatArray) -> float:
    """Return 1 − Var(R − V)/Var(R): 1 if values predict returns exactly, 0 if they are no better than a constant.

    NaN if the returns do not vary.

    >>> explained_variance(np.array([1, 2, 3], np.float32), np.array([1, 2, 3], np.float32))
    1.0
    """
    spread = float(np.var(returns, dtype=np.float64))
    if spread == 0:
        return math.nan
    return 1 - float(np.var(returns.astype(np.float64) - values)) / spread
