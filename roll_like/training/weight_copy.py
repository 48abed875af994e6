"""A second set of numbers for what a rank trains, in host memory: a reference or a teacher that follows the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from roll_like.training.host_copies import CHUNK_BYTES

#: Where a tensor may begin in host memory that several share. Bytes.
_ALIGNMENT = 16
Shares: TypeAlias = Mapping[str, Tensor]


class WeightCopy:
    """Numbers for this rank's shares of what is trained: at first those that the shares have.

    A share has the same place in the copy, so that following and computing need no other rank.

    Args:
        shares: Returns the shares as they are now, by name; they are written to.
        precise: Whether it is kept in float32, for moves that are smaller than a 16-bit number tells apart.
    """

    def __init__(self, shares: Callable[[], Shares], *, precise: bool) -> None:
        self._shares = shares
        own = shares()
        self._numbers = _in_host(own, torch.float32 if precise else None)
        self._policy = _in_host(own)  # holds the policy while something else is in its place
        self.follow(1.0)

    @property
    def bytes(self) -> int:
        """How much host memory it takes."""
        return sum(each.nbytes for kept in (self._numbers, self._policy) for each in kept.values())

    @torch.no_grad()
    def follow(self, share: float) -> tuple[float, int]:
        """Move to `share` of the policy and the rest of itself: copy ← share·policy + (1 − share)·copy.

        Returns:
            The sum of squared differences from the policy before that, and how many there were.
        """
        squared, count = 0.0, 0
        for name, policy in self._shares().items():
            kept = self._numbers[name]
            now, before = policy.to(kept.dtype), kept.to(policy.device)
            if policy.numel():
                squared += float(torch.linalg.vector_norm(now - before, dtype=torch.float64)) ** 2
                count += policy.numel()
            # a share of 1 has to give the policy's numbers, to the bit
            kept.copy_(now if share == 1.0 else torch.lerp(before, now, share))
        return squared, count

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Hold it in the policy's place, which has its own numbers again afterwards, to the bit."""
        with torch.no_grad():
            for name, share in self._shares().items():
                self._policy[name].copy_(share)
        try:
            with torch.no_grad():
                for name, share in self._shares().items():
                    share.copy_(self._numbers[name])
            yield
        finally:
            with torch.no_grad():
                for name, share in self._shares().items():
                    share.copy_(self._policy[name])

    def save(self, path: Path) -> None:
        """Write it."""
        torch.save(dict(self._numbers), path)

    def load(self, path: Path) -> None:
        """Take back what `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            RuntimeError: It was written by ranks with other shares.
        """
        stored: Shares = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        shapes, found = ({name: tuple(each.shape) for name, each in all_.items()} for all_ in (self._numbers, stored))
        if shapes != found:
            names = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
            raise RuntimeError(
                f"{path.name} was written by ranks that divide weights otherwise, or is of another model: of "
                f"{names[0]} it has {found.get(names[0], 'nothing')}, and this rank {shapes.get(names[0], 'nothing')}"
            )
        for name, kept in self._numbers.items():
            kept.copy_(stored[name])


def _in_host(shares: Shares, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return room for tensors in host memory; they share pieces of it, because pinned ones are rounded up."""
    dtypes = {name: dtype or share.dtype for name, share in shares.items()}
    sizes = {
        name: -(-share.numel() * dtypes[name].itemsize // _ALIGNMENT) * _ALIGNMENT for name, share in shares.items()
    }
    pinned = any(share.device.type == "cuda" for share in shares.values())
    left, piece, room = sum(sizes.values()), torch.empty(0, dtype=torch.uint8), {}
    for name, share in shares.items():
        if len(piece) < sizes[name]:
            piece = torch.empty(max(sizes[name], min(left, CHUNK_BYTES)), dtype=torch.uint8, pin_memory=pinned)
        used, piece = piece[: share.numel() * dtypes[name].itemsize], piece[sizes[name] :]
        room[name] = used.view(dtypes[name]).view(share.shape)
        left -= sizes[name]
    return room
