"""Sends requests to inference replicas: which one, how many at a time, again after a failure.

`Router.generate` returns one sample. Requests that are made at the same moment are sent in one call per
replica, and a replica is polled only while it has requests. Replicas are anything with the methods of
`Replica`; in a run they are handles on Ray actors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from roll_like.errors import GenerationError
from roll_like.inference.interface import FailedGeneration, GenerateRequest, Generation

POLL_SECONDS = 30.0
#: Affinity keys that are kept; the next request of a dropped one may miss the prefix cache.
MAX_AFFINITIES = 65536


class ReplicaLost(GenerationError):
    """A replica's process is gone; its requests go to another."""


class SampleLost(GenerationError):
    """A request failed in every attempt."""


class RequestAborted(GenerationError):
    """A request was taken back before a replica had it."""


class Replica(Protocol):
    """One inference engine. Its methods raise `ReplicaLost` when its process is gone."""

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start generating."""

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        """Return what finished since the last call; wait up to `timeout` seconds for the first."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; they come out of `poll` with their tokens so far."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A request, its replica, and the future of its sample."""

    request: GenerateRequest
    affinity_key: Hashable
    done: asyncio.Future[Generation]
    attempts: int = 0
    replica: int | None = None


class Router:
    """Routes requests to replicas.

    Args:
        replicas: The inference engines.
        max_in_flight: Requests that may be generating at a time; more wait.
        retries: Further attempts of a request that failed. A lost replica counts as no attempt.
    """

    def __init__(self, replicas: Sequence[Replica], *, max_in_flight: int, retries: int) -> None:
        self._replicas = dict(enumerate(replicas))
        self._max_in_flight = max_in_flight
        self._retries = retries
        self._waiting: deque[_Pending] = deque()
        self._running: dict[str, _Pending] = {}
        self._affinities: OrderedDict[Hashable, int] = OrderedDict()
        self._dispatching: asyncio.Task[None] | None = None
        self._pollers: dict[int, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._broken: Exception | None = None

    async def generate(self, request: GenerateRequest, affinity_key: Hashable) -> Generation:
        """Return what a replica samples; an aborted request comes back with its tokens so far.

        Args:
            request: What to sample; its id is unique among unfinished ones.
            affinity_key: Requests with the same key go to the same replica, whose cache has their prefix (session
                affinity).

        Raises:
            SampleLost: Every attempt failed.
            RequestAborted: `abort` took it back before it started.
            GenerationError: No replica is left.
        """
        if self._broken is not None:
            raise self._broken
        pending = _Pending(request, affinity_key, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        self._wake()
        try:
            return await pending.done
        except asyncio.CancelledError:
            self._abandon(pending)
            raise

    async def abort(self, request_ids: Collection[str]) -> None:
        """Take requests back, and wait until replicas have let go of them."""
        wanted = set(request_ids)
        for pending in [pending for pending in self._waiting if pending.request.request_id in wanted]:
            self._waiting.remove(pending)
            _fail(pending, RequestAborted(f"the request {pending.request.request_id} was taken back"))
        running = [pending for request_id, pending in self._running.items() if request_id in wanted]
        by_replica: dict[int, list[str]] = {}
        for pending in running:
            if pending.replica is not None:
                by_replica.setdefault(pending.replica, []).append(pending.request.request_id)
        for replica, ids in by_replica.items():
            await self._abort_on(replica, ids)
        await asyncio.gather(*(pending.done for pending in running), return_exceptions=True)

    # ---- sending -------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Dispatch after everything that is ready now had its turn, so that requests travel together."""
        if self._dispatching is None or self._dispatching.done():
            self._dispatching = asyncio.create_task(self._dispatch())

    async def _dispatch(self) -> None:
        try:
            while self._waiting and len(self._running) < self._max_in_flight and self._broken is None:
                for replica, batch in self._next_batches().items():
                    await self._submit(replica, batch)
        except Exception as error:  # noqa: BLE001 - raised in every waiting call
            self._break(error)

    def _next_batches(self) -> dict[int, list[_Pending]]:
        """Take requests that may start now; a new affinity key goes to the replica with the least load."""
        loads = dict.fromkeys(self._replicas, 0)
        for pending in self._running.values():
            if pending.replica in loads:
                loads[pending.replica] += 1
        batches: dict[int, list[_Pending]] = {}
        while self._waiting and len(self._running) < self._max_in_flight:
            pending = self._waiting.popleft()
            if pending.done.done():
                continue
            replica = self._affinities.get(pending.affinity_key)
            if replica not in loads:
                replica = min(loads, key=lambda index: loads[index])
                self._affinities[pending.affinity_key] = replica
                self._affinities.move_to_end(pending.affinity_key)
                if len(self._affinities) > MAX_AFFINITIES:
                    self._affinities.popitem(last=False)
            pending.replica = replica
            loads[replica] += 1
            self._running[pending.request.request_id] = pending
            batches.setdefault(replica, []).append(pending)
        return batches

    async def _submit(self, replica: int, batch: list[_Pending]) -> None:
        try:
            await self._replicas[replica].submit([pending.request for pending in batch])
        except ReplicaLost as error:
            self._lose(replica, error)
            return
        poller = self._pollers.get(replica)
        if poller is None or poller.done():
            self._pollers[replica] = asyncio.create_task(self._poll_while_busy(replica))

    # ---- receiving -----------------------------------------------------------------------------

    async def _poll_while_busy(self, replica: int) -> None:
        try:
            while any(pending.replica == replica for pending in self._running.values()):
                for result in await self._replicas[replica].poll(POLL_SECONDS):
                    self._take(result)
                if self._waiting:
                    self._wake()
        except ReplicaLost as error:
            self._lose(replica, error)
        except Exception as error:  # noqa: BLE001 - raised in every waiting call
            self._break(error)

    def _take(self, result: Generation | FailedGeneration) -> None:
        pending = self._running.pop(result.request_id, None)
        if pending is None or pending.done.done():
            return
        if isinstance(result, Generation):
            pending.done.set_result(result)
            return
        pending.attempts += 1
        if pending.attempts > self._retries:
            _fail(pending, SampleLost(str(result.error)))
            return
        pending.replica = None
        self._waiting.append(pending)
        self._wake()

    def _lose(self, replica: int, error: ReplicaLost) -> None:
        """Queue a lost replica's requests again; this does not count as an attempt of theirs."""
        self._replicas.pop(replica, None)
        for pending in [pending for pending in self._running.values() if pending.replica == replica]:
            del self._running[pending.request.request_id]
            pending.replica = None
            self._waiting.append(pending)
        if self._replicas:
            self._wake()
            return
        gone = GenerationError(
            f"every inference replica is gone; the last error: {error}",
            fix="look for out-of-memory kills; lower inference.max_running, or the engine's own keys for memory",
        )
        gone.__cause__ = error
        self._break(gone)

    def _abandon(self, pending: _Pending) -> None:
        """Stop a request whose caller was cancelled."""
        if pending in self._waiting:
            self._waiting.remove(pending)
        elif pending.replica in self._replicas:
            task = asyncio.create_task(self._abort_on(pending.replica, [pending.request.request_id]))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort_on(self, replica: int, request_ids: Sequence[str]) -> None:
        with contextlib.suppress(ReplicaLost, KeyError):  # its poller finds out, and hands the requests on
            await self._replicas[replica].abort(request_ids)

    def _break(self, error: Exception) -> None:
        """Nothing can be generated any more: raise in every waiting call."""
        self._broken = error
        for pending in [*self._waiting, *self._running.values()]:
            _fail(pending, error)
        self._waiting.clear()
        self._running.clear()


def _fail(pending: _Pending, error: BaseException) -> None:
    if not pending.done.done():
        pending.done.set_exception(error)
