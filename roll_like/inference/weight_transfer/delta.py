"""Buckets of which only changed values travel, for engines that cannot map the trainer's memory.

An update at the learning rates of RL leaves most numbers of 16-bit weights as they were, bit for bit. Trainer and
engine both keep the bytes of every bucket as they were sent last. The trainer compares bits and sends what differs:

    kept by both   a b c d e f        positions   1 4
    to be sent     a X c d Y f        values      X Y

The engine writes the values into its copy, and loads the whole bucket from there, so that nothing behind it knows that
the rest did not travel. Checksums of the whole tensors come along and are compared before anything is loaded.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

#: Keys of a bucket's description: which one it is, of which send; and what changed in it.
KEPT, CHANGES = "kept", "changes"
#: The token of an engine that has no complete copy of any send.
NOTHING = ""
#: Integers of the sizes of all precisions: numbers are compared bit by bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SyncMode = Literal["auto", "full", "delta"]
SendKind = Literal["full", "delta"]


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as integers, flat and in host memory: a view, if they are there and contiguous."""
    return tensor.detach().reshape(-1).cpu().view(_BITS[tensor.element_size()])


def take_changes(old: Tensor, new: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Write new numbers over old ones; return where they differ, and the new ones there, as bytes.

        >>> old = torch.tensor([1, 2, 3], dtype=torch.int16)
        >>> positions, values = take_changes(old, torch.tensor([1, 9, 3], dtype=torch.int16))
        >>> positions.tolist(), values.view("int16").tolist(), old.tolist()
        ([1], [9], [1, 9, 3])

    Args:
        old: Flat integers (`bits_of`), which are changed.
    """
    places = (old != new).nonzero().flatten()
    values = new[places]
    old[places] = values
    width = np.uint32 if len(old) <= 1 << 32 else np.uint64
    return places.numpy().astype(width), values.numpy().view(np.uint8)


def apply_changes(kept: Sequence[Tensor], changes: Mapping[str, Any]) -> None:
    """Write what changed into an engine's copy of a bucket.

    Args:
        kept: The copy's tensors, contiguous and in host memory.
        changes: What `pack_changes` returned.
    """
    position = value = 0
    for tensor, count in zip(kept, changes["counts"], strict=True):
        if not count:
            continue
        bits = bits_of(tensor)
        size = count * bits.element_size()
        places = torch.from_numpy(changes["positions"][position : position + count].astype(np.int64))
        values = changes["values"][value : value + size].copy()
        bits[places] = torch.from_numpy(values).view(bits.dtype)
        position, value = position + count, value + size


def pack_changes(found: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> dict[str, Any]:
    """Return the changes of a bucket's tensors (`take_changes`) as they travel."""
    return {
        "counts": [len(positions) for positions, _ in found],
        "positions": np.concatenate([positions for positions, _ in found]),
        "values": np.concatenate([values for _, values in found]),
    }


def changes_bytes(changes: Mapping[str, Any]) -> int:
    """Return what changes take on their way."""
    return int(changes["positions"].nbytes + changes["values"].nbytes)


class SendPlan:
    """Decides for each send whether all of it travels, and measures both ways.

    `auto` sends everything twice (the first takes fresh memory and is not measured), then what changed, and goes on
    with the way that took less time.

    Args:
        mode: `inference.weight_sync`.
        full_every: Of so many sends one is full whatever is faster.
    """

    def __init__(self, mode: SyncMode, full_every: int) -> None:
        self._mode = mode
        self._full_every = full_every
        self._version: int | None = None
        self._seconds: dict[SendKind, float] = {}
        self._began = 0.0
        self._sends = 0
        self._how: SendKind = "full"
        #: What engines hold that got all of the last send.
        self.token = NOTHING

    @property
    def keeps(self) -> bool:
        """Return whether both sides keep what was sent."""
        return self._mode != "full"

    def begin(self, version: int, held: Sequence[str]) -> SendKind:
        """Return how the next send goes: in full, if there is any doubt about what an engine holds.

        Args:
            version: Of the policy; one that comes again was not received by all.
            held: What each engine says that it holds.
        """
        known = self.token != NOTHING and set(held) == {self.token} and version != self._version
        due = self._sends % self._full_every == 0
        if due:
            self._seconds.pop("delta", None)  # what changes is tried again afterwards: it may be less by now
        self._how = "delta" if self.keeps and known and not due and self._delta_wins() else "full"
        self._version, self.token = version, NOTHING  # until it has ended well
        self._began = time.perf_counter()
        return self._how

    def end(self, token: str) -> None:
        """Note that the send ended well, as engines will say."""
        if self._sends:
            self._seconds[self._how] = time.perf_counter() - self._began
        self._sends += 1
        self.token = token

    def _delta_wins(self) -> bool:
        if self._mode == "delta":
            return True
        full, delta = self._seconds.get("full"), self._seconds.get("delta")
        return full is not None and (delta is None or delta < full)


def new_token() -> str:
    """Return a name for what one send brings."""
    return uuid.uuid4().hex
