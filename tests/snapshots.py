"""The whole weights of ranks, by the way that weights take to inference engines."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank

Weights = dict[str, npt.NDArray[np.float32]]


class SnapshotSender:
    """Stands in for a weight transfer and its sender: what is sent comes back as the report."""

    def connect(self, rank: TrainingRank, _number: int) -> SnapshotSender:
        self.rank = rank
        return self

    def send(self, _salt: int) -> Weights:
        weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in self.rank.full_weights()}
        return weights if self.rank.rank == 0 else {}

    def close(self) -> None:
        """Nothing is open."""


def snapshot(engine: TrainingEngine[Any]) -> Weights:
    """Return every parameter of an engine, whole, in float32."""
    engine.cluster.everywhere(TrainingRank.connect_weights, cast(Any, SnapshotSender()))
    return cast(Weights, engine.cluster.everywhere(TrainingRank.send_weights, 0)[0])
