"""The trainer of a service, from the driver: models over one base, one request after the other.

When a rank dies, all are started again, and each model becomes what its last finished request had made of it: it is
read from a copy on disk, and what was asked since then is computed once more. Models without recent requests
are in such a copy only, until their next request.
"""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from roll_like.cluster.worker_restarts import RestartCallback, WorkerDied, WorkerRestarts, to_stderr
from roll_like.config.training import OptimizerConfig
from roll_like.errors import CheckpointError, WorkerError
from roll_like.service.objective import DatumOutput, TargetLosses, datum_batches, in_order
from roll_like.service.rank import AdapterRequest, ModelsRank, TrainShare
from roll_like.service.types import Datum, RequestError
from roll_like.training.engine import TrainingEngine

_log = logging.getLogger(__name__)

R = TypeVar("R")
#: How often a request is computed whose rank dies: what ends them twice does not pass by itself.
ATTEMPTS = 2
#: What is kept of a model's requests to compute them once more, before a copy of it is written. Bytes.
JOURNAL_BYTES = 32 << 20


@dataclass(slots=True, kw_only=True)
class _History:
    """How a model came about.

    Attributes:
        adapter: What it began with.
        copy: Folder of a copy on disk; None for its beginning.
        since: What was asked after that, to be asked again.
        since_bytes: Size of the data in it.
        steps: Optimizer steps among them.
        gradient: Whether one was added up since the last step.
        loaded: Whether ranks have it; else it is on disk only.
        used: When it was last asked for, on the monotonic clock.
    """

    adapter: AdapterRequest | None
    copy: Path | None = None
    since: list[Callable[[], object]] = field(default_factory=list)
    since_bytes: int = 0
    steps: int = 0
    gradient: bool = False
    loaded: bool = True
    used: float = field(default_factory=time.monotonic)


