"""The router against fakes: homes, batches, limits, urgency, failures, requests that are taken back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_support import all_follows

from roll_like.errors import GenerationError
from roll_like.inference.interface import FailedGeneration, GenerateRequest, Generation, Guesses, Sampling
from roll_like.rollout.metrics import speculation_metrics
from roll_like.rollout.router import ReplicaLost, RequestAborted, Router, SampleLost, most_held
from roll_like.types import Segment, StopReason

pytestmark = pytest.mark.timeout(60)


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
    return asyncio.run(asyncio.wait_for(work, timeout=60))


async def test_requests_of_one_moment_travel_together_and_homes_stay() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    router = Router(replicas, max_running=100, max_in_flight=100, retries=0)
    names = ["a0", "a1", "b0", "b1"]
    await asyncio.gather(*(router.generate(request(name), affinity_key=name[0]) for name in names))
    await router.generate(request("b2"), affinity_key="b")
    await router.generate(request("a2"), affinity_key="a")
    first, second = replicas
    assert first.calls == [["a0", "a1"], ["a2"]]
    assert second.calls == [["b0", "b1"], ["b2"]]


async def test_requests_in_flight_are_bounded_and_the_others_wait() -> None:
    replica = FakeReplica()
    router = Router([replica], max_running=100, max_in_flight=2, retries=0)
    results = await asyncio.gather(*(router.generate(request(str(n)), affinity_key=n) for n in range(5)))
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


async def test_a_lost_replicas_requests_move_and_their_home_too() -> None:
    replicas = [FakeReplica(held=["a"]), FakeReplica()]
    router = Router(replicas, max_running=100, max_in_flight=9, retries=0)
    waiting = asyncio.create_task(router.generate(request("a"), affinity_key="a"))
    await all_follows()
    replicas[0].lose(ReplicaLost("gone"))
    assert (await waiting).text == "a"
    await router.generate(request("a2"), affinity_key="a")
    assert replicas[1].calls == [["a"], ["a2"]]


async def test_requests_under_way_are_spans_up_to_now() -> None:
    before = time.time()
    clock = itertools.count(100.0, 2.0)
    replica = FakeReplica(held=["a"])
    router = Router([replica], max_running=9, max_in_flight=9, retries=0, clock=lambda: next(clock))
    assert router.under_way() == []
    waiting = [router.submit(request(name), affinity_key=0) for name in "ab"]
    await waiting[1]
    found = router.under_way()
    replica.release("a")
    await waiting[0]
    assert router.under_way() == []
    (span,) = found
    assert (span.track, span.name) == ("engine 0", "request")
    assert before <= span.ended <= time.time()
    assert 4 <= span.ended - span.began <= 20  # of the clock that ticks 2 s a look


async def test_without_replicas_everybody_is_told_and_later_ones_too() -> None:
    replica = FakeReplica(held=["a", "b"])
    router = Router([replica], max_running=100, max_in_flight=1, retries=0)
    waiting = [asyncio.create_task(router.generate(request(name), affinity_key=name)) for name in "ab"]
    await all_follows()
    replica.lose(ReplicaLost("gone"))
    for one in waiting:
        with pytest.raises(GenerationError, match="every inference replica is gone; the last error: gone"):
            await one
    with pytest.raises(GenerationError, match="every inference replica is gone"):
        await router.generate(request("c"), affinity_key="c")


async def test_an_unexpected_error_of_a_replica_reaches_who_waits() -> None:
    replica = FakeReplica(held=["a"])
    router = Router([replica], max_running=100, max_in_flight=1, retries=0)
    waiting = asyncio.create_task(router.generate(request("a"), affinity_key=0))
    await all_follows()
    replica.lose(ValueError("what is this"))
    with pytest.raises(ValueError, match="what is this"):
        await waiting


async def test_aborted_requests_come_back_or_never_start() -> None:
    replica = FakeReplica(held=["a"])
    router = Router([replica], max_running=100, max_in_flight=1, retries=0)
    running = asyncio.create_task(router.generate(request("a"), affinity_key=0))
    queued = asyncio.create_task(router.generate(request("b"), affinity_key=0))
    await all_follows()
    await router.abort(["a", "b"])
    assert running.done() or (await running)
    assert (await running).stop_reason is StopReason.ABORTED
    with pytest.raises(RequestAborted):
        await queued
    assert replica.calls == [["a"]]
    assert replica.aborted == ["a"]


async def test_who_stops_waiting_frees_the_replica() -> None:
    replica = FakeReplica(held=["a"])
    router = Router([replica], max_running=100, max_in_flight=1, retries=0)
    waiting = asyncio.create_task(router.generate(request("a"), affinity_key=0))
    queued = asyncio.create_task(router.generate(request("b"), affinity_key=0))
    await all_follows()
    waiting.cancel()
    assert (await router.generate(request("c"), affinity_key=0)).text == "c"
    assert (await queued).text == "b"
    assert replica.aborted == ["a"]


class Rig:
    """A router over replicas that do what a test says, and what became of each request."""

    def __init__(self, replicas: int = 1, **changes: Any) -> None:
        self.replicas = [ScriptedReplica() for _ in range(replicas)]
        limits = {"max_running": 2, "max_in_flight": 1000, "retries": 0} | changes
        self.router = Router(self.replicas, **limits)
        self.asked: dict[str, asyncio.Task[Generation]] = {}

    def ask(self, name: str, key: Any = None, *, urgent: bool = False) -> None:
        work = self.router.generate(request(name), affinity_key=name if key is None else key, urgent=urgent)
        self.asked[name] = asyncio.create_task(work)

    async def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def finish(self, *names: str, failed: bool = False) -> None:
        for replica in self.replicas:
            replica.finish([name for name in names if name in replica.open], failed=failed)
        await self.settle()

    @property
    def sent(self) -> list[str]:
        """Requests in the order in which replicas got them."""
        return [name for _, name in sorted(entry for replica in self.replicas for entry in replica.got)]


class ScriptedReplica:
    """Finishes what a test names."""

    clock = itertools.count()

    def __init__(self) -> None:
        self.got: list[tuple[int, str]] = []
        self.open: set[str] = set()
        self.most = 0
        self.lost = False
        self.speculation: Guesses | None = None
        self._results: list[Generation | FailedGeneration] = []
        self._changed = asyncio.Event()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        if self.lost:
            raise ReplicaLost("gone")
        for one in requests:
            assert one.request_id not in self.open
            self.got.append((next(self.clock), one.request_id))
            self.open.add(one.request_id)
        self.most = max(self.most, len(self.open))

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        while not self._results and not self.lost:
            self._changed.clear()
            await self._changed.wait()
        if self.lost:
            raise ReplicaLost("gone")
        results, self._results = self._results, []
        return results

    async def abort(self, request_ids: Sequence[str]) -> None:
        if self.lost:
            raise ReplicaLost("gone")
        self.finish([name for name in request_ids if name in self.open], reason=StopReason.ABORTED)

    def finish(self, names: Sequence[str], *, failed: bool = False, reason: StopReason = StopReason.STOP) -> None:
        self.open.difference_update(names)
        for name in names:
            if failed:
                self._results.append(FailedGeneration(request_id=name, error=GenerationError("hiccup")))
            else:
                none = np.zeros(0, np.int32), np.zeros(0, np.float32)
                self._results.append(
                    Generation(
                        request_id=name,
                        token_ids=none[0],
                        logprobs=none[1],
                        segments=(),
                        text=name,
                        stop_reason=reason,
                        speculation=self.speculation,
                    )
                )
        self._changed.set()

    def lose(self) -> None:
        self.lost = True
        self.open.clear()
        self._changed.set()


async def test_a_replica_has_what_it_can_run_and_a_few_more_and_the_rest_goes_to_who_is_free() -> None:
    assert [most_held(running) for running in (1, 16, 17, 128)] == [2, 17, 19, 136]

    rig = Rig(replicas=2, max_running=2)
    for number in range(9):
        rig.ask(str(number), key="same")
    await rig.settle()
    first, second = rig.replicas
    assert (len(first.open), len(second.open)) == (3, 3)
    await rig.finish(*second.open)
    assert (len(first.open), len(second.open)) == (3, 3)  # all that waited went to the free one, whatever its key
    assert sorted(second.open) == ["6", "7", "8"]


async def test_a_key_keeps_its_home_until_that_is_ahead_by_more_than_the_slack() -> None:
    rig = Rig(replicas=2, max_running=8)
    for number in range(4):
        rig.ask(str(number), key="episode")
    await rig.settle()
    first, second = rig.replicas
    assert (sorted(first.open), sorted(second.open)) == (["0", "1", "2"], ["3"])
    await rig.finish("0", "1", "2")
    rig.ask("4", key="episode")  # its home is the second one now
    await rig.settle()
    assert sorted(second.open) == ["3", "4"]
    rig.router.forget(["episode"])
    rig.ask("5", key="episode")
    await rig.settle()
    assert first.open == {"5"}


def test_requests_of_new_keys_go_to_the_least_loaded_replica_whatever_has_ended() -> None:
    async def work() -> None:
        rig = Rig(replicas=3, max_running=100)
        first, second, third = rig.replicas
        numbers = itertools.count()

        async def loads(asked: int) -> list[int]:
            for _ in range(asked):
                number = next(numbers)
                rig.ask(str(number), key=str(number))
            await rig.settle()
            return [len(replica.open) for replica in rig.replicas]

        assert await loads(6) == [2, 2, 2]
        await rig.finish(*second.open, next(iter(third.open)))
        assert await loads(0) == [2, 0, 1]
        assert await loads(2) in ([2, 2, 1], [2, 1, 2])
        assert await loads(1) == [2, 2, 2]
        await rig.finish(*first.open, *third.open)
        assert await loads(3) in ([2, 2, 1], [1, 2, 2])

    run(work())


async def test_a_key_moves_when_its_home_is_full() -> None:
    rig = Rig(replicas=2, max_running=1)
    for number in range(3):
        rig.ask(str(number), key="episode")
    await rig.settle()
    assert [sorted(replica.open) for replica in rig.replicas] == [["0", "1"], ["2"]]


async def test_a_cancelled_request_leaves_its_queue_at_once() -> None:
    rig = Rig(max_running=1, max_in_flight=1)
    rig.ask("a")
    await rig.settle()
    rig.ask("b")
    rig.ask("c", urgent=True)
    await rig.settle()
    assert any(rig.router._queues.values())
    rig.asked["b"].cancel()
    rig.asked["c"].cancel()
    await rig.settle()
    assert not any([*rig.router._queues.values(), rig.router._ordinary])
    await rig.finish("a")
    assert rig.sent == ["a"]


async def test_urgent_requests_go_before_prioritized_ones_and_these_before_others() -> None:
    rig = Rig(max_running=1, max_in_flight=1)
    rig.ask("first")
    await rig.settle()
    for name in ("a0", "b0", "b1", "a1"):
        rig.ask(name, key=name[0])
    rig.ask("measured", urgent=True)
    rig.router.prioritize("b")
    rig.ask("b2", key="b")  # a later turn
    for name in ("first", "measured", "b0", "b1", "b2", "a0"):
        await rig.finish(name)
    assert rig.sent == ["first", "measured", "b0", "b1", "b2", "a0", "a1"]
    rig.router.forget("b")
    rig.ask("a2", key="a")
    rig.ask("b3", key="b")
    for name in ("a1", "a2", "b3"):
        await rig.finish(name)
    assert rig.sent[-2:] == ["a2", "b3"]
    assert all(one.done() for one in rig.asked.values())


async def test_engines_are_busy_while_they_have_a_request() -> None:
    now = 10.0
    rig = Rig(replicas=2, clock=lambda: now)
    assert (rig.router.replicas, rig.router.busy_seconds()) == (2, 0)
    rig.ask("a")
    rig.ask("b")
    await rig.settle()
    now = 12.0
    assert rig.router.busy_seconds() == 4  # of two, both still at it
    await rig.finish("a")
    now = 15.0
    assert rig.router.busy_seconds() == 7
    rig.replicas[1].lose()
    await rig.settle()
    now = 16.0
    assert rig.replicas[0].open == {"b"}  # it moved at 15: 2 + 5 seconds before, and one since
    assert (rig.router.replicas, rig.router.busy_seconds()) == (1, 8)
    rig.ask("c")
    await rig.settle()
    now = 17.0
    await rig.finish("b")  # it is still at the other
    now = 18.0
    await rig.finish("c")
    now = 20.0
    assert rig.router.busy_seconds() == 10


def test_an_aborted_request_is_not_tried_again() -> None:
    async def ended(happens: Callable[[Rig], Awaitable[None] | None]) -> None:
        rig = Rig(replicas=2, retries=5)
        rig.ask("a")
        await rig.settle()
        rig.replicas[0].abort = nothing  # type: ignore[method-assign]
        taking_back = asyncio.create_task(rig.router.abort(["a"]))
        await rig.settle()
        assert not taking_back.done()
        if (work := happens(rig)) is not None:
            await work
        await taking_back
        with pytest.raises(RequestAborted, match="request a was taken back"):
            await rig.asked["a"]
        assert rig.sent == ["a"]

    async def nothing(request_ids: Sequence[str]) -> None:
        pass

    run(ended(lambda rig: rig.finish("a", failed=True)))
    run(ended(lambda rig: rig.replicas[0].lose()))


async def test_an_abort_does_not_overtake_its_request() -> None:
    replica = FakeReplica(held=["a"])
    router = Router([replica], max_running=9, max_in_flight=9, retries=0)
    submit, gate = replica.submit, asyncio.Event()

    async def slow(requests: Sequence[GenerateRequest]) -> None:
        await gate.wait()
        await submit(requests)

    replica.submit = slow  # type: ignore[method-assign]
    waiting = asyncio.create_task(router.generate(request("a"), affinity_key=0))
    await all_follows()
    taking_back = asyncio.create_task(router.abort(["a"]))
    await all_follows()
    assert replica.aborted == []
    gate.set()
    await taking_back
    assert (await waiting).stop_reason is StopReason.ABORTED


async def test_a_replica_that_is_slow_to_take_requests_delays_no_other() -> None:
    rig = Rig(replicas=2)
    rig.replicas[0].submit = lambda requests: asyncio.Event().wait()  # type: ignore[assignment, method-assign]
    for name in "abcd":
        rig.ask(name)
    await rig.settle()
    assert len(rig.replicas[1].open) == 2
    await rig.finish(*rig.replicas[1].open)
    rig.ask("e")
    await rig.settle()
    assert rig.replicas[1].open == {"e"}


#: What a script may do next; numbers choose among what there is.
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask"] * 3 + ["urgent", "finish", "finish", "fail", "abort", "cancel", "prioritize", "forget", "lose"]
        ),
        st.integers(0, 4),
    ),
    min_size=10,
    max_size=60,
)


class Script(Rig):
    """A rig that keeps book of how urgent each request is, and does events by name."""

    def __init__(self, *args: Any, **changes: Any) -> None:
        super().__init__(*args, **changes)
        self.ranks: dict[str, int] = {}  # 0 urgent, 1 prioritized, 2 ordinary
        self.prioritized: set[int] = set()

    @property
    def running(self) -> list[str]:
        return sorted(name for replica in self.replicas for name in replica.open)

    @property
    def unfinished(self) -> list[str]:
        return sorted(name for name, one in self.asked.items() if not one.done())

    async def do(self, what: str, number: int, choice: int) -> None:
        names = self.running if what in ("finish", "fail") else self.unfinished
        name = names[choice % len(names)] if names else None
        if what in ("ask", "urgent"):
            self.ranks[f"{number}-{choice}"] = 0 if what == "urgent" else 1 if choice in self.prioritized else 2
            self.ask(f"{number}-{choice}", key=choice, urgent=what == "urgent")
        elif what in ("prioritize", "forget", "lose"):
            getattr(self, what)(choice)
        elif name is not None and what == "abort":
            await self.router.abort([name, "unknown"])
        elif name is not None and what == "cancel":
            self.asked[name].cancel()
        elif name is not None:
            await self.finish(name, failed=what == "fail")
        await self.settle()

    def prioritize(self, key: int) -> None:
        self.router.prioritize([key])
        self.prioritized.add(key)
        self.ranks |= {one: 1 for one in self.unfinished if self.ranks[one] == 2 and one.endswith(f"-{key}")}

    def forget(self, key: int) -> None:
        if any(name.endswith(f"-{key}") for name in self.unfinished):
            return  # a key is forgotten when its group has ended
        self.router.forget([key])
        self.prioritized.discard(key)

    def lose(self, choice: int) -> None:
        alive = [replica for replica in self.replicas if not replica.lost]
        if len(alive) > 1:
            alive[choice % len(alive)].lose()


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2))
async def test_whatever_happens_limits_hold_urgent_ones_go_first_and_each_request_ends_once(
    events: list[tuple[str, int]], replicas: int, max_running: int, max_in_flight: int, retries: int
) -> None:
    rig = Script(replicas, max_running=max_running, max_in_flight=max_in_flight, retries=retries)
    held = most_held(max_running)
    for number, (what, choice) in enumerate(events):
        before = len(rig.sent)
        await rig.do(what, number, choice)
        running, sent = rig.running, rig.sent[before:]
        assert len(set(running)) == len(running) <= max_in_flight
        assert all(replica.most <= held for replica in rig.replicas)
        waiting = [name for name in rig.unfinished if name not in running]
        room = any(len(one.open) < held for one in rig.replicas if not one.lost)
        assert not waiting or not room or len(running) == max_in_flight  # no place stays free
        if what != "lose" and waiting and sent:  # what a lost replica had waits again, after others have started
            assert max(rig.ranks[name] for name in sent) <= min(rig.ranks[name] for name in waiting)
    while rig.running:
        await rig.finish(*rig.running)
    results = await asyncio.gather(*rig.asked.values(), return_exceptions=True)  # a second end would have raised
    for name, result in zip(rig.asked, results, strict=True):
        assert isinstance(result, (RequestAborted, SampleLost, asyncio.CancelledError)) or result.text == name
    router = rig.router
    assert not any([router._unfinished, *router._queues.values(), router._ordinary, router._in_flight])


async def test_guesses_of_all_samples_add_up_and_are_taken_once() -> None:
    rig = Rig(replicas=1, max_running=4)
    for number in range(3):
        rig.ask(str(number), key=number)
    await rig.settle()
    rig.replicas[0].speculation = Guesses(tokens=8, accepted=6, passes=2)
    await rig.finish(*rig.replicas[0].open)
    taken = rig.router.take_guesses()
    assert taken == Guesses(tokens=24, accepted=18, passes=6)
    metrics = speculation_metrics(taken)
    assert metrics["rollout/speculation/accepted"].value == 0.75
    assert metrics["rollout/speculation/length"].value == 4.0
    assert speculation_metrics(rig.router.take_guesses()) == {}
