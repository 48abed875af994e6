"""Weights of a model in stages: each rank's Megatron-Core modules are filled, and whole weights handed out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll_like.models.unread import materialise
from roll_like.training.megatron_weights import (
    EXTRA,
    OUTPUT,
    Bundle,
    Place,
    bundles,
    rank_part,
    tell_all,
    whole_experts,
    whole_of,
)

#: Of experts that are put together at a time. One whole layer of DeepSeek-V3 would be 15 GB.
PIECE_BYTES = 64 << 20


class StageWeights:
    """The weights of a module in the chunks of this rank and of the other stages, under the module's names.

    To those who ask it is a `Stage`, this rank's.

    Args:
        place: Which part of a weight this rank has.
        stages: The ranks whose chunks make one model with this rank's.
        rank: Of this rank among those with the same chunks.
    """

    def __init__(self, place: Place, stages: ProcessGroup, dtype: torch.dtype, rank: int) -> None:
        self._place, self._stages, self._dtype = place, stages, dtype
        self.number, self.rank = stages.rank(), rank
        self._own: dict[Bundle, list[Tensor]] = {}
        self._owners: dict[str, int] = {}  # the stage that hands a weight out, by its name
        self._bundle_of: dict[str, Bundle] = {}
        self._outlines: dict[str, nn.Parameter] = {}  # the module's parameters, without memory
        self._names: dict[int, str] = {}  # of these, by identity
        # what was gathered last, by whether all stages were told: they then agree on who has it still
        self._whole: dict[bool, tuple[Bundle, dict[str, Tensor]]] = {}

    def fill(self, module: nn.Module, backbone: nn.Module, heads: Sequence[Any], chunks: Sequence[Any]) -> None:
        """Give this rank's parameters their numbers, bundle by bundle, and leave the module its names alone.

        Args:
            backbone: The language model in it, without its output.
            chunks: What computes in the place of the backbone.
        """
        from roll_like.training.megatron_model import first_layer

        named: dict[str, nn.Parameter] = dict(backbone.named_parameters())
        known = {id(parameter) for parameter in named.values()}
        if heads and id(heads[0].weight) not in known:
            named[OUTPUT] = heads[0].weight
            known.add(id(heads[0].weight))
        extra = [each for each in module.parameters() if id(each) not in known]
        named.update({f"{EXTRA}{index}": each for index, each in enumerate(extra)})
        last = chunks[-1]
        if last.post_process and extra:
            for each in extra:
                each.data = each.data.to(torch.cuda.current_device(), self._dtype)
            last.extra = nn.ParameterList(extra)
        tied = Bundle("vocabulary", ("embed_tokens.weight",), self._place.family)
        with torch.no_grad():
            for chunk in chunks:
                found = bundles(chunk.named_parameters(), first_layer(chunk), self._place.family)
                for bundle, own in found.items():
                    source = tied if bundle.names == (OUTPUT,) and OUTPUT not in named else bundle
                    if bundle.names[0].startswith(EXTRA):
                        self._own[bundle] = own
                        continue
                    for name in source.names:
                        materialise(named[name])
                    whole = [bundle.plain(named[name].data) for name in source.names]
                    parts = rank_part(bundle.kind, whole, self._place)
                    for parameter, part in zip(own, parts, strict=True):
                        parameter.copy_(part)
                        parameter.requires_grad_(named[source.names[0]].requires_grad)
                    if source is bundle:
                        self._own[bundle] = own
        self._leave_names(module, named, {id(each) for each in extra} if last.post_process else set())
        self._tell_stages()

    def _leave_names(self, module: nn.Module, named: Mapping[str, nn.Parameter], kept: set[int]) -> None:
        """Replace the module's parameters by such without memory, except those that compute here."""
        outlines: dict[int, nn.Parameter] = {}
        for name, parameter in named.items():
            outline = parameter
            if id(parameter) not in kept:
                outline = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
            outlines[id(parameter)] = self._outlines[name] = outline
            self._names[id(outline)] = name
        for owner in module.modules():
            for key, given in owner._parameters.items():
                if given is not None:
                    owner._parameters[key] = outlines[id(given)]

    def _tell_stages(self) -> None:
        """Let all stages know which of them has which weights."""
        mine = {name: bundle for bundle in self._own for name in bundle.names}
        everyone: list[Any] = [None] * self._stages.size()
        torch.distributed.all_gather_object(everyone, mine, group=self._stages)
        for stage, theirs in reversed(list(enumerate(everyone))):
            self._owners.update(dict.fromkeys(theirs, stage))
            self._bundle_of.update(theirs)
        missing = set(self._outlines) - set(self._owners)
        assert not missing, f"no rank has {sorted(missing)[:3]}"

    def described(self, module: nn.Module) -> Any:
        """Return what `megatron_files.read_parameters` needs beside a checkpoint, as JSON has it."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return {
            "queries": self._place.queries,
            "groups": self._place.groups,
            "vocabulary": self._place.vocabulary,
            "family": self._place.family,
            "names": {name: names[id(outline)] for name, outline in self._outlines.items() if id(outline) in names},
        }

    def forget(self) -> None:
        """Hold no whole weight any more: their numbers change."""
        self._whole.clear()

    def owner(self, parameter: Tensor) -> int:
        """Return which stage hands out one of the module's parameters; the first one, if it is a buffer."""
        name = self._names.get(id(parameter))
        return 0 if name is None else self._owners[self._bundle_of[name].names[0]]

    @contextmanager
    def gathered(self, parameters: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Hold the whole of some of this stage's parameters; its ranks ask for the same ones."""
        yield [self.whole(parameter, told=False) for parameter in parameters]

    def whole(self, parameter: Tensor, *, told: bool = True) -> Tensor:
        """Return the whole of one of the module's parameters, or a buffer as it is.

        The weight's stage puts it together, with those of its bundle. The bundle is held until one of another is asked
        for with the same `told`.

        Args:
            parameter: All ranks ask for the same one.
            told: Whether the other stages are told; else only the ranks of the weight's stage ask.
        """
        name = self._names.get(id(parameter))
        if name is None:
            return parameter  # a buffer
        bundle = self._bundle_of[name]
        if told not in self._whole or self._whole[told][0] != bundle:
            self._whole.pop(told, None)  # first of all, for its memory
            self._whole[told] = bundle, self._put_together(bundle, told)
        return self._whole[told][1][name]

    def experts(self, parameter: Tensor, *, told: bool = True) -> Iterator[tuple[range, Tensor]]:
        """Yield a few experts of one of the module's parameters [E, …] at a time, with their numbers.

        They are `PIECE_BYTES` at most, or one expert.

        Args:
            parameter: All ranks ask for the same one.
            told: Whether the other stages are told; else only the ranks of the weight's stage ask.
        """
        name = self._names[id(parameter)]
        self._whole.pop(told, None)
        outline, ranks = self._outlines[name], self._place.expert.size()
        each = outline.shape[0] // ranks
        most = min(max(PIECE_BYTES // (outline[0].numel() * self._dtype.itemsize), 1), each)
        for owner in range(ranks):
            for first in range(0, each, most):
                few = slice(first, min(first + most, each))
                yield range(owner * each + few.start, owner * each + few.stop), self._few(name, owner, few, told)

    def _few(self, name: str, owner: int, few: slice, told: bool) -> Tensor:
        """Return some of the experts that the ranks with the number `owner` have, of one parameter."""
        bundle = self._bundle_of[name]
        stage = self._owners[name]
        if self._stages.rank() == stage:
            own = [each.detach() for each in self._own[bundle]]
            found = bundle.stored(whole_experts(bundle.kind, own, self._place, owner, few)).contiguous()
        else:
            shape = (few.stop - few.start, *self._outlines[name].shape[1:])
            found = torch.empty(shape, dtype=self._dtype, device=torch.cuda.current_device())
        if told:
            tell_all(found, stage, self._stages)
        return found

    def _put_together(self, bundle: Bundle, told: bool) -> dict[str, Tensor]:
        """Return the whole weights of a bundle, by name."""
        device = torch.cuda.current_device()
        shapes = {name: self._outlines[name].shape for name in bundle.names}
        owner = self._owners[bundle.names[0]]
        mine = self._stages.rank() == owner
        if bundle.kind.startswith("expert"):
            (name,) = bundle.names
            whole = {name: torch.empty(shapes[name], dtype=self._dtype, device=device)}
            for numbers, few in self.experts(self._outlines[name], told=told):
                whole[name][numbers.start : numbers.stop] = few
            return whole
        if mine:
            own = [each.detach() for each in self._own[bundle]]
            plain = whole_of(bundle.kind, own, self._place)
            whole = {name: bundle.stored(each) for name, each in zip(bundle.names, plain, strict=True)}
        else:
            whole = {name: torch.empty(shape, dtype=self._dtype, device=device) for name, shape in shapes.items()}
        if told:
            for name, tensor in whole.items():
                whole[name] = tensor.contiguous()
                tell_all(whole[name], owner, self._stages)
        return whole
