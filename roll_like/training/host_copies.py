"""Moves what tensors hold to host memory and back, whatever refers to them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from roll_like.algorithms.lazy import torch  # a backend's module imports this one, and is imported for configurations

if TYPE_CHECKING:
    from torch import Tensor

#: Host memory is taken in pieces of this size: pinned memory is rounded up to a power of two.
CHUNK_BYTES = 256 * 2**20


class HostCopies:
    """Copies of tensors in host memory, while the tensors themselves hold no memory.

    What is emptied is the storage, so that all views of it stay views: of flat buffers, of partitions, of parameters in
    a graph. Until `reload` the tensors must not be used; afterwards they hold the same bits as before.

    Args:
        device: Kind of device to make room on; tensors elsewhere stay as they are. Of `cpu` storages are emptied
            likewise, and their copies lie beside them.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._copies: list[tuple[torch.UntypedStorage, list[Tensor]]] = []

    @property
    def bytes(self) -> int:
        """How much is in host memory now."""
        return sum(piece.numel() for _, pieces in self._copies for piece in pieces)

    def offload(self, tensors: Iterable[Tensor], keep: Iterable[Tensor] = ()) -> None:
        """Empty the storages of some tensors, in addition to those that are empty already.

        Args:
            tensors: Whose storages to empty.
            keep: Tensors whose storages stay as they are.
        """
        pinned = self._device == "cuda"
        kept = {storage.data_ptr() for storage in self._storages(keep)}
        for storage in self._storages(tensors):
            if storage.data_ptr() in kept:
                continue
            content = _bytes_of(storage)
            pieces = []
            for part in torch.split(content, CHUNK_BYTES):
                pieces.append(torch.empty(len(part), dtype=torch.uint8, pin_memory=pinned))
                pieces[-1].copy_(part, non_blocking=pinned)
            self._copies.append((storage, pieces))
        if pinned:
            torch.cuda.synchronize()  # nothing is copied any more
        for storage, _ in self._copies:
            storage.resize_(0)
        if pinned:
            gc.collect()
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Fill all storages again."""
        for storage, pieces in self._copies:
            storage.resize_(sum(piece.numel() for piece in pieces))
            for part, piece in zip(torch.split(_bytes_of(storage), CHUNK_BYTES), pieces, strict=True):
                part.copy_(piece, non_blocking=self._device == "cuda")
        if self._device == "cuda":
            torch.cuda.synchronize()  # the copies are given back below
        self._copies = []

    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Return each storage once that can be emptied and holds something."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == self._device and storage.nbytes() and storage.resizable():
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_within(*roots: Any, of: tuple[str, ...] = ()) -> Iterator[Tensor]:
    """Yield every tensor that objects hold in attributes, dictionaries and sequences, each once, with its gradient.

    Args:
        roots: Where to begin; their own attributes are followed whatever they are.
        of: Top-level packages whose objects are followed too; others are passed over.
    """
    seen: set[int] = set()
    waiting: list[Any] = [inside for root in roots for inside in _inside(root)]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
            waiting += [item.grad if item.is_leaf else None, *vars(item).values()]
        elif isinstance(item, Mapping | list | tuple | set | frozenset) or type(item).__module__.split(".")[0] in of:
            waiting += _inside(item)


def _inside(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return [*item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return [*item]
    return [*getattr(item, "__dict__", {}).values()]
