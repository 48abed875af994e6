"""A worker extension that leaves the output head as it was: what a sync check has to notice.

CPUs with bfloat16 keep a packed copy of a tied head, which grows stale by itself when nobody packs it again.
Others compute with the weights themselves, so the old matrix is kept on purpose here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roll_like.inference.vllm import worker_extension

Transfer = worker_extension.SharedMemoryWeightTransfer
_start = Transfer.start_weight_update
_old: list[torch.Tensor] = []


def start_weight_update(self: Any) -> None:
    _old.append(self.model.lm_head.weight.detach().clone())
    _start(self)


def keep_the_old_head(model: nn.Module) -> None:
    model.lm_head.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, _old[0], bias)


Transfer.start_weight_update = start_weight_update
worker_extension.repack_head = keep_the_old_head

WorkerExtension = worker_extension.WorkerExtension
