"""Experts of a mixture in vLLM's worker: packed again after every reload, and read back as they are computed with.

vLLM keeps the experts of a layer in two parameters: `w13_weight` [E, 2·I, D], gates above ups, and `w2_weight`
[E, D, I]. Kernels want them in layouts of their own: packed for the CPU, halves exchanged for FlashInfer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from roll_like.inference.weight_transfer.fingerprint import checked_columns, checked_numbers

#: Every number below this is exact in bfloat16.
_EXACT = 128
#: Experts of a layer that have other names in checkpoints (Granite 4).
_OTHER_NAMES = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
}
_PLAIN_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


class RepackedExperts(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """vLLM's method for unquantised experts, which also packs them after a reload.

    vLLM's own packs after the first load only: after a reload its CPU kernel would read unpacked weights as packed
    ones. Each reloaded layer is packed before its weights are copied to where the kernel reads them, so layers that a
    reload leaves out are not packed twice, and padded layers have the shape that the kernel has.
    """

    def _setup_kernel(self, layer: RoutedExperts, w13: Tensor, w2: Tensor) -> None:
        reloaded = self.moe_kernel is not None
        super()._setup_kernel(layer=layer, w13=w13, w2=w2)
        if reloaded:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def repack_experts() -> None:
    """Let models that are made in this process from now on use `RepackedExperts`. Only CPU kernels need it."""
    if current_platform.is_cpu() and UnquantizedFusedMoEMethod.__name__ not in op_registry_oot:
        UnquantizedFusedMoEMethod.register_oot(RepackedExperts)


class ExpertLayers:
    """The numbers of a model's experts that fingerprints are made of, by the names of a checkpoint.

    Args:
        model: vLLM's.
        seed: Chooses the columns.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._layers = {
            path.removesuffix(".routed_experts"): layer
            for path, layer in model.named_modules()
            if isinstance(layer, RoutedExperts)
        }
        # of the last layer only: a checkpoint's tensors of a layer follow each other
        self._last: tuple[str, _Readable | None] = "", None

    def numbers(self, name: str) -> Tensor | None:
        """Return the numbers of a checkpoint's tensor, as the kernel computes with them; None if they are unknown.

        Args:
            name: `….experts.3.gate_proj.weight` (or w1, w2, w3), `….experts.gate_up_proj`, `….experts.down_proj_bias`.
        """
        for theirs, usual in _OTHER_NAMES.items():
            name = name.removesuffix(theirs) + usual if name.endswith(theirs) else name
        path = name
        while path and path not in self._layers:
            path = path.rpartition(".")[0]
        if not path:
            return None
        if self._last[0] != path:
            self._last = path, _Readable.of(self._layers[path], self._seed)
        readable = self._last[1]
        return None if readable is None else readable.numbers(name.removeprefix(f"{path}."))


