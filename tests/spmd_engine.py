"""A training engine without Ray: each rank's process runs the driver's code too, and all of them do the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import RankSpec
from roll_like.training.rank import TrainingRank


class EveryRank:
    """Ranks as a cluster, in the process of each of them."""

    name = "training"

    def __init__(self, rank: TrainingRank) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return self.rank.world_size

    def everywhere(self, method: Any, *arguments: Any) -> list[Any]:
        return self._of_all(method(self.rank, *arguments))

    def scatter(self, method: Any, shards: Sequence[Any]) -> list[Any]:
        return self._of_all(method(self.rank, shards[self.rank.rank]))

    def _of_all(self, result: Any) -> list[Any]:
        found: list[Any] = [None] * len(self)
        torch.distributed.all_gather_object(found, result)
        return found


def spmd_engine(spec: RankSpec[Any], rank: int, world_size: int, address: tuple[str, int]) -> TrainingEngine[Any]:
    """Start this process's rank (`gloo_ranks.on_ranks`), and return the engine of all."""
    own = TrainingRank(spec, rank, world_size)
    own.start(address)
    cluster: Any = EveryRank(own)
    return TrainingEngine(cluster, spec.objective, joined=own.joins_rows())
