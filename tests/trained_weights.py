"""What a model's ranks hold, read through the seam that hands weights to inference engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roll_like.inference.weight_transfer.interface import SendReport
from roll_like.training.rank import TrainingRank


@dataclass(frozen=True)
class _Reader:
    """A sender that reports the weights themselves."""

    rank: TrainingRank

    def send(self, _seed: int) -> Any:
        # whole parameters are gathered from all ranks, and rank 0 reports them
        weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in self.rank.full_weights()}
        return weights if self.rank.rank == 0 else {}

    def close(self) -> None:
        pass


class _Reading:
    """A weight transfer to a test."""

    in_parts = False

    def connect(self, rank: TrainingRank, _index: int) -> Any:
        return _Reader(rank)


def trained_weights(cluster: Any) -> dict[str, torch.Tensor]:
    """Return every parameter of the ranks of a cluster, whole, in float32."""
    cluster.everywhere(TrainingRank.connect_weights, _Reading())
    found: Any = cluster.everywhere(TrainingRank.send_weights, 0)[0]
    return {name: torch.tensor(array) for name, array in found.items()}


@dataclass(frozen=True)
class _AdapterReader(_Reader):
    """A sender whose report has tensors in the place of fingerprints."""

    def send(self, seed: int) -> Any:
        return SendReport(fingerprints=super().send(seed), bytes=0, buckets=0)


class _ReadingAdapters:
    """A transfer of adapters alone to a test."""

    in_parts = False

    def connect(self, rank: TrainingRank, _index: int) -> Any:
        return _AdapterReader(rank)


def sent_adapters(cluster: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what engines are sent of adapters alone, whole, in float32, and the base's fingerprints with seed 0."""
    cluster.everywhere(TrainingRank.connect_weights, _ReadingAdapters(), True)
    first: Any = cluster.everywhere(TrainingRank.send_weights, 0)[0].fingerprints
    again: Any = cluster.everywhere(TrainingRank.send_weights, 0)[0].fingerprints
    adapters = {name: torch.tensor(array) for name, array in again.items()}
    return adapters, {name: value for name, value in first.items() if name not in again}


def largest_difference(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """Return how far two models' weights are apart at most."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
