"""Buckets of tensors in anonymous shared memory.

The memory belongs to no name in the file system (`memfd_create`): the kernel frees it when the last process
that maps it is gone, however that process ends. Nothing can be left behind, nothing has to be swept up, and
a container's small /dev/shm does not matter. A receiver opens it through the sender's /proc entry, so both
are processes of one user on one machine.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll_like.errors import WeightSyncError
from roll_like.inference.weight_transfer.fingerprint import checksum

_ALIGNMENT = 64


@dataclass
class BucketInfo:
    """Where a bucket is and what is in it. Travels as a plain dictionary, field by field.

    Attributes:
        pid: Process that holds the memory.
        fd: Its descriptor there.
        size: Bytes.
        names: Tensors, in order.
        dtype_names: Their precisions (`bfloat16`).
        shapes: Their shapes.
        offsets: Where each begins, in bytes.
        checksums: Hash of each one's bytes.
    """

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
        WeightSyncError: The sender is gone, or bytes differ from those that were sent.
    """
    try:
        with open(f"/proc/{info.pid}/fd/{info.fd}", "rb") as file:
            # private: whoever writes to a view writes to a copy
            memory = mmap.mmap(file.fileno(), info.size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"the shared memory of trainer process {info.pid} cannot be mapped: {error}",
            fix="trainer and inference engine must run on one machine as one user; across machines use GPUs (NCCL)",
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


def from_payload(payload: Mapping[str, Any]) -> BucketInfo:
    """Undo `as_payload`."""
    return BucketInfo(**payload)
