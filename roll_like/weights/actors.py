"""The engines as Ray actors: seen from trainer rank 0, and from the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_like.cluster import Cluster
from roll_like.errors import RollLikeError, WeightSyncError
from roll_like.inference.base import Fingerprints
from roll_like.inference.worker import InferenceWorker


class ActorClient:
    """`EngineClient` over actor handles; travels to the trainer.

    Args:
        handles: Actors that host an `InferenceWorker`, by rank.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = list(handles)

    def __len__(self) -> int:
        return len(self._handles)

    def init_weight_transfer(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Let every engine meet the trainer."""
        _wait([handle.init_weight_transfer.remote(info) for handle, info in zip(self._handles, infos, strict=True)])

    def update_weights(self, info: Mapping[str, Any]) -> None:
        """Let every engine load a bucket."""
        _wait([handle.update_weights.remote(info) for handle in self._handles])


class ClusterEngines:
    """`Engines` over the driver's cluster."""

    def __init__(self, cluster: Cluster[InferenceWorker]) -> None:
        self._cluster = cluster

    def start_weight_update(self) -> None:
        """Freeze generation and get ready."""
        self._cluster.everywhere(InferenceWorker.start_weight_update)

    def finish_weight_update(self, version: int) -> None:
        """Switch to the new weights."""
        self._cluster.everywhere(InferenceWorker.finish_weight_update, version)

    def fingerprints(self, names: Sequence[str], salt: int) -> Sequence[Fingerprints]:
        """Return each engine's fingerprints."""
        held: Any = self._cluster.everywhere(InferenceWorker.fingerprints, names, salt)
        return list(held)

    def resume(self) -> None:
        """Go on generating."""
        self._cluster.everywhere(InferenceWorker.resume)


def _wait(refs: Sequence[Any]) -> None:
    try:
        ray.get(list(refs))
    except RayTaskError as error:
        if isinstance(error.cause, RollLikeError):
            raise error.cause from None
        raise WeightSyncError(f"an inference engine failed while it took weights: {error}") from None
    except RayActorError as error:
        raise WeightSyncError(f"an inference engine's process is gone: {error}") from None
