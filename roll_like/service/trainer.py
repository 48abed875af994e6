"""The trainer of a service, from the driver: models over one base, one request after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roll_like.config.training import OptimizerConfig
from roll_like.inference.weight_transfer.sync import SyncReport, WeightSync
from roll_like.service.objective import DatumOutput, TargetLosses, datum_batches, in_order
from roll_like.service.rank import AdapterRequest, ModelsRank, TrainShare
from roll_like.service.types import Datum, RequestError
from roll_like.training.engine import TrainingEngine


class ModelsTrainer:
    """Speaks to the ranks. Its methods block, and are called one at a time.

    Args:
        engine: Started ranks, `ModelsRank`s.
        untrained: Where ranks write what a model is before any training.
    """

    def __init__(self, engine: TrainingEngine[Any], untrained: Path) -> None:
        self._engine = engine
        self._untrained = untrained
        self._everywhere(ModelsRank.prepare, str(untrained))

    def create(self, model: str, adapter: AdapterRequest | None) -> None:
        """Begin a model: with adapters, or None for a whole one."""
        self._everywhere(ModelsRank.create, model, adapter)

    def drop(self, model: str) -> None:
        """Forget a model."""
        self._everywhere(ModelsRank.drop, model)

    def train(self, model: str, losses: TargetLosses, data: Sequence[Datum], *, backward: bool) -> list[DatumOutput]:
        """Return what a loss tells of each datum; with `backward`, add its gradient to the model's."""
        shards = datum_batches(data, self._engine.layout)
        shares = [TrainShare(model=model, losses=losses, backward=backward, batches=batches) for batches in shards]
        train: Callable[..., list[DatumOutput]] = ModelsRank.train
        return in_order(self._engine.scatter(train, shares))

    def step(self, model: str, optimizer: OptimizerConfig) -> float:
        """Move a model by the gradient that was added up, and return its norm before clipping.

        Raises:
            RequestError: It is not finite: it was forgotten, and nothing moved.
        """
        norm: float = self._everywhere(ModelsRank.step, model, optimizer)[0]
        if not math.isfinite(norm):
            raise RequestError(
                f"the norm of the gradient is {norm}: it was forgotten, and the weights did not move",
                fix="look at the losses of this step's data, and lower the learning rate",
            )
        return norm

    def save(self, model: str, directory: Path) -> None:
        """Write a model and its optimizer into a directory."""
        directory.mkdir(parents=True)
        self._everywhere(ModelsRank.save_model, model, str(directory))

    def load(self, model: str, directory: Path, *, optimizer: bool) -> None:
        """Take back what `save` wrote."""
        self._everywhere(ModelsRank.load_model, model, str(directory), optimizer)

    def snapshot(self, model: str, file: Path) -> None:
        """Write a model's weights for samplers."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._everywhere(ModelsRank.snapshot, model, str(file))

    def push(self, sync: WeightSync, *, model: str | None = None, file: Path | None = None) -> SyncReport:
        """Send weights to the engines.

        Args:
            sync: The way.
            model: Whose present weights; None for those in a file.
            file: What `snapshot` wrote; None for the model before any training.
        """
        if model is not None:
            self._everywhere(ModelsRank.switch, model)
            return sync.push()
        self._everywhere(ModelsRank.cover, None if file is None else str(file))
        try:
            return sync.push()
        finally:
            self._everywhere(ModelsRank.uncover)

    def _everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._engine.cluster.everywhere(method, *arguments)
