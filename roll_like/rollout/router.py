"""Sends requests to inference replicas: which one, how many at a time, in which order, again after a failure.

`Router.submit` returns the future of one sample. Requests that are made at the same moment are sent in one call per
replica, and a replica is polled only while it has requests. Replicas are anything with the methods of
`Replica`; in a run they are handles on Ray actors.

Each replica has about as many requests as it can run (`most_held`); the others wait in the router. A request is
therefore given to a replica when one has room, not when it is made, and goes to the one that is free first, in
the order of urgency (queue scheduling of ROLL Flash, Lu et al. 2025, arXiv:2510.11345).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Protocol

from roll_like.cluster.spans import SPANS, Span
from roll_like.errors import GenerationError
from roll_like.inference.interface import FailedGeneration, GenerateRequest, Generation, Guesses

POLL_SECONDS = 30.0
#: Affinity keys that are kept; the next request of a dropped one may miss the prefix cache.
MAX_AFFINITIES = 65536
#: What a replica holds beside the requests that it runs, as a share of these.
HELD_SHARE = 1 / 16


def most_held(max_running: int) -> int:
    """Return how many requests a replica may hold that runs `max_running` at a time.

    A few more, at least one: the place of a finished request is taken at the next decoding step, and not after the
    round trip of its result to the driver and of the next request back. More would only wait where no other replica
    can take them.

    >>> most_held(128)
    136
    """
    return max_running + math.ceil(max_running * HELD_SHARE)


def affinity_slack(max_running: int) -> int:
    """Return by how many requests a key's replica may be ahead of the least loaded one before the key moves.

    An eighth of those that a replica runs, at least two: so the samples of one prompt share its computation, and a
    replica decodes hardly slower than the others. verl moves keys for the same reason (verl#7435).

    >>> affinity_slack(128), affinity_slack(8)
    (16, 2)
    """
    return max(2, max_running // 8)


class ReplicaLost(GenerationError):
    """A replica's process is gone; its requests go to another."""

    retry = True


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


class _Rank(IntEnum):
    """The queue that a request waits in; a later one is served when the earlier ones are empty."""

    URGENT = 0
    PRIORITIZED = 1
    ORDINARY = 2


@dataclass(slots=True, eq=False)
class _Pending:
    """A request, where it is, and the future of its sample."""

    request: GenerateRequest
    affinity_key: Hashable
    rank: _Rank
    done: asyncio.Future[Generation]
    attempts: int = 0
    endpoint: _Endpoint | None = None  # None: it waits
    given: float = 0.0  # when a replica got it
    taken_back: bool = False


@dataclass(slots=True, eq=False)
class _Endpoint:
    """A replica, and what it was given."""

    replica: Replica
    number: int
    requests: dict[str, _Pending] = field(default_factory=dict)
    submits: set[asyncio.Task[None]] = field(default_factory=set)
    poller: asyncio.Task[None] | None = None
    busy_since: float = 0.0
    lost: bool = False

    @property
    def load(self) -> int:
        """Requests that it has."""
        return len(self.requests)


class _ByLoad:
    """Endpoints by their load; finds one of the least loaded without looking at the others.

    Args:
        endpoints: Endpoints without requests.
        most: Most requests that an endpoint has.
    """

    def __init__(self, endpoints: Iterable[_Endpoint], most: int) -> None:
        self._endpoints = [OrderedDict[_Endpoint, None]() for _ in range(most + 1)]
        self._endpoints[0].update((endpoint, None) for endpoint in endpoints)
        self._least = 0

    def least(self) -> _Endpoint | None:
        """Return the endpoint that has had the least load for longest; None without endpoints."""
        while self._least < len(self._endpoints) and not self._endpoints[self._least]:
            self._least += 1
        if self._least == len(self._endpoints):
            return None
        return next(iter(self._endpoints[self._least]))

    def moved(self, endpoint: _Endpoint, before: int) -> None:
        """Note that an endpoint's load was `before` and is another now."""
        del self._endpoints[before][endpoint]
        self._endpoints[endpoint.load][endpoint] = None
        self._least = min(self._least, endpoint.load)

    def add(self, endpoint: _Endpoint) -> None:
        """Take in an endpoint without requests."""
        self._endpoints[0][endpoint] = None
        self._least = 0

    def remove(self, endpoint: _Endpoint) -> None:
        """Forget an endpoint."""
        del self._endpoints[endpoint.load][endpoint]


class Router:
    """Routes requests to replicas. Every operation costs the same, however many requests wait and replicas there are.

    Args:
        max_running: Requests that one replica runs at a time; it holds at most `most_held` of them.
        max_in_flight: Requests that may be at replicas at a time, all together; more wait.
        retries: Further attempts of a request that failed. A lost replica counts as no attempt.
        awaits_more: Asked when the last replica is lost: whether another will be admitted. Requests wait for it.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        max_running: int,
        max_in_flight: int,
        retries: int,
        awaits_more: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = [_Endpoint(replica, number) for number, replica in enumerate(replicas)]
        self._numbers = itertools.count(len(self._endpoints))
        self._most_held = most_held(max_running)
        self._slack = affinity_slack(max_running)
        self._by_load = _ByLoad(self._endpoints, self._most_held)
        self._max_in_flight = max_in_flight
        self._retries = retries
        self._awaits_more = awaits_more
        self._clock = clock
        self._unfinished: dict[str, _Pending] = {}
        self._queues = {rank: OrderedDict[str, _Pending]() for rank in _Rank}
        self._ordinary: dict[Hashable, dict[str, _Pending]] = {}  # what waits and could be prioritized, by key
        self._prioritized: set[Hashable] = set()
        self._in_flight = 0
        self._affinities: OrderedDict[Hashable, _Endpoint] = OrderedDict()
        self._busy_seconds = 0.0
        self._guesses = Guesses()
        self._woken = False
        self._aborts: set[asyncio.Task[None]] = set()
        self._broken: Exception | None = None

    def submit(
        self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False
    ) -> asyncio.Future[Generation]:
        """Return the future of what a replica samples. Cancelling it takes the request back.

        An aborted request comes back with its tokens so far.

        Args:
            request: What to sample; its id is unique among unfinished ones.
            affinity_key: Requests with the same key go to the same replica, whose cache has their prefix (session
                affinity), while that replica has room and at most `affinity_slack` requests more than the least loaded.
                Else the key moves there.
            urgent: Whether it goes before all that are not.

        Raises:
            SampleLost: In the future; every attempt failed.
            RequestAborted: In the future; `abort` took it back before it started.
            GenerationError: No replica is left.
        """
        if self._broken is not None:
            raise self._broken
        rank = _Rank.URGENT if urgent else _Rank.ORDINARY
        pending = _Pending(request, affinity_key, rank, asyncio.get_running_loop().create_future())
        pending.done.add_done_callback(partial(self._settle, pending))
        self._unfinished[request.request_id] = pending
        self._enqueue(pending)
        return pending.done

    async def generate(self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False) -> Generation:
        """Return what a replica samples, as `submit` does."""
        return await self.submit(request, affinity_key, urgent)

    async def abort(self, request_ids: Collection[str]) -> None:
        """Take requests back, and wait until replicas have let go of them."""
        found = [self._unfinished[request_id] for request_id in request_ids if request_id in self._unfinished]
        wanted = [pending for pending in found if not pending.done.done()]
        by_endpoint: dict[_Endpoint, list[str]] = {}
        for pending in wanted:
            pending.taken_back = True
            if pending.endpoint is None:
                self._dequeue(pending)
                _fail(pending, _taken_back(pending))
            else:
                by_endpoint.setdefault(pending.endpoint, []).append(pending.request.request_id)
        await asyncio.gather(*(self._abort_on(endpoint, ids) for endpoint, ids in by_endpoint.items()))
        if wanted:
            await asyncio.wait([pending.done for pending in wanted])

    def prioritize(self, keys: Iterable[Hashable]) -> None:
        """Serve requests with these affinity keys before ordinary ones, those to come included, until `forget`."""
        for key in keys:
            self._prioritized.add(key)
            for request_id, pending in self._ordinary.pop(key, {}).items():
                del self._queues[_Rank.ORDINARY][request_id]
                pending.rank = _Rank.PRIORITIZED
                self._queues[_Rank.PRIORITIZED][request_id] = pending

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop what is known of affinity keys that no further request will have."""
        for key in keys:
            self._prioritized.discard(key)
            self._affinities.pop(key, None)

    def unfinished(self, keys: Collection[Hashable]) -> int:
        """Return how many requests with these affinity keys wait or are with replicas."""
        return sum(pending.affinity_key in keys for pending in self._unfinished.values())

    def admit(self, replica: Replica) -> None:
        """Give requests to another replica too, such as one in the place of a lost one."""
        endpoint = _Endpoint(replica, next(self._numbers))
        self._endpoints.append(endpoint)
        self._by_load.add(endpoint)
        self._wake()

    @property
    def replicas(self) -> int:
        """Replicas that are there."""
        return len(self._endpoints)

    def busy_seconds(self) -> float:
        """Return for how long replicas had at least one request so far, all together. Seconds."""
        now = self._clock()
        return self._busy_seconds + sum(now - endpoint.busy_since for endpoint in self._endpoints if endpoint.requests)

    def under_way(self) -> list[Span]:
        """Return when replicas got the requests that they have."""
        now, clock = time.time(), self._clock()
        return [
            Span(f"engine {endpoint.number}", "request", now - (clock - pending.given), now)
            for endpoint in list(self._endpoints)
            for pending in list(endpoint.requests.values())
        ]

    def take_guesses(self) -> Guesses:
        """Return what engines guessed of all requests since the last call: evaluations and judges, aborted ones too."""
        taken, self._guesses = self._guesses, Guesses()
        return taken

    # ---- waiting -------------------------------------------------------------------------------

    def _enqueue(self, pending: _Pending) -> None:
        request_id, key = pending.request.request_id, pending.affinity_key
        if pending.rank is _Rank.ORDINARY:
            if key in self._prioritized:
                pending.rank = _Rank.PRIORITIZED
            else:
                self._ordinary.setdefault(key, {})[request_id] = pending
        self._queues[pending.rank][request_id] = pending
        self._wake()

    def _dequeue(self, pending: _Pending) -> None:
        request_id, key = pending.request.request_id, pending.affinity_key
        del self._queues[pending.rank][request_id]
        if pending.rank is _Rank.ORDINARY:
            del self._ordinary[key][request_id]
            if not self._ordinary[key]:
                del self._ordinary[key]

    def _next(self) -> _Pending | None:
        """Return what is served next; it still waits."""
        for queue in self._queues.values():
            if queue:
                return next(iter(queue.values()))
        return None

    # ---- sending -------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Dispatch after everything that is ready now had its turn, so that requests travel together."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Give waiting requests to replicas that have room. A slow replica delays no other."""
        self._woken = False
        batches: dict[_Endpoint, list[_Pending]] = {}
        while (pending := self._next()) is not None and self._in_flight < self._max_in_flight:
            least = self._by_load.least()
            if least is None or least.load >= self._most_held:
                break
            self._dequeue(pending)
            if pending.done.done():
                continue
            endpoint = self._endpoint_of(pending.affinity_key, least)
            self._give(endpoint, pending)
            batches.setdefault(endpoint, []).append(pending)
        for endpoint, batch in batches.items():
            task = asyncio.create_task(self._submit(endpoint, [pending.request for pending in batch]))
            endpoint.submits.add(task)
            task.add_done_callback(endpoint.submits.discard)

    def _endpoint_of(self, key: Hashable, least: _Endpoint) -> _Endpoint:
        """Return where a request goes: to the replica that has its prefix, unless that is full or ahead of others."""
        endpoint = self._affinities.get(key, least)
        if endpoint.lost or endpoint.load >= self._most_held or endpoint.load > least.load + self._slack:
            endpoint = least
        self._affinities[key] = endpoint
        self._affinities.move_to_end(key)
        if len(self._affinities) > MAX_AFFINITIES:
            self._affinities.popitem(last=False)
        return endpoint

    def _give(self, endpoint: _Endpoint, pending: _Pending) -> None:
        if not endpoint.requests:
            endpoint.busy_since = self._clock()
        pending.endpoint, pending.given = endpoint, self._clock()
        endpoint.requests[pending.request.request_id] = pending
        self._by_load.moved(endpoint, endpoint.load - 1)
        self._in_flight += 1

    def _take(self, endpoint: _Endpoint, request_id: str) -> _Pending | None:
        pending = endpoint.requests.pop(request_id, None)
        if pending is not None:
            pending.endpoint = None
            if SPANS.on:
                SPANS.past(f"engine {endpoint.number}", "request", self._clock() - pending.given)
            self._by_load.moved(endpoint, endpoint.load + 1)
            self._in_flight -= 1
            if not endpoint.requests:
                self._busy_seconds += self._clock() - endpoint.busy_since
        return pending

    async def _submit(self, endpoint: _Endpoint, requests: Sequence[GenerateRequest]) -> None:
        try:
            await endpoint.replica.submit(requests)
        except ReplicaLost as error:
            self._lose(endpoint, error)
            return
        except Exception as error:  # noqa: BLE001 - raised in every waiting call
            self._break(error)
            return
        if endpoint.poller is None or endpoint.poller.done():
            endpoint.poller = asyncio.create_task(self._poll_while_busy(endpoint))

    # ---- receiving -----------------------------------------------------------------------------

    async def _poll_while_busy(self, endpoint: _Endpoint) -> None:
        try:
            while endpoint.requests:
                for result in await endpoint.replica.poll(POLL_SECONDS):
                    self._receive(endpoint, result)
                self._wake()
        except ReplicaLost as error:
            self._lose(endpoint, error)
        except Exception as error:  # noqa: BLE001 - raised in every waiting call
            self._break(error)

    def _receive(self, endpoint: _Endpoint, result: Generation | FailedGeneration) -> None:
        if isinstance(result, Generation) and result.speculation is not None:
            self._guesses += result.speculation
        pending = self._take(endpoint, result.request_id)
        if pending is None or pending.done.done():
            return
        if isinstance(result, Generation):
            pending.done.set_result(result)
            return
        pending.attempts += 1
        if pending.attempts > self._retries:
            _fail(pending, SampleLost(str(result.error)))
        else:
            self._try_again(pending)

    def _try_again(self, pending: _Pending) -> None:
        """Queue a request again, unless it was taken back or its caller was cancelled."""
        if pending.taken_back:
            _fail(pending, _taken_back(pending))
        elif not pending.done.done():
            self._enqueue(pending)

    def _lose(self, endpoint: _Endpoint, error: ReplicaLost) -> None:
        """Queue a lost replica's requests again; this does not count as an attempt of theirs."""
        if endpoint.lost:
            return
        endpoint.lost = True
        self._endpoints.remove(endpoint)
        lost = list(endpoint.requests.values())
        for pending in lost:
            self._take(endpoint, pending.request.request_id)
        self._by_load.remove(endpoint)
        if self._endpoints or self._awaits_more():
            for pending in lost:
                self._try_again(pending)
        else:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Raise in every waiting call, and in those to come: no replica is left, and none will come."""
        self._break(all_gone(error))

    def _settle(self, pending: _Pending, done: asyncio.Future[Generation]) -> None:
        """Forget a request whose future is done; stop it if that was cancelled."""
        request_id = pending.request.request_id
        del self._unfinished[request_id]
        if not done.cancelled():
            return
        pending.taken_back = True
        if pending.endpoint is not None:
            task = asyncio.create_task(self._abort_on(pending.endpoint, [request_id]))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
        elif self._queues[pending.rank].get(request_id) is pending:
            self._dequeue(pending)

    async def _abort_on(self, endpoint: _Endpoint, request_ids: Sequence[str]) -> None:
        if endpoint.submits:  # what a replica does not know yet it cannot abort
            await asyncio.wait(endpoint.submits)
        if not endpoint.lost:
            with contextlib.suppress(ReplicaLost):  # its poller finds out, and hands the requests on
                await endpoint.replica.abort(request_ids)

    def _break(self, error: Exception) -> None:
        """Nothing can be generated any more: raise in every waiting call."""
        self._broken = error
        for pending in self._unfinished.values():
            _fail(pending, error)
        for queue in self._queues.values():
            queue.clear()
        self._ordinary.clear()
        for endpoint in self._endpoints:
            for request_id in list(endpoint.requests):
                self._take(endpoint, request_id)


def all_gone(error: Exception) -> ReplicaLost:
    """Return the error of a run without any engine."""
    gone = ReplicaLost(
        f"every inference replica is gone; the last error: {error}",
        fix="look for out-of-memory kills; lower inference.max_running, or the engine's own keys for memory",
    )
    gone.__cause__ = error
    return gone


def _taken_back(pending: _Pending) -> RequestAborted:
    return RequestAborted(f"the request {pending.request.request_id} was taken back")


def _fail(pending: _Pending, error: BaseException) -> None:
    if not pending.done.done():
        pending.done.set_exception(error)
