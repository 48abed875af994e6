"""Weights between a transformers model and Megatron-Core's parameters of one rank, in both directions.

A layer of transformers has three matrices of queries, keys and values where Megatron-Core has one, in which each tensor
rank's part is contiguous; likewise a gated pair. Its experts are one parameter, and Megatron-Core's are one each:

    q_proj, k_proj, v_proj                →  self_attention.linear_qkv      group by group: its queries, key, value
    gate_proj, up_proj                    →  mlp.linear_fc1                 the rank's part of both
    experts.gate_up_proj [E, 2·I, D]      →  mlp.experts.local_experts.0.linear_fc1, …

gpt-oss keeps matrices of experts transposed, and the rows of a gated pair in turn (`Bundle.plain`).

Parameters that follow from each other are a `Bundle`. No more than one of them is whole at a time, and of experts only
as many as their receiver asks for (`whole_experts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll_like.models.megatron_plan import LATENT

#: How ranks divide a bundle: not at all; queries, keys and values by heads; a gated pair; by outputs; by inputs; by
#: vocabulary; and the same of experts.
Kind: TypeAlias = Literal[
    "whole", "heads", "gated", "columns", "rows", "vocabulary", "expert_whole", "expert_gated", "expert_rows"
]

_EXPERT = r"mlp\.experts\.local_experts\.(\d+)\."
#: Megatron-Core's name within a layer, how ranks divide it, and the names within a layer of transformers.
_LAYER: tuple[tuple[str, Kind, tuple[str, ...]], ...] = (
    (r"input_layernorm\.weight", "whole", ("input_layernorm.weight",)),
    (r"pre_mlp_layernorm\.weight", "whole", ("post_attention_layernorm.weight",)),
    (r"self_attention\.q_layernorm\.weight", "whole", ("self_attn.q_norm.weight",)),
    (r"self_attention\.k_layernorm\.weight", "whole", ("self_attn.k_norm.weight",)),
    (
        r"self_attention\.linear_qkv\.weight",
        "heads",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    (
        r"self_attention\.linear_qkv\.bias",
        "heads",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
    (r"self_attention\.linear_proj\.weight", "rows", ("self_attn.o_proj.weight",)),
    (r"self_attention\.linear_proj\.bias", "whole", ("self_attn.o_proj.bias",)),
    (r"mlp\.linear_fc1\.weight", "gated", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    (r"mlp\.linear_fc2\.weight", "rows", ("mlp.down_proj.weight",)),
    (
        r"mlp\.shared_experts\.linear_fc1\.weight",
        "gated",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ),
    (r"mlp\.shared_experts\.linear_fc2\.weight", "rows", ("mlp.shared_experts.down_proj.weight",)),
    (r"mlp\.router\.weight", "whole", ("mlp.gate.weight",)),
    (_EXPERT + r"linear_fc1\.weight", "expert_gated", ("mlp.experts.gate_up_proj",)),
    (_EXPERT + r"linear_fc2\.weight", "expert_rows", ("mlp.experts.down_proj",)),
)
#: The same for what families have otherwise.
_LATENT: tuple[tuple[str, Kind, tuple[str, ...]], ...] = (
    (r"self_attention\.linear_q_proj\.weight", "columns", ("self_attn.q_proj.weight",)),
    (r"self_attention\.linear_q_down_proj\.weight", "whole", ("self_attn.q_a_proj.weight",)),
    (r"self_attention\.q_layernorm\.weight", "whole", ("self_attn.q_a_layernorm.weight",)),
    (r"self_attention\.linear_q_up_proj\.weight", "columns", ("self_attn.q_b_proj.weight",)),
    (r"self_attention\.linear_kv_down_proj\.weight", "whole", ("self_attn.kv_a_proj_with_mqa.weight",)),
    (r"self_attention\.kv_layernorm\.weight", "whole", ("self_attn.kv_a_layernorm.weight",)),
    (r"self_attention\.linear_kv_up_proj\.weight", "columns", ("self_attn.kv_b_proj.weight",)),
)
_GPT_OSS: tuple[tuple[str, Kind, tuple[str, ...]], ...] = (
    (r"self_attention\.core_attention\.sinks", "columns", ("self_attn.sinks",)),
    (r"mlp\.router\.weight", "whole", ("mlp.router.weight",)),
    (r"mlp\.router\.bias", "whole", ("mlp.router.bias",)),
    (_EXPERT + r"linear_fc1\.bias", "expert_gated", ("mlp.experts.gate_up_proj_bias",)),
    (_EXPERT + r"linear_fc2\.bias", "expert_whole", ("mlp.experts.down_proj_bias",)),
)
_OWN = {"gpt_oss": _GPT_OSS} | dict.fromkeys(LATENT, _LATENT)
_OUTSIDE: dict[str, tuple[Kind, str]] = {
    "embedding.word_embeddings.weight": ("vocabulary", "embed_tokens.weight"),
    "decoder.final_layernorm.weight": ("whole", "norm.weight"),
}
#: The output projection; what is trained beside the language model, such as a value head, is `extra.…`.
OUTPUT, EXTRA = "output_layer.weight", "extra."


@dataclass(frozen=True, slots=True)
class Bundle:
    """Parameters that are converted together.

    Attributes:
        kind: How ranks divide them.
        names: Of the backbone of the transformers model.
        family: Its `model_type`.
    """

    kind: Kind
    names: tuple[str, ...]
    family: str

    def plain(self, whole: Tensor) -> Tensor:
        """Return a whole parameter as most families have it: outputs before inputs, a gated pair one after the other.

        gpt_oss gate_up_proj [E, D, 2·I], gate and up in turn  →  [E, 2·I, D], all of gate before all of up
        """
        if self.family != "gpt_oss" or not self.kind.startswith("expert"):
            return whole
        outputs_first = whole.transpose(1, 2) if whole.dim() == 3 else whole
        return (
            outputs_first
            if self.kind != "expert_gated"
            else torch.cat([outputs_first[:, ::2], outputs_first[:, 1::2]], 1)
        )

    def stored(self, plain: Tensor) -> Tensor:
        """Return the reverse of `plain`."""
        if self.family != "gpt_oss" or not self.kind.startswith("expert"):
            return plain
        own_order = torch.stack(plain.chunk(2, 1), 2).flatten(1, 2) if self.kind == "expert_gated" else plain
        return own_order.transpose(1, 2) if plain.dim() == 3 else own_order


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Which part of the weights a rank has, and how large they are.

    Attributes:
        tensor: Ranks that divide matrices.
        expert_tensor: Ranks that divide the matrices of experts.
        expert: Ranks that divide the experts of a layer.
        queries: Query heads, G·(queries of a group).
        groups: Key and value heads, G.
        vocabulary: Tokens of the model, without those that fill it up to what ranks divide.
        family: Its `model_type`.
    """

    tensor: ProcessGroup
    expert_tensor: ProcessGroup
    expert: ProcessGroup
    queries: int
    groups: int
    vocabulary: int
    family: str

    def parts(self, kind: Kind) -> ProcessGroup:
        """Return the ranks that divide a matrix."""
        return self.expert_tensor if kind.startswith("expert") else self.tensor


