"""Every causal language model of transformers as a random one of some thousand parameters, from its configuration alone.

No family is described here by itself: sizes are those of `_SIZES`, wherever a configuration has a key of that name, in
its parts as well. What a few families need beside is in `_OWN`.
"""

from __future__ import annotations

import copy
from typing import Any

VOCABULARY = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.05,
}
