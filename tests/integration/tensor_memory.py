"""How much the tensors of a rank's process hold."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch


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
