"""Weights from the trainer's ranks to the engines, some of which may die meanwhile or be new."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from roll_like.cluster.worker_restarts import WorkerDied
from roll_like.inference.interface import EngineDied
from roll_like.inference.weight_transfer.sync import SyncReport, WeightSync
from roll_like.rollout.engine_pool import EnginePool, ReplicaState
from roll_like.service.snapshots import SnapshotLoad, delete_files, link_files
from roll_like.service.trainer import ModelsTrainer

_log = logging.getLogger(__name__)


class WeightDelivery:
    """Sends weights of models, and knows what engines hold. Its methods are called on the trainer's thread.

    Args:
        directory: For files of what engines hold; it is there.
    """

    def __init__(self, trainer: ModelsTrainer, sync: WeightSync, engines: EnginePool, directory: Path) -> None:
        self._trainer = trainer
        self._sync = sync
        self._engines = engines
        self._named = engines.takes_adapters
        self._directory = directory
        #: Files of what engines hold, by the names that requests have for it. They are there as long as engines need
        #: them: a checkpoint may be deleted or overwritten while its weights are sampled with.
        self._held: dict[str, Path | None] = {}
        self._unwanted: list[str] = []
        self._told_unchecked = False

    def deliver(self, load: SnapshotLoad, *, model: str | None) -> None:
        """Send weights to all engines. One that dies meanwhile is replaced, and the others get them once more.

        Args:
            model: A model that has these weights still; None where they are read from the snapshot's file.

        Raises:
            WorkerDied: A rank of the trainer died.
            WeightSyncError: An engine has other numbers than were sent.
            ReplicaLost: No engine is left.
            RequestError: The weights were deleted.
        """
        name, file = load.name, load.snapshot.file
        load.snapshot.require()
        for each in load.dropped or (() if self._named else (name,)):
            self._forget(each)
        self._unwanted += load.dropped
        # an engine that was replaced needs all adapters; `catch_up` sends them
        addressed = (ReplicaState.SERVING,) if self._named else (ReplicaState.SERVING, ReplicaState.STALE)
        try:
            while True:
                if not self._engines.reachable():
                    self._engines.wait_for_one()
                if self._named:
                    self.catch_up()
                with self._engines.addressing(*addressed) as found:
                    if found and self._pushed(name, file, model):
                        self._engines.synced()
                        break
        except BaseException:
            self._unwanted.append(name)  # some engines may have it
            raise
        self._unwanted.clear()
        self._held[name] = None if file is None else self._directory / name
        if file is not None:
            link_files(file, self._directory / name)

    def _forget(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            delete_files(self._directory / name)

    def catch_up(self) -> None:
        """Send engines that were replaced what the others hold."""
        with self._engines.addressing(ReplicaState.STALE) as any_stale:
            if not any_stale or not (self._held or self._named):
                return  # whole weights that are not known: all engines get the next ones
            if all(self._pushed(name, file, None, again=True) for name, file in self._held.items()):
                self._engines.synced()

    def _pushed(self, name: str, file: Path | None, model: str | None, *, again: bool = False) -> bool:
        """Send to the engines that are addressed; return False where one died, which is replaced."""
        push: Callable[[], SyncReport | None] = partial(self._sync.push, again=again)
        if self._named:
            push = partial(self._sync.push_adapter, name, tuple(self._unwanted))
        died = False

        def send() -> None:
            nonlocal died
            try:
                report = push()
                if report is not None and report.not_read_back is not None and not self._told_unchecked:
                    self._told_unchecked = True
                    _log.warning(report.not_read_back)
            except (WorkerDied, EngineDied) as error:
                self._engines.replace_dead(error)  # raises where it is the trainer that died
                died = True

        self._trainer.push(send, model=model, file=file)
        return not died
