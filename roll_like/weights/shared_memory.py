"""Trainer and engines on one machine, without GPUs: buckets in shared memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from roll_like.inference.fingerprint import fingerprint
from roll_like.inference.shared_memory import Bucket, as_payload
from roll_like.weights.transfer import EngineClient, SendReport, WeightSource, buckets_of

DEFAULT_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SharedMemoryTransfer:
    """Fills a bucket while the engines load the one before it.

    Args:
        client: The engines.
        bucket_bytes: Size of one bucket; about two exist at a time, besides what an engine still holds of a
            layer whose tensors are not all there.
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

    def send(self, salt: int) -> SendReport:
        """Gather on every rank; write and announce buckets on rank 0."""
        buckets = buckets_of(self._source.full_weights(), self._transfer.bucket_bytes)
        if self._rank != 0:
            deque(buckets, maxlen=0)
            return SendReport(fingerprints={}, bytes=0, buckets=0)
        outbox = _Outbox(self._transfer.client, salt)
        try:
            for tensors in buckets:
                outbox.put(tensors)
            return outbox.finish()
        except BaseException:
            # the other ranks are gathering: whoever leaves now would leave them waiting for ever
            deque(buckets, maxlen=0)
            raise
        finally:
            outbox.close()

    def close(self) -> None:
        """Do nothing: nothing is held between two sends."""


class _Outbox:
    """At most one bucket on its way, while the next is being filled."""

    def __init__(self, client: EngineClient, salt: int) -> None:
        self._client = client
        self._salt = salt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")
        self._on_its_way: tuple[Bucket, Future[None]] | None = None
        self._fingerprints: dict[str, str] = {}
        self._bytes = 0
        self._buckets = 0

    def put(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        bucket = Bucket(tensors)
        try:
            self._wait()
        except BaseException:
            bucket.close()
            raise
        self._on_its_way = bucket, self._thread.submit(self._client.update_weights, as_payload(bucket.info))
        self._fingerprints.update((name, fingerprint(tensor, self._salt)) for name, tensor in tensors)
        self._bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        self._buckets += 1

    def finish(self) -> SendReport:
        self._wait()
        return SendReport(fingerprints=self._fingerprints, bytes=self._bytes, buckets=self._buckets)

    def close(self) -> None:
        """Wait for what is on its way; its outcome no longer matters, its memory does."""
        if self._on_its_way is not None:
            bucket, loaded = self._on_its_way
            loaded.exception()
            bucket.close()
        self._thread.shutdown(wait=True)

    def _wait(self) -> None:
        if self._on_its_way is None:
            return
        bucket, loaded = self._on_its_way
        try:
            loaded.result()
        finally:
            bucket.close()
            self._on_its_way = None
