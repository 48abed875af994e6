"""Ranks that divide a vocabulary as threads of one process: collectives in microseconds."""

from __future__ import annotations

from collections.abc import Callable
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
        self.barrier.wait(20)
        found = [each.clone() for each in self.boxes]
        assert len({(each.shape, each.dtype) for each in found}) == 1, "ranks tell figures of different shapes"
        self.barrier.wait(20)
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