class _Readable:
    """The experts of one layer whose layout is known.

    Attributes:
        layer: vLLM's.
        places_13: Where each number of an expert's w13 is in its memory, shape [2·I, D]; None where it is as it looks.
        places_2: The same of w2, [D, I].
        gate_first: Whether gates are above ups.
        seed: Chooses the columns.
    """

    def __init__(
        self, layer: Any, places_13: Tensor | None, places_2: Tensor | None, *, gate_first: bool, seed: int
    ) -> None:
        self.layer = layer
        self.seed = seed
        self.places_13 = places_13
        self.places_2 = places_2
        self.gate_first = gate_first
        self._of_every_expert: dict[str, Tensor | None] = {}

    @classmethod
    def of(cls, layer: Any, seed: int) -> _Readable | None:
        """Return the layer's experts, or None: divided among ranks, quantised, or in a layout that is not known."""
        method, parallel = layer.quant_method, layer.moe_config.moe_parallel_config
        alone = parallel.tp_size == 1 and parallel.ep_size == 1
        if not alone or not isinstance(method, UnquantizedFusedMoEMethod) or not layer.moe_config.is_act_and_mul:
            return None
        backend = method.unquantized_backend
        if backend in _PLAIN_BACKENDS:
            return cls(layer, None, None, gate_first=True, seed=seed)
        if backend == UnquantizedMoeBackend.FLASHINFER_CUTLASS:
            return cls(layer, None, None, gate_first=False, seed=seed)
        kernel = getattr(method.moe_kernel, "fused_experts", None)
        if backend != UnquantizedMoeBackend.CPU or kernel is None or getattr(kernel, "_use_zentorch", True):
            return None
        places = [
            packed_places(*weight.shape[1:], weight.dtype, kernel.isa) for weight in (layer.w13_weight, layer.w2_weight)
        ]
        return cls(layer, places[0], places[1], gate_first=True, seed=seed) if None not in places else None

    def numbers(self, leaf: str) -> Tensor | None:
        """Return what the fingerprint of a checkpoint's tensor is of, `leaf` below the experts."""
        config = self.layer.moe_config
        inner, width = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
        first, _, rest = leaf.partition(".")
        if first.isdecimal():
            part = rest.removesuffix(".weight")
            if part not in self._of_every_expert:  # read at once: there may be 128 of them
                self._of_every_expert[part] = self._experts(part, inner, width)
            every = self._of_every_expert[part]
            return None if every is None else every[int(first)]
        if leaf in ("gate_up_proj", "down_proj"):
            return self._fused(leaf, inner, width)
        return self._bias(leaf, inner, width)

    def _experts(self, part: str, inner: int, width: int) -> Tensor | None:
        """Return the checked columns of a matrix that every expert has, shape [E, rows, C]."""
        layer = self.layer
        if part == layer.ckpt_down_proj_name:
            return self._down(torch.arange(width)[:, None], checked_columns(inner, self.seed)).float()
        names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name]
        if part not in names:
            return None
        above = (part == names[0]) == self.gate_first
        rows = torch.arange(inner) + (0 if above else layer.w13_weight.shape[1] // 2)
        return self._gate_up(rows[:, None], checked_columns(width, self.seed)).float()

    def _fused(self, leaf: str, inner: int, width: int) -> Tensor | None:
        """Return the numbers of a tensor that a checkpoint has for all experts of a layer together."""
        transposed = transposed_on_disk(self.layer)
        if leaf == "gate_up_proj":
            half = self.layer.w13_weight.shape[1] // 2
            if not self.gate_first or (interleaved(self.layer) and half != inner):
                return None
            rows, columns, read = 2 * inner, width, self._gate_up
        else:
            half, rows, columns, read = width, width, inner, self._down
        chosen = checked_columns(rows * columns, self.seed)
        row, column = (chosen % rows, chosen // rows) if transposed else (chosen // columns, chosen % columns)
        if leaf == "gate_up_proj":
            row = torch.where(row < inner, row, row - inner + half)  # padding is between gates and ups
        return read(row, column)

    def _bias(self, leaf: str, inner: int, width: int) -> Tensor | None:
        name, rows = {"gate_up_proj_bias": ("w13_bias", 2 * inner), "down_proj_bias": ("w2_bias", width)}.get(
            leaf, ("", 0)
        )
        bias = getattr(self.layer, name, None) if name else None
        if bias is None or bias.shape[1] != rows or not self.gate_first:
            return None
        return checked_numbers(bias, self.seed)

    def _gate_up(self, rows: Tensor, columns: Tensor) -> Tensor:
        return _read(self.layer.w13_weight, self.places_13, rows, columns)

    def _down(self, rows: Tensor, columns: Tensor) -> Tensor:
        return _read(self.layer.w2_weight, self.places_2, rows, columns)


def transposed_on_disk(layer: Any) -> bool:
    """Return whether a checkpoint's tensors for all experts together are [E, inputs, outputs]."""
    return bool(layer.is_fused_checkpoint_transposed) or interleaved(layer)


def interleaved(layer: Any) -> bool:
    """Return whether gates and ups are in turns: gpt-oss keeps them so, on disk and in memory."""
    return bool(layer.activation.value == "swigluoai")


def _read(weight: Tensor, places: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """Return numbers of every expert's matrix, a copy, shape [E, …]; `rows` and `columns` are broadcast to […]."""
    if places is None:
        return weight[:, rows.to(weight.device), columns.to(weight.device)]
    return weight.flatten(1)[:, places[rows, columns]]


@lru_cache(maxsize=8)
def packed_places(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor | None:
    """Return where vLLM's CPU packing puts each number of an expert's matrix, shape [rows, columns].

    The packing is asked: it gets matrices whose numbers say where they were, one digit at a time. None if it does more
    than move numbers.
    """
    count = rows * columns
    number, found, base = torch.arange(count), torch.zeros(count, dtype=torch.long), 1
    while base < count:
        digits = (number // base % _EXACT).to(dtype).view(1, rows, columns)
        found += cpu_prepack_moe_weight(digits, isa).flatten().long() * base
        base *= _EXACT
    places = torch.full((count,), -1)
    places[found.clamp(0, count - 1)] = number
    return None if bool((places < 0).any()) else places.view(rows, columns)
