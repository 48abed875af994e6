"""Weights between processes of one machine: buckets of tensors in anonymous shared memory.

The memory belongs to no name in the file system (`memfd_create`): the kernel frees it when the last process
that maps it is gone, however that process ends. Nothing can be left behind, nothing has to be swept up, and
a container's small /dev/shm does not matter. A receiver opens it through the sender's /proc entry, so both
are processes of one user on one machine.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll_like.cluster.address import own_node
from roll_like.cluster.progress import PROGRESS, Work
from roll_like.errors import WeightSyncError
from roll_like.inference.interface import InferenceEngine
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
    return BucketInfo(
        node=own_node(),
        pid=os.getpid(),
        fd=memory.fd,
        size=max(at, _ALIGNMENT),
        names=[name for name, _ in tensors],
        dtype_names=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        shapes=[list(tensor.shape) for _, tensor in tensors],
        offsets=offsets,
        checksums=[_copy(memory.view, offset, tensor) for offset, (_, tensor) in zip(offsets, tensors, strict=True)],
    )


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


class LocalBuckets:
    """Buckets that came with their content, in shared memory of this machine: an engine's own processes read it."""

    def __init__(self) -> None:
        self._memory: list[SharedMemory] = []
        own_node()  # for processes that this one starts

    def here(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return a description of the bucket in this machine's memory: the same, unless it came with its content."""
        if CONTENT not in info:
            return dict(info)
        memory = SharedMemory(info["size"])
        self._memory.append(memory)
        memory.view.write(info[CONTENT].data)
        rest = {key: value for key, value in info.items() if key != CONTENT}
        return rest | {"node": own_node(), "pid": os.getpid(), "fd": memory.fd}

    def clear(self) -> None:
        """Give the memory up: the update is over."""
        while self._memory:
            self._memory.pop().close()


@dataclass(frozen=True, slots=True)
class SharedMemoryTransfer:
    """Fills a bucket while the engines load the one before it.

    Args:
        engines: The engines.
        bucket_bytes: Size of one bucket.
        by_value: Whether buckets travel through Ray with their content, because an engine may be on another machine.
    """

    engines: ClusterHandle[InferenceEngine]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    by_value: bool = False

    def connect(self, source: WeightSource, rank: int) -> SharedMemorySender:
        """Return this rank's end; no connection is needed."""
        return SharedMemorySender(self, source, rank)


class SharedMemorySender:
    """One rank's end; see `WeightSender`."""

    def __init__(self, transfer: SharedMemoryTransfer, source: WeightSource, rank: int) -> None:
        self._transfer = transfer
        self._source = source
        self._rank = rank
        self._kept: list[SharedMemory] = []

    def send(self, seed: int) -> SendReport:
        """Gather on every rank; write and announce buckets on rank 0."""
        with _Send(self._transfer, self._kept) as sending:
            report = send_buckets(self._source, self._transfer.bucket_bytes, self._rank, seed, sending.put)
            sending.wait()
            self._kept = sending.worth_keeping()
        return report

    def close(self) -> None:
        """Give the memory up."""
        while self._kept:
            self._kept.pop().close()


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
        payload = with_content(info, memory) if self._by_value else as_payload(info)
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
