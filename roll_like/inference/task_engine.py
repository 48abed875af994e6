"""The part of an engine that serves each request in an asyncio task of its own."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from roll_like.cluster.progress import PROGRESS
from roll_like.errors import GenerationError
from roll_like.inference.interface import (
    EngineDied,
    EngineSpec,
    FailedGeneration,
    GenerateRequest,
    Generation,
    PolledEngine,
)

#: How often a call that an engine's processes have not answered looks whether they are alive. Seconds.
DEATH_SECONDS = 1.0
R = TypeVar("R")


class TaskEngine(PolledEngine):
    """Base of an engine whose library has one awaitable answer a request, and processes of its own.

    Finished samples gather in one list that `poll` hands over whole.

    Args:
        spec: Model, precision, devices.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._frozen = False

    @abstractmethod
    async def _generate(self, request: GenerateRequest) -> Generation:
        """Return the outcome of one request; whatever it raises fails that request alone.

        Raises:
            EngineDied: The engine is gone, and with it all requests.
        """

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take requests. See `InferenceEngine.submit`."""
        self._check(requests, self._tasks)
        for request in requests:
            self._tasks[request.request_id] = asyncio.create_task(self._serve(request))
        self._show()

    async def _serve(self, request: GenerateRequest) -> None:
        """Run one request; its outcome, whatever it is, goes to `poll`."""
        outcome: Generation | FailedGeneration
        try:
            outcome = await self._generate(request)
        except EngineDied:
            return
        except Exception as error:  # noqa: BLE001 - whatever a library raises over one request fails that request
            cause = error.__cause__ or error
            outcome = FailedGeneration(
                request_id=request.request_id,
                error=GenerationError(f"request {request.request_id} failed: {type(cause).__name__}: {cause}"),
            )
        finally:
            self._tasks.pop(request.request_id, None)
            self._show()
        self._finished.append(outcome)
        self._arrived.set()

    async def _end_tasks(self) -> None:
        """Cancel what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answered(self, call: Coroutine[Any, Any, R]) -> R:
        """Return what the library's processes answer. The library itself may wait for ever if they die meanwhile.

        Raises:
            EngineDied: They have died.
        """
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=DEATH_SECONDS)
                if not answer.done():
                    self._require_alive()
        finally:
            if not answer.done():
                answer.cancel()
                await asyncio.wait({answer}, timeout=DEATH_SECONDS)
        return answer.result()

    def _freeze(self, frozen: bool) -> None:
        self._frozen = frozen
        self._show()

    def _show(self) -> None:
        """Show the watchdog whether tokens are due: requests of a frozen engine wait."""
        PROGRESS.hold("generate", bool(self._tasks) and not self._frozen)
