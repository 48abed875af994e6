"""Weights from the trainer's ranks to the engines, some of which may die meanwhile or be new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from roll_like.cluster.worker_restarts import WorkerDied
from roll_like.inference.interface import EngineDied
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.rollout.engine_pool import EnginePool, ReplicaState


class WeightDelivery:
    """Sends what the ranks have at the moment.

    Args:
        sync: The way, with its check.
        engines: The engines.
    """

    def __init__(self, sync: WeightSync, engines: EnginePool) -> None:
        self._sync = sync
        self._engines = engines

    def send(self) -> None:
        """Send to all engines. One that dies meanwhile is replaced, and the others get the weights once more.

        Raises:
            WorkerDied: A rank of the trainer died.
            WeightSyncError: An engine has other numbers than were sent.
            ReplicaLost: No engine is left.
        """
        while True:
            if not self._engines.reachable():
                self._engines.wait_for_one()
            with self._engines.addressing(ReplicaState.SERVING, ReplicaState.STALE):
                try:
                    self._sync.push()
                except (WorkerDied, EngineDied) as error:
                    self._engines.replace_dead(error)
                else:
                    self._engines.synced()
                    return

    @contextmanager
    def to_stale(self) -> Iterator[Callable[[], None] | None]:
        """Yield what sends to engines that were replaced alone; None where there are none."""
        with self._engines.addressing(ReplicaState.STALE) as any_stale:
            yield self._send_again if any_stale else None

    def _send_again(self) -> None:
        try:
            self._sync.push(again=True)
        except (WorkerDied, EngineDied) as error:
            self._engines.replace_dead(error)
        else:
            self._engines.synced()
