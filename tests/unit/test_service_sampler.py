"""Which weights engines hold when samples are drawn, and in which order requests for several sets of them go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from roll_like.errors import WeightSyncError
from roll_like.service.sampler import UNTRAINED, Snapshot, SnapshotSampler

A, B = Snapshot(file=Path("a")), Snapshot(file=Path("b"))


class Engines:
    """Engines that note what weights each request began and ended with."""

    def __init__(self) -> None:
        self.held: Snapshot | None = None
        self.pushes: list[Snapshot] = []
        self.running = 0
        self.seen: list[tuple[str, Snapshot | None]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.error: Exception | None = None

    async def push(self, snapshot: Snapshot) -> None:
        assert self.running == 0, "weights change under a request"
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.pushes.append(snapshot)
        self.held = snapshot

    def submit(self, request: Any, key: str) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._run(request))

    async def _run(self, request: str) -> str:
        self.running += 1
        held = self.held
        try:
            if request in self.gates:
                await self.gates[request].wait()
            assert self.held == held
            self.seen.append((request, held))
            return request
        finally:
            self.running -= 1

    async def abort(self, names: Any) -> None:
        pass

    def forget(self, keys: Any) -> None:
        pass


class _Request:
    def __init__(self, name: str) -> None:
        self.request_id = name

    def __hash__(self) -> int:
        return hash(self.request_id)

    def __eq__(self, other: object) -> bool:
        return self.request_id == (other.request_id if isinstance(other, _Request) else other)


def sampler_of(engines: Engines) -> SnapshotSampler:
    router: Any = engines
    return SnapshotSampler(router, router, engines.push)


def ask(sampler: SnapshotSampler, snapshot: Snapshot, name: str) -> asyncio.Task[Any]:
    requests: Any = [_Request(name)]
    return asyncio.ensure_future(sampler.generate(snapshot, requests, key=name))


def test_engines_finish_what_they_have_before_they_take_other_weights() -> None:
    async def body() -> None:
        engines = Engines()
        sampler = sampler_of(engines)
        gate = engines.gates[_Request("one")] = asyncio.Event()  # type: ignore[index]
        one = ask(sampler, A, "one")
        await asyncio.sleep(0.01)
        rest = [ask(sampler, snapshot, name) for snapshot, name in ((B, "two"), (A, "three"), (B, "four"))]
        await asyncio.sleep(0.01)
        assert (engines.pushes, engines.running, sampler.waiting) == ([A], 1, 3)
        gate.set()
        await asyncio.gather(one, *rest)
        # "four" goes with "two", and "three" does not wait for ever: the weights change twice
        assert engines.pushes == [A, B, A]
        assert [(request.request_id, held) for request, held in engines.seen] == [  # type: ignore[attr-defined]
            ("one", A),
            ("two", B),
            ("four", B),
            ("three", A),
        ]

    asyncio.run(body())


def test_the_same_weights_are_sent_once() -> None:
    async def body() -> None:
        engines = Engines()
        sampler = sampler_of(engines)
        await asyncio.gather(*(ask(sampler, UNTRAINED, str(number)) for number in range(5)))
        await ask(sampler, UNTRAINED, "later")
        assert engines.pushes == [UNTRAINED]

    asyncio.run(body())


def test_weights_that_could_not_be_sent_fail_those_who_want_them() -> None:
    async def body() -> None:
        engines = Engines()
        sampler = sampler_of(engines)
        engines.error = WeightSyncError("they differ")
        failed = [ask(sampler, A, "one"), ask(sampler, A, "two")]
        for task in failed:
            with pytest.raises(WeightSyncError, match="they differ"):
                await task
        engines.error = None
        await ask(sampler, A, "three")
        assert engines.pushes == [A]

    asyncio.run(body())


def test_a_request_that_is_taken_back_leaves_its_place() -> None:
    async def body() -> None:
        engines = Engines()
        sampler = sampler_of(engines)
        gate = engines.gates[_Request("one")] = asyncio.Event()  # type: ignore[index]
        one = ask(sampler, A, "one")
        await asyncio.sleep(0.01)
        waiting = ask(sampler, B, "two")
        await asyncio.sleep(0.01)
        waiting.cancel()
        last = ask(sampler, A, "three")
        await asyncio.sleep(0.01)
        one.cancel()
        gate.set()
        await last
        await asyncio.wait([one])
        assert (engines.pushes, sampler.waiting, sampler._running) == ([A], 0, 0)

    asyncio.run(body())
