"""What this package adds to vLLM's worker, inside the engine's process.

vLLM imports this module there because it is named as `worker_extension_cls`. Importing it registers the
`shared_memory` weight-transfer engine beside vLLM's own, and 8-bit weights. On CPU it also replaces what packs experts
after a reload, and what rotates heads, tells which tokens were kept, and has guesses checked as they are sampled. It
also lets the watchdog see the process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import lru_cache
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
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from roll_like.cluster.progress import PROGRESS
from roll_like.errors import WeightSyncError
from roll_like.inference.vllm.adapters import HeldAdapters, compute_adapters_on_cpu
from roll_like.inference.vllm.arguments import ADAPTER_ID
from roll_like.inference.vllm.cpu_kernels import check_guesses_as_sampled, rotate_every_head
from roll_like.inference.vllm.experts import ExpertLayers, repack_experts
from roll_like.inference.vllm.int8 import Int8Linear
from roll_like.inference.vllm.kept import tell_kept_tokens
from roll_like.inference.vllm.places import (
    HEAD,
    LayerPlace,
    LayerPlaces,
    chosen_pieces,
    divided,
    plain_parameter,
    shares_in_order,
)
from roll_like.inference.vllm.states import (
    ChangedOnLoad,
    convolution,
    convolves,
    remember_decay_rates,
    renew_convolutions,
)
from roll_like.inference.weight_transfer.fingerprint import Digests, checked_columns, checked_numbers
from roll_like.inference.weight_transfer.shared_memory import BucketInfo, read_bucket

BACKEND = "shared_memory"


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
        renew_convolutions(self.model)

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeightTransfer)
repack_experts()
compute_adapters_on_cpu()
rotate_every_head()
tell_kept_tokens()
check_guesses_as_sampled()
remember_decay_rates()
PROGRESS.open()


def untouched_layers(model: Any) -> list[str]:
    """Return the paths of layers that have parameters and were sent nothing, during a reload.

    Some of vLLM's models copy tensors past the loaders that a reload listens to: it would put their old weights back.
    """
    head = output_head(model)
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    left = []
    for path, layer in model.named_modules():
        info = get_layerwise_info(layer)
        waiting = info.can_load() and info.load_numel == 0 and not is_deferred_attention_layer(layer)
        if waiting and not (tied and layer is head) and any(each.numel() for each in info.restore_metadata[0].values()):
            left.append(path)
    return left


def output_head(model: Any) -> Any:
    """Return the output head, which a vision-language model has in its language model; None without one."""
    inner = model.get_language_model() if hasattr(model, "get_language_model") else model
    return getattr(inner, "lm_head", None)


def repack_head(model: nn.Module) -> None:
    """Pack the output head again.

    On CPU a head keeps a packed copy of its matrix. One that is tied to the embedding loads nothing itself,
    so vLLM's reload leaves that copy as it was, and the engine would go on sampling with the old head.
    """
    head = output_head(model)
    if isinstance(head, VocabParallelEmbedding):
        head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    model_runner: Any
    model_config: Any
    _adapters: HeldAdapters | None = None

    def accept_signals(self) -> None:
        """Let SIGTERM end this process, which ignores it as all that a run starts does (`cluster.session.spared`)."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    @torch.inference_mode()
    def hold_adapter(self, rank: int, modules: list[str]) -> list[str]:
        """Begin with an adapter that changes nothing; return those `modules` that cannot have one."""
        self._adapters = HeldAdapters(self.model_runner.get_model(), rank)
        return self._adapters.unserved(modules)

    def start_adapter_update(self, dropped: list[int]) -> None:
        """Get ready for another adapter, and forget those of these numbers."""
        self._held().begin()
        self._held().drop(dropped)

    def update_adapter(self, info: dict[str, Any]) -> None:
        """Take one bucket of its tensors."""
        self._held().receive(read_bucket(BucketInfo(**info)))

    @torch.inference_mode()
    def finish_adapter_update(self, number: int) -> None:
        """Compute with it from now on where requests have this number."""
        self._held().finish(number)

    def require_every_layer(self) -> None:
        """Let nothing of the old weights stay, before a reload is closed: none of vLLM's weight transfers checks this.

        Raises:
            WeightSyncError: Layers would keep their old weights; names them.
        """
        model = self.model_runner.get_model()
        left = untouched_layers(model)
        if left:
            raise WeightSyncError(
                f"vLLM's {type(model).__name__} put none of the tensors that it was sent into {len(left)} of its "
                f"layers ({', '.join(left[:3])}{', …' if len(left) > 3 else ''}), so they would keep old weights",
                fix="use inference.type: hf, or another model.path",
            )

    def _held(self) -> HeldAdapters:
        assert self._adapters is not None, "the engine was not started with an adapter"
        return self._adapters

    @torch.inference_mode()
    def weight_fingerprints(self, names: list[str], seed: int, adapter: int = ADAPTER_ID) -> dict[str, Any]:
        """Return fingerprints of the tensors that the trainer calls `names`, as this engine computes with them.

        Tensors of layers that this function cannot read back are left out. `adapter` is the number of the adapter that
        is asked about, where there are any.
        """
        model = self.model_runner.get_model()
        digests = Digests()
        tied: dict[str, str] = {}
        layers, experts, quantized = LayerPlaces(model), ExpertLayers(model, seed), []
        pieces: dict[nn.Module, list[Tensor]] = {}  # of the last fused layer only: siblings follow each other
        for name in (each for each in names if not layers.rearranged(each)):
            found = experts.numbers(name)
            if found is not None:
                digests.add(name, found, own=True)
                continue
            place = layers.locate(name)
            if place is not None:
                pieces = pieces if place.layer in pieces else {}
                found = _held_numbers(place, name, seed, pieces)
                if found is not None and place.leaf == "weight" and _is_int8(place.layer):
                    quantized.append(name)
            if found is not None:
                digests.add(name, found)
        for name, found in () if self._adapters is None else self._adapters.numbers(adapter, names, seed):
            digests.add(name, found)
        head = output_head(model)
        if isinstance(head, VocabParallelEmbedding):
            # in another precision than the model's, products are those of the matrix itself, not of a packed copy
            config = self.model_config
            columns = head_columns if config.head_dtype == config.dtype else embedding_columns
            digests.add(HEAD, columns(head, seed))
            if HEAD not in names:
                tied.update((HEAD, name) for name in names if layers.is_input(name, head.embedding_dim))
        PROGRESS.note_memory()  # once a sync
        return {"tensors": dict(digests.found()), "tied": tied, "quantized": quantized}