def bundle_of(name: str, first_layer: int, family: str) -> tuple[Bundle, int]:
    """Return the bundle of one of Megatron-Core's parameters, and which of the rank's experts it is (else 0).

    Args:
        first_layer: The model's layer that the chunk calls 0.
        family: Of the model (`model_type`).

    Raises:
        KeyError: Nothing of transformers is known for it.
    """
    if name in _OUTSIDE:
        kind, other = _OUTSIDE[name]
        return Bundle(kind, (other,), family), 0
    if name == OUTPUT:
        return Bundle("vocabulary", (OUTPUT,), family), 0
    if name.startswith(EXTRA):
        return Bundle("whole", (name,), family), 0
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    for pattern, kind, names in _OWN.get(family, ()) + _LAYER if found else ():
        assert found is not None
        match = re.fullmatch(pattern, found[2])
        if match:
            prefix = f"layers.{int(found[1]) + first_layer}."
            return Bundle(kind, tuple(prefix + each for each in names), family), int(match[1]) if match.groups() else 0
    raise KeyError(f"no weight of a transformers model is known for Megatron-Core's parameter {name}")


def rank_part(kind: Kind, whole: Sequence[Tensor], place: Place) -> Iterator[Tensor]:
    """Yield what a rank has of a bundle's `plain` tensors: one, or one for each of its experts."""
    size, rank = place.parts(kind).size(), place.parts(kind).rank()
    first = whole[0]
    if kind == "heads":
        grouped = [each.reshape(place.groups, -1, *each.shape[1:]) for each in whole]
        yield torch.cat(grouped, 1).flatten(0, 1).chunk(size)[rank]
    elif kind == "gated":
        yield torch.cat([each.chunk(size)[rank] for each in whole])
    elif kind == "columns":
        yield first.chunk(size)[rank]
    elif kind == "rows":
        yield first.chunk(size, 1)[rank]
    elif kind == "vocabulary":
        share = -(-place.vocabulary // size)
        own = first[rank * share : (rank + 1) * share]
        yield torch.cat([own, own.new_zeros(share - len(own), *own.shape[1:])])
    elif kind == "whole":
        yield first
    else:
        for expert in first.chunk(place.expert.size())[place.expert.rank()]:
            if kind == "expert_whole":
                yield expert
            elif kind == "expert_rows":
                yield expert.chunk(size, 1)[rank]
            else:
                yield torch.cat([half.chunk(size)[rank] for half in expert.chunk(2)])


def whole_of(kind: Kind, own: Sequence[Tensor], place: Place) -> list[Tensor]:
    """Return a bundle's `plain` tensors out of what ranks have of it; all ranks of its groups must ask together.

    Args:
        own: This rank's tensors, in the order of `rank_part`.
    """
    group = place.parts(kind)
    if kind == "whole":
        return [own[0]]
    if kind == "heads":
        told = torch.cat(_told(own[0], group))
        by_group = told.view(place.groups, -1, *told.shape[1:])
        share = place.queries // place.groups
        width = by_group.shape[1] // (share + 2)
        split = torch.split(by_group, [share * width, width, width], 1)
        return [each.flatten(0, 1) for each in split]
    if kind == "gated":
        return _halves(_told(own[0], group), 0)
    if kind in ("columns", "rows", "vocabulary"):
        whole = torch.cat(_told(own[0], group), 1 if kind == "rows" else 0)
        return [whole[: place.vocabulary] if kind == "vocabulary" else whole]
    parts = [whole_experts(kind, own, place, owner) for owner in range(place.expert.size())]
    return [parts[0] if len(parts) == 1 else torch.cat(parts)]


def whole_experts(kind: Kind, own: Sequence[Tensor], place: Place, owner: int, few: slice = slice(None)) -> Tensor:
    """Return the `plain` tensor of some experts of one rank, [experts, …]; all ranks of its groups must ask together.

    Args:
        kind: How it is divided: one of those of experts.
        own: This rank's tensors, in the order of `rank_part`.
        owner: Which of the ranks that divide the experts has them.
        few: Which of its own.
    """
    group, dim = place.expert_tensor, 2 if kind == "expert_rows" else 1
    if owner == place.expert.rank():
        found = torch.stack(list(own[few]))
        if kind != "expert_whole" and group.size() > 1:
            parts = _told(found, group)
            found = torch.cat(_halves(parts, dim), dim) if kind == "expert_gated" else torch.cat(parts, dim)
    else:
        shape = [len(own[few]), *own[0].shape]
        if kind != "expert_whole":
            shape[dim] *= group.size()
        found = own[0].new_empty(shape)
    tell_all(found, owner, place.expert)
    return found


def _halves(parts: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Return both whole matrices of a gated pair out of what each rank has of the two."""
    return [torch.cat(half, dim) for half in zip(*(part.chunk(2, dim) for part in parts), strict=True)]


def _told(own: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return the same tensor of every rank."""
    if group.size() == 1:
        return [own]
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, own.contiguous(), group=group)
    return parts


def tell_all(tensor: Tensor, source: int, group: ProcessGroup) -> None:
    """Give all ranks of a group what one of them has, in a contiguous tensor of theirs."""
    if group.size() > 1:
        torch.distributed.broadcast(tensor, src=torch.distributed.get_process_group_ranks(group)[source], group=group)


def bundles(parameters: Iterable[tuple[str, Tensor]], first_layer: int, family: str) -> Mapping[Bundle, list[Tensor]]:
    """Return the bundles of a chunk's parameters, with the rank's tensors of each in the order of `rank_part`."""
    found: dict[Bundle, dict[int, Tensor]] = {}
    for name, parameter in parameters:
        bundle, expert = bundle_of(name, first_layer, family)
        found.setdefault(bundle, {})[expert] = parameter
    return {bundle: [own for _, own in sorted(parts.items())] for bundle, parts in found.items()}
