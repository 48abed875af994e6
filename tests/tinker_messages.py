"""What a client of a training service sends and gets as protocol buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from roll_like.service import wire
from roll_like.service.types import Datum


def train_message(model: str, number: int, data: Sequence[Datum], loss: str = "cross_entropy") -> bytes:
    """Return the request for a gradient."""
    message = wire._CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn=loss)
    for each in data:
        added = message.data.add()
        added.model_input.add().encoded_text.tokens = each.tokens.tobytes()
        for name, values in each.inputs.items():
            tensor = added.loss_fn_inputs[name]
            whole = np.issubdtype(values.dtype, np.integer)
            tensor.dense = values.astype(np.int64 if whole else np.float32).tobytes()
            tensor.dtype, tensor.shape[:] = 2 if whole else 1, list(values.shape)
    data_bytes: bytes = message.SerializeToString()
    return data_bytes


def read_message(name: str, data: bytes) -> Any:
    """Return a message of the protocol."""
    message = wire._CLASSES[name]()
    message.ParseFromString(data)
    return message
