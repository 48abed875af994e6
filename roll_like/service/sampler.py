"""Samples with exactly the weights that a client was promised, one set of them in the engines at a time.

Requests wait in line. Those that want the weights that engines hold go on; else the engines finish what they have,
take the weights that the first in line wants, and all that wait for these go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from roll_like.inference.interface import GenerateRequest, Generation, InferenceEngine
from roll_like.rollout.engine_pool import EnginePool
from roll_like.rollout.router import Router
from roll_like.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights for samplers.

    Attributes:
        file: What ranks wrote; None for the model before any training.
        model_id: Whose they are; None for the model before any training.
        updates: How often its weights had changed.
    """

    file: Path | None = None
    model_id: str | None = None
    updates: int = 0


#: The model before any training.
UNTRAINED = Snapshot()


@dataclass(slots=True, eq=False)
class _Waiting:
    snapshot: Snapshot
    admitted: asyncio.Future[None]


class SnapshotSampler:
    """Runs on the event loop of its router.

    Args:
        router: Sends requests to the engines.
        engines: The engines.
        push: Sends the weights of a snapshot to all engines.
    """

    def __init__(self, router: Router, engines: EnginePool, push: Callable[[Snapshot], Awaitable[None]]) -> None:
        self._router = router
        self._engines = engines
        self._push = push
        self._held: Snapshot | None = None
        self._line: deque[_Waiting] = deque()
        self._running = 0
        self._switch: asyncio.Task[None] | None = None

    @property
    def held(self) -> Snapshot | None:
        """What engines sample with; None while that changes, and before the first request."""
        return self._held

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    async def generate(
        self, snapshot: Snapshot, requests: Sequence[GenerateRequest], *, key: str
    ) -> Sequence[Generation]:
        """Return what engines sample with the weights of a snapshot.

        Args:
            snapshot: The weights.
            requests: Of one prompt.
            key: Unique; requests of a key go to the same engine.
        """
        async with self._with(snapshot):
            futures = [self._router.submit(request, key) for request in requests]
            try:
                return await asyncio.gather(*futures)
            finally:
                # engines have let go of what is not wanted any more before they take other weights
                await self._router.abort([request.request_id for request in requests])
                self._router.forget([key])

    async def prompt_logprobs(self, snapshot: Snapshot, tokens: IntArray) -> FloatArray:
        """Return the log-probability of each token but the first under the weights of a snapshot, shape [P−1]."""
        async with self._with(snapshot):
            return await self._engines.engines().ask(0, InferenceEngine.prompt_logprobs, tokens)

    @asynccontextmanager
    async def _with(self, snapshot: Snapshot) -> AsyncIterator[None]:
        waiting = _Waiting(snapshot, asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        self._go_on()
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            if waiting.admitted.done() and not waiting.admitted.cancelled() and not waiting.admitted.exception():
                self._left()
            raise
        try:
            yield
        finally:
            self._left()

    def _left(self) -> None:
        self._running -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Admit the first in line, as long as engines have what they want."""
        if self._switch is not None:
            return
        while self._line:
            first = self._line[0]
            if first.admitted.done():  # it was taken back
                self._line.popleft()
            elif first.snapshot == self._held:
                self._admit(self._line.popleft())
            else:
                if not self._running:
                    self._switch = asyncio.get_running_loop().create_task(self._switch_to(first.snapshot))
                return

    def _admit(self, waiting: _Waiting) -> None:
        self._running += 1
        waiting.admitted.set_result(None)

    async def _switch_to(self, snapshot: Snapshot) -> None:
        self._held = None
        failure: Exception | None = None
        try:
            await self._push(snapshot)
            self._held = snapshot
        except Exception as error:  # noqa: BLE001 - those who wait for these weights get it
            failure = error
        self._switch = None
        others: deque[_Waiting] = deque()
        for waiting in self._line:
            if waiting.snapshot != snapshot:
                others.append(waiting)
            elif waiting.admitted.done():
                continue
            elif failure is None:
                self._admit(waiting)
            else:
                waiting.admitted.set_exception(failure)
        self._line = others
        self._go_on()
