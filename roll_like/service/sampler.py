"""Samples with exactly the weights that a client was promised.

Engines have room for several adapters at a time, or for one set of whole weights. Requests for weights that are there
go on. For others one place is emptied, the one that was unused for longest: it takes no more requests, finishes those
that it has, and gets the weights that the first in line wants. Meanwhile the other places go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from roll_like.config.inference import POLICY
from roll_like.inference.interface import GenerateRequest, Generation, InferenceEngine, PromptScores
from roll_like.rollout.engine_pool import EnginePool
from roll_like.rollout.router import Router
from roll_like.service.snapshots import Snapshot, SnapshotLoad
from roll_like.types import IntArray


@dataclass(slots=True, eq=False)
class _Waiting:
    snapshot: Snapshot
    admitted: asyncio.Future[_Place]


@dataclass(slots=True, eq=False)
class _Place:
    """Room for one set of weights in the engines.

    Attributes:
        name: How engines call what is there; empty before the first.
        snapshot: What is there; None where that is not known.
        running: Requests that are computed with it.
        turn: When a request was last admitted.
        wanted: What it is to get, before it takes further requests.
        loading: What brings that.
    """

    name: str = ""
    snapshot: Snapshot | None = None
    running: int = 0
    turn: int = 0
    wanted: Snapshot | None = None
    loading: asyncio.Task[None] | None = None


class SnapshotSampler:
    """Runs on the event loop of its router.

    Args:
        router: Sends requests to the engines.
        load: Sends weights to all engines.
        adapters: How many adapters engines hold at a time; 0 where they take whole weights.
    """

    def __init__(
        self, router: Router, engines: EnginePool, load: Callable[[SnapshotLoad], Awaitable[None]], *, adapters: int
    ) -> None:
        self._router = router
        self._engines = engines
        self._load = load
        self._named = adapters > 0
        self._places = [_Place() for _ in range(max(adapters, 1))]
        self._line: list[_Waiting] = []
        self._turn = self._loads = 0

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    async def generate(
        self, snapshot: Snapshot, requests: Sequence[GenerateRequest], *, key: str
    ) -> Sequence[Generation]:
        """Return what engines sample with the weights of a snapshot.

        Args:
            key: Unique; requests of a key go to the same engine.
        """
        async with self._with(snapshot) as name:
            futures = [self._router.submit(replace(request, adapter=name), key) for request in requests]
            try:
                return await asyncio.gather(*futures)
            finally:
                # engines have let go of what is not wanted any more before they take other weights
                await self._router.abort([request.request_id for request in requests])
                self._router.forget([key])

    async def score(self, snapshot: Snapshot, tokens: IntArray, top_k: int) -> PromptScores:
        """Return the log-probability of each token but the first under the weights of a snapshot.

        Args:
            tokens: Shape [P]; two or more.
            top_k: How many of the likeliest tokens are told at each position.
        """
        async with self._with(snapshot) as name:
            return await self._engines.ask_one(InferenceEngine.score_prompt, tokens, name, top_k)

    @asynccontextmanager
    async def _with(self, snapshot: Snapshot) -> AsyncIterator[str]:
        waiting = _Waiting(snapshot, asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        self._go_on()
        try:
            place = await waiting.admitted
        except asyncio.CancelledError:
            if waiting.admitted.done() and not waiting.admitted.cancelled() and not waiting.admitted.exception():
                self._leave(waiting.admitted.result())
            raise
        try:
            yield place.name
        finally:
            self._leave(place)

    def _leave(self, place: _Place) -> None:
        place.running -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Admit those whose weights are there, and let the first of the others have places emptied."""
        waiting = [each for each in self._line if not each.admitted.done()]  # others were taken back
        wanted = {each.snapshot for each in waiting}
        for place in self._places:
            if place.loading is None and place.wanted not in wanted:
                place.wanted = None
        places = {place.snapshot: place for place in self._places if place.wanted is None}
        self._line = [each for each in waiting if each.snapshot not in places]
        for each in waiting:
            if each.snapshot in places:
                self._admit(each, places[each.snapshot])
        for each in self._line:
            self._want(each.snapshot)
        for place in self._places:
            if place.wanted is not None and not place.running and place.loading is None:
                place.loading = asyncio.get_running_loop().create_task(self._bring(place, place.wanted))

    def _admit(self, waiting: _Waiting, place: _Place) -> None:
        self._turn += 1
        place.turn = self._turn
        place.running += 1
        waiting.admitted.set_result(place)

    def _want(self, snapshot: Snapshot) -> None:
        """Let a place be emptied for a snapshot, unless one is."""
        if any(place.wanted == snapshot for place in self._places):
            return
        free = [place for place in self._places if place.wanted is None]
        if free:
            min(free, key=lambda place: (place.snapshot is not None, place.turn)).wanted = snapshot

    async def _bring(self, place: _Place, snapshot: Snapshot) -> None:
        dropped = (place.name,) if self._named and place.name else ()
        self._loads += 1
        # engines share keys and values of prompts between requests of the same name
        place.name, place.snapshot = f"adapter-{self._loads}" if self._named else POLICY, None
        failure: Exception | None = None
        try:
            await self._load(SnapshotLoad(snapshot=snapshot, name=place.name, dropped=dropped))
            place.snapshot = snapshot
        except Exception as error:  # noqa: BLE001 - those who wait for these weights get it
            failure = error
        place.wanted = place.loading = None
        for waiting in self._line:
            if failure is not None and waiting.snapshot == snapshot and not waiting.admitted.done():
                waiting.admitted.set_exception(failure)
        self._go_on()
