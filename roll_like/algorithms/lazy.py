"""Torch, imported when it is first used.

Losses are registered together with their settings, and reading a configuration needs only the settings: with
`from roll_like.algorithms.lazy import torch` a misspelt key is reported in a second, and not after torch was imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()

P = ParamSpec("P")
T = TypeVar("T")


def logsigmoid(values: torch.Tensor) -> torch.Tensor:
    """Return log σ of each value."""
    return torch.nn.functional.logsigmoid(values)


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Compute without gradients, as `torch.no_grad()` does."""

    @wraps(function)
    def compute(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **kwargs)

    return compute


__all__ = ["logsigmoid", "no_grad", "torch"]
