"""Models whose layers stay in the checkpoint's files until each tensor is wanted.

`from_pretrained` reads a whole model into memory where its tensors are not those of the files: in another precision, or
experts that transformers fuses. Here such tensors of the repeated layers hold no memory at first. transformers' own
conversion makes each of them out of the files when it is asked for, with the bits that `from_pretrained` would give.
What is outside the layers (embeddings, output head) is read at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_UNREAD = "_roll_like_unread"


@dataclass(frozen=True, slots=True)
class _Unread:
    """How a parameter is made: a conversion of transformers, which empties what it has collected."""

    conversion: Any
    layer_name: str
    target: str
    model: Any

    def __call__(self) -> Tensor:
        conversion = _copied(self.conversion)
        found = conversion.convert(self.layer_name, model=self.model, config=self.model.config)
        return _first(found[self.target])


@dataclass(slots=True)
class _Source:
    """A tensor of a checkpoint file, as `spawn_materialize` of transformers hands it to a conversion."""

    read: Callable[[], Tensor]
    stored: Any
    dtype: torch.dtype | None

    def __call__(self) -> Tensor:
        return self.read()

    def empty(self) -> Tensor:
        """Return a tensor of the same shape and precision without numbers; the file is mapped, and not read."""
        outline: Tensor = self.stored[...].to(device="meta", dtype=self.dtype)
        return outline

    @property
    def kept(self) -> bool:
        """Whether the tensor is the file's, so that it takes no memory of the process."""
        return self.dtype is None or self.stored[...].dtype == self.dtype


@contextmanager
def late_reading() -> Iterator[dict[str, _Unread]]:
    """Let `from_pretrained` leave tensors of layers unread; yields what it left, by the parameter's name, for `mark`.

    It replaces functions within transformers 5.19's module of conversions, for as long as it is open.
    """
    from transformers import core_model_loading as loading
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: dict[str, _Unread] = {}
    spawn = loading.spawn_materialize
    convert = {kind: kind.convert for kind in (loading.WeightRenaming, loading.WeightConverter)}

    def spawned(pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **options: Any) -> _Source:  # noqa: ARG001
        return _Source(spawn(None, tensor, device, dtype, **options), tensor, dtype)

    def converted(conversion: Any, layer_name: str, **options: Any) -> dict[str, Any]:
        model = options["model"]
        plain = next(own for kind, own in convert.items() if isinstance(conversion, kind))
        sources = [each for tensors in conversion.collected_tensors.values() for each in tensors]
        changes = isinstance(conversion, loading.WeightConverter) or not all(each.kept for each in sources)
        if not changes or not _late(model, layer_name, GradientCheckpointingLayer):
            read_now: dict[str, Any] = plain(conversion, layer_name, **options)
            return read_now
        outline = _copied(conversion, _Source.empty)
        recipe = _copied(conversion)
        conversion.collected_tensors.clear()
        results = {}
        for target, value in plain(outline, layer_name, **options).items():
            results[target] = _without_memory(_first(value))
            found[target] = _Unread(recipe, layer_name, target, model)
        return results

    with ExitStack() as stack:
        stack.enter_context(_replaced(loading, "spawn_materialize", spawned))
        for kind in convert:
            stack.enter_context(_replaced(kind, "convert", converted))
        yield found


def mark(model: nn.Module, unread: dict[str, _Unread]) -> None:
    """Note at each parameter that was left unread how to read it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, each in unread.items():
        if name in parameters and not parameters[name].untyped_storage().nbytes():
            setattr(parameters[name], _UNREAD, each)


def materialise(parameter: nn.Parameter) -> None:
    """Give a parameter its numbers, where it has none yet; nothing else."""
    unread = vars(parameter).pop(_UNREAD, None)
    if unread is not None:
        parameter.data = unread()


@contextmanager
def layer_by_layer(model: nn.Module) -> Iterator[None]:
    """Let the model compute: a layer's parameters are read for its forward pass, and hold no memory after it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    def fill(layer: nn.Module, _: Any) -> None:
        for parameter in _unread_of(layer):
            parameter.data = getattr(parameter, _UNREAD)()

    def empty(layer: nn.Module, *_: Any) -> None:
        for parameter in _unread_of(layer):
            parameter.data = _without_memory(parameter)

    handles = []
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and _unread_of(layer):
            handles += [layer.register_forward_pre_hook(fill), layer.register_forward_hook(empty, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unread_of(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if hasattr(parameter, _UNREAD)]


def _late(model: Any, name: str, kind: type[nn.Module]) -> bool:
    """Whether a name is that of a parameter, and no buffer, of a module of a kind or of one of its parts."""
    *path, leaf = name.split(".")
    module: Any = model
    within = False
    for part in path:
        module = getattr(module, part, None)
        within = within or isinstance(module, kind)
    return within and leaf not in getattr(module, "_buffers", ())


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU of the same shape and precision, whose storage is empty."""
    hollow = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
    hollow.untyped_storage().resize_(0)
    return hollow


def _copied(conversion: Any, changed: Callable[[_Source], Any] | None = None) -> Any:
    """Return a conversion that has collected the same tensors, or others in their place."""
    copied = copy.copy(conversion)
    copied.collected_tensors = {
        pattern: [each if changed is None else (lambda each=each: changed(each)) for each in tensors]
        for pattern, tensors in conversion.collected_tensors.items()
    }
    return copied


def _first(value: Any) -> Tensor:
    """Return a conversion's result, which may be in a list."""
    found: Tensor = value[0] if isinstance(value, list) else value
    return found


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)
