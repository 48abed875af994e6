"""Which engines have which weights while some of them die and are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from roll_like.errors import WeightSyncError
from roll_like.inference.interface import EngineDied
from roll_like.rollout.engine_pool import ReplicaState
from roll_like.service.delivery import WeightDelivery
from roll_like.service.sampler import Snapshot, SnapshotLoad


class Pool:
    """Two engines, each with adapters by name, or whole weights; a dead one comes back when it is waited for."""

    def __init__(self, *, takes_adapters: bool) -> None:
        self.takes_adapters = takes_adapters
        self.held: list[dict[str, Path | None]] = [{}, {}]
        self.states = [ReplicaState.SERVING, ReplicaState.SERVING]
        self.addressed: list[int] = []

    def reachable(self) -> list[int]:
        return [rank for rank, state in enumerate(self.states) if state is not ReplicaState.RESTARTING]

    def wait_for_one(self) -> None:
        self.restart()

    def restart(self) -> None:
        for rank, state in enumerate(self.states):
            if state is ReplicaState.RESTARTING:
                self.states[rank], self.held[rank] = ReplicaState.STALE, {}

    @contextmanager
    def addressing(self, *states: ReplicaState) -> Iterator[bool]:
        self.addressed = [rank for rank, state in enumerate(self.states) if state in states]
        yield bool(self.addressed)

    def replace_dead(self, error: EngineDied) -> None:
        assert error.worker is not None
        self.states[error.worker[1]] = ReplicaState.RESTARTING

    def synced(self) -> None:
        for rank in self.addressed:
            if self.states[rank] is ReplicaState.STALE:
                self.states[rank] = ReplicaState.SERVING


class Sync:
    """Gives the engines that are addressed what the trainer shows; fails at some of its calls."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.file: Path | None = None
        self.calls = 0
        self.errors: dict[int, Exception] = {}

    def push(self, *, again: bool = False) -> None:
        self._send("policy", ())

    def push_adapter(self, name: str, dropped: Sequence[str] = ()) -> None:
        self._send(name, dropped)

    def _send(self, name: str, dropped: Sequence[str]) -> None:
        self.calls += 1
        for rank in self.pool.addressed:
            for each in dropped:
                self.pool.held[rank].pop(each, None)
            self.pool.held[rank][name] = self.file
            if self.calls in self.errors:
                raise self.errors[self.calls]


class Trainer:
    def __init__(self, sync: Sync) -> None:
        self.sync = sync

    def push(self, send: Callable[[], object], *, model: str | None = None, file: Path | None = None) -> None:
        self.sync.file = file
        send()


def rig(*, takes_adapters: bool) -> tuple[WeightDelivery, Pool, Sync]:
    pool: Any = Pool(takes_adapters=takes_adapters)
    sync: Any = Sync(pool)
    trainer: Any = Trainer(sync)
    return WeightDelivery(trainer, sync, pool), pool, sync


def dead(rank: int) -> EngineDied:
    error = EngineDied("killed")
    error.worker = ("inference", rank)
    return error


def load(name: str, *dropped: str) -> SnapshotLoad:
    return SnapshotLoad(snapshot=Snapshot(file=Path(f"{name}.pt")), name=name, dropped=dropped)


def files(*names: str) -> dict[str, Path]:
    return {name: Path(f"{name}.pt") for name in names}


def test_all_engines_have_all_adapters_whichever_dies_when() -> None:
    loads = [load("a"), load("b"), load("c", "a"), load("d", "b")]
    for call in range(1, 6):
        for rank in (0, 1):
            delivery, pool, sync = rig(takes_adapters=True)
            sync.errors[call] = dead(rank)
            for each in loads:
                delivery.deliver(each, model=None)
                pool.restart()
            delivery.catch_up()
            assert pool.held == [files("c", "d")] * 2, (call, rank)
            assert pool.states == [ReplicaState.SERVING] * 2, (call, rank)


def test_an_engine_that_dies_as_it_catches_up_is_replaced_once_more() -> None:
    delivery, pool, sync = rig(takes_adapters=True)
    delivery.deliver(load("a"), model=None)
    pool.states[1] = ReplicaState.RESTARTING
    pool.restart()
    sync.errors[2] = dead(1)
    delivery.catch_up()
    assert pool.states == [ReplicaState.SERVING, ReplicaState.RESTARTING]
    pool.restart()
    # it gets what it lacks before it serves anything, also where another adapter comes first
    delivery.deliver(load("b"), model=None)
    assert pool.held == [files("a", "b")] * 2
    assert pool.states == [ReplicaState.SERVING] * 2


def test_engines_that_have_all_died_get_everything_before_they_serve() -> None:
    delivery, pool, _ = rig(takes_adapters=True)
    delivery.deliver(load("a"), model=None)
    pool.states = [ReplicaState.RESTARTING] * 2
    delivery.deliver(load("b"), model=None)
    assert pool.held == [files("a", "b")] * 2
    assert pool.states == [ReplicaState.SERVING] * 2


def test_an_adapter_that_was_refused_makes_room_for_the_next() -> None:
    delivery, pool, sync = rig(takes_adapters=True)
    sync.errors[2] = WeightSyncError("they differ")
    delivery.deliver(load("a"), model=None)
    with pytest.raises(WeightSyncError, match="they differ"):
        delivery.deliver(load("b", "a"), model=None)
    pool.states[1] = ReplicaState.RESTARTING
    pool.restart()
    delivery.deliver(load("c", "b"), model=None)
    assert pool.held == [files("c")] * 2


def test_whole_weights_go_to_all_engines_at_once() -> None:
    delivery, pool, sync = rig(takes_adapters=False)
    pool.states[1] = ReplicaState.STALE
    delivery.catch_up()
    assert sync.calls == 0  # it gets the next ones with the others
    delivery.deliver(load("policy"), model=None)
    assert (pool.held, pool.states) == ([files("policy")] * 2, [ReplicaState.SERVING] * 2)
    pool.states[0] = ReplicaState.RESTARTING
    pool.restart()
    delivery.catch_up()
    assert (pool.held, sync.calls) == ([files("policy")] * 2, 2)
    sync.errors[3] = WeightSyncError("they differ")
    with pytest.raises(WeightSyncError):
        delivery.deliver(load("policy"), model=None)
    pool.states[0] = ReplicaState.STALE
    delivery.catch_up()
    assert sync.calls == 3  # what engines have now is not known
