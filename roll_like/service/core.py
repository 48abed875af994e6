"""What a service does, without HTTP: every request of the protocol is a method of one of its parts."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable

from roll_like.errors import RollLikeError
from roll_like.service.config import ServiceConfig
from roll_like.service.delivery import WeightDelivery
from roll_like.service.hosted import HostedModel, Session
from roll_like.service.model_requests import ModelRequests
from roll_like.service.sample_requests import SampleRequests
from roll_like.service.sampler import SnapshotSampler
from roll_like.service.snapshots import SnapshotLoad
from roll_like.service.state import ServiceState
from roll_like.service.status import ModelLine, Rates, ServiceStatus
from roll_like.service.trainer import ModelsTrainer
from roll_like.service.weight_requests import WeightRequests

_log = logging.getLogger(__name__)

#: How often sessions, results and checkpoints are looked at that have had their time. Seconds.
TIDY_SECONDS = 5.0


class ServiceCore:
    """Sessions, models, samplers, results and checkpoints; runs on one event loop.

    Args:
        sampler: Makes the engines' side, given what sends a snapshot's weights.

    Attributes:
        state: What requests share.
        models: Requests about models.
        weights: Requests about weights.
        samples: Requests for samples.
    """

    def __init__(
        self,
        config: ServiceConfig,
        trainer: ModelsTrainer,
        delivery: WeightDelivery,
        sampler: Callable[[Callable[[SnapshotLoad], Awaitable[None]]], SnapshotSampler],
        *,
        vocabulary: int,
    ) -> None:
        self.state = ServiceState(config, vocabulary=vocabulary)
        self.models = ModelRequests(self.state, trainer)
        self.weights = WeightRequests(self.state, trainer, self.models)
        self.samples = SampleRequests(self.state, sampler(self._push))
        self._trainer = trainer
        self._delivery = delivery
        self._rates = Rates()

    async def _push(self, load: SnapshotLoad) -> None:
        """Send the weights of a snapshot to the engines."""
        await self.state.on_ranks(self._deliver, load, self.state.models.get(load.snapshot.model_id or ""))

    def _deliver(self, load: SnapshotLoad, model: HostedModel | None) -> None:
        # the model may have moved before the ranks come to this; then they read what they wrote
        if model is not None and (model.updates != load.snapshot.updates or model.model_id not in self.state.models):
            model = None
        self._delivery.deliver(load, model=None if model is None else model.model_id)

    def catch_up(self) -> None:
        """Send engines that were replaced what the others have; called on another thread than the loop's."""
        self.state.thread.submit(self._delivery.catch_up).result()

    async def end_session(self, owner: str, session_id: str) -> None:
        """End a session: its models are unloaded, and what it waits for is dropped."""
        await self._end(self.state.session(owner, session_id))

    async def _end(self, session: Session) -> None:
        self.state.sessions.pop(session.session_id, None)
        self.state.futures.drop(session.session_id)
        for model_id in list(session.models):
            try:
                await self.models.drop(model_id)
            except (OSError, RollLikeError):  # it is gone, and the others are to go too
                _log.exception("the model %s could not be dropped", model_id)
        await self.state.in_files(shutil.rmtree, self.state.snapshots / session.session_id, True)

    async def tidy(self, show: Callable[[ServiceStatus], None]) -> None:
        """Look, again and again, for what has had its time: sessions of dead clients, results, checkpoints.

        Args:
            show: Takes what is going on, on another thread.
        """
        while True:
            try:
                await self.state.in_files(show, self.status())
                await asyncio.sleep(TIDY_SECONDS)
                await self._tidy()
            except (OSError, RollLikeError):
                _log.exception("tidying failed; it is tried again")
                await asyncio.sleep(TIDY_SECONDS)

    async def _tidy(self) -> None:
        state = self.state
        state.futures.tidy(state.config.session_seconds)  # who was away for longer is taken for dead
        for model in state.models.values():
            model.queue.give_up_gaps()
        until = time.monotonic() - state.config.session_seconds
        for session in [each for each in state.sessions.values() if each.seen < until]:
            await self._end(session)
        await state.in_files(state.shelf.all)

    async def park_idle(self) -> None:
        """Put idle models on disk, again and again. Apart from `tidy`, because it waits for the trainer."""
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            try:
                await self.state.on_ranks(self._trainer.park_idle, self.state.config.idle_seconds)
            except (OSError, RollLikeError):
                _log.exception("idle models could not be put on disk; it is tried again")

    def status(self) -> ServiceStatus:
        """Return what is going on, with rates since the last call."""
        state = self.state
        trained, sampled = self._rates.of(state.trained_tokens, state.sampled_tokens)
        return ServiceStatus(
            name=state.config.name,
            base_model=state.config.base_model,
            sessions=len(state.sessions),
            models=[
                ModelLine(
                    model=each.model_id,
                    rank=each.lora_rank,
                    updates=each.updates,
                    queued=len(each.queue),
                    loaded=self._trainer.is_loaded(each.model_id),
                )
                for each in state.models.values()
            ],
            unfinished=state.futures.unfinished,
            train_tokens_per_second=trained,
            sampled_tokens_per_second=sampled,
            requests=state.futures.finished,
            failed=state.futures.failed,
        )

    def close(self) -> None:
        """Let go of threads."""
        self.state.close()
