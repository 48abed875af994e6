"""Ranks that divide a vocabulary as threads of one process (collectives in microseconds), and what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from roll_like.algorithms.divided import DividedVocabulary

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class ThreadVocabulary(DividedVocabulary):
    """What one thread has of a vocabulary; the others are in `boxes`."""

    barrier: Barrier
    boxes: list[Any]

    def told(self, figures: Tensor) -> list[Tensor]:
        self.boxes[self.group.rank()] = figures.detach().clone()
        self.barrier.wait(120)
        found = [each.clone() for each in self.boxes]
        assert len({(each.shape, each.dtype) for each in found}) == 1, "ranks tell figures of different shapes"
        self.barrier.wait(120)
        return found

    def sum(self, figures: Tensor) -> Tensor:
        return figures.copy_(torch.stack(self.told(figures)).sum(0))


def on_threads(function: Callable[[DividedVocabulary], R], *, ranks: int, vocabulary: int) -> list[R]:
    """Return what a function makes of each rank's part of a vocabulary."""
    barrier, boxes = Barrier(ranks), [None] * ranks

    def call(rank: int) -> R:
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
        plain = DividedVocabulary.of(group, vocabulary)
        try:
            return function(ThreadVocabulary(group, vocabulary, plain.share, barrier, boxes))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(call, range(ranks)))


def compare_with_ranks(
    compute: Callable[[Sequence[Tensor], DividedVocabulary], tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    wanted: tuple[Tensor, Tensor],
    upstream: Tensor,
    *,
    ranks: int,
) -> None:
    """Compare log-probabilities, entropies and their gradients of ranks with those of one with the whole vocabulary.

    Args:
        compute: From a rank's own hidden states, output projection and perhaps bias.
        inputs: The whole ones, of which `wanted` was computed.
        wanted: Log-probabilities and entropies.
        upstream: Their gradients, shape [2, N]; where all of the entropies' are 0 they get none.
        ranks: How many divide the vocabulary.
    """

    def gradients(found: tuple[Tensor, Tensor], of: Sequence[Tensor]) -> Any:
        total = (found[0] * upstream[0]).sum() + ((found[1] * upstream[1]).sum() if upstream[1].any() else 0.0)
        return torch.autograd.grad(total, of)

    def of_rank(divided: DividedVocabulary) -> Any:
        parts = [inputs[0], *(each[divided.own] for each in inputs[1:])]
        own = [each.detach().clone().requires_grad_() for each in parts]
        found = compute(own, divided)
        return found, gradients(found, own)

    wanted_grads = gradients(wanted, inputs)
    results = on_threads(of_rank, ranks=ranks, vocabulary=len(inputs[1]))
    for found, grads in results:
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(grads[0], wanted_grads[0])
        assert torch.equal(found[0], results[0][0][0])  # every rank the same bits
    for place in range(1, len(inputs)):
        torch.testing.assert_close(torch.cat([grads[place] for _, grads in results]), wanted_grads[place])
