"""The router against fakes: homes, batches, limits, failures, requests that are taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from roll_like.errors import GenerationError
from roll_like.inference.interface import FailedGeneration, GenerateRequest, Generation, Sampling
from roll_like.rollout.router import ReplicaLost, RequestAborted, Router, SampleLost
from roll_like.types import Segment, StopReason


def request(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=np.array([1], np.int32), sampling=Sampling(max_tokens=4), seed=None
    )


class FakeReplica:
    """Answers what is not held back; remembers each call of `submit`."""

    def __init__(self, *, held: Sequence[str] = (), failing: int = 0) -> None:
        self.calls: list[list[str]] = []
        self.aborted: list[str] = []
        self.held = set(held)
        self.failing = failing
        self.lost: Exception | None = None
        self.most = 0
        self._open: dict[str, GenerateRequest] = {}
        self._changed = asyncio.Event()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        if self.lost is not None:
            raise self.lost
        self.calls.append([one.request_id for one in requests])
        self._open |= {one.request_id: one for one in requests}
        self.most = max(self.most, len(self._open))
        self._changed.set()

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        while True:
            await asyncio.sleep(0)
            if self.lost is not None:
                raise self.lost
            ready = [name for name in self._open if name not in self.held]
            if ready:
                return [self._finish(name) for name in ready]
            self._changed.clear()
            await self._changed.wait()

    def _finish(self, name: str) -> Generation | FailedGeneration:
        del self._open[name]
        if self.failing:
            self.failing -= 1
            return FailedGeneration(request_id=name, error="hiccup")
        return Generation(
            request_id=name,
            token_ids=np.array([5], np.int32),
            logprobs=np.array([-1.0], np.float32),
            segments=(Segment(start=0, end=1, policy_version=0),),
            text=name,
            stop_reason=StopReason.ABORTED if name in self.aborted else StopReason.STOP,
        )

    def release(self, name: str) -> None:
        self.held.discard(name)
        self._changed.set()

    def lose(self, error: Exception) -> None:
        self.lost = error
        self._changed.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        self.held -= set(request_ids)
        self._changed.set()


def run(work):
    return asyncio.run(asyncio.wait_for(work, timeout=5))


def test_requests_of_one_moment_travel_together_and_homes_stay() -> None:
    async def work() -> list[FakeReplica]:
        replicas = [FakeReplica(), FakeReplica()]
        router = Router(replicas, max_running=100, max_in_flight=100, retries=0)
        names = ["a0", "a1", "b0", "b1"]
        await asyncio.gather(*(router.generate(request(name), affinity_key=name[0]) for name in names))
        await router.generate(request("b2"), affinity_key="b")
        await router.generate(request("a2"), affinity_key="a")
        return replicas

    first, second = run(work())
    assert first.calls == [["a0", "a1"], ["a2"]]
    assert second.calls == [["b0", "b1"], ["b2"]]


def test_requests_in_flight_are_bounded_and_the_others_wait() -> None:
    async def work() -> tuple[FakeReplica, list[Generation]]:
        replica = FakeReplica()
        router = Router([replica], max_running=100, max_in_flight=2, retries=0)
        return replica, await asyncio.gather(*(router.generate(request(str(n)), affinity_key=n) for n in range(5)))

    replica, results = run(work())
    assert replica.most == 2
    assert [result.text for result in results] == list("01234")


def test_failures_are_tried_again_and_then_raised() -> None:
    async def work(failing: int) -> Generation:
        return await Router([FakeReplica(failing=failing)], max_running=100, max_in_flight=9, retries=1).generate(
            request("a"), affinity_key=0
        )

    assert run(work(1)).text == "a"
    with pytest.raises(SampleLost, match="hiccup"):
        run(work(2))


def test_a_lost_replicas_requests_move_and_their_home_too() -> None:
    async def work() -> list[FakeReplica]:
        replicas = [FakeReplica(held=["a"]), FakeReplica()]
        router = Router(replicas, max_running=100, max_in_flight=9, retries=0)
        waiting = asyncio.create_task(router.generate(request("a"), affinity_key="a"))
        await asyncio.sleep(0.01)
        replicas[0].lose(ReplicaLost("gone"))
        assert (await waiting).text == "a"
        await router.generate(request("a2"), affinity_key="a")
        return replicas

    assert run(work())[1].calls == [["a"], ["a2"]]


def test_without_replicas_everybody_is_told_and_later_ones_too() -> None:
    async def work() -> None:
        replica = FakeReplica(held=["a", "b"])
        router = Router([replica], max_running=100, max_in_flight=1, retries=0)
        waiting = [asyncio.create_task(router.generate(request(name), affinity_key=name)) for name in "ab"]
        await asyncio.sleep(0.01)
        replica.lose(ReplicaLost("gone"))
        for one in waiting:
            with pytest.raises(GenerationError, match="every inference replica is gone; the last error: gone"):
                await one
        with pytest.raises(GenerationError, match="every inference replica is gone"):
            await router.generate(request("c"), affinity_key="c")

    run(work())


def test_an_unexpected_error_of_a_replica_reaches_who_waits() -> None:
    async def work() -> None:
        replica = FakeReplica(held=["a"])
        router = Router([replica], max_running=100, max_in_flight=1, retries=0)
        waiting = asyncio.create_task(router.generate(request("a"), affinity_key=0))
        await asyncio.sleep(0.01)
        replica.lose(ValueError("what is this"))
        with pytest.raises(ValueError, match="what is this"):
            await waiting

    run(work())


def test_aborted_requests_come_back_or_never_start() -> None:
    async def work() -> None:
        replica = FakeReplica(held=["a"])
        router = Router([replica], max_running=100, max_in_flight=1, retries=0)
        running = asyncio.create_task(router.generate(request("a"), affinity_key=0))
        queued = asyncio.create_task(router.generate(request("b"), affinity_key=0))
        await asyncio.sleep(0.01)
        await router.abort(["a", "b"])
        assert running.done() or (await running)
        assert (await running).stop_reason is StopReason.ABORTED
        with pytest.raises(RequestAborted):
            await queued
        assert replica.calls == [["a"]]
        assert replica.aborted == ["a"]

    run(work())


def test_who_stops_waiting_frees_the_replica() -> None:
    async def work() -> None:
        replica = FakeReplica(held=["a"])
        router = Router([replica], max_running=100, max_in_flight=1, retries=0)
        waiting = asyncio.create_task(router.generate(request("a"), affinity_key=0))
        queued = asyncio.create_task(router.generate(request("b"), affinity_key=0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        assert (await router.generate(request("c"), affinity_key=0)).text == "c"
        assert (await queued).text == "b"
        assert replica.aborted == ["a"]

    run(work())
