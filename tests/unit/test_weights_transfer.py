"""Shared memory buckets, the sender, and the driver's part of a sync, with engines that are dictionaries."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from roll_like.cluster.progress import Work
from roll_like.errors import WeightSyncError
from roll_like.inference.interface import Fingerprints
from roll_like.inference.weight_transfer import shared_memory
from roll_like.inference.weight_transfer.delta import CHANGES, KEPT, SendPlan, bits_of
from roll_like.inference.weight_transfer.fingerprint import (
    CHECKED_COLUMNS,
    Digests,
    checked_columns,
    checked_numbers,
    fingerprint,
)
from roll_like.inference.weight_transfer.interface import SendReport, all_sent, buckets_of
from roll_like.inference.weight_transfer.shared_memory import (
    BucketInfo,
    LocalBuckets,
    SharedMemory,
    SharedMemoryTransfer,
    as_payload,
    bucket_size,
    fill_bucket,
    read_bucket,
)
from roll_like.inference.weight_transfer.sync import WeightSync, compare_fingerprints
from roll_like.values import Last, Sum


class Policy:
    """A few tensors in the trainer's place."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "embed.weight": torch.randn(100, 48, generator=generator).bfloat16(),
            "layer.q.weight": torch.randn(48, 48, generator=generator).bfloat16(),
            "layer.norm.weight": torch.randn(48, generator=generator),
            "layer.scale": torch.randn((), generator=generator),
            "empty": torch.empty(0, 3),
        }

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class DictEngines:
    """A cluster of one engine, whose weights are a dictionary. What is loaded becomes visible at the finish."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    def everywhere(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [getattr(self, method.__name__)(*args)]

    def update_weights(self, info: Mapping[str, Any]) -> None:
        self.calls.append("update")
        self.views.update(read_bucket(BucketInfo(**info)))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def finish_weight_update(self, version: int) -> None:
        self.calls.append(f"finish {version}")
        self.held = {name: view.clone() for name, view in self.views.items()}
        self.views = {}

    def fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
        self.calls.append("check")
        return Fingerprints(tensors={name: fingerprint(self.held[name], seed) for name in names}, tied={})

    def resume(self) -> None:
        self.calls.append("resume")


def sync_of(policy: Policy, engines: DictEngines, bucket_bytes: int = 4000) -> tuple[WeightSync, Any]:
    sender = SharedMemoryTransfer(engines, bucket_bytes).connect(policy, rank=0)
    return WeightSync(sender.send, engines), sender


@pytest.fixture(autouse=True)
def _earlier_tests_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of other test files may live in this process, and hold their memory until they are collected."""
    monkeypatch.setitem(globals(), "EARLIER", frozenset(shared_memory_here()))


EARLIER: frozenset[str] = frozenset()


def my_shared_memory() -> list[str]:
    """Descriptors and mappings that hold weights and came with this test."""
    return [entry for entry in shared_memory_here() if entry not in EARLIER]


