"""Low-rank adapters in vLLM's worker that come and are replaced in memory, and are read back.

vLLM itself loads adapters from disk only. This builds the same objects from tensors and hands them to vLLM's manager.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import parse_fine_tuned_lora_name

from roll_like.errors import WeightSyncError
from roll_like.inference.vllm.arguments import ADAPTER_ID
from roll_like.inference.weight_transfer.fingerprint import checked_numbers


class HeldAdapters:
    """The adapters in one worker that were sent: the policy's, and others by their numbers.

    Requests with another number, or without one, are computed without them.

    Args:
        model: vLLM's model, started with `enable_lora`.
    """

    def __init__(self, model: Any, rank: int) -> None:
        self._model = model
        self._manager = model.lora_manager
        self._rank = rank
        self._dtype = self._manager.lora_config.lora_dtype
        self._arriving: dict[str, Tensor] = {}
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self._part_of = {
            part: (whole, index)
            for whole, parts in self._manager.packed_modules.items()
            for index, part in enumerate(parts)
        }
        # all requests have an adapter from the start, so that those that cross the first update have one afterwards
        self._put(ADAPTER_ID, self._manager.create_dummy_lora(ADAPTER_ID, rank, {}))

    def unserved(self, names: Sequence[str]) -> list[str]:
        """Return those last parts of layers' names for which vLLM's model has no layer that takes an adapter."""
        served = {path.rpartition(".")[2] for path in (*self._manager.modules, *self._part_of)}
        return [name for name in names if name not in served]

    def begin(self) -> None:
        """Get ready for another adapter; the present ones work on."""
        self._arriving = {}

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget adapters that no request has any more."""
        for number in numbers:
            self._manager.remove_adapter(number)

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Keep a bucket's tensors."""
        self._arriving.update((name, tensor.clone()) for name, tensor in tensors)

    def finish(self, number: int) -> None:
        """Put the adapter that has arrived in the place of the one of this number, if there is one.

        Raises:
            WeightSyncError: It has tensors for layers that take no adapter here, or lacks half of a pair.
        """
        arrived, self._arriving = self._arriving, {}
        placed = {name: self._place(name) for name in arrived}
        homeless = [name for name, (path, _, _) in placed.items() if path not in self._manager.modules]
        if homeless:
            raise WeightSyncError(
                f"vLLM's {type(self._model).__name__} takes no adapter in {len(homeless)} of the layers that were "
                f"sent one: {', '.join(homeless[:3])}{', …' if len(homeless) > 3 else ''}",
                fix="set inference.lora: false, or choose other layers in training.lora.target_modules",
            )
        # the sender has multiplied B with the scale: alpha / rank is 1
        helper = PEFTHelper(r=self._rank, lora_alpha=self._rank, target_modules=[])
        built = LoRAModel.from_lora_tensors(
            number, arrived, helper, device="cpu", dtype=self._dtype, weights_mapper=self._mapper
        )
        halved = [path for path, pair in built.loras.items() if pair.lora_a is None or pair.lora_b is None]
        if halved:
            raise WeightSyncError(f"only one of the two matrices of an adapter arrived for {', '.join(halved[:3])}")
        self._put(number, built)

    def _put(self, number: int, adapter: Any) -> None:
        self._manager.remove_adapter(number)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(number)
        self._manager.pin_adapter(number)

    def _place(self, name: str) -> tuple[str, int | None, bool]:
        """Return the path of vLLM's layer, which of the matrices that it computes as one, and whether this is A."""
        path, is_down = parse_fine_tuned_lora_name(name, self._mapper)
        whole, index = self._part_of.get(path, (path, None))
        return whole, index, is_down

    def numbers(self, number: int, names: Sequence[str], seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, what its fingerprint is of) of an adapter's tensors among `names`, as they are computed with.

        With tensor parallelism a worker computes with a share of a tensor. It compares the share with what it should
        be, and then tells of the whole.
        """
        slot = self._manager.lora_index_to_id.index(number)
        adapter = self._manager.get_adapter(number)
        for name in names:
            if not is_adapter(name):
                continue
            path, index, is_down = self._place(name)
            layer, held = self._manager.modules.get(path), adapter.get_lora(path)
            if layer is None or held is None or not hasattr(layer, "lora_a_stacked"):
                continue
            whole = held.lora_a if is_down else held.lora_b
            if isinstance(whole, list) and len(whole) != layer.n_slices:
                continue  # vLLM cuts these otherwise than the checkpoint: a probe has to do
            share = whole if layer.tp_size == 1 else layer.slice_lora_a(whole) if is_down else layer.slice_lora_b(whole)
            if index is not None:
                whole, share = whole[index], share[index]
            stacked = (layer.lora_a_stacked if is_down else layer.lora_b_stacked)[index or 0]
            computed = stacked[slot, 0]
            rows, columns = share.shape
            expected = torch.zeros_like(computed)
            expected[:rows, :columns] = share
            # the rest of the buffer is zero too, or the product would have more terms
            yield name, checked_numbers(whole if torch.equal(computed, expected) else computed, seed)


def is_adapter(name: str) -> bool:
    """Return whether a tensor that was sent is one of an adapter's."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def without_wrappers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's layers by path, those that vLLM has wrapped for adapters as they are inside."""
    return {
        path: layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer
        for path, layer in model.named_modules()
    }


def compute_adapters_on_cpu() -> None:
    """Let vLLM compute adapters on CPU with two matrix products a layer.

    vLLM's own code for CPUs copies both matrices for every token before it multiplies, and takes the last adapter for
    requests that have none.
    """
    PunicaWrapperCPU.add_lora_linear = add_lora_linear


def add_lora_linear(
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
    **_: Any,
) -> None:
    """Add the adapters' products to y, in place. See `PunicaWrapperCPU.add_lora_linear`.

    Args:
        self: The wrapper, which knows which token has which adapter; −1 has none.
        y: Shape [T, sum(output_slices)].
        x: Shape [T, in].
        lora_a_stacked: Of each slice, shape [adapters, 1, r, in].
        lora_b_stacked: Of each slice, shape [adapters, 1, out, r].
        output_slices: Columns of y of each slice.
    """
    if self.no_lora:
        return
    slots_T = self.token_lora_indices[: x.shape[0]]
    for slot in range(lora_a_stacked[0].shape[0]):
        rows = (slots_T == slot).nonzero()[:, 0]
        if not len(rows):
            continue
        whole = len(rows) == x.shape[0]
        inputs = x if whole else x[rows]
        start = 0
        for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            product = (inputs @ down[slot, 0].T).mul_(scale) @ up[slot, 0].T
            if whole:
                y[:, start : start + width] += product
            else:
                y[rows, start : start + width] += product
            start += width
