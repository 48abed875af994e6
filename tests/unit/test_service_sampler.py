"""Which weights engines hold when samples are drawn, and in which order requests for several sets of them go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests_support import all_follows

from roll_like.errors import WeightSyncError
from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.service.sampler import SnapshotSampler
from roll_like.service.snapshots import UNTRAINED, Snapshot, SnapshotLoad

A, B, C = (Snapshot(file=Path(name)) for name in "abc")


class Engines:
    """Engines that note which weights they have by each name, and with which each request began and ended."""

    def __init__(self) -> None:
        self.held: dict[str, Snapshot] = {}
        self.pushes: list[Snapshot] = []
        self.running: list[str] = []
        self.most = 0
        self.seen: list[tuple[str, Snapshot]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.error: Exception | None = None

    async def load(self, load: SnapshotLoad) -> None:
        changed = {load.name, *load.dropped}
        assert not changed & {*self.running}, "weights change under a request"
        for name in changed:
            self.held.pop(name, None)
        await asyncio.sleep(0)
        assert not changed & {*self.running}, "weights change under a request"
        if self.error is not None:
            raise self.error
        self.pushes.append(load.snapshot)
        self.held[load.name] = load.snapshot

    def submit(self, request: Any, key: str) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._run(request))

    async def _run(self, request: GenerateRequest) -> str:
        self.running.append(request.adapter)
        self.most = max(self.most, len({*self.running}))
        held = self.held[request.adapter]
        try:
            if request.request_id in self.gates:
                await self.gates[request.request_id].wait()
            assert self.held[request.adapter] is held
            self.seen.append((request.request_id, held))
            return request.request_id
        finally:
            self.running.remove(request.adapter)

    async def abort(self, names: Any) -> None:
        pass

    def forget(self, keys: Any) -> None:
        pass


def sampler_of(engines: Engines, adapters: int = 0) -> SnapshotSampler:
    router: Any = engines
    return SnapshotSampler(router, router, engines.load, adapters=adapters)


def ask(sampler: SnapshotSampler, snapshot: Snapshot, name: str) -> asyncio.Task[Any]:
    request = GenerateRequest(
        request_id=name, prompt_ids=np.zeros(1, np.int32), sampling=Sampling(max_tokens=1), seed=None
    )
    return asyncio.ensure_future(sampler.generate(snapshot, [request], key=name))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_engines_finish_what_they_have_before_they_take_other_weights() -> None:
    engines = Engines()
    sampler = sampler_of(engines)
    gate = engines.gates["one"] = asyncio.Event()
    one = ask(sampler, A, "one")
    await until(lambda: bool(engines.running))
    rest = [ask(sampler, snapshot, name) for snapshot, name in ((B, "two"), (A, "three"), (B, "four"))]
    await all_follows()
    assert (engines.pushes, engines.running, sampler.waiting) == ([A], ["policy"], 3)
    gate.set()
    await asyncio.gather(one, *rest)
    # "four" goes with "two", and "three" does not wait for ever: the weights change twice
    assert engines.pushes == [A, B, A]
    assert engines.seen == [("one", A), ("two", B), ("four", B), ("three", A)]


async def test_the_same_weights_are_sent_once() -> None:
    engines = Engines()
    sampler = sampler_of(engines)
    await asyncio.gather(*(ask(sampler, UNTRAINED, str(number)) for number in range(5)))
    await ask(sampler, UNTRAINED, "later")
    assert engines.pushes == [UNTRAINED]


async def test_weights_that_could_not_be_sent_fail_those_who_want_them() -> None:
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


async def test_a_request_that_is_taken_back_leaves_its_place() -> None:
    engines = Engines()
    sampler = sampler_of(engines)
    gate = engines.gates["one"] = asyncio.Event()
    one = ask(sampler, A, "one")
    await until(lambda: bool(engines.running))
    waiting = ask(sampler, B, "two")
    await all_follows()
    waiting.cancel()
    last = ask(sampler, A, "three")
    await all_follows()
    one.cancel()
    gate.set()
    await last
    await asyncio.wait([one])
    assert (engines.pushes, sampler.waiting, engines.running) == ([A], 0, [])


async def test_several_adapters_are_sampled_with_at_a_time() -> None:
    engines = Engines()
    sampler = sampler_of(engines, adapters=2)
    gates = {name: engines.gates.setdefault(name, asyncio.Event()) for name in ("a1", "b1")}
    first = [ask(sampler, A, "a1"), ask(sampler, B, "b1")]
    await until(lambda: len(engines.running) == 2)
    assert engines.pushes == [A, B]
    # a third takes the place that was unused for longest, as soon as that is idle; the other goes on meanwhile
    waiting = [ask(sampler, C, "c1"), ask(sampler, B, "b2"), ask(sampler, A, "a2")]
    await until(lambda: bool(engines.seen))
    assert ([name for name, _ in engines.seen], sampler.waiting) == (["b2"], 2)
    gates["a1"].set()
    await asyncio.gather(first[0], waiting[0])
    assert engines.pushes == [A, B, C]
    gates["b1"].set()
    await asyncio.gather(*first, *waiting)
    assert (sampler.waiting, engines.most, len(engines.held)) == (0, 2, 2)
    assert {*engines.seen} == {("a1", A), ("a2", A), ("b1", B), ("b2", B), ("c1", C)}


async def test_of_many_adapters_none_waits_for_ever() -> None:
    engines = Engines()
    sampler = sampler_of(engines, adapters=3)
    snapshots = [Snapshot(file=Path(str(number))) for number in range(7)]
    draws, wanted = np.random.default_rng(0), dict[str, Snapshot]()
    tasks = []
    for number in range(400):
        wanted[str(number)] = chosen = snapshots[int(draws.integers(7))]
        task = ask(sampler, chosen, str(number))
        if draws.random() < 0.1:
            task.cancel()
        else:
            tasks.append(task)
        if draws.random() < 0.3:
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        done = [await task for task in tasks]
    assert len(done) == len(tasks) > 300
    assert all(held is wanted[name] for name, held in engines.seen)
    assert (sampler.waiting, engines.running, len(engines.held)) == (0, [], 3)
