"""Trainer and engines on one machine, without GPUs: buckets in shared memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from roll_like.inference.weight_transfer.fingerprint import fingerprint
from roll_like.inference.weight_transfer.interface import EngineClient, SendReport, WeightSource, buckets_of
from roll_like.inference.weight_transfer.shared_memory import SharedMemory, as_payload, bucket_size, fill_bucket

DEFAULT_BUCKET_BYTES = 64 << 20
#: Memory that is kept between syncs. Fresh memory costs a page fault every 4 KiB, ten times the copying.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class SharedMemoryTransfer:
    """Fills a bucket while the engines load the one before it.

    Args:
        client: The engines.
        bucket_bytes: Size of one bucket.
    """

    client: EngineClient
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def connect(self, source: WeightSource, rank: int) -> SharedMemorySender:
        """Return this rank's end. Nothing has to be agreed on before the first bucket."""
        return SharedMemorySender(self, source, rank)


class SharedMemorySender:
    """One rank's end; see `WeightSender`."""

    def __init__(self, transfer: SharedMemoryTransfer, source: WeightSource, rank: int) -> None:
        self._transfer = transfer
        self._source = source
        self._rank = rank
        self._kept: list[SharedMemory] = []

    def send(self, salt: int) -> SendReport:
        """Gather on every rank; write and announce buckets on rank 0."""
        buckets = buckets_of(self._source.full_weights(), self._transfer.bucket_bytes)
        if self._rank != 0:
            deque(buckets, maxlen=0)
            return SendReport(fingerprints={}, bytes=0, buckets=0)
        with _Outbox(self._transfer.client, salt, self._kept) as outbox:
            try:
                for tensors in buckets:
                    outbox.put(tensors)
                report = outbox.finish()
            except BaseException:
                # the other ranks are gathering: whoever leaves now would leave them waiting for ever
                deque(buckets, maxlen=0)
                raise
            self._kept = outbox.worth_keeping()
        return report

    def close(self) -> None:
        """Give the memory up."""
        while self._kept:
            self._kept.pop().close()


class _Outbox:
    """One send: at most one bucket on its way, while the next is being filled.

    No memory is written twice within a send, because an engine may hold on to a bucket until the end: a layer
    is loaded when all its tensors are there.
    """

    def __init__(self, client: EngineClient, salt: int, kept: list[SharedMemory]) -> None:
        self._client = client
        self._salt = salt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")
        self._on_its_way: tuple[SharedMemory, Future[None]] | None = None
        self._kept = kept  # from the send before, not written to yet
        self._used: list[SharedMemory] = []
        self._fingerprints: dict[str, str] = {}
        self._bytes = 0
        self._buckets = 0

    def __enter__(self) -> _Outbox:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_its_way is not None:
            self._on_its_way[1].exception()  # whatever it is, an earlier error is on its way up
            self._used.append(self._on_its_way[0])
        self._thread.shutdown(wait=True)
        for pieces in (self._kept, self._used):
            while pieces:
                pieces.pop().close()

    def put(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        memory = self._memory(bucket_size(tensors))
        try:
            info = fill_bucket(memory, tensors)
            self._wait()
        except BaseException:
            self._used.append(memory)
            raise
        self._on_its_way = memory, self._thread.submit(self._client.update_weights, as_payload(info))
        self._fingerprints.update((name, fingerprint(tensor, self._salt)) for name, tensor in tensors)
        self._bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        self._buckets += 1

    def finish(self) -> SendReport:
        self._wait()
        return SendReport(fingerprints=self._fingerprints, bytes=self._bytes, buckets=self._buckets)

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
        for index, memory in enumerate(self._kept):
            if memory.size >= size:
                return self._kept.pop(index)
        return SharedMemory(size)

    def _wait(self) -> None:
        if self._on_its_way is None:
            return
        memory, loaded = self._on_its_way
        self._on_its_way = None
        self._used.append(memory)
        loaded.result()
