"""Sequence parallelism: ranks that share the rows of a micro-batch, each with its share of the tokens.

All of a layer but attention computes each token by itself. Before attention the ranks of a group exchange tokens for
heads, and after it heads for tokens (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509), so attention sees whole
rows and every kind of mask stands:

    tokens T/S, heads H   →   tokens T, heads H/S   →   tokens T/S, heads H

What heads of the model make of the hidden states before targets is computed where the states are, and then told to all
ranks of the group: losses see whole sequences, and each rank's gradient is that of its own tokens, to be added up over
all ranks like those of different micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll_like.training.backend import COLLECTIVE_TIMEOUT
from roll_like.training.exchange import exchange


@dataclass(frozen=True, eq=False, slots=True)
class SequenceParallel:
    """One rank's place in a group of ranks with the same rows.

    Attributes:
        group: The ranks that share rows.
        rank: This one's place among them.
        size: Their number, S.
    """

    group: ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, size: int) -> SequenceParallel:
        """Divide the ranks of the process group into groups of neighbours; all ranks must call this together."""
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        groups = [
            torch.distributed.new_group(list(range(first, first + size)), timeout=COLLECTIVE_TIMEOUT)
            for first in range(0, world, size)
        ]
        return cls(groups[rank // size], rank % size, size)

    def own(self, tokens: int) -> slice:
        """Return this rank's tokens of T; the last ones may lie beyond T, and all ranks have equally many."""
        share = -(-tokens // self.size)
        return slice(self.rank * share, (self.rank + 1) * share)

    def heads(self, count: int) -> slice:
        """Return this rank's heads."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def to_heads(self, own_THD: Tensor, tokens: int) -> Tensor:
        """Return all tokens of this rank's heads, shape [tokens, H/S, D].

        Args:
            own_THD: This rank's tokens of all heads. Fewer heads than ranks are repeated.
            tokens: T, without those beyond it.
        """
        own, heads, width = own_THD.shape
        if heads < self.size:
            own_THD = own_THD.repeat_interleave(self.size // heads, 1)
        by_rank_STHD = own_THD.reshape(own, self.size, -1, width).transpose(0, 1)
        return exchange(by_rank_STHD, self.group).flatten(0, 1)[:tokens]

    def to_tokens(self, heads_THD: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, shape [T/S rounded up, H, D]; the inverse of `to_heads`."""
        tokens, heads, width = heads_THD.shape
        share = -(-tokens // self.size)
        padded_THD = torch.nn.functional.pad(heads_THD, (0, 0, 0, 0, 0, share * self.size - tokens))
        of_ranks_STHD = exchange(padded_THD.view(self.size, share, heads, width), self.group)
        return of_ranks_STHD.transpose(0, 1).reshape(share, self.size * heads, width)


@dataclass(frozen=True, eq=False, slots=True)
class OwnTargets:
    """Which targets of a micro-batch a rank computes: all, or those of its tokens.

    Attributes:
        parallel: The ranks that share them; None for one rank.
        own_N: Whether each target is this rank's; None where all are.
    """

    parallel: SequenceParallel | None = None
    own_N: Tensor | None = None

    def part(self, figures: Any) -> Any:
        """Return what belongs to this rank's targets: rows of a tensor, or `select` of what has that."""
        if self.own_N is None:
            return figures
        return figures[self.own_N] if isinstance(figures, Tensor) else figures.select(self.own_N)

    def whole(self, found: Any) -> Any:
        """Return what all ranks of the group found, in the order of all targets: tensors [N, …], in tuples or dicts.

        In the backward pass each rank has the gradient of its own targets.
        """
        if self.parallel is None or self.own_N is None:
            return found
        if isinstance(found, dict):
            return {name: self.whole(each) for name, each in found.items()}
        if isinstance(found, tuple):
            return tuple(self.whole(each) for each in found)
        return _Gather.apply(found, self.own_N, self.parallel.group)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Puts what ranks found at their own places together; each place is one rank's."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, own_N: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(own_N)
        whole = found.new_zeros(len(own_N), *found.shape[1:])
        whole[own_N] = found
        torch.distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (own_N,) = ctx.saved_tensors
        return gradient[own_N], None, None
