"""A training engine without processes, for objectives of classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll_like.training.interface import RankModel, Update
from roll_like.training.layout import Layout, MicroBatch
from roll_like.values import merge, reduce


class PlainEngine:
    """Runs an objective on one classifier, with the layout of any number of ranks."""

    def __init__(self, objective: Any, module: torch.nn.Module, layout: Layout) -> None:
        self.layout = layout
        self._objective = objective
        self._model = RankModel(module=module, forward=module, device=torch.device("cpu"))

    def forward(self, shards: Sequence[Sequence[MicroBatch]]) -> list[list[Any]]:
        with torch.no_grad():
            return [[self._objective.forward(self._model, batch) for batch in own] for own in shards]

    def loss(self, update: Update[MicroBatch]) -> tuple[torch.Tensor, dict[str, float]]:
        found = [self._objective.loss(self._model, batch, update.shared) for own in update.shards for batch in own]
        return torch.stack([value for value, _ in found]).sum(), reduce(merge(metrics for _, metrics in found))
