"""The simulation of schedules: its engines' arithmetic by hand, its virtual time, and that it repeats."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from virtual_time import Deadlock, run_virtually

from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.types import StopReason

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = ("schedule_simulation", "simulated", "virtual_loop", "common")
#: 30 tokens of a prompt take 0.3 s; a token takes 0.11 s alone and 0.12 s in company.
RATES = {"step_seconds": 0.1, "request_seconds": 0.01, "slots": 2, "prefill_rate": 100.0}


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's names, and those of `simulated.py`."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {**vars(importlib.import_module("simulated")), **vars(importlib.import_module("schedule_simulation"))}
    yield SimpleNamespace(**names)
    for name in MODULES:
        sys.modules.pop(name, None)


def request(name: str, *, length: int, prompt: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.full(30, prompt, np.int32),
        sampling=Sampling(max_tokens=length),
        seed=None,
    )


def engine(simulation: Any, **rates: float) -> Any:
    replica = simulation.SimulatedReplica(
        simulation.EngineRates(**{**RATES, **rates}), lambda one: one.sampling.max_tokens
    )
    replica.resume(1)
    return replica


async def ends(replica: Any, count: int) -> list[tuple[str, float, int, StopReason]]:
    """Return id, time, oldest version and reason of the next results."""
    found: list[tuple[str, float, int, StopReason]] = []
    while len(found) < count:
        results: list[Generation] = await replica.poll(1.0)
        time = round(asyncio.get_running_loop().time(), 6)
        found += [(one.request_id, time, one.segments[0].policy_version, one.stop_reason) for one in results]
    return found


def test_requests_share_an_engine_and_the_last_one_is_faster_alone(simulation: Any) -> None:
    async def run() -> None:
        replica = engine(simulation)
        await replica.submit([request("short", length=10, prompt=0), request("long", length=20, prompt=1)])
        # 2 prompts: 0.6; 10 tokens in company: 1.2; 10 tokens alone: 1.1
        assert await ends(replica, 2) == [("short", 1.8, 1, StopReason.STOP), ("long", 2.9, 1, StopReason.STOP)]
        await asyncio.sleep(5)
        replica.advance()
        assert replica.busy_seconds == pytest.approx(2.9)
        assert replica.slot_seconds == pytest.approx(2 * 1.8 + 1.1)

    run_virtually(run())


def test_without_a_slot_a_request_waits_and_a_prompt_is_computed_once(simulation: Any) -> None:
    async def run() -> None:
        replica = engine(simulation, slots=1)
        await replica.submit([request("a", length=10, prompt=7), request("b", length=20, prompt=7)])
        # 0.3 + 10 · 0.11, then 20 · 0.11
        assert [time for _, time, _, _ in await ends(replica, 2)] == [1.4, 3.6]

    run_virtually(run())


def test_a_request_that_comes_later_slows_the_others_from_then_on(simulation: Any) -> None:
    async def run() -> None:
        replica = engine(simulation)
        await replica.submit([request("a", length=10, prompt=0)])
        await asyncio.sleep(0.3 + 5 * 0.11)
        await replica.submit([request("b", length=2, prompt=1)])
        # 0.85, prefill 0.3, 2 tokens at 0.12: b; the 3 tokens left of a at 0.11
        assert [(name, time) for name, time, _, _ in await ends(replica, 2)] == [("b", 1.39), ("a", 1.72)]

    run_virtually(run())


def test_a_push_keeps_tokens_and_computes_their_context_again(simulation: Any) -> None:
    async def run() -> None:
        replica = engine(simulation, slots=1)
        await replica.submit([request("a", length=10, prompt=0), request("b", length=1, prompt=0)])
        await asyncio.sleep(0.3 + 5 * 0.11)
        replica.pause()
        assert replica.context() == pytest.approx(30 + 5)
        await asyncio.sleep(2)
        replica.resume(2)
        # 2.85, context 0.35, 5 tokens 0.55; b has its prompt in the cache, and only new tokens
        assert await ends(replica, 2) == [("a", 3.75, 1, StopReason.STOP), ("b", 3.86, 2, StopReason.STOP)]
        replica.advance()
        assert replica.busy_seconds == pytest.approx(3.86 - 2)

    run_virtually(run())


def test_a_push_empties_the_prefix_cache(simulation: Any) -> None:
    async def run() -> None:
        replica = engine(simulation)
        for version, end in ((1, 0.3 + 0.11), (2, 0.82)):
            replica.resume(version)
            await replica.submit([request("a", length=1, prompt=0)])
            assert (await ends(replica, 1))[0][1] == pytest.approx(end)

    run_virtually(run())


def test_what_is_submitted_to_a_paused_engine_starts_with_the_new_version(simulation: Any) -> None:
    async def run() -> None:
        replica = engine(simulation)
        replica.pause()
        await replica.submit([request("a", length=1, prompt=0)])
        await asyncio.sleep(4)
        replica.resume(2)
        assert await ends(replica, 1) == [("a", 4.41, 2, StopReason.STOP)]

    run_virtually(run())


def test_an_aborted_request_comes_back_and_leaves_its_slot(simulation: Any) -> None:
    async def run() -> None:
        replica = engine(simulation, slots=1)
        await replica.submit([request(name, length=10, prompt=0) for name in "abc"])
        await asyncio.sleep(0.3)
        await replica.abort(["a", "c", "unknown"])
        assert await ends(replica, 2) == [("a", 0.3, 1, StopReason.ABORTED), ("c", 0.3, 1, StopReason.ABORTED)]
        await replica.submit([request("a", length=1, prompt=0)])  # an id may come again
        assert await ends(replica, 2) == [("b", 1.4, 1, StopReason.STOP), ("a", 1.51, 1, StopReason.STOP)]

    run_virtually(run())


def test_lengths_have_the_mean_that_was_asked_for_and_belong_to_the_task(simulation: Any) -> None:
    lengths = simulation.Lengths(1800.0, 16, cap=32768, seed=3)
    drawn = np.array([lengths.of(number) for number in range(4000)])
    assert drawn.mean() == pytest.approx(1800, rel=0.05)
    assert drawn.min() >= 1
    assert np.log(drawn).std() == pytest.approx(0.9, rel=0.03)
    assert np.log(drawn).mean(axis=1).std() == pytest.approx(math.hypot(0.6, 0.67 / 4), rel=0.05)
    assert simulation.Lengths(1800.0, 16, cap=32768, seed=3).of(5) == lengths.of(5)
    assert max(max(simulation.Lengths(9900.0, 16, cap=100, seed=0).of(number)) for number in range(9)) <= 100
    fifth = GenerateRequest(
        request_id="3-99-5", prompt_ids=np.full(4, 17, np.int32), sampling=Sampling(max_tokens=1), seed=None
    )
    assert lengths.of_request(fifth) == lengths.of(17)[5]


def test_the_median_of_a_cut_lognormal(simulation: Any) -> None:
    median = simulation.median_of(9900.0, 0.9, 32768)
    drawn = median * np.exp(0.9 * np.random.default_rng(0).standard_normal(400_000))
    assert np.minimum(drawn, 32768).mean() == pytest.approx(9900, rel=0.01)


def work(simulation: Any, **changes: Any) -> Any:
    settings = {"groups": 4, "samples": 2, "steps": 4, "warm_up": 1, **changes}
    rates = simulation.EngineRates(step_seconds=0.01, request_seconds=0.001, slots=8, prefill_rate=1e4)
    lengths = simulation.Lengths(500.0, settings["samples"], cap=4000, seed=0)
    return simulation.Work(rates=rates, lengths=lengths, **settings)


def test_a_synchronous_step_is_generation_training_and_a_push(simulation: Any) -> None:
    one = work(simulation, groups=1, samples=1, steps=1, warm_up=0)
    outcome = run_virtually(simulation.synchronous(one, 1))
    (length,) = one.lengths.of(0)
    generation = 256 / 1e4 + length * 0.011
    seconds = generation + (256 + length) / 6500 + 3
    assert outcome.step_seconds == pytest.approx(seconds)
    assert outcome.waiting == pytest.approx(generation / seconds)
    assert outcome.busy == pytest.approx(generation / seconds)
    assert outcome.occupied == pytest.approx(generation / seconds / 8)
    assert (outcome.mean_age, outcome.max_age) == (0, 0)


@pytest.mark.parametrize(("max_staleness", "ahead"), [(1, 1.0), (2, 1.0), (4, 2.0)])
def test_an_asynchronous_run_keeps_the_bound_and_repeats(simulation: Any, max_staleness: int, ahead: float) -> None:
    first, second = (
        run_virtually(simulation.asynchronous(work(simulation), 4, 1, max_staleness, ahead)) for _ in range(2)
    )
    assert first == second
    assert 0 < first.max_age <= max_staleness
    assert (first.trainers, first.engines) == (1, 3)
    assert 0 < first.occupied <= first.busy <= 1


def test_the_search_ends_at_a_split_that_is_no_slower_than_its_start(simulation: Any) -> None:
    start = run_virtually(simulation.asynchronous(work(simulation), 4, 3, 1, 1.0))
    found = simulation.fastest_split(work(simulation), 4, 1, 1.0, 3)
    assert found.step_seconds < start.step_seconds
    assert found.trainers < 3


def test_the_table_says_where_splitting_is_slower(simulation: Any) -> None:
    outcome = run_virtually(simulation.synchronous(work(simulation), 2))
    assert "0.80 (slower)" in simulation.row(2, "1, 1", outcome, 0.8)
    assert "slower" not in simulation.row(2, "1, 1", outcome, 1.25)


def test_the_driver_is_measured_with_all_groups_under_way(simulation: Any) -> None:
    assert simulation.driver_seconds(work(simulation), 2, 6) > 0


def test_virtual_time_jumps_to_what_is_scheduled_next() -> None:
    async def naps() -> list[float]:
        loop = asyncio.get_running_loop()
        ended: list[float] = []

        async def nap(seconds: float) -> None:
            await asyncio.sleep(seconds)
            ended.append(loop.time())

        await asyncio.gather(nap(7200), nap(0.5), nap(30))
        return ended

    assert run_virtually(naps()) == [0.5, 30, 7200]


def test_a_deadlock_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.sleep(3)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="at 3 s every task waits"):
        run_virtually(wait())
