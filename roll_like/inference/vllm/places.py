"""Where vLLM has the tensors of a checkpoint: layers by a checkpoint's names.

vLLM computes some layers as one (q, k and v), renames others, and divides some parameters among ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import get_packed_modules_mapping

from roll_like.inference.vllm.adapters import without_wrappers

HEAD = "lm_head.weight"
#: Renamed by loaders of single models (Granite 4), which no mapper tells.
_BY_HAND = ((".A_log", ".A"), (".block_sparse_moe.router.layer.", ".block_sparse_moe.gate."))
_QKV = {"q": 0, "k": 1, "v": 2}


class LayerPlace(NamedTuple):
    """A parameter of a layer, or some of those that the layer computes as one.

    Attributes:
        layer: The layer.
        leaf: The parameter's name in it.
        parts: Which matrices of a layer that computes several; None for all of them.
        owner: What the layer is a part of.
    """

    layer: nn.Module
    leaf: str
    parts: tuple[int, ...] | None
    owner: nn.Module | None


class LayerPlaces:
    """A model's layers by the names of a checkpoint.

    Args:
        model: vLLM's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = without_wrappers(model)
        self._fused_into: dict[str, tuple[str, tuple[int, ...]]] = {
            part: (whole, (index,))
            for whole, parts in get_packed_modules_mapping(model).items()
            for index, part in enumerate(parts)
            if whole != part
        }
        self._renames: list[tuple[str, Any]] = []
        for path, module in self._modules.items():
            mapper = getattr(module, "hf_to_vllm_mapper", None)
            if mapper is None:
                continue
            self._renames.append((f"{path}." if path else "", mapper.get_rename_mapper()))
            for part, (whole, shards) in mapper.orig_to_new_stacked.items():
                shard_ids = shards if isinstance(shards, tuple) else (shards,)
                places: list[Any] = [_QKV.get(each, each) for each in shard_ids]
                if all(isinstance(each, int) for each in places):
                    self._fused_into[part.rpartition(".")[2]] = (whole.rpartition(".")[2], tuple(places))

    def locate(self, name: str) -> LayerPlace | None:
        """Return where vLLM has a checkpoint's tensor; None if that is unknown."""
        found = self._locate(name)
        for prefix, mapper in self._renames:
            if found is None and name.startswith(prefix):
                name = prefix + (mapper.map_name(name.removeprefix(prefix)) or "")
                found = self._locate(name)
        for theirs, own in _BY_HAND:
            found = found or (self._locate(name.replace(theirs, own)) if theirs in name else None)
        return found

    def is_input(self, name: str) -> bool:
        """Return whether a tensor is the model's input embedding."""
        place = self.locate(name)
        return place is not None and isinstance(place.layer, VocabParallelEmbedding) and name != HEAD

    def _locate(self, name: str) -> LayerPlace | None:
        path, _, leaf = name.rpartition(".")
        parent, _, own = path.rpartition(".")
        parts = None
        if path not in self._modules and own in self._fused_into:
            whole, parts = self._fused_into[own]
            path = f"{parent}.{whole}" if parent else whole
        layer = self._modules.get(path)
        if layer is None or not leaf or not hasattr(layer, leaf):
            return None
        return LayerPlace(layer, leaf, parts, self._modules.get(path.rpartition(".")[0]))


def plain_parameter(place: LayerPlace) -> Tensor | None:
    """Return a parameter that is kept as it is (norms, biases, decay rates), or None; of a fused one, its share."""
    layer, leaf, parts, _ = place
    named = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    parameter: Tensor | None = named.get(leaf)
    if parameter is None or parameter.numel() == 0:
        return None
    divided = getattr(layer, "tp_size", 1) > 1
    if divided and isinstance(layer, LinearBase):
        return None
    loader = getattr(parameter, "weight_loader", None)
    if divided and getattr(loader, "__qualname__", "").startswith(f"{sharded_weight_loader.__name__}."):
        whole: Tensor = tensor_model_parallel_all_gather(parameter.contiguous(), dim=0)
        return whole
    if parts is None:
        return parameter
    sizes = list(getattr(layer, "output_partition_sizes", []))
    pieces: Sequence[Tensor] = torch.split(parameter, sizes) if sum(sizes) == len(parameter) else ()
    return torch.cat([pieces[part] for part in parts]) if pieces else None
