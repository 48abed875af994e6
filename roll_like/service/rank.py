"""A rank that trains several models over one base: adapters with an optimizer each, or one whole model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_like.cluster.progress import PROGRESS, shared_phase
from roll_like.config.training import OptimizerConfig
from roll_like.errors import CheckpointError, EngineError
from roll_like.service.objective import DatumBatch, DatumOutput, RequestObjective, TargetLosses
from roll_like.training.backend import SetAside
from roll_like.training.rank import TrainingRank


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequest:
    """What a client wants of an adapter.

    Attributes:
        rank: Of its matrices, at most that of the service's configuration.
        seed: Of the A matrices; None takes those of the service's own seed.
    """

    rank: int
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainShare:
    """One rank's part of a request.

    Attributes:
        model: Whose.
        losses: The loss of each target.
        backward: Whether its gradient is wanted.
        batches: The data.
    """

    model: str
    losses: TargetLosses
    backward: bool
    batches: Sequence[DatumBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A model that the rank is not at work on.

    Attributes:
        share: What the backend has put aside.
        scale: What the products of its adapters are multiplied with; None where it has none.
    """

    share: SetAside
    scale: float | None


class ModelsRank(TrainingRank):
    """Trains one of its models at a time; the others are put aside, in the device's memory."""

    def prepare(self, untrained: str) -> None:
        """Note what a model is before any training. Called once, after `start`.

        Args:
            untrained: Where that is written, as `snapshot` does.
        """
        self._others: dict[str, _Held] = {}
        self._active: str | None = None
        self._covered: _Held | None = None
        self._untrained = untrained
        self._write(untrained)

    def create(self, model: str, adapter: AdapterRequest | None) -> None:
        """Begin a model, and work on it.

        Args:
            adapter: Adapters of the model; None for a whole one.
        """
        self._leave()
        self._read(self._untrained)
        self._active = model
        if adapter is None:
            return
        lora = self._settings.lora
        assert lora is not None, "the service has adapters"
        if adapter.seed is not None and adapter.seed != self._spec.seed:
            self._draw(adapter.seed)
        self._limit_rank(adapter.rank)
        self._set_scale(lora.alpha / (math.sqrt(adapter.rank) if lora.rslora else adapter.rank))

    def drop(self, model: str) -> None:
        """Forget a model."""
        if self._active == model:
            self._active = None
        self._others.pop(model, None)

    @shared_phase
    def keep_model(self, model: str, file: str) -> None:
        """Write all that a model is, moments and gradient included, this rank's share, to a file of its own.

        Args:
            file: The rank's own file is beside this.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        self.switch(model)
        share = self._backend.set_aside()
        try:
            self._store(
                file, {**{each.name: getattr(share, each.name) for each in fields(share)}, "scale": self._scale()}
            )
        finally:
            self._backend.put_back(share)

    @shared_phase
    def take_model(self, model: str, file: str) -> None:
        """Begin a model as `keep_model` wrote it, and work on it.

        Raises:
            CheckpointError: The file cannot be read.
        """
        self._leave()
        stored = self._stored(file)
        self._set_scale(stored.pop("scale"))
        self._backend.put_back(SetAside(**stored))
        self._active = model

    def switch(self, model: str) -> None:
        """Work on a model.

        Raises:
            EngineError: There is none of this name.
        """
        if self._active == model:
            return
        if model not in self._others:
            raise EngineError(f"the trainer has no model {model!r}")
        self._leave()
        held = self._others.pop(model)
        self._backend.put_back(held.share)
        self._set_scale(held.scale)
        self._active = model

    @shared_phase
    def train(self, share: TrainShare) -> list[DatumOutput]:
        """Return what a loss tells of each datum; where that is wanted, add its gradient."""
        self.switch(share.model)
        objective = self._objective
        assert isinstance(objective, RequestObjective), "the service starts it"
        told: list[DatumOutput] = []

        def loss_of(batch: DatumBatch) -> Tensor:
            loss, outputs = objective.outputs(self._model, batch, share.losses)
            told.extend(outputs)
            PROGRESS.tick()
            return loss

        if share.backward:
            self._backend.forward_backward(share.batches, loss_of)
        else:
            with torch.no_grad():
                for batch in share.batches:
                    loss_of(batch)
        return told

    @shared_phase
    def step(self, model: str, optimizer: OptimizerConfig) -> float:
        """Move a model's weights by the gradient that was added up, and return its norm before clipping.

        Where that is not finite, the gradient is forgotten and nothing moves.
        """
        self.switch(model)
        self._backend.adjust(optimizer)
        norm = self._backend.optimizer_step(optimizer.lr)
        self.updates += int(math.isfinite(norm))
        return norm

    @shared_phase
    def save_model(self, model: str, directory: str) -> None:
        """Write a model and its optimizer, as `save` does."""
        self.switch(model)
        self.save(directory)

    @shared_phase
    def load_model(self, model: str, directory: str, optimizer: bool) -> None:
        """Take back what `save_model` wrote; without `optimizer` the weights alone. Its gradient is forgotten."""
        self.switch(model)
        self.load(directory)
        if not optimizer:
            self._backend.put_back(SetAside.of_weights(self._backend.set_aside().weights))

    # ---- weights for samplers ------------------------------------------------------------------

    @shared_phase
    def snapshot(self, model: str, file: str) -> None:
        """Write the weights of a model, this rank's share of them, to a file of its own beside `file`.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        self.switch(model)
        self._write(file)

    @shared_phase
    def cover(self, file: str | None) -> None:
        """Have the weights of a snapshot, to send them; those of before come back with `uncover`.

        Args:
            file: As in `snapshot`; None for the model before any training.
        """
        self._covered = _Held(share=self._backend.set_aside(), scale=self._scale())
        self._read(file or self._untrained)

    @shared_phase
    def uncover(self) -> None:
        """Go on with the model of before `cover`."""
        covered, self._covered = self._covered, None
        if covered is not None:
            self._backend.put_back(covered.share)
            self._set_scale(covered.scale)

    def _write(self, file: str) -> None:
        shares: Mapping[str, Tensor] = self._backend.trained_shares()
        self._store(file, {"weights": {name: share.cpu() for name, share in shares.items()}, "scale": self._scale()})

    def _read(self, file: str) -> None:
        stored = self._stored(file)
        self._backend.put_back(SetAside.of_weights(stored["weights"]))
        self._set_scale(stored["scale"])

    def _store(self, file: str, what: Mapping[str, Any]) -> None:
        try:
            torch.save(what, self._own_file(file))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"rank {self.rank} cannot write weights to {file}: {error}", fix="free disk space"
            ) from error

    def _stored(self, file: str) -> dict[str, Any]:
        try:
            stored: dict[str, Any] = torch.load(self._own_file(file), weights_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"rank {self.rank} cannot read the weights in {file}: {error}") from error
        return stored

    def _own_file(self, file: str) -> Path:
        return Path(f"{file}.rank_{self.rank}.pt")

    # ---- what is worked on ---------------------------------------------------------------------

    def _leave(self) -> None:
        if self._active is not None:
            self._others[self._active] = _Held(share=self._backend.set_aside(), scale=self._scale())
        self._active = None

    def _adapted(self) -> list[Any]:
        return [layer for layer in self._hf_model().modules() if hasattr(layer, "lora_A")]

    def _scale(self) -> float | None:
        return next((float(layer.scaling["default"]) for layer in self._adapted()), None)

    def _set_scale(self, scale: float | None) -> None:
        for layer in self._adapted():
            layer.scaling["default"] = scale

    def _draw(self, seed: int) -> None:
        """Draw the A matrices anew; whole ones on every rank, of which each takes its share."""
        generator = torch.Generator().manual_seed(seed)
        lora = self._settings.lora
        assert lora is not None, "the service has adapters"
        for layer in self._adapted():
            weight = layer.lora_A["default"].weight
            whole = torch.empty(weight.shape)
            if lora.init == "gaussian":
                whole.normal_(std=1 / lora.rank, generator=generator)
            else:
                torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            self._backend.write(weight, whole)

    def _limit_rank(self, rank: int) -> None:
        """Let an adapter be of a lower rank: further rows of A are 0, and stay so, as columns of B do."""
        for layer in self._adapted():
            weight = layer.lora_A["default"].weight
            if rank < weight.shape[0]:
                with self._gathered([weight]) as (whole,):
                    kept = whole.detach().clone()
                kept[rank:] = 0
                self._backend.write(weight, kept)