class ModelsTrainer:
    """Speaks to the ranks. Its methods block, and are called one at a time.

    Args:
        engine: Started ranks, `ModelsRank`s.
        directory: Where ranks write what a model is before any training, and copies of models.
        recovery_steps: Optimizer steps of a model between two copies.
        report: Told about ranks that were replaced.
    """

    def __init__(
        self,
        engine: TrainingEngine[Any],
        directory: Path,
        *,
        recovery_steps: int,
        max_loaded: int,
        report: RestartCallback = to_stderr,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._recovery_steps = recovery_steps
        self._max_loaded = max_loaded
        self._restarts = WorkerRestarts(engine.cluster.name, "models become what they were", report)
        self._histories: dict[str, _History] = {}
        self._prepare()

    def create(self, model: str, adapter: AdapterRequest | None) -> None:
        """Begin a model: with adapters, or None for a whole one."""
        self._make_room()
        self._survived(lambda: self._everywhere(ModelsRank.create, model, adapter))
        self._histories[model] = _History(adapter=adapter)

    def drop(self, model: str) -> None:
        """Forget a model."""
        history = self._histories.pop(model, None)
        if history is not None and history.copy is not None:
            shutil.rmtree(history.copy, ignore_errors=True)
        self._survived(lambda: self._everywhere(ModelsRank.drop, model))

    def is_loaded(self, model: str) -> bool:
        """Return whether ranks have a model; else it is on disk, or there is none of this name."""
        history = self._histories.get(model)
        return history is not None and history.loaded

    def park_idle(self, seconds: float) -> None:
        """Move models to disk that had no request for so many seconds."""
        until = time.monotonic() - seconds
        for model, history in self._histories.items():
            if history.loaded and history.used < until:
                self._park(model)

    def train(self, model: str, losses: TargetLosses, data: Sequence[Datum], *, backward: bool) -> list[DatumOutput]:
        """Return what a loss tells of each datum; with `backward`, add its gradient to the model's."""
        history = self._used(model)
        work = partial(self._train, model, losses, data, backward)
        told = self._survived(work)
        if backward:
            history.since.append(work)
            history.since_bytes += sum(datum_bytes(datum) for datum in data)
            history.gradient = True
            if history.since_bytes > JOURNAL_BYTES:
                self._try_copy(model)
        return told

    def step(self, model: str, optimizer: OptimizerConfig) -> float:
        """Move a model by the gradient that was added up, and return its norm before clipping.

        Raises:
            RequestError: There is none, or it is not finite: it was forgotten, and nothing moved.
        """
        history = self._used(model)
        if not history.gradient:
            raise RequestError("there is no gradient since the last step: call forward_backward before optim_step")
        work = partial(self._everywhere, ModelsRank.step, model, optimizer)
        norm: float = self._survived(work)[0]
        history.since.append(work)
        history.steps += 1
        history.gradient = False
        if history.steps >= self._recovery_steps:
            self._try_copy(model)
        if not math.isfinite(norm):
            raise RequestError(
                f"the norm of the gradient is {norm}: it was forgotten, and the weights did not move",
                fix="look at the losses of this step's data, and lower the learning rate",
            )
        return norm

    def save(self, model: str, directory: Path) -> None:
        """Write a model and its optimizer into a directory."""
        self._used(model)
        self._survived(lambda: self._save(model, directory))

    def load(self, model: str, directory: Path, *, optimizer: bool) -> None:
        """Take back what `save` wrote."""
        history = self._used(model)
        work = partial(self._everywhere, ModelsRank.load_model, model, str(directory), optimizer)
        self._survived(work)
        history.since.append(work)
        history.gradient = False
        self._copy(model)  # the checkpoint may be deleted

    def snapshot(self, model: str, file: Path) -> None:
        """Write a model's weights for samplers."""
        self._used(model)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._survived(lambda: self._everywhere(ModelsRank.snapshot, model, str(file)))

    def push(self, send: Callable[[], object], *, model: str | None = None, file: Path | None = None) -> None:
        """Send weights to the engines.

        Args:
            send: Sends what the ranks have.
            model: A model that has the weights of the file, if there is one; ranks need not read them then.
            file: What `snapshot` wrote; None for the model before any training.
        """
        present = model if model is not None and self.is_loaded(model) else None
        self._survived(lambda: self._push(send, present, file))

    # ---- models on disk ------------------------------------------------------------------------

    def _used(self, model: str) -> _History:
        """Load a model if it is on disk only, note that it is used, and return its history."""
        history = self._histories[model]
        if not history.loaded:
            self._make_room()
            self._survived(lambda: self._restore(model, history))
            history.loaded = True
        history.used = time.monotonic()
        return history

    def _make_room(self) -> None:
        """Park models until there is room for one more."""
        loaded = sorted((each.used, model) for model, each in self._histories.items() if each.loaded)
        for _, model in loaded[: max(0, len(loaded) + 1 - self._max_loaded)]:
            self._park(model)

    def _park(self, model: str) -> None:
        """Move a model to disk."""
        history = self._histories[model]
        if history.since:
            self._copy(model)
        self._survived(lambda: self._everywhere(ModelsRank.drop, model))
        history.loaded = False

    def _try_copy(self, model: str) -> None:
        """Write a copy where the disk has room; what was asked for is done either way."""
        try:
            self._copy(model)
        except (OSError, CheckpointError):
            _log.exception("no copy of the model %s could be written; it is tried again at its next request", model)

    def _copy(self, model: str) -> None:
        """Write a copy of a model, and forget how it came about."""
        history = self._histories[model]
        folder = self._directory / "copies" / secrets.token_hex(8)
        folder.mkdir(parents=True)
        try:
            self._survived(lambda: self._everywhere(ModelsRank.keep_model, model, str(folder / "model")))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        old, history.copy = history.copy, folder
        history.since.clear()
        history.since_bytes = history.steps = 0
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _restore(self, model: str, history: _History) -> None:
        if history.copy is None:
            self._everywhere(ModelsRank.create, model, history.adapter)
        else:
            self._everywhere(ModelsRank.take_model, model, str(history.copy / "model"))
        for again in history.since:
            again()

    # ---- the same, without recovery from failures ----------------------------------------------

    def _train(self, model: str, losses: TargetLosses, data: Sequence[Datum], backward: bool) -> list[DatumOutput]:
        shards = datum_batches(data, self._engine.layout)
        shares = [TrainShare(model=model, losses=losses, backward=backward, batches=batches) for batches in shards]
        train: Callable[..., list[DatumOutput]] = ModelsRank.train
        return in_order(self._engine.scatter(train, shares))

    def _save(self, model: str, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # of an attempt before
        directory.mkdir(parents=True)
        self._everywhere(ModelsRank.save_model, model, str(directory))

    def _push(self, send: Callable[[], object], model: str | None, file: Path | None) -> None:
        if model is not None:
            self._everywhere(ModelsRank.switch, model)
            send()
            return
        self._everywhere(ModelsRank.cover, None if file is None else str(file))
        try:
            send()
        finally:
            self._everywhere(ModelsRank.uncover)

    def _everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._engine.cluster.everywhere(method, *arguments)

    # ---- failures ------------------------------------------------------------------------------

    def _survived(self, work: Callable[[], R]) -> R:
        """Do some work; where a rank fails, bring back what there was before, and try once more if it has died.

        Raises:
            WorkerError: A rank raised, or died twice. Models are as they were before.
        """
        for attempt in range(ATTEMPTS):
            try:
                return work()
            except WorkerError as error:
                if (error.worker or ("", 0))[0] != self._engine.cluster.name:
                    raise
                # one that raised may have added a part of a gradient, and others may wait for it
                self._restarts.replace("every rank of the trainer", error, self._bring_back)
                if attempt + 1 == ATTEMPTS or not isinstance(error, WorkerDied):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _bring_back(self) -> None:
        self._engine.rebuild()
        self._prepare()
        for model, history in self._histories.items():
            if history.loaded:
                self._restore(model, history)

    def _prepare(self) -> None:
        self._everywhere(ModelsRank.prepare, str(self._directory / "untrained"))


def datum_bytes(datum: Datum) -> int:
    """Return the bytes of a datum's arrays."""
    return datum.tokens.nbytes + sum(values.nbytes for values in datum.inputs.values())
