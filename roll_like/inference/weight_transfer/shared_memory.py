"""Weights between processes of one machine: buckets of tensors in anonymous shared memory.

The memory belongs to no name in the file system (`memfd_create`): the kernel frees it when the last process
that maps it is gone, however that process ends. Nothing can be left behind, nothing has to be swept up, and
a container's small /dev/shm does not matter. A receiver opens it through the sender's /proc entry, so both
are processes of one user on one machine.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from roll_like.cluster.address import own_node
from roll_like.cluster.progress import PROGRESS, Work
from roll_like.errors import WeightSyncError
from roll_like.inference.interface import InferenceEngine
from roll_like.inference.weight_transfer.delta import (
    CHANGES,
    KEPT,
    NOTHING,
    SendPlan,
    SyncMode,
    apply_changes,
    bits_of,
    changes_bytes,
    new_token,
    pack_changes,
    take_changes,
)
from roll_like.inference.weight_transfer.fingerprint import checksum
from roll_like.inference.weight_transfer.interface import SendReport, WeightSource, send_buckets

if TYPE_CHECKING:
    from roll_like.cluster import ClusterHandle

_ALIGNMENT = 64
DEFAULT_BUCKET_BYTES = 64 << 20
#: Key of a bucket's bytes, where they travel with its description.
CONTENT = "content"
#: Memory that is kept between syncs. Fresh memory costs a page fault every 4 KiB, ten times the copying.
KEPT_BYTES = 1 << 30


@dataclass
class BucketInfo:
    """Where a bucket is and what is in it. Travels as a plain dictionary, field by field.

    Attributes:
        node: Node of the memory, as Ray calls it; empty if unknown.
        pid: Process that holds the memory.
        fd: Its descriptor there.
        size: Bytes.
        names: Tensors, in order.
        dtype_names: Their precisions (`bfloat16`).
        shapes: Their shapes.
        offsets: Where each begins, in bytes.
        checksums: Hash of each one's bytes.
    """

    node: str
    pid: int
    fd: int
    size: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    checksums: list[str]

    @property
    def layout(self) -> list[tuple[str, str, list[int]]]:
        """Name, precision and shape of each tensor."""
        return list(zip(self.names, self.dtype_names, self.shapes, strict=True))


class SharedMemory:
    """A piece of anonymous shared memory that this process writes to.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("roll_like-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.view = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Give it up. A receiver that has mapped it keeps what it mapped."""
        self.view.close()
        os.close(self.fd)


def _of_size(size: int, memory: SharedMemory | None) -> SharedMemory:
    """Return memory of this size: the given one, or another in its place."""
    if memory is None or memory.size != size:
        if memory is not None:
            memory.close()
        memory = SharedMemory(size)
    return memory


def bucket_size(tensors: Sequence[tuple[str, Tensor]]) -> int:
    """Return the bytes that a bucket of these tensors takes."""
    return max(sum(_aligned(tensor) for _, tensor in tensors), _ALIGNMENT)


def fill_bucket(memory: SharedMemory, tensors: Sequence[tuple[str, Tensor]]) -> BucketInfo:
    """Copy tensors into shared memory, one after the other, and return what a receiver needs to find them.

    Args:
        memory: At least `bucket_size(tensors)` bytes.
        tensors: (name, tensor) pairs, contiguous or not, on any device.
    """
    offsets, at = [], 0
    for _, tensor in tensors:
        offsets.append(at)
        at += _aligned(tensor)
    layout = _layout(tensors)
    return BucketInfo(
        node=own_node(),
        pid=os.getpid(),
        fd=memory.fd,
        size=max(at, _ALIGNMENT),
        names=[name for name, _, _ in layout],
        dtype_names=[dtype for _, dtype, _ in layout],
        shapes=[shape for _, _, shape in layout],
        offsets=offsets,
        checksums=[_copy(memory.view, offset, tensor) for offset, (_, tensor) in zip(offsets, tensors, strict=True)],
    )


def _layout(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, str, list[int]]]:
    """Return name, precision and shape of each tensor."""
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _copy(memory: mmap.mmap, offset: int, tensor: Tensor) -> str:
    if tensor.numel() == 0:
        return checksum(tensor.detach().cpu())
    place = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    place.copy_(tensor.detach().reshape(-1))
    return checksum(place)


def read_bucket(info: BucketInfo) -> list[tuple[str, Tensor]]:
    """Map a bucket and return its tensors as views; the mapping lives as long as they do.

    Raises:
        WeightSyncError: It is on another node, the sender is gone, or bytes differ from those that were sent.
    """
    own = own_node()
    if info.node and own and info.node != own:
        raise WeightSyncError(
            f"weights are in shared memory of node {info.node}, and this engine is on node {own}, which cannot map it",
            fix="set resources.nodes to the number of nodes that the run uses, so that weights go through Ray",
        )
    try:
        with open(f"/proc/{info.pid}/fd/{info.fd}", "rb") as file:
            # private: a write to a view changes a copy
            memory = mmap.mmap(file.fileno(), info.size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"the shared memory of trainer process {info.pid} cannot be mapped: {error}",
            fix="trainer and inference engine must run as one user; for several machines set resources.nodes",
        ) from error
    tensors = []
    for index, name in enumerate(info.names):
        tensor = _view(memory, info, index)
        if checksum(tensor) != info.checksums[index]:
            raise WeightSyncError(f"the bytes of {name} arrived changed: their checksum is not the sender's")
        tensors.append((name, tensor))
    return tensors


