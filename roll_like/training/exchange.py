"""Rows that ranks send each other in a forward pass, and their gradients, which travel back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Counts = Sequence[int] | None


def exchange(rows: Tensor, group: ProcessGroup, sent: Counts = None, came: Counts = None) -> Tensor:
    """Send rows to the ranks of a group, in their order, and return those that came, in their order too.

    Args:
        rows: Shape [N, …].
        group: The ranks; all must call this together.
        sent: How many rows go to each; None: to all equally many.
        came: How many come from each; None: from all equally many.
    """
    exchanged: Tensor = _Exchange.apply(rows, group, sent, came)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, sent: Counts, came: Counts) -> Tensor:
        ctx.group, ctx.sent, ctx.came = group, sent, came
        return _exchanged(rows, group, sent, came)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.group, ctx.came, ctx.sent), None, None, None


def _exchanged(rows: Tensor, group: ProcessGroup, sent: Counts, came: Counts) -> Tensor:
    received = rows.new_empty(len(rows) if came is None else sum(came), *rows.shape[1:])
    torch.distributed.all_to_all_single(received, rows.contiguous(), came, sent, group=group)
    return received
