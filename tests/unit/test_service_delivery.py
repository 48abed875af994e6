"""Which engines have which weights while some of them die and are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from roll_like.errors import WeightSyncError
from roll_like.inference.interface import EngineDied
from roll_like.inference.weight_transfer.sync import SyncReport
from roll_like.rollout.engine_pool import ReplicaState
from roll_like.service.checkpoints import StoredCheckpoint
from roll_like.service.delivery import WeightDelivery
from roll_like.service.snapshots import Snapshot, SnapshotLoad
from roll_like.service.types import RequestError


class Pool:
    """Two engines, each with adapters by name, or whole weights; a dead one comes back when it is waited for."""

    def __init__(self, *, takes_adapters: bool) -> None:
        self.takes_adapters = takes_adapters
        self.held: list[dict[str, str]] = [{}, {}]
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
        self.weights = ""
        self.calls = 0
        self.errors: dict[int, Exception] = {}

    def push(self, *, again: bool = False) -> SyncReport:
        self._send("policy", ())
        return SyncReport(
            version=1, bytes=8, buckets=1, seconds=0.1, check_seconds=0.1, checked=1, unchecked=("A_log", "D")
        )

    def push_adapter(self, name: str, dropped: Sequence[str] = ()) -> None:
        self._send(name, dropped)

    def _send(self, name: str, dropped: Sequence[str]) -> None:
        self.calls += 1
        for rank in self.pool.addressed:
            for each in dropped:
                self.pool.held[rank].pop(each, None)
            self.pool.held[rank][name] = self.weights
            if self.calls in self.errors:
                raise self.errors[self.calls]


class Trainer:
    def __init__(self, sync: Sync) -> None:
        self.sync = sync

    def push(self, send: Callable[[], object], *, model: str | None = None, file: Path | None = None) -> None:
        assert file is not None
        self.sync.weights = file.with_name(f"{file.name}.rank_0.pt").read_text()
        send()


def rig(folder: Path, *, takes_adapters: bool) -> tuple[WeightDelivery, Pool, Sync]:
    pool: Any = Pool(takes_adapters=takes_adapters)
    sync: Any = Sync(pool)
    trainer: Any = Trainer(sync)
    (folder / "held").mkdir(parents=True, exist_ok=True)
    return WeightDelivery(trainer, sync, pool, folder / "held"), pool, sync


def dead(rank: int) -> EngineDied:
    error = EngineDied("killed")
    error.worker = ("inference", rank)
    return error


def load(folder: Path, name: str, *dropped: str) -> SnapshotLoad:
    """Weights that say whose they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.rank_0.pt").write_text(f"weights of {name}")
    return SnapshotLoad(snapshot=Snapshot(file=folder / name), name=name, dropped=dropped)


def weights(*names: str) -> dict[str, str]:
    return {name: f"weights of {name}" for name in names}


def test_what_engines_cannot_read_back_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    delivery, _, _ = rig(tmp_path, takes_adapters=False)
    for name in ("a", "b"):
        delivery.deliver(load(tmp_path, name), model=None)
    assert [record.message for record in caplog.records] == [
        "the engine cannot read back 2 of 3 tensors (A_log, D): each sync compares log-probabilities instead "
        "(sync/probe)"
    ]


def test_all_engines_have_all_adapters_whichever_dies_when(tmp_path: Path) -> None:
    loads = [load(tmp_path, "a"), load(tmp_path, "b"), load(tmp_path, "c", "a"), load(tmp_path, "d", "b")]
    for call in range(1, 6):
        for rank in (0, 1):
            delivery, pool, sync = rig(tmp_path / f"{call}-{rank}", takes_adapters=True)
            sync.errors[call] = dead(rank)
            for each in loads:
                delivery.deliver(each, model=None)
                pool.restart()
            delivery.catch_up()
            assert pool.held == [weights("c", "d")] * 2, (call, rank)
            assert pool.states == [ReplicaState.SERVING] * 2, (call, rank)


