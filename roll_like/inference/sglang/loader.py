"""What SGLang's schedulers call to load a bucket of weights: SGLang knows it as a `custom_weight_loader`.

SGLang would carry the tensors of `update_weights_from_tensor` itself, once for every GPU of an engine. A bucket is in
shared memory already, which every process of the machine can map, so only its description travels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roll_like.cluster.progress import PROGRESS
from roll_like.inference.weight_transfer.shared_memory import BucketInfo, read_bucket


def described(info: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return a bucket's description in the form of SGLang's named tensors: as the name of an empty one."""
    return [(json.dumps(dict(info)), torch.empty(0))]


def load_bucket(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Map a bucket and load it into the model of one scheduler.

    Args:
        model: SGLang's model, which takes a checkpoint's names and keeps its own GPU's share.
        named_tensors: What `described` returned.

    Raises:
        WeightSyncError: Its bytes are not those that were sent.
    """
    ((text, _),) = named_tensors
    device = next(model.parameters()).device  # where SGLang would have them; one tensor at a time
    tensors = read_bucket(BucketInfo(**json.loads(text)))
    model.load_weights((name, tensor.to(device)) for name, tensor in tensors)
    PROGRESS.open()
    PROGRESS.note_memory()