def shared_memory_here() -> list[str]:
    """Descriptors and mappings of this process that hold weights."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "roll_like-weights" in line]
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return maps + [path for path in descriptors if os.path.islink(path) and "roll_like-weights" in os.readlink(path)]


def test_the_trainer_is_seen_to_wait_for_the_engines(progress: list[tuple[str, str, Work]]) -> None:
    engines = DictEngines()
    sync, sender = sync_of(Policy(), engines)
    sync.push()
    assert progress == [("begin", "send_weights", Work.ELSEWHERE)] * engines.calls.count("update")
    sender.close()


def test_every_tensor_arrives_bit_by_bit_however_often() -> None:
    policy, engines = Policy(), DictEngines()
    sync, sender = sync_of(policy, engines)
    for version in (1, 2, 3):
        policy.tensors["layer.q.weight"].add_(1)
        report = sync.push()
        assert report.version == sync.version == version
        assert report.buckets == 3  # the embedding is larger than a bucket and travels alone
        assert report.checked == len(policy.tensors)
        assert report.bytes == sum(tensor.nbytes for tensor in policy.tensors.values())
        for name, tensor in policy.tensors.items():
            assert engines.held[name].dtype == tensor.dtype
            assert torch.equal(engines.held[name], tensor)
    assert engines.calls[:7] == ["start", "update", "update", "update", "finish 1", "check", "resume"]
    sender.close()
    assert my_shared_memory() == []


def test_an_engine_that_refuses_a_bucket_stays_frozen_and_memory_is_freed() -> None:
    class Refusing(DictEngines):
        def update_weights(self, info: Mapping[str, Any]) -> None:
            if "layer.q.weight" in info["names"]:
                raise WeightSyncError("no room")
            super().update_weights(info)

    policy, engines = Policy(), Refusing()
    gathered: list[str] = []

    def full_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in policy.tensors.items():
            gathered.append(name)
            yield name, tensor

    policy.full_weights = full_weights  # type: ignore[method-assign]
    sync, _ = sync_of(policy, engines)
    with pytest.raises(WeightSyncError, match="no room"):
        sync.push()
    assert sync.version == 0
    assert "resume" not in engines.calls
    assert gathered == list(policy.tensors), "other ranks would wait for ever in the gather"
    engines.views.clear()
    assert my_shared_memory() == []


def test_ranks_other_than_the_first_only_gather() -> None:
    engines = DictEngines()
    report = SharedMemoryTransfer(engines).connect(Policy(), rank=1).send(1)
    assert report == SendReport(fingerprints={}, bytes=0, buckets=0)
    assert engines.calls == []


def test_a_bucket_survives_its_sender_and_dies_with_its_reader() -> None:
    tensors = [("a", torch.arange(1000)), ("b", torch.ones(3, 5, dtype=torch.bfloat16).T)]
    memory = SharedMemory(bucket_size(tensors))
    info = pickle.loads(pickle.dumps(as_payload(fill_bucket(memory, tensors))))
    arrived = dict(read_bucket(BucketInfo(**info)))
    memory.close()
    assert torch.equal(arrived["a"], torch.arange(1000))
    assert torch.equal(arrived["b"], torch.ones(5, 3, dtype=torch.bfloat16))
    arrived.clear()
    assert my_shared_memory() == []
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        read_bucket(BucketInfo(**info))


def _hold_a_bucket(to_parent: Any) -> None:
    tensors = [("a", torch.arange(100_000))]
    memory = SharedMemory(bucket_size(tensors))
    to_parent.send(as_payload(fill_bucket(memory, tensors)))
    to_parent.recv()


def test_a_killed_sender_leaves_nothing_and_other_processes_can_read() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    sender = context.Process(target=_hold_a_bucket, args=(there,))
    before = set(os.listdir("/dev/shm"))
    sender.start()
    info = here.recv()
    ((_, tensor),) = read_bucket(BucketInfo(**info))
    assert torch.equal(tensor, torch.arange(100_000))
    assert {name for name in os.listdir("/dev/shm") if "roll_like" in name} == set()
    sender.kill()
    sender.join()
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        read_bucket(BucketInfo(**info))
    # other processes of the machine make files of their own meanwhile
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "roll_like" in name or re.search(rf"\b{sender.pid}\b", name)]


def test_changed_bytes_are_found_on_arrival() -> None:
    tensors = [("first", torch.ones(8)), ("second", torch.ones(8))]
    memory = SharedMemory(bucket_size(tensors))
    info = fill_bucket(memory, tensors)
    memory.view[info.offsets[1]] ^= 1
    with pytest.raises(WeightSyncError, match="second arrived changed"):
        read_bucket(info)
    memory.close()


def test_memory_of_another_node_is_refused_though_it_could_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two nodes of one machine; on two machines another process may have the sender's number."""
    node = Mock(return_value="trainers")
    monkeypatch.setattr(shared_memory, "own_node", node)
    tensors = [("a", torch.ones(8))]
    memory = SharedMemory(bucket_size(tensors))
    info = as_payload(fill_bucket(memory, tensors))
    assert len(read_bucket(BucketInfo(**LocalBuckets().here(info)))) == 1
    node.return_value = "engines"
    with pytest.raises(WeightSyncError, match="shared memory of node trainers, and this engine is on node engines"):
        read_bucket(BucketInfo(**LocalBuckets().here(info)))
    memory.close()