def test_an_engine_that_dies_as_it_catches_up_is_replaced_once_more(tmp_path: Path) -> None:
    delivery, pool, sync = rig(tmp_path, takes_adapters=True)
    delivery.deliver(load(tmp_path, "a"), model=None)
    pool.states[1] = ReplicaState.RESTARTING
    pool.restart()
    sync.errors[2] = dead(1)
    delivery.catch_up()
    assert pool.states == [ReplicaState.SERVING, ReplicaState.RESTARTING]
    pool.restart()
    # it gets what it lacks before it serves anything, also where another adapter comes first
    delivery.deliver(load(tmp_path, "b"), model=None)
    assert pool.held == [weights("a", "b")] * 2
    assert pool.states == [ReplicaState.SERVING] * 2


def test_engines_that_have_all_died_get_everything_before_they_serve(tmp_path: Path) -> None:
    delivery, pool, _ = rig(tmp_path, takes_adapters=True)
    delivery.deliver(load(tmp_path, "a"), model=None)
    pool.states = [ReplicaState.RESTARTING] * 2
    delivery.deliver(load(tmp_path, "b"), model=None)
    assert pool.held == [weights("a", "b")] * 2
    assert pool.states == [ReplicaState.SERVING] * 2


def test_an_adapter_that_was_refused_makes_room_for_the_next(tmp_path: Path) -> None:
    delivery, pool, sync = rig(tmp_path, takes_adapters=True)
    sync.errors[2] = WeightSyncError("they differ")
    delivery.deliver(load(tmp_path, "a"), model=None)
    with pytest.raises(WeightSyncError, match="they differ"):
        delivery.deliver(load(tmp_path, "b", "a"), model=None)
    pool.states[1] = ReplicaState.RESTARTING
    pool.restart()
    delivery.deliver(load(tmp_path, "c", "b"), model=None)
    assert pool.held == [weights("c")] * 2


def test_whole_weights_go_to_all_engines_at_once(tmp_path: Path) -> None:
    delivery, pool, sync = rig(tmp_path, takes_adapters=False)
    pool.states[1] = ReplicaState.STALE
    delivery.catch_up()
    assert sync.calls == 0  # it gets the next ones with the others
    delivery.deliver(load(tmp_path, "policy"), model=None)
    assert (pool.held, pool.states) == ([weights("policy")] * 2, [ReplicaState.SERVING] * 2)
    pool.states[0] = ReplicaState.RESTARTING
    pool.restart()
    delivery.catch_up()
    assert (pool.held, sync.calls) == ([weights("policy")] * 2, 2)
    sync.errors[3] = WeightSyncError("they differ")
    with pytest.raises(WeightSyncError):
        delivery.deliver(load(tmp_path, "policy"), model=None)
    pool.states[0] = ReplicaState.STALE
    delivery.catch_up()
    assert sync.calls == 3  # what engines have now is not known


def test_weights_that_were_deleted_are_held_on_and_not_given_again(tmp_path: Path) -> None:
    delivery, pool, _ = rig(tmp_path, takes_adapters=True)
    named = load(tmp_path / "checkpoint", "a")
    about = StoredCheckpoint(
        model_id="m", kind="sampler_weights", name="a", time=datetime.now(UTC), base_model="tiny", lora_rank=8
    )
    (tmp_path / "checkpoint" / "checkpoint.json").write_text(about.model_dump_json())
    named = replace(named, snapshot=replace(named.snapshot, saved=about.time))
    delivery.deliver(named, model=None)
    # overwritten: engines that are replaced get what the others have, and nobody gets the new weights for the old
    changed = about.model_copy(update={"time": about.time + timedelta(seconds=1)})
    (tmp_path / "checkpoint" / "checkpoint.json").write_text(changed.model_dump_json())
    (tmp_path / "checkpoint" / "a.rank_0.pt").unlink()
    (tmp_path / "checkpoint" / "a.rank_0.pt").write_text("other weights")
    pool.states[1] = ReplicaState.RESTARTING
    pool.restart()
    delivery.catch_up()
    assert (pool.held, pool.states) == ([weights("a")] * 2, [ReplicaState.SERVING] * 2)
    with pytest.raises(RequestError, match="was deleted or overwritten"):
        delivery.deliver(replace(named, name="again"), model=None)
    delivery.deliver(load(tmp_path, "b", "a"), model=None)
    assert [file.name for file in (tmp_path / "held").iterdir()] == ["b.rank_0.pt"]
