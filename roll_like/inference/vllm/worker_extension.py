"""What this package adds to vLLM's worker, inside the engine's process.

vLLM imports this module there because it is named as `worker_extension_cls`. Importing it registers the
`shared_memory` weight-transfer engine beside vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll_like.inference.weight_transfer.fingerprint import checked_columns, digest, fingerprint
from roll_like.inference.weight_transfer.shared_memory import BucketInfo, read_bucket

BACKEND = "shared_memory"
HEAD = "lm_head.weight"


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on before the first bucket."""


@dataclass
class SharedMemoryUpdateInfo(BucketInfo, WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket."""


class SharedMemoryWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads buckets that a trainer on the same machine left in shared memory."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Do nothing: every bucket holds its own address."""

    def start_weight_update(self) -> None:
        """Open vLLM's layer-by-layer reload."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Map a bucket and load it; layers whose tensors are not all there yet keep views of it."""
        self.model.load_weights(iter(read_bucket(update_info)))

    def finish_weight_update(self) -> None:
        """Close the reload."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_head(self.model)

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeightTransfer)


def repack_head(model: nn.Module) -> None:
    """Pack the output head again.

    On CPU a head keeps a packed copy of its matrix. One that is tied to the embedding loads nothing itself,
    so vLLM's reload leaves that copy as it was, and the engine would go on sampling with the old head.
    """
    head = getattr(model, "lm_head", None)
    if isinstance(head, VocabParallelEmbedding):
        head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    @torch.inference_mode()
    def weight_fingerprints(self, names: list[str], salt: int) -> dict[str, dict[str, str]]:
        """Return fingerprints of the tensors that the trainer calls `names`, as this engine computes with them.

        Tensors of layers that this function cannot read back are left out.
        """
        model = self.model_runner.get_model()
        tensors: dict[str, str] = {}
        tied: dict[str, str] = {}
        modules = dict(model.named_modules())
        fused = _Fused(getattr(model, "packed_modules_mapping", {}))
        pieces: dict[str, list[Tensor]] = {}  # of the last fused layer only: siblings follow each other
        for name in names:
            path, _, leaf = name.rpartition(".")
            layer_path, index = fused.locate(path, modules)
            layer = modules.get(layer_path)
            if layer is None:
                continue
            if isinstance(layer, LinearBase) and leaf == "weight":
                if layer_path not in pieces:
                    pieces = {layer_path: linear_columns(layer, salt)}
                if index < len(pieces[layer_path]):
                    tensors[name] = digest(pieces[layer_path][index])
            elif isinstance(layer, VocabParallelEmbedding) and leaf == "weight":
                tensors[name] = digest(embedding_columns(layer, salt))
            elif (parameter := _plain(layer, leaf, index, fused.count(layer_path))) is not None:
                tensors[name] = fingerprint(parameter, salt)
        head = getattr(model, "lm_head", None)
        if isinstance(head, VocabParallelEmbedding):
            tensors[HEAD] = digest(head_columns(head, salt))
            if HEAD not in names:
                tied.update((HEAD, name) for name in names if _is_embedding(modules, name))
        return {"tensors": tensors, "tied": tied}


class _Fused:
    """vLLM computes some of the trainer's layers as one: q, k and v, for example."""

    def __init__(self, mapping: dict[str, list[str]]) -> None:
        self._fused_into = {
            part: (whole, index)
            for whole, parts in mapping.items()
            for index, part in enumerate(parts)
            if whole != part
        }
        self._counts = {whole: len(parts) for whole, parts in mapping.items()}

    def locate(self, path: str, modules: dict[str, nn.Module]) -> tuple[str, int]:
        """Return the path of the layer that holds the trainer's layer `path`, and its place in it."""
        parent, _, own = path.rpartition(".")
        if path in modules or own not in self._fused_into:
            return path, 0
        whole, index = self._fused_into[own]
        return f"{parent}.{whole}" if parent else whole, index

    def count(self, path: str) -> int:
        """Return how many of the trainer's layers one of vLLM's holds."""
        return self._counts.get(path.rpartition(".")[2], 1)


def unit_vectors(width: int, salt: int, like: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the unit vectors of the checked columns, shape [C, width]."""
    columns = checked_columns(width, salt)
    device = None if like is None else like.device
    vectors = torch.zeros(len(columns), width, dtype=dtype, device=device)
    vectors[torch.arange(len(columns)), columns] = 1
    return vectors


def linear_columns(layer: LinearBase, salt: int) -> list[Tensor]:
    """Return the checked columns of every matrix of a (fused) layer, as it multiplies, shape [out, C] each."""
    weight = next(layer.parameters(), None)
    inputs = unit_vectors(layer.input_size, salt, weight, layer.params_dtype)
    if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
        share = layer.input_size_per_partition
        inputs = inputs[:, layer.tp_rank * share : (layer.tp_rank + 1) * share].contiguous()
        outputs = tensor_model_parallel_all_reduce(layer.quant_method.apply(layer, inputs, None))
        return [outputs.T]
    outputs = layer.quant_method.apply(layer, inputs, None)
    sizes = getattr(layer, "output_partition_sizes", [outputs.shape[1]])
    return [_whole(piece, layer, index).T for index, piece in enumerate(outputs.split(list(sizes), dim=1))]


def _whole(piece: Tensor, layer: LinearBase, index: int) -> Tensor:
    """Return all ranks' shares of one matrix's outputs, side by side, shape [C, out]."""
    if getattr(layer, "tp_size", 1) == 1:
        return piece
    gathered: Tensor = tensor_model_parallel_all_gather(piece.contiguous(), dim=-1)
    copies = getattr(layer, "num_kv_head_replicas", 1) if index > 0 else 1
    if copies == 1:
        return gathered
    # ranks with the same key-value head hold the same rows
    return gathered.view(len(gathered), -1, copies, piece.shape[1])[:, :, 0].reshape(len(gathered), -1)


def embedding_columns(layer: VocabParallelEmbedding, salt: int) -> Tensor:
    """Return the checked columns of an embedding, shape [vocabulary, C]."""
    columns = checked_columns(layer.weight.shape[1], salt).to(layer.weight.device)
    rows: Tensor = layer.weight[:, columns]
    if layer.tp_size > 1:
        rows = tensor_model_parallel_all_gather(rows.contiguous(), dim=0)
    return rows[: layer.org_vocab_size]


def head_columns(layer: VocabParallelEmbedding, salt: int) -> Tensor:
    """Return the checked columns of the output head, as logits are computed with it, shape [vocabulary, C]."""
    inputs = unit_vectors(layer.embedding_dim, salt, layer.weight, layer.weight.dtype)
    logits: Tensor = layer.quant_method.apply(layer, inputs)
    if layer.tp_size > 1:
        logits = tensor_model_parallel_all_gather(logits.contiguous(), dim=-1)
    return logits[:, : layer.org_vocab_size].T


def _plain(layer: nn.Module, leaf: str, index: int, count: int) -> Tensor | None:
    """Return a parameter that is kept as it is (norms, biases), or None; of a fused one, its share."""
    parameter = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}.get(leaf)
    if parameter is None or parameter.numel() == 0:
        return None
    if getattr(layer, "tp_size", 1) > 1 and isinstance(layer, LinearBase):
        return None
    if count == 1:
        return parameter
    sizes = list(getattr(layer, "output_partition_sizes", []))
    return parameter[sum(sizes[:index]) : sum(sizes[: index + 1])] if index < len(sizes) else None


def _is_embedding(modules: dict[str, nn.Module], name: str) -> bool:
    layer = modules.get(name.rpartition(".")[0])
    return isinstance(layer, VocabParallelEmbedding) and name.endswith("embed_tokens.weight")