def test_buckets_keep_order_and_size() -> None:
    weights = [(str(index), torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate([3, 3, 10, 1, 2, 3])]
    names = [[name for name, _ in bucket] for bucket in buckets_of(iter(weights), 6)]
    assert names == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert list(buckets_of(iter([]), 6)) == []


def test_a_fingerprint_sees_every_row_of_the_columns_it_looks_at() -> None:
    matrix = torch.randn(30, 200, generator=torch.Generator().manual_seed(0))
    for seed in (1, 2):
        columns = checked_columns(200, seed)
        assert len(set(columns.tolist())) == CHECKED_COLUMNS
        changed = matrix.clone()
        changed[29, columns[-1]] += 1e-6
        assert fingerprint(changed, seed) != fingerprint(matrix, seed)
        assert fingerprint(matrix.clone(), seed) == fingerprint(matrix, seed)
    assert not torch.equal(checked_columns(200, 1), checked_columns(200, 2))
    looked_at = {int(column) for seed in range(120) for column in checked_columns(200, seed)}
    assert looked_at == set(range(200)), "over many syncs every column has its turn"
    vector = torch.zeros(9)
    assert fingerprint(-vector, 1) == fingerprint(vector, 1)
    assert fingerprint(vector + 1, 1) != fingerprint(vector, 1)
    assert fingerprint(vector.bfloat16(), 1) == fingerprint(vector, 1), "the same numbers, held in another precision"
    assert fingerprint((vector + 0.1).bfloat16(), 1) != fingerprint(vector + 0.1, 1)
    assert fingerprint(vector.reshape(3, 3), 1) != fingerprint(vector, 1)


def test_digests_together_are_those_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.inference.weight_transfer.fingerprint._WAITING_BYTES", 2000)
    random = torch.Generator().manual_seed(0)
    shapes = {
        "matrix": (30, 200),
        "vector": (7,),
        "scalar": (),
        "nothing": (0, 4),
        "kernel": (5, 1, 4),
        "last": (64, 64),
    }
    tensors = {
        f"{name} {dtype}": torch.randn(shape, generator=random).to(dtype)
        for name, shape in shapes.items()
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    }
    digests = Digests()
    expected = {name: fingerprint(tensor, 3) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        digests.add(name, checked_numbers(tensor, 3))
        tensor.zero_()  # memory of a bucket is used again
    assert digests.found() == expected


def test_digests_of_several_devices_are_not_copied_together() -> None:
    """As an adapter that vLLM keeps in host memory and the output head on a GPU."""
    digests = Digests()
    digests.add("adapter", torch.ones(3))
    digests.add("head", torch.ones(3, device="meta"))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # which has no numbers
        digests.found()


def test_drift_is_named_also_in_a_copy_that_only_the_engine_has() -> None:
    sent = {"embed": "a", "q": "b", "odd": "c"}
    held = Fingerprints(tensors={"embed": "a", "q": "x", "head": "old"}, tied={"head": "embed"})
    assert compare_fingerprints(sent, held) == (["q", "head (tied to embed)"], ["odd"])
    fine = Fingerprints(tensors={**sent, "head": "a"}, tied={"head": "embed"})
    assert compare_fingerprints(sent, fine) == ([], [])


def test_a_drifted_engine_never_goes_on() -> None:
    class Drifting(DictEngines):
        def finish_weight_update(self, version: int) -> None:
            super().finish_weight_update(version)
            if version == 2:
                self.held["layer.norm.weight"][7] *= np.nextafter(1, 2, dtype=np.float32)

    engines = Drifting()
    sync, sender = sync_of(Policy(), engines)
    sync.push()
    with pytest.raises(
        WeightSyncError, match=r"sync 2, weights differ on inference engine 0, in 1 of 5 tensors: layer\.norm\.weight"
    ):
        sync.push()
    assert engines.calls[-1] == "check"
    assert sync.version == 1
    sender.close()


@pytest.mark.parametrize(("fingerprints", "message"), [({}, "no tensor at all"), ({"a": "1"}, "cannot be verified")])
def test_a_sync_that_proves_nothing_is_an_error(fingerprints: dict[str, str], message: str) -> None:
    class Blind(DictEngines):
        def fingerprints(self, names: Sequence[str], seed: int) -> Fingerprints:
            return Fingerprints(tensors={}, tied={})

    with pytest.raises(WeightSyncError, match=message):
        WeightSync(lambda seed: SendReport(fingerprints=fingerprints, bytes=1, buckets=1), Blind()).push()


class OtherMachine(DictEngines):
    """An engine that cannot see the trainer's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets = LocalBuckets()

    def update_weights(self, info: Mapping[str, Any]) -> None:
        travelled = {**pickle.loads(pickle.dumps(info)), "node": "another"}
        assert (travelled["pid"], travelled["fd"]) == (0, 0)
        here = self.buckets.here(travelled)
        assert here["pid"] == os.getpid()
        super().update_weights(here)


def test_buckets_travel_with_their_content_where_memory_is_not_shared() -> None:
    policy, engine = Policy(), OtherMachine()
    sender = SharedMemoryTransfer(engine, bucket_bytes=6000, by_value=True).connect(policy, rank=0)  # type: ignore[arg-type]
    for seed in (1, 2):
        policy.tensors = {name: tensor + seed for name, tensor in policy.tensors.items()}
        assert sender.send(seed).buckets == 2
        engine.finish_weight_update(seed)
        assert engine.held.keys() == policy.tensors.keys()
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in policy.tensors.items())
        assert engine.buckets._memory
        engine.buckets.clear()
        assert not engine.buckets._memory
    sender.close()
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        read_bucket(BucketInfo("", 0, 0, size=64, names=[], dtype_names=[], shapes=[], offsets=[], checksums=[]))


class Keeping(OtherMachine):
    """The same engine, which keeps what it was sent."""

    def held_weights(self, part: int = 0) -> str:
        return self.buckets.held(part)

    def finish_weight_update(self, version: int) -> None:
        super().finish_weight_update(version)
        self.buckets.clear()


class Changing(Policy):
    """Weights of which a few change, bit by bit."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = {name: tensor.bfloat16() for name, tensor in self.tensors.items()}
        self.tensors |= {"nothing": torch.empty(0, 4), "steps": torch.arange(300)}

    def change(self) -> int:
        """Change four numbers, also to what compares equal or to nothing; return how many."""
        weights = self.tensors["layer.q.weight"].view(-1)
        weights[1] = -weights[1]
        weights[7] = float("nan")
        self.tensors["steps"][2] += 1
        self.tensors["steps"][5] *= -1
        return 4


def keeping(policy: Policy, engines: Any, mode: Any = "delta", full_every: int = 100) -> tuple[WeightSync, Any]:
    transfer = SharedMemoryTransfer(engines, 4000, by_value=True, sync=mode, full_every=full_every)
    sender = transfer.connect(policy, rank=0)
    return WeightSync(sender.send, engines), sender


def same_bits(policy: Policy, engine: DictEngines) -> bool:
    return engine.held.keys() == policy.tensors.keys() and all(
        torch.equal(bits_of(engine.held[name]), bits_of(tensor))
        for name, tensor in policy.tensors.items()
        if tensor.numel()
    )


def test_only_what_changed_travels_and_arrives_bit_by_bit() -> None:
    policy, engine = Changing(), Keeping()
    policy.tensors["layer.q.weight"].view(-1)[1] = 0.0  # will be -0.0
    sync, sender = keeping(policy, engine)
    first = sync.push()
    assert (first.sent_bytes or 0) >= first.bytes  # in full, aligned
    assert first.changed_share is None
    numbers = sum(tensor.numel() for tensor in policy.tensors.values())
    for _ in range(3):
        policy.change()
        report = sync.push()
        assert same_bits(policy, engine)
        assert report.bytes == first.bytes
        assert report.checked == len(policy.tensors)
        assert report.changed_share is not None
        # a NaN stays the same bits after the first time
        assert round(report.changed_share * numbers) in (3, 4)
        assert report.sent_bytes is not None
        assert report.sent_bytes <= 4 * (4 + 8)
        assert report.metrics["sync/changed_share"] == Last(report.changed_share)
        assert report.metrics["sync/sent_bytes"] == Sum(float(report.sent_bytes))
    sender.close()
    engine.buckets.close()
    engine.views.clear()
    assert my_shared_memory() == []


def test_a_bucket_that_changed_a_lot_travels_whole() -> None:
    policy, engine = Changing(), Keeping()
    sync, sender = keeping(policy, engine)
    full = sync.push().sent_bytes
    policy.tensors = {name: tensor + 1 for name, tensor in policy.tensors.items()}
    report = sync.push()
    assert report.sent_bytes == full
    assert report.changed_share is not None
    assert report.changed_share > 0.9  # 1 is nothing to 300 in bfloat16
    assert same_bits(policy, engine)
    sender.close()
    engine.buckets.close()


@pytest.mark.parametrize("doubt", ["another engine", "the version again", "an update that failed", "every so often"])
def test_everything_travels_after_any_doubt(doubt: str) -> None:
    policy, engine = Changing(), Keeping()
    sync, sender = keeping(policy, engine, full_every=3 if doubt == "every so often" else 100)
    full = sync.push().sent_bytes
    for _ in range(2):
        policy.change()
        assert sync.push().sent_bytes != full
    policy.change()
    again = doubt == "the version again"
    if doubt == "another engine":
        engine.buckets.close()
        engine.buckets = LocalBuckets()
    elif doubt == "an update that failed":
        assert sender._plan.begin(7, [sender._plan.token]) == "delta"  # a send that does not end
    assert sync.push(again=again).sent_bytes == full
    assert same_bits(policy, engine)
    policy.change()
    assert sync.push().sent_bytes != full
    assert same_bits(policy, engine)
    sender.close()
    engine.buckets.close()


def test_changes_on_a_copy_that_was_altered_are_refused() -> None:
    policy, engine = Changing(), Keeping()
    sync, sender = keeping(policy, engine)
    sync.push()
    policy.change()
    engine.buckets._kept[0, 0].view[0] ^= 1
    with pytest.raises(WeightSyncError, match="arrived changed"):
        sync.push()
    with pytest.raises(WeightSyncError, match="does not have the bucket"):
        LocalBuckets().here({"size": 64, KEPT: ("a", 0, 0), CHANGES: {}})
    sender.close()
    engine.buckets.close()


def test_auto_takes_what_was_faster_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    plan = SendPlan("auto", 6)
    seconds, hows = {"full": 5.0, "delta": 6.0}, []
    for version in range(12):
        hows.append(plan.begin(version, ["all"] * 2))
        clock[0] += seconds[hows[-1]]
        plan.end("all")
        if version == 5:
            seconds["delta"] = 1.0
    # measured after two full ones, and slower; tried again after the next full one, and faster by then
    assert hows[:6] == ["full", "full", "delta", "full", "full", "full"]
    assert hows[6:] == ["full", *["delta"] * 5]
    assert [SendPlan("full", 1).begin(version, ["all"]) for version in (1, 2)] == ["full", "full"]


class Layers(Changing):
    """The same weights under names of a stage's own."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"{self.stage}.{name}", tensor) for name, tensor in self.tensors.items())


def test_stages_send_their_layers_at_the_same_time_and_each_what_changed_in_its_own() -> None:
    stages, engine = [Layers(0), Layers(1)], Keeping()
    transfer = SharedMemoryTransfer(engine, 4000, by_value=True, sync="delta", full_every=100)  # type: ignore[arg-type]
    senders = [transfer.connect(each, rank, each.stage) for each in stages for rank in (0, 1)]  # the second one gathers

    def send(seed: int) -> SendReport:
        with ThreadPoolExecutor(len(senders)) as threads:
            return all_sent([*threads.map(lambda sender: sender.send(seed), senders)])

    sync = WeightSync(send, engine)  # type: ignore[arg-type]
    whole = {name: tensor for each in stages for name, tensor in each.full_weights()}
    first = sync.push()
    assert first.bytes == sum(tensor.nbytes for tensor in whole.values())
    assert (first.buckets, first.checked, first.changed_share) == (2 * 3, len(whole), None)
    changed = stages[1].change()
    second = sync.push()
    assert second.sent_bytes == 2 * 6 + 2 * (4 + 8)  # positions and values of weights and of steps
    assert second.changed_share == pytest.approx(changed / sum(map(torch.Tensor.numel, whole.values())), rel=0.5)
    senders[2:] = [transfer.connect(stages[1], rank, 1) for rank in (0, 1)]  # its ranks were replaced
    stages[0].change()
    third = sync.push()
    assert third.sent_bytes is not None
    assert first.bytes / 2 < third.sent_bytes < first.bytes
    for name, tensor in whole.items():
        assert torch.equal(bits_of(engine.held[name]), bits_of(tensor)) or not tensor.numel()
    for sender in senders:
        sender.close()
