"""Whole weights of a transformers model out of Megatron-Core's checkpoints, without ranks and without Megatron-Core.

Its files have one tensor for the same weight of all layers, and one dimension more for the experts of a layer:

    decoder.layers.mlp.linear_fc1.weight [L, 2·I, D]  →  layers.0.mlp.gate_proj.weight [I, D], …
    decoder.layers.mlp.experts.experts.linear_fc1.weight [L, E, 2·I, D]  →  layers.0.mlp.experts.gate_up_proj
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from roll_like.training.backend import LazyTensors
from roll_like.training.checkpoint_reader import TensorReader
from roll_like.training.megatron_weights import Bundle, Place, bundle_of, whole_of

#: Names that Megatron-Core has in files alone: those of Transformer Engine, which joins norms with what follows.
_IN_FILES = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("mlp.experts.experts.", "mlp.experts.local_experts.0."),
)
#: What Megatron-Core has as a buffer.
_BUFFER = ".router.expert_bias"


class _Alone:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def read_parameters(folder: Path, described: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the parameters of the trained module, each read when it is asked for.

    Args:
        described: What `StageWeights.described` returned when it was written.
    """
    reader, alone = TensorReader(folder, others=True), _Alone()
    groups: Any = {"tensor": alone, "expert_tensor": alone, "expert": alone}
    place = Place(**groups, **{key: described[key] for key in ("queries", "groups", "vocabulary", "family")})

    @lru_cache(maxsize=1)
    def whole(bundle: Bundle, key: str, row: int | None) -> list[Tensor]:
        stored = reader.read_tensor(key, row)
        own = list(stored.unbind(0)) if bundle.kind.startswith("expert") else [stored]
        return [bundle.stored(each) for each in whole_of(bundle.kind, own, place)]

    def read(bundle: Bundle, key: str, row: int | None, position: int) -> Tensor:
        return whole(bundle, key, row)[position]

    readers = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        for name, row in _parameters(key, stored) if not key.startswith("optimizer.") else ():
            if name.endswith(_BUFFER):
                continue  # nothing trains it: an export has the base's
            bundle, _ = bundle_of(name, 0, described["family"])
            for position, each in enumerate(bundle.names):
                readers[described["names"][each]] = partial(read, bundle, key, row, position)
    return LazyTensors(readers)


def _parameters(key: str, stored: Any) -> Iterator[tuple[str, int | None]]:
    """Yield the parameters that a file's tensor has, by Megatron-Core's names, and where they are in it."""
    for name, other in _IN_FILES:
        key = key.replace(name, other)
    together = re.fullmatch(r"decoder\.layers\.(\D.*)", key)
    if together is None:
        yield key, None
        return
    yield from ((f"decoder.layers.{layer}.{together[1]}", layer) for layer in range(stored.size[0]))
