"""Real Ray: placement, typed calls, errors with the worker's traceback, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from roll_like.cluster import Cluster, Hang, ResourceManager, WorkerDied, watchdog, watching
from roll_like.cluster.cluster import _StartLimit
from roll_like.cluster.node_watch import NodeWatch
from roll_like.config.resources import DeviceRange, ResourcesConfig
from roll_like.errors import CheckpointError, ConfigError, EngineError, ResourceError, WorkerError

pytestmark = pytest.mark.integration


class Adder:
    """A worker of a few lines."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def add(self, number: int, *, more: int = 0) -> int:
        return self.rank + number + more

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def pid(self) -> int:
        return os.getpid()

    def raise_config_error(self) -> None:
        raise ConfigError("the key is wrong", fix="mend it")

    def divide(self, by: float) -> float:
        return 1 / by

    def die(self) -> None:
        os._exit(3)

    def hang(self, seconds: float) -> None:
        time.sleep(seconds)

    def die_or_lose_the_other(self, seconds: float, kind: type[Exception] = RuntimeError) -> None:
        if self.rank == 1:
            time.sleep(seconds)
            os._exit(3)
        raise kind("Connection closed by peer")

    def fail_on_rank_one(self, seconds: float) -> None:
        if self.rank == 1:
            raise ValueError("rank one")
        time.sleep(seconds)


class AsyncAdder:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    async def add(self, number: int) -> int:
        return self.rank + number


@pytest.fixture
def adders(resources: ResourceManager):  # type: ignore[no-untyped-def]
    placements = resources.place(DeviceRange.model_validate("0-1"), 2, "training")
    cluster = Cluster(
        "adders",
        Adder,
        placements,
        arguments=lambda rank: (rank,),
        environment=lambda rank: {"RANK_OF_TEST": str(rank)},
    )
    yield cluster
    cluster.close()


def test_calls(adders: Cluster[Adder]) -> None:
    assert adders.everywhere(Adder.add, 10, more=100) == [110, 111]
    assert adders.scatter(Adder.add, [1, 2]) == [1, 3]
    assert adders.on(1, Adder.add, 5) == 6
    assert adders.everywhere(Adder.environment, "RANK_OF_TEST") == ["0", "1"]
    with pytest.raises(ValueError, match="3 shards for 2 workers"):
        adders.scatter(Adder.add, [1, 2, 3])


async def test_asynchronous_calls(resources: ResourceManager) -> None:
    cluster = Cluster("async", AsyncAdder, resources.beside(2), arguments=lambda rank: (rank,))
    assert await cluster.ask(1, AsyncAdder.add, 1) == 2
    assert await asyncio.gather(*(cluster.ask(rank, AsyncAdder.add, 1) for rank in range(2))) == [1, 2]
    cluster.close()


def test_an_error_arrives_as_itself_with_the_workers_traceback(adders: Cluster[Adder]) -> None:
    with pytest.raises(ConfigError, match="the key is wrong") as caught:
        adders.everywhere(Adder.raise_config_error)
    assert caught.value.fix == "mend it"
    assert "raise_config_error" in caught.value.__notes__[0]
    with pytest.raises(WorkerError, match="adders worker 0 in divide raised ZeroDivisionError") as plain:
        adders.on(0, Adder.divide, 0)
    assert "return 1 / by" in str(plain.value)


def test_the_first_error_wins_over_ranks_that_wait(adders: Cluster[Adder]) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match="adders worker 1 in fail_on_rank_one raised ValueError: rank one"):
        adders.everywhere(Adder.fail_on_rank_one, 60.0)
    assert time.monotonic() - started < 50


@pytest.mark.parametrize("kind", [RuntimeError, pytest.param(EngineError, marks=pytest.mark.slow), CheckpointError])
def test_a_death_is_the_cause_of_an_error_that_arrives_before_it(adders: Cluster[Adder], kind: type[Exception]) -> None:
    adders.everywhere(Adder.pid)  # both have started
    with pytest.raises(WorkerDied, match=r"adders worker 1 in die_or_lose_the_other: its process is gone") as caught:
        adders.everywhere(Adder.die_or_lose_the_other, 0.5, kind)
    assert caught.value.worker == ("adders", 1)


def test_a_dead_worker_is_said_to_be_dead_and_can_be_replaced(adders: Cluster[Adder]) -> None:
    with pytest.raises(WorkerDied, match="its process is gone"):
        adders.on(1, Adder.die)
    adders.restart(1)
    assert adders.everywhere(Adder.add, 0) == [0, 1]


class SlowToStart(Adder):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        if rank == 1:
            time.sleep(600)


