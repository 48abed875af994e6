"""From a model's parameters to the tensors of its checkpoint format, in bounded memory.

transformers keeps some tensors in memory in another form than on disk. A mixture of experts has one parameter for all
experts of a layer; its checkpoint has tensors for each expert. Checkpoint names are what inference engines read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Parameters that are converted together: nearly always one.

        mlp.experts.gate_up_proj [E, 2·I, D]  →  mlp.experts.0.gate_proj.weight [I, D], mlp.experts.0.up_proj.weight, …

    Attributes:
        parameters: Their names in the model.
        tensors: The names of what they are in a checkpoint.
        experts: E, where the checkpoint has the experts of the one parameter apart; else 0.
    """

    parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    experts: int = 0

    @property
    def unchanged(self) -> bool:
        """Whether the checkpoint has the parameter as it is."""
        return self.parameters == self.tensors


def tensor_groups(causal_lm: Any, shapes: Mapping[str, Sequence[int]]) -> list[TensorGroup]:
    """Return which parameters become which checkpoint tensors, in the order of the parameters.

    Args:
        causal_lm: A Hugging Face model. Its parameters are not read: they may be sharded.
        shapes: Whole shape of every parameter, by its name.
    """
    import torch

    empty = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    together = _reverted(causal_lm, empty)
    alone = {name: tuple(_reverted(causal_lm, {name: tensor})) for name, tensor in empty.items()}
    groups = []
    for names in _sharing(alone):
        tensors = alone[names[0]] if len(names) == 1 else tuple(_reverted(causal_lm, {n: empty[n] for n in names}))
        experts = _experts_apart(causal_lm, names[0], empty[names[0]], tensors) if len(names) == 1 else 0
        groups.append(TensorGroup(names, tensors, experts))
    if {name for group in groups for name in group.tensors} != set(together):
        # a renaming that depends on other names of the model: correct only for all at once
        return [TensorGroup(tuple(empty), tuple(together))]
    return groups


def checkpoint_tensors(
    causal_lm: Any, group: TensorGroup, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs of a checkpoint that a group's parameters are; some are views.

    Args:
        causal_lm: The model that the groups were made for.
        group: One of `tensor_groups`.
        parameters: The group's parameters, whole, by name.
    """
    yield from (parameters if group.unchanged else _reverted(causal_lm, parameters)).items()


def expert_tensors(causal_lm: Any, group: TensorGroup, numbers: range, experts: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs of a checkpoint that some of a group's experts are.

    Args:
        causal_lm: The model that the groups were made for.
        group: One of `tensor_groups`, with `experts`.
        experts: Weights of the experts, shape [len(numbers), …].
    """
    found = _reverted(causal_lm, {group.parameters[0]: experts}).values()
    yield from zip(_names_of(group.tensors, group.experts, numbers), found, strict=True)


def _names_of(tensors: Sequence[str], experts: int, numbers: range) -> list[str]:
    """Return the names that some experts have in a checkpoint: first one tensor of each of them, then the next."""
    return [tensors[kind + number] for kind in range(0, len(tensors), experts) for number in numbers]


def _experts_apart(causal_lm: Any, name: str, empty: Tensor, tensors: Sequence[str]) -> int:
    """Return how many experts a parameter has whose checkpoint has tensors of each; 0 for other parameters."""
    experts = empty.shape[0] if empty.ndim > 1 else 0
    if experts < 2 or len(tensors) < 2 or len(tensors) % experts:
        return 0
    few = range(2)
    return experts if [*_reverted(causal_lm, {name: empty[:2]})] == _names_of(tensors, experts, few) else 0


def converted(causal_lm: Any, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint that a stream of parameters is, each group as soon as it is complete.

    Args:
        causal_lm: The model, perhaps an empty one.
        parameters: Each whole for as long as it is the last that was taken, by the model's own names.
    """
    tied = causal_lm.all_tied_weights_keys
    shapes = {name: tensor.shape for name, tensor in causal_lm.state_dict().items() if name not in tied}
    group_of = {name: group for group in tensor_groups(causal_lm, shapes) for name in group.parameters}
    waiting: dict[TensorGroup, dict[str, Tensor]] = {}
    for name, tensor in parameters:
        group = group_of[name]
        if len(group.parameters) == 1:
            yield from checkpoint_tensors(causal_lm, group, {name: tensor})
            continue
        members = waiting.setdefault(group, {})
        members[name] = tensor.detach().clone()
        if len(members) == len(group.parameters):
            del waiting[group]
            yield from checkpoint_tensors(causal_lm, group, {each: members[each] for each in group.parameters})


def _reverted(causal_lm: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = revert_weight_conversion(causal_lm, dict(parameters))
    return tensors


def _sharing(tensors_of: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the parameters in groups: two that go into the same checkpoint tensor are in one group."""
    members: list[list[str]] = []
    group_of: dict[str, int] = {}
    for parameter, tensors in tensors_of.items():
        found = next((group_of[tensor] for tensor in tensors if tensor in group_of), len(members))
        if found == len(members):
            members.append([])
        members[found].append(parameter)
        group_of.update(dict.fromkeys(tensors, found))
    return [tuple(names) for names in members]
