"""How much the tensors of a rank's process hold."""

from __future__ import annotations

import gc
import sys
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensor_bytes(objective: Any, model: Any) -> int:
    """Return the bytes of all floating-point storages that anything refers to; copies in host memory are bytes."""
    del objective, model  # what `TrainingRank.ask` passes
    gc.collect()
    # bitsandbytes, which peft imports where it is installed, keeps two tables
    tables = {id(table) for table in getattr(sys.modules.get("bitsandbytes.backends.utils"), "CODE", {}).values()}
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.is_floating_point() and id(item) not in tables:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


class NewTensors(TorchDispatchMode):
    """Counts what tensors that are made within hold together, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does with this rank's part comes here
        self._new(args)  # what was there before: a rank's own part
        made = func(*args, **(kwargs or {}))
        for storage in self._new(made):
            self.held += storage.nbytes()
            finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return made

    def _new(self, tensors: Any) -> list[torch.UntypedStorage]:
        found = {}
        for each in tree_leaves(tensors):
            if isinstance(each, Tensor) and not isinstance(each, DTensor) and not each.is_meta:
                found[each.untyped_storage()._cdata] = each.untyped_storage()
        new = [storage for key, storage in found.items() if key not in self._known]
        self._known.update(found)
        return new

    def _gone(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.held -= size
