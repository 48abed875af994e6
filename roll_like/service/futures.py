"""Results that clients ask for by polling: each has an id, and belongs to the session that asked for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from roll_like.errors import RollLikeError
from roll_like.service.types import RequestError

_log = logging.getLogger(__name__)

#: How long one poll waits. Seconds; clients give up after 45.
POLL_SECONDS = 30.0

#: What a client gets: a message of the protocol as bytes, or JSON.
Answer: TypeAlias = bytes | dict[str, Any]


@dataclass(slots=True, eq=False)
class _Pending:
    """A result to come.

    Attributes:
        session: Whose.
        done: The answer, or what became of it.
        task: What brings it about, where it can be cancelled.
        fetched: When it was, on the monotonic clock.
    """

    session: str
    done: asyncio.Future[Answer]
    task: asyncio.Task[None] | None = None
    fetched: float | None = None


@dataclass(slots=True)
class Futures:
    """All results that are to come or were not fetched long ago. Runs on one event loop."""

    #: How many results there were, and how many of them were errors.
    finished: int = 0
    failed: int = 0
    _pending: dict[str, _Pending] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    @property
    def unfinished(self) -> int:
        """Results that are to come."""
        return sum(not pending.done.done() for pending in self._pending.values())

    def open(self, request_id: str, session: str) -> None:
        """Begin a result."""
        self._pending[request_id] = _Pending(session, asyncio.get_running_loop().create_future())

    async def fulfil(self, request_id: str, work: Callable[[], Awaitable[Answer]]) -> None:
        """Do the work of a result that was begun; what it raises is what the client gets."""
        pending = self._pending.get(request_id)
        if pending is None or pending.done.done():
            return
        self.finished += 1
        try:
            answer = await work()
        except asyncio.CancelledError:
            fail(pending.done, RequestError("the request was taken back"))
            raise
        except Exception as error:  # noqa: BLE001 - the client gets it, and the service goes on
            if not isinstance(error, RollLikeError):
                _log.exception("the request %s failed", request_id)
            self.failed += 1
            fail(pending.done, error)
        else:
            if not pending.done.done():
                pending.done.set_result(answer)

    def start(self, request_id: str, session: str, work: Callable[[], Awaitable[Answer]]) -> None:
        """Begin a result and its work, which has no place in any order."""
        self.open(request_id, session)
        self._pending[request_id].task = asyncio.get_running_loop().create_task(self.fulfil(request_id, work))

    def refuse(self, request_id: str, error: Exception) -> None:
        """End a result that will not come."""
        fail(self._pending[request_id].done, error)

    async def result(self, request_id: str, session_of: Callable[[str], bool]) -> Answer | None:
        """Return a result, or None where it is still to come after `POLL_SECONDS`.

        Args:
            session_of: Says whether a session is the caller's.

        Raises:
            KeyError: There is none, or it is another client's.
            Exception: What became of it.
        """
        pending = self._pending.get(request_id)
        if pending is None or not session_of(pending.session):
            raise KeyError(request_id)
        await asyncio.wait([pending.done], timeout=POLL_SECONDS)
        if not pending.done.done():
            return None
        pending.fetched = pending.fetched or time.monotonic()
        return pending.done.result()

    def cancel(self, request_id: str, session_of: Callable[[str], bool]) -> None:
        """Take a request back, where its work can be cancelled; unknown ones are ignored."""
        pending = self._pending.get(request_id)
        if pending is not None and session_of(pending.session) and pending.task is not None:
            pending.task.cancel()

    def drop(self, session: str) -> None:
        """Forget everything of a session."""
        for request_id in [name for name, pending in self._pending.items() if pending.session == session]:
            pending = self._pending.pop(request_id)
            if pending.task is not None:
                pending.task.cancel()
            fail(pending.done, RequestError("the session has ended"))

    def tidy(self, kept_seconds: float) -> None:
        """Forget results that were fetched so long ago.

        The way of an answer to its client may have failed, and the client asks for it again when it is back.
        """
        until = time.monotonic() - kept_seconds
        for request_id, pending in list(self._pending.items()):
            if pending.fetched is not None and pending.fetched < until:
                del self._pending[request_id]


def fail(future: asyncio.Future[Answer], error: Exception) -> None:
    """End a future with an error that nobody has to fetch."""
    if not future.done():
        future.set_exception(error)
        future.exception()
