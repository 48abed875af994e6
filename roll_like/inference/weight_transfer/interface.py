"""The trainer's side of a sync: what moves weights, and what they are read from.

A `WeightTransfer` is made on the driver, travels to every trainer rank and is connected there to the rank's
weights. Every rank then takes part in each `send`, because sharded parameters are gathered by all of them;
rank 0 alone talks to the engines. Where ranks divide the layers, those of each stage do so for their own layers
at the same time (`in_parts`): no weight goes from one stage to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from roll_like.inference.weight_transfer.fingerprint import fingerprint
from roll_like.inference.weight_transfer.int8 import int8_fingerprint


class WeightSource(Protocol):
    """A rank that holds (a share of) the policy."""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) in the precision that engines compute with, always in the same order.

        All ranks walk through it together. Names and shapes are those of the model's checkpoint format.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What one rank did in one `send`, or all of them together. Ranks that do not send report nothing.

    Attributes:
        fingerprints: Fingerprint of each tensor as it was sent.
        bytes: Their size.
        buckets: How many pieces they went in.
        sent_bytes: What travelled of them to each engine; None where it was all.
        changed_share: Share of the numbers that differed from those of the send before; None where none was compared.
        quantized: Fingerprint of each matrix as an engine with 8-bit weights has to hold it; empty for others.
    """

    fingerprints: Mapping[str, str]
    bytes: int
    buckets: int
    sent_bytes: int | None = None
    changed_share: float | None = None
    quantized: Mapping[str, str] = field(default_factory=dict)


def all_sent(reports: Sequence[SendReport]) -> SendReport:
    """Return what ranks sent together: each sends other tensors."""
    sent = [each for each in reports if each.buckets]
    compared = [each for each in sent if each.changed_share is not None]
    numbers = sum(each.bytes for each in compared)
    return SendReport(
        fingerprints={name: found for each in reports for name, found in each.fingerprints.items()},
        bytes=sum(each.bytes for each in sent),
        buckets=sum(each.buckets for each in sent),
        sent_bytes=(
            sum(each.bytes if each.sent_bytes is None else each.sent_bytes for each in sent)
            if any(each.sent_bytes is not None for each in sent)
            else None
        ),
        changed_share=sum((each.changed_share or 0.0) * each.bytes for each in compared) / numbers if numbers else None,
        quantized={name: found for each in reports for name, found in each.quantized.items()},
    )


class WeightSender(Protocol):
    """One rank's end of a connected transfer."""

    def send(self, seed: int) -> SendReport:
        """Take part in moving all weights. Every rank calls it.

        Args:
            seed: Chooses what the fingerprints look at.

        Raises:
            WeightSyncError: An engine refused a bucket.
        """

    def close(self) -> None:
        """Let go of the engines."""


class WeightTransfer(Protocol):
    """A way for weights to travel. Picklable."""

    #: Whether several ranks may send at a time, each a part of the weights.
    in_parts: ClassVar[bool]

    def connect(self, source: WeightSource, rank: int, part: int = 0) -> WeightSender:
        """Return this rank's end. Called once on every rank, after the engines have started.

        Args:
            source: The weights, or a part of them.
            rank: Of this process among those that gather them; 0 sends.
            part: Which part they are.
        """


def buckets_of(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Gather tensors into lists of at most `max_bytes`; a larger tensor is alone in one."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket


def send_buckets(
    source: WeightSource,
    max_bytes: int,
    rank: int,
    seed: int,
    send: Callable[[Sequence[tuple[str, Tensor]]], None],
    *,
    int8: bool = False,
) -> SendReport:
    """Gather all weights on every rank, and have rank 0 send them, bucket by bucket; see `WeightSender.send`.

    Args:
        max_bytes: Size of a bucket.
        seed: Chooses what the fingerprints look at.
        send: Sends a bucket.
        int8: Whether engines make 8-bit weights of matrices.
    """
    buckets = buckets_of(source.full_weights(), max_bytes)
    fingerprints: dict[str, str] = {}
    quantized: dict[str, str] = {}
    total = count = 0
    try:
        for tensors in buckets if rank == 0 else ():
            send(tensors)
            fingerprints.update((name, fingerprint(tensor, seed)) for name, tensor in tensors)
            for name, tensor in tensors if int8 else ():
                if tensor.ndim == 2:
                    quantized[name] = int8_fingerprint(tensor, seed)
            total += sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
            count += 1
            del tensors  # before the next ones are gathered
    finally:
        # all ranks gather, and would wait for ever for one that does not
        deque(buckets, maxlen=0)
    return SendReport(fingerprints=fingerprints, bytes=total, buckets=count, quantized=quantized)
