"""Where vLLM has the tensors of a checkpoint: layers by a checkpoint's names.

vLLM computes some layers as one (q, k and v), renames others, and divides some parameters among ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader, sharded_weight_loader

from roll_like.inference.vllm.adapters import without_wrappers

HEAD = "lm_head.weight"
#: Renamed by loaders of single models (Granite 4), which no mapper tells.
_BY_HAND = ((".A_log", ".A"), (".block_sparse_moe.router.layer.", ".block_sparse_moe.gate."))
#: What loaders of single models transpose or reorder: what a layer has of it is not, number by number, what was sent.
_REARRANGED = {
    "BloomModel": (".query_key_value.",),
    "GPT2Model": (".c_attn.weight", ".c_fc.weight", ".c_proj.weight"),
    "Llama4Model": (".q_proj.weight", ".k_proj.weight", ".experts.gate_up_proj", ".experts.down_proj"),
}
_QKV = {"q": 0, "k": 1, "v": 2}
#: Layers of which each rank has one share of every matrix, in the order of ranks. Subclasses repeat some rows.
_IN_ORDER = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)


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
    """A model's layers by the names of a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = without_wrappers(model)
        kinds = {type(module).__name__ for module in self._modules.values()}
        self._rearranged = [word for kind, words in _REARRANGED.items() if kind in kinds for word in words]
        self._fused_into: list[tuple[str, dict[str, tuple[str, tuple[int, ...]]]]] = []
        self._renames: list[tuple[str, Any]] = []
        for path, module in self._modules.items():
            prefix = f"{path}." if path else ""
            fused: dict[str, tuple[str, tuple[int, ...]]] = {}
            for whole, parts in (getattr(module, "packed_modules_mapping", None) or {}).items():
                fused |= {part: (whole, (index,)) for index, part in enumerate(parts) if whole != part}
            mapper = getattr(module, "hf_to_vllm_mapper", None)
            if mapper is not None:
                self._renames.append((prefix, mapper.get_rename_mapper()))
            for part, (whole, shards) in mapper.orig_to_new_stacked.items() if mapper is not None else ():
                shard_ids = shards if isinstance(shards, tuple) else (shards,)
                places: list[Any] = [_QKV.get(each, each) for each in shard_ids]
                if all(isinstance(each, int) for each in places):
                    fused[part.rpartition(".")[2]] = (whole.rpartition(".")[2], tuple(places))
            if fused:
                self._fused_into.append((prefix, fused))
        self._fused_into.sort(key=lambda each: -len(each[0]))  # a part of the model knows better than the whole

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

    def rearranged(self, name: str) -> bool:
        """Return whether the model's loader changes the order of a tensor's numbers."""
        return any(word in name for word in self._rearranged)

    def is_input(self, name: str, width: int) -> bool:
        """Return whether a tensor is the model's input embedding, of this width; Gemma 4 has one for all layers too."""
        place = self.locate(name)
        if place is None or not isinstance(place.layer, VocabParallelEmbedding) or name == HEAD:
            return False
        return bool(place.layer.embedding_dim == width)

    def _locate(self, name: str) -> LayerPlace | None:
        path, _, leaf = name.rpartition(".")
        parent, _, own = path.rpartition(".")
        parts = None
        found = (fused[own] for prefix, fused in self._fused_into if path.startswith(prefix) and own in fused)
        if path not in self._modules and (into := next(found, None)) is not None:
            whole, parts = into
            path = f"{parent}.{whole}" if parent else whole
        layer = self._modules.get(path)
        if layer is None or not leaf or not hasattr(layer, leaf):
            return None
        return LayerPlace(layer, leaf, parts, self._modules.get(path.rpartition(".")[0]))


def divided(layer: LinearBase) -> bool:
    """Return whether ranks have shares of a layer; a replicated one is whole on each, also where its `tp_size` is 2."""
    return layer.tp_size > 1 and not isinstance(layer, ReplicatedLinear)


def shares_in_order(layer: LinearBase) -> bool:
    """Return whether ranks' shares of a layer's weight are, side by side, what a checkpoint has.

    A loader that is not the layer's own may interleave and repeat rows, as Mamba 2's does with one group.
    """
    loader = getattr(getattr(layer, "weight", None), "weight_loader", None)
    return type(layer) in _IN_ORDER and (loader is None or getattr(loader, "__self__", None) is layer)


def chosen_pieces(pieces: Sequence[Tensor], parts: tuple[int, ...] | None) -> Tensor | None:
    """Return those of a fused layer's pieces that a tensor is made of; None where they cannot be told."""
    if not pieces or max(parts or (0,)) >= len(pieces):
        return None
    return torch.cat([pieces[part] for part in parts] if parts is not None else list(pieces))


def plain_parameter(place: LayerPlace) -> Tensor | None:
    """Return a parameter that is kept as it is (norms, biases, decay rates), or None; of a fused one, its share."""
    layer, leaf, parts, _ = place
    named = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    parameter: Tensor | None = named.get(leaf)
    if parameter is None or parameter.numel() == 0:
        return None
    if isinstance(layer, LinearBase):
        parameter = None if divided(layer) else parameter
    elif get_tensor_model_parallel_world_size() > 1:
        parameter = _of_all_ranks(parameter)
    if parts is None or parameter is None:
        return parameter
    sizes = list(getattr(layer, "output_partition_sizes", []))
    return chosen_pieces(torch.split(parameter, sizes), parts) if sum(sizes) == len(parameter) else None


def _of_all_ranks(parameter: Tensor) -> Tensor | None:
    """Return the whole of a parameter that ranks may divide; None where it is not known how they do."""
    loader = getattr(parameter, "weight_loader", default_weight_loader)
    held: Tensor = tensor_model_parallel_all_gather(parameter.contiguous()[None], dim=0)
    if getattr(loader, "__qualname__", "").startswith(f"{sharded_weight_loader.__name__}."):
        return held.flatten(0, 1)
    # some models divide a parameter before they load it (attention sinks of gpt-oss)
    return parameter if loader is default_weight_loader and bool((held == held[0]).all()) else None
