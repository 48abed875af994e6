"""Sessions of clients, and the models that they train: whose they are, and in which order their requests are done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from roll_like.service.futures import Answer, Futures
from roll_like.service.snapshots import Snapshot
from roll_like.service.types import RequestError

#: How long a request waits for one of the same model that comes before it. Seconds.
GAP_SECONDS = 120.0

ModelWork = Callable[[], Awaitable[Answer]]


@dataclass(slots=True, eq=False)
class Sampler:
    """A sampling session: weights that a client was promised.

    Attributes:
        sampler_id: Its name.
        snapshot: The weights.
        model_path: The checkpoint that they are of, where they are of one.
        clients: How many copies of its client were numbered.
    """

    sampler_id: str
    snapshot: Snapshot
    model_path: str | None = None
    clients: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """A client's session.

    Attributes:
        session_id: Its name.
        owner: Fingerprint of its API key.
        user_metadata: What the client says of it.
        display_name: The same, for people.
        seen: When it was last heard of, on the monotonic clock.
        created: When it began.
        models: The ids of its models.
        samplers: Its sampling sessions.
        ephemeral: Those of them whose weights no checkpoint has, the oldest first.
    """

    session_id: str
    owner: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    seen: float = field(default_factory=time.monotonic)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    models: list[str] = field(default_factory=list)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    ephemeral: list[str] = field(default_factory=list)


def sampler_name(session_id: str, number: int) -> str:
    """Return the id of a session's sampler, as its client derives it too."""
    return f"{session_id}:sample:{number}"


class ModelQueue:
    """The requests of one model, done one after the other in the order of their numbers, however they arrive."""

    def __init__(self, futures: Futures) -> None:
        self._futures = futures
        self._next = 1
        self._early: dict[int, tuple[str, ModelWork]] = {}
        self._since = time.monotonic()
        self._ready: asyncio.Queue[tuple[str, ModelWork]] = asyncio.Queue()
        self._worker = asyncio.get_running_loop().create_task(self._run())
        self._busy = False

    def __len__(self) -> int:
        return len(self._early) + self._ready.qsize() + self._busy

    def put(self, number: int, request_id: str, work: ModelWork) -> None:
        """Take a request; it is done when all before it are.

        Raises:
            RequestError: Its number is not one that is to come.
        """
        if number < self._next:
            raise RequestError(f"request {number} of this model was taken before; the next one is {self._next}")
        self._early[number] = (request_id, work)
        self._advance()

    def _advance(self) -> None:
        while self._next in self._early:
            self._ready.put_nowait(self._early.pop(self._next))
            self._next += 1
            self._since = time.monotonic()

    async def _run(self) -> None:
        while True:
            request_id, work = await self._ready.get()
            self._busy = True
            await self._futures.fulfil(request_id, work)
            self._busy = False

    def give_up_gaps(self) -> None:
        """Refuse requests that have waited `GAP_SECONDS` for one that does not come."""
        now = time.monotonic()
        if self._busy or self._ready.qsize():
            self._since = now
        if not self._early or now - self._since < GAP_SECONDS:
            return
        missing = self._next
        for number in sorted(self._early):
            request_id, _ = self._early.pop(number)
            self._futures.refuse(
                request_id,
                RequestError(
                    f"request {number} of this model waited {GAP_SECONDS:.0f} s for request {missing}, which did not "
                    "come; nothing of it was done"
                ),
            )
            self._next = number + 1
        self._since = time.monotonic()

    def close(self) -> None:
        """Do no more."""
        self._worker.cancel()


@dataclass(slots=True, eq=False)
class HostedModel:
    """A model that a client trains.

    Attributes:
        model_id: Its name.
        session: Whose it is.
        lora_rank: Of its adapters; None for a whole model.
        queue: Its requests.
        updates: How often its weights have changed.
        user_metadata: What the client says of it.
        last_request: When it was last asked something.
    """

    model_id: str
    session: str
    lora_rank: int | None
    queue: ModelQueue
    updates: int = 0
    user_metadata: dict[str, Any] | None = None
    last_request: datetime = field(default_factory=lambda: datetime.now(UTC))
