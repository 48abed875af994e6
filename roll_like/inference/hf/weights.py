"""A transformers model's parameters under the names of its checkpoint format: written to, and read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from roll_like.errors import WeightSyncError
from roll_like.models.checkpoint_names import TensorGroup, checkpoint_tensors, tensor_groups
from roll_like.models.modules import persistent_buffers


class CheckpointWeights:
    """The parameters of a loaded model, and the buffers that its checkpoint has."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(persistent_buffers(model))}
        groups = tensor_groups(model, {name: parameter.shape for name, parameter in self._parameters.items()})
        self._group_of = {name: group for group in groups for name in group.tensors}
        self._indexed: tuple[TensorGroup, dict[str, Tensor]] | None = None

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy a checkpoint's tensor to where the model computes with it.

        Raises:
            WeightSyncError: The model has no such tensor, or has it in another shape.
        """
        group = self._group_of.get(name)
        if group is not None and group.unchanged:
            parameter = self._parameters[name]
            _require_shape(name, tensor, tuple(parameter.shape))
            parameter.copy_(tensor)
            return
        index = None if group is None else self._index(group)[name]
        _require_shape(name, tensor, None if index is None else tuple(index.shape))
        assert group is not None
        assert index is not None
        places, numbers, start = index.flatten(), tensor.flatten(), 0
        for parameter in (self._parameters[member] for member in group.parameters):
            own = (places >= start) & (places < start + parameter.numel())
            flat = parameter.view(-1)
            flat[(places[own] - start).to(flat.device)] = numbers[own].to(flat.device, flat.dtype)
            start += parameter.numel()

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of those names that the model has."""
        wanted = set(names)
        for group in dict.fromkeys(self._group_of[name] for name in names if name in self._group_of):
            members = {member: self._parameters[member].detach() for member in group.parameters}
            yield from (pair for pair in checkpoint_tensors(self._model, group, members) if pair[0] in wanted)

    def _index(self, group: TensorGroup) -> dict[str, Tensor]:
        """Return where each number of each tensor is: an index into the group's parameters, laid end to end."""
        if self._indexed is None or self._indexed[0] != group:
            positions, start = {}, 0
            for member in group.parameters:
                shape = self._parameters[member].shape
                positions[member] = torch.arange(start, start + shape.numel()).view(shape)
                start += shape.numel()
            self._indexed = (group, dict(checkpoint_tensors(self._model, group, positions)))
        return self._indexed[1]


def _require_shape(name: str, tensor: Tensor, shape: tuple[int, ...] | None) -> None:
    if tuple(tensor.shape) != shape:
        raise WeightSyncError(
            f"the trainer sent {name} with shape {tuple(tensor.shape)}; the engine has {shape or 'nothing'} under that "
            "name"
        )
