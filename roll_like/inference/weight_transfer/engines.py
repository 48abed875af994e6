"""The inference cluster, as the driver and the sending trainer rank reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll_like.cluster import ClusterHandle
from roll_like.inference.interface import Fingerprints
from roll_like.inference.worker import InferenceWorker


class ActorEngines:
    """Both ends of a sync call the engines through this; it travels to the trainer's rank 0.

    Args:
        cluster: The engines' actors.
    """

    def __init__(self, cluster: ClusterHandle[InferenceWorker]) -> None:
        self._cluster = cluster

    def __len__(self) -> int:
        return len(self._cluster)

    def init_weight_transfer(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Let every engine meet the trainer, each with its own information."""
        self._cluster.scatter(InferenceWorker.init_weight_transfer, infos)

    def start_weight_update(self) -> None:
        """Freeze generation and get ready."""
        self._cluster.everywhere(InferenceWorker.start_weight_update)

    def update_weights(self, info: Mapping[str, Any]) -> None:
        """Let every engine load the same bucket."""
        self._cluster.everywhere(InferenceWorker.update_weights, info)

    def finish_weight_update(self, version: int) -> None:
        """Switch to the new weights."""
        self._cluster.everywhere(InferenceWorker.finish_weight_update, version)

    def fingerprints(self, names: Sequence[str], salt: int) -> Sequence[Fingerprints]:
        """Return each engine's fingerprints."""
        return self._cluster.everywhere(InferenceWorker.fingerprints, names, salt)

    def resume(self) -> None:
        """Go on generating."""
        self._cluster.everywhere(InferenceWorker.resume)