def _view(memory: mmap.mmap, info: BucketInfo, index: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, info.dtype_names[index])
    shape = info.shapes[index]
    count = int(torch.Size(shape).numel())
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=info.offsets[index]).view(shape)


def as_payload(info: BucketInfo) -> dict[str, Any]:
    """Return a bucket's description as the plain dictionary that travels."""
    return dict(vars(info))


def with_content(info: BucketInfo, memory: SharedMemory) -> dict[str, Any]:
    """Return the same with the bucket's bytes, for `LocalBuckets` in the engine's process."""
    content = np.frombuffer(memory.view, np.uint8, count=info.size).copy()
    return {**vars(info), "pid": 0, "fd": 0, CONTENT: content}


def _description(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `BucketInfo` out of what travelled."""
    return {key: value for key, value in payload.items() if key not in (CONTENT, CHANGES, KEPT)}


class LocalBuckets:
    """Buckets that came with their content, in shared memory of this machine: an engine's own processes read it.

    Those of which only changes will come are kept until the next ones (`delta.py`).
    """

    def __init__(self) -> None:
        self._memory: list[SharedMemory] = []
        self._kept: dict[tuple[int, int], SharedMemory] = {}  # by part of the weights, and number of the bucket
        self._coming: dict[int, str] = {}
        self._held: dict[int, str] = {}
        own_node()  # for processes that this one starts

    def held(self, part: int = 0) -> str:
        """Return the send of a part whose buckets are all kept here, as the trainer calls it."""
        return self._held.get(part, NOTHING)

    def here(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return a description of the bucket in this machine's memory: the same, unless it came with its content."""
        if CONTENT not in info and CHANGES not in info:
            return dict(info)
        if KEPT in info:
            memory = self._keep(info, *info[KEPT])
        else:
            memory = SharedMemory(info["size"])
            self._memory.append(memory)
            memory.view.write(info[CONTENT].data)
        return _description(info) | {"node": own_node(), "pid": os.getpid(), "fd": memory.fd}

    def _keep(self, info: Mapping[str, Any], token: str, part: int, number: int) -> SharedMemory:
        """Write what came of a bucket over what is kept of it; `held` is empty until all have come."""
        self._held.pop(part, None)
        self._coming[part] = token
        memory = self._kept.get((part, number))
        if CHANGES in info:
            if memory is None or memory.size != info["size"]:
                raise WeightSyncError(
                    f"an inference engine was sent changes of weight bucket {number}, and does not have the bucket",
                    fix="set inference.weight_sync: full, and report this",
                )
            bucket = BucketInfo(**_description(info))
            apply_changes([_view(memory.view, bucket, index) for index in range(len(bucket.names))], info[CHANGES])
            return memory
        memory = self._kept[part, number] = _of_size(info["size"], memory)
        memory.view.seek(0)
        memory.view.write(info[CONTENT].data)
        return memory

    def clear(self) -> None:
        """Give the memory up that is not kept: the update is over."""
        self._held, self._coming = self._held | self._coming, {}
        while self._memory:
            self._memory.pop().close()

    def close(self) -> None:
        """Give up what is kept as well."""
        self.clear()
        self._held = {}
        while self._kept:
            self._kept.popitem()[1].close()


@dataclass(frozen=True, slots=True)
class SharedMemoryTransfer:
    """Fills a bucket while the engines load the one before it.

    Args:
        bucket_bytes: Size of one bucket.
        by_value: Whether buckets travel through Ray with their content, because an engine may be on another machine.
        sync: Whether what changed can travel alone; only `by_value`.
        full_every: Of so many sends one is full all the same.
        int8: Whether engines make 8-bit weights of what they are sent.
    """

    engines: ClusterHandle[InferenceEngine]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    by_value: bool = False
    sync: SyncMode = "full"
    full_every: int = 1
    int8: bool = False
    in_parts: ClassVar[bool] = True

    def connect(self, source: WeightSource, rank: int, part: int = 0) -> SharedMemorySender:
        """Return this rank's end; no connection is needed."""
        return SharedMemorySender(self, source, rank, part)


class SharedMemorySender:
    """One rank's end; see `WeightSender`."""

    def __init__(self, transfer: SharedMemoryTransfer, source: WeightSource, rank: int, part: int) -> None:
        self._transfer = transfer
        self._source = source
        self._rank = rank
        self._part = part
        self._kept: list[SharedMemory] = []
        self._plan = SendPlan(transfer.sync if transfer.by_value else "full", transfer.full_every)
        self._sent: dict[int, tuple[SharedMemory, BucketInfo]] = {}  # as engines keep it, bucket by bucket

    def send(self, seed: int) -> SendReport:
        """Gather on every rank; write and announce buckets on rank 0."""
        if self._plan.keeps and self._rank == 0:
            return self._send_kept(seed)
        with _Send(self._transfer, self._kept) as sending:
            report = self._send_buckets(seed, sending.put)
            sending.wait()
            self._kept = sending.worth_keeping()
        return report

    def _send_kept(self, seed: int) -> SendReport:
        """Send all of it or what changed, and keep what engines have then."""
        how = self._plan.begin(seed, self._transfer.engines.everywhere(InferenceEngine.held_weights, self._part))
        token = new_token()
        with _Send(self._transfer, []) as sending:
            number = sent = changed = compared = 0

            def put(tensors: Sequence[tuple[str, Tensor]]) -> None:
                nonlocal number, sent, changed, compared
                payload, counts = self._payload(number, tensors, changes=how == "delta")
                sent += changes_bytes(payload[CHANGES]) if CHANGES in payload else payload["size"]
                if counts is not None:
                    changed += sum(counts)
                    compared += sum(tensor.numel() for _, tensor in tensors)
                sending.announce({**payload, KEPT: (token, self._part, number)})
                number += 1

            report = self._send_buckets(seed, put)
            sending.wait()
        self._plan.end(token)
        share = changed / compared if compared else None
        return replace(report, sent_bytes=sent, changed_share=share)

    def _send_buckets(self, seed: int, send: Callable[[Sequence[tuple[str, Tensor]]], None]) -> SendReport:
        transfer = self._transfer
        return send_buckets(self._source, transfer.bucket_bytes, self._rank, seed, send, int8=transfer.int8)

    def _payload(
        self, number: int, tensors: Sequence[tuple[str, Tensor]], *, changes: bool
    ) -> tuple[dict[str, Any], list[int] | None]:
        """Write a bucket over what was sent of it last; return what has to travel, and how much of each tensor changed.

        What changed travels alone where that is less. The second is None where nothing was compared.
        """
        size = bucket_size(tensors)
        last = self._sent.get(number)
        if not changes or last is None or _layout(tensors) != last[1].layout:
            memory = _of_size(size, None if last is None else last[0])
            info = fill_bucket(memory, tensors)
            self._sent[number] = memory, info
            return with_content(info, memory), None
        memory, before = last
        found, checksums = [], []
        for index, (_, tensor) in enumerate(tensors):
            kept = _view(memory.view, before, index)
            found.append(take_changes(bits_of(kept), bits_of(tensor)))
            checksums.append(checksum(kept))
        info = replace(before, checksums=checksums)
        self._sent[number] = memory, info
        packed = pack_changes(found)
        if changes_bytes(packed) >= size:
            return with_content(info, memory), packed["counts"]
        return {**vars(info), "pid": 0, "fd": 0, CHANGES: packed}, packed["counts"]

    def close(self) -> None:
        """Give the memory up."""
        while self._kept:
            self._kept.pop().close()
        while self._sent:
            self._sent.popitem()[1][0].close()


class _Send:
    """One send: at most one bucket is being loaded, while the next is being filled.

    No memory is written twice within a send, because an engine may hold on to a bucket until the end: a layer
    is loaded when all its tensors are there.
    """

    def __init__(self, transfer: SharedMemoryTransfer, kept: list[SharedMemory]) -> None:
        self._engines = transfer.engines
        self._by_value = transfer.by_value
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")
        self._loading: Future[list[None]] | None = None
        self._kept = kept  # from the send before, not written to yet
        self._used: list[SharedMemory] = []

    def __enter__(self) -> _Send:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True)
        for pieces in (self._kept, self._used):
            while pieces:
                pieces.pop().close()

    def put(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        memory = self._memory(bucket_size(tensors))
        info = fill_bucket(memory, tensors)
        self.announce(with_content(info, memory) if self._by_value else as_payload(info))

    def announce(self, payload: Mapping[str, Any]) -> None:
        """Let the engines load a bucket, when they have loaded the one before."""
        self.wait()
        self._loading = self._thread.submit(self._engines.everywhere, InferenceEngine.update_weights, payload)

    def worth_keeping(self) -> list[SharedMemory]:
        """Return memory for the next send, which comes after the engines have let go of this one."""
        kept: list[SharedMemory] = []
        total = 0
        for memory in list(self._used):
            if total + memory.size <= KEPT_BYTES:
                total += memory.size
                kept.append(memory)
                self._used.remove(memory)
        return kept

    def _memory(self, size: int) -> SharedMemory:
        memory = next((one for one in self._kept if one.size >= size), None)
        if memory is None:
            memory = SharedMemory(size)
        else:
            self._kept.remove(memory)
        self._used.append(memory)
        return memory

    def wait(self) -> None:
        """Wait until the engines have loaded the bucket before."""
        if self._loading is not None:
            with PROGRESS.phase("send_weights", Work.ELSEWHERE):
                self._loading.result()