def test_a_role_that_does_not_start_in_time_is_named_with_the_key(
    resources: ResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    placements = [replace(placement, start_timeout_seconds=300.0) for placement in resources.beside(2)]
    cluster = Cluster("slow", SlowToStart, placements, arguments=lambda rank: (rank,))
    assert cluster.on(0, SlowToStart.add, 1) == 1
    assert cluster.on(0, SlowToStart.pid) > 0
    monkeypatch.setattr(cluster, "_limit", _StartLimit(time.monotonic(), 2.0))  # the time of rank 1 is over soon
    wait = cluster.begin(SlowToStart.pid)
    with pytest.raises(WorkerError, match="slow: worker 1 did not start within 2 s") as caught:
        wait()
    assert "resources.start_timeout_seconds" in str(caught.value.fix)
    cluster.close()


def test_a_started_role_may_take_its_time(resources: ResourceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("started", Adder, resources.beside(1), arguments=lambda rank: (rank,))
    cluster.everywhere(Adder.pid)
    monkeypatch.setattr(_StartLimit, "left", lambda limit: 0.1)
    assert cluster.everywhere(Adder.hang, 1.0) == [None]
    cluster.close()


def test_close_ends_the_processes_even_of_workers_that_hang(resources: ResourceManager) -> None:
    placements = resources.place(DeviceRange.model_validate("0-1"), 2, "training")
    cluster = Cluster("closing", Adder, placements, arguments=lambda rank: (rank,))
    pids = cluster.everywhere(Adder.pid)
    cluster.on(0, Adder.add, 1)
    cluster.close(Adder.pid, timeout_seconds=5)
    gone = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < gone:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "STOPPED_SECONDS", 1.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("address", ["its own", pytest.param("another machine's", marks=pytest.mark.slow)])
def test_a_worker_that_is_stopped_is_reported_dies_and_can_be_replaced(
    resources: ResourceManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    if address != "its own":  # then the node has an actor that watches
        monkeypatch.setattr(watchdog, "node_address", lambda: address)
    reports: list[tuple[Hang, str]] = []
    stacks = tmp_path / "stacks"
    warnings: list[str] = []
    with watching(
        resources,
        None,
        stacks=stacks,
        step=lambda: 1,
        moves=lambda: 1,
        report=lambda hang, text: reports.append((hang, text)),
        warn=warnings.append,
    ):
        folder = Cluster.pages
        assert folder is not None
        cluster = Cluster("my/adders", Adder, resources.beside(2), arguments=lambda rank: (rank,))
        pids = cluster.everywhere(Adder.pid)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="its process is gone"):
            cluster.on(1, Adder.add, 1)
        until = time.monotonic() + 60
        while not reports and time.monotonic() < until:
            time.sleep(0.1)
        cluster.restart(1)
        assert cluster.everywhere(Adder.add, 0) == [0, 1]
        again = cluster.on(1, Adder.pid)
        watch = NodeWatch(folder)
        assert {(one.role, one.rank, one.pid) for one in watch.look()} == {
            ("my/adders", 0, pids[0]),
            ("my/adders", 1, again),
        }
        cluster.close()
    ((hang, text),) = reports
    assert (hang.role, hang.ranks, hang.stopped) == ("my/adders", (1,), True)
    assert text.startswith("my/adders 1 was stopped for 1 s; killed; stacks in ")
    evidence = {path.name: path.read_text() for path in stacks.iterdir()}
    assert evidence.keys() == {"1-my%2Fadders-0.txt", "1-my%2Fadders-1.txt"}
    assert "Thread 0x" in evidence["1-my%2Fadders-0.txt"]
    assert warnings == []
    assert not folder.exists()
    assert Cluster.pages is None


def test_a_cluster_that_is_too_small_says_what_it_has(resources: ResourceManager) -> None:
    wanted = ResourcesConfig(
        device="cpu", devices_per_node=64, device_mapping={"training": "0-63", "inference": "0-63"}
    )
    with pytest.raises(ResourceError, match=r"asks for 1 node\(s\) with 64 CPU each; the Ray cluster has 1: 2 CPU"):
        ResourceManager(wanted).allocate()
    gpus = wanted.model_copy(update={"device": "cuda", "devices_per_node": 1})
    with pytest.raises(ResourceError, match="4 CPU, 1 GPU"):
        ResourceManager(gpus).allocate()


def test_device_mapping_that_do_not_divide_are_refused(resources: ResourceManager) -> None:
    with pytest.raises(ResourceError, match="3 workers on devices 0-1 of 2"):
        resources.place(DeviceRange.model_validate("0-1"), 3, "inference")
    with pytest.raises(ResourceError, match="1 workers on devices 2 of 2"):
        resources.place(DeviceRange.model_validate("2"), 1, "inference")