def _held_numbers(place: LayerPlace, name: str, seed: int, pieces: dict[nn.Module, list[Tensor]]) -> Tensor | None:
    """Return what a tensor's fingerprint is of, where it can be read back; `pieces` keeps a fused layer's columns."""
    layer = place.layer
    if isinstance(layer, LinearBase) and place.leaf == "weight" and convolves(layer):
        weight = convolution(layer, place.owner)
        return None if weight is None else checked_numbers(weight, seed)
    if isinstance(layer, LinearBase) and place.leaf == "weight":
        if layer not in pieces:
            pieces[layer] = linear_columns(layer, seed)
        return chosen_pieces(pieces[layer], place.parts)
    if isinstance(layer, VocabParallelEmbedding) and place.leaf == "weight":
        return embedding_columns(layer, seed)
    loader = getattr(getattr(layer, place.leaf), "weight_loader", None)
    if isinstance(loader, ChangedOnLoad):
        return loader.numbers(getattr(layer, place.leaf))
    if name.endswith(".A_log") and place.leaf != "A_log":
        return None  # decay rates of Mamba 1, which cannot be told from what is held
    parameter = plain_parameter(place)
    return None if parameter is None else checked_numbers(parameter, seed)


def _is_int8(layer: Any) -> bool:
    return isinstance(getattr(layer, "quant_method", None), Int8Linear)


@lru_cache(maxsize=16)
def unit_vectors(width: int, seed: int, device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """Return the unit vectors of the checked columns, shape [C, width]."""
    columns = checked_columns(width, seed)
    vectors = torch.zeros(len(columns), width, dtype=dtype)
    vectors[torch.arange(len(columns)), columns] = 1
    return vectors.to(device)


def linear_columns(layer: LinearBase, seed: int) -> list[Tensor]:
    """Return the checked columns of every matrix of a (fused) layer, as it multiplies, shape [out, C] each.

    None where they cannot be told: what vLLM's own 8-bit layers compute of a unit vector is rounded, and some layers
    divide their rows among ranks in a way of their own.
    """
    if isinstance(layer.quant_method, OnlineLinearBase) and not _is_int8(layer):
        return []
    if divided(layer) and not shares_in_order(layer):
        return []
    weight = next(layer.parameters(), None)
    inputs = unit_vectors(layer.input_size, seed, None if weight is None else weight.device, layer.params_dtype)
    if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
        share = layer.input_size_per_partition
        inputs = inputs[:, layer.tp_rank * share : (layer.tp_rank + 1) * share].contiguous()
        outputs = tensor_model_parallel_all_reduce(layer.quant_method.apply(layer, inputs, None))
        return [outputs.T]
    outputs = layer.quant_method.apply(layer, inputs, None)
    if _is_int8(layer):
        return list(layer.quant_method.held(outputs).split(list(layer.logical_widths)))
    sizes = getattr(layer, "output_partition_sizes", [outputs.shape[1]])
    return [_whole(piece, layer, index).T for index, piece in enumerate(outputs.split(list(sizes), dim=1))]


def _whole(piece: Tensor, layer: LinearBase, index: int) -> Tensor:
    """Return all ranks' shares of one matrix's outputs, side by side, shape [C, out]."""
    if not divided(layer):
        return piece
    gathered: Tensor = tensor_model_parallel_all_gather(piece.contiguous(), dim=-1)
    copies = getattr(layer, "num_kv_head_replicas", 1) if index > 0 else 1
    if copies == 1:
        return gathered
    # ranks with the same key-value head hold the same rows
    return gathered.view(len(gathered), -1, copies, piece.shape[1])[:, :, 0].reshape(len(gathered), -1)


def embedding_columns(layer: VocabParallelEmbedding, seed: int) -> Tensor:
    """Return the checked columns of an embedding, shape [vocabulary, C]."""
    columns = checked_columns(layer.weight.shape[1], seed).to(layer.weight.device)
    rows: Tensor = layer.weight[:, columns]
    if layer.tp_size > 1:
        rows = tensor_model_parallel_all_gather(rows.contiguous(), dim=0)
    return rows[: layer.org_vocab_size]


def head_columns(layer: VocabParallelEmbedding, seed: int) -> Tensor:
    """Return the checked columns of the output head, as logits are computed with it, shape [vocabulary, C]."""
    inputs = unit_vectors(layer.embedding_dim, seed, layer.weight.device, layer.weight.dtype)
    logits: Tensor = layer.quant_method.apply(layer, inputs)
    if layer.tp_size > 1:
        logits = tensor_model_parallel_all_gather(logits.contiguous(), dim=-1)
    return logits[:, : layer.org_vocab_size].T
