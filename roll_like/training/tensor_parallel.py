"""Tensor parallelism: ranks that divide the matrices of every layer, and between them the tokens.

Attention heads, the inner width of the feed-forward layers and the vocabulary are divided: a rank has the rows of the
first matrix and the columns of the second (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053). What is computed for
each token by itself (norms, residuals) is divided by tokens, so that no activation is there twice (Korthikanti et al.
2022, arXiv:2205.05198, section 4.2.2):

    tokens T/S  →  gathered: T  →  heads H/S, or inner width I/S  →  summed and divided: T/S

Of an adapter B·A the matrix on the divided side is divided with the layer's, the other is on all ranks.

Names of parameters and the layers' own forward passes stay those of transformers. A divided parameter is a `DTensor` on
the ranks of a group; a norm's is on all of them, and its gradient, of the rank's own tokens or heads, a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from roll_like.algorithms.divided import DividedVocabulary
from roll_like.models.unread import materialise
from roll_like.training.policy import TokenLogprobHead

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True, eq=False, slots=True)
class TensorParallel:
    """One rank's place among ranks that divide matrices.

    Attributes:
        mesh: The ranks, in one dimension.
        kept_as: The precision of parameters that are trained (True), and of others.
    """

    mesh: DeviceMesh
    kept_as: dict[bool, torch.dtype]
    _divided: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    @property
    def group(self) -> ProcessGroup:
        """Return their process group."""
        return self.mesh.get_group()

    def divide(self, module: nn.Module) -> None:
        """Let the matrices of a module's language model be divided.

        Of a parameter that is still in the checkpoint's files no more than one is in memory at a time.

        Args:
            module: What holds the model, which the ranks can divide (`refuse_undivided_matrices`), on the CPU; all
                ranks have the same.
        """
        from transformers import PreTrainedModel

        language: Any = next(each for each in module.modules() if isinstance(each, PreTrainedModel))
        backbone = language.base_model
        embedding = backbone.embed_tokens
        vocabulary = DividedVocabulary.of(self.group, len(embedding.weight))
        self._place(embedding, weight=Shard(0))
        embedding.forward = partial(_embed, embedding, vocabulary)
        for layer in backbone.layers:
            self._layer(layer)
        self._norm(backbone.norm, _collected)
        for head in (each for each in module.modules() if isinstance(each, TokenLogprobHead)):
            self._place(language.get_output_embeddings(), weight=Shard(0), bias=Shard(0))
            head.divided = vocabulary
        for owner in module.modules():  # also the second owner of a tied parameter
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter in self._divided:
                    owner._parameters[name] = self._divided[parameter]

    def _layer(self, layer: Any) -> None:
        for name in _COLUMNS:
            linear = layer.get_submodule(name)
            for each in (_base(linear), *getattr(linear, "lora_B", {}).values()):
                self._place(each, weight=Shard(0), bias=Shard(0))
                each.forward = partial(_column, each)
            for each in getattr(linear, "lora_A", {}).values():
                self._place(each, weight=Replicate())
                each.forward = partial(_product, each, whole=True)
        for name in _ROWS:
            linear = layer.get_submodule(name)
            base = _base(linear)
            compute = partial(_product, base) if base is linear else linear.forward
            for each in (base, *getattr(linear, "lora_A", {}).values()):
                self._place(each, weight=Shard(1), bias=Replicate())
                each.forward = partial(_product, each)
            for each in getattr(linear, "lora_B", {}).values():
                self._place(each, weight=Replicate())
                each.forward = partial(_product, each, whole=True)
            linear.forward = partial(_row, base, compute, self.group)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            self._norm(norm)
        for name in ("q_norm", "k_norm"):
            if hasattr(layer.self_attn, name):
                self._norm(getattr(layer.self_attn, name))
        layer.self_attn.forward = partial(_attention, layer.self_attn.forward, self.group)
        layer.mlp.forward = partial(_feed_forward, layer.mlp.forward, self.group)
        left = [name for name, parameter in layer.named_parameters() if parameter not in self._divided]
        assert not left, f"the plan of {type(layer).__name__} leaves {left} out"

    def _norm(self, norm: Any, then: Callable[[Tensor, ProcessGroup], Tensor] | None = None) -> None:
        self._place(norm, weight=Replicate())
        norm.forward = partial(_normed, norm, type(norm).forward, self.group, then)

    def _place(self, owner: nn.Module, **placements: Shard | Replicate) -> None:
        """Make the parameters of a module `DTensor`s of the same shapes, of which this rank holds its part."""
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in self._divided:  # tied
                continue
            materialise(parameter)
            own, placement = parameter.data, placements[name]
            if isinstance(placement, Shard):
                own = own.chunk(self.mesh.size(), placement.dim)[self.mesh.get_local_rank()]
            # a copy: a slice would keep the memory of the whole
            own = own.to(self.kept_as[parameter.requires_grad], copy=True, memory_format=torch.contiguous_format)
            divided = DTensor.from_local(own, self.mesh, [placement], run_check=False)
            self._divided[parameter] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.new_empty(0)


# ---- forward passes of modules whose parameters are divided -------------------------------------------


def _column(linear: Any, x: Tensor) -> Tensor:
    """Return this rank's outputs for all tokens."""
    return nn.functional.linear(x, _local(linear.weight), _local(linear.bias))


def _base(linear: Any) -> Any:
    """Return the layer beside which adapters are, or a layer without adapters itself."""
    return getattr(linear, "base_layer", linear)


def _product(linear: Any, x: Tensor, *, whole: bool = False) -> Tensor:
    """Return what this rank adds to a sum over ranks, without the bias.

    Args:
        linear: Its weight is divided by inputs, or `whole` on all ranks.
        x: This rank's inputs, or what all ranks have of them.
        whole: Whether the other one of an adapter's matrices is divided; gradients are partial sums.
    """
    return nn.functional.linear(x, _local(linear.weight, of_own_tokens=whole))


def _row(base: Any, compute: Callable[[Tensor], Tensor], group: ProcessGroup, x: Tensor) -> Tensor:
    """Return all outputs for this rank's tokens, shape [1, T/S, D], from its inputs for all tokens."""
    own_1TD = _own_of_sum(compute(x).flatten(0, -2), group)[None]
    bias = _local(base.bias, of_own_tokens=True)
    return own_1TD if bias is None else own_1TD + bias


def _embed(embedding: Any, vocabulary: DividedVocabulary, token_ids_BL: Tensor) -> Tensor:
    """Return the embeddings of this rank's tokens, shape [1, T/S, D]; each is in one rank's part of the vocabulary."""
    ids_T, own = token_ids_BL.flatten(), vocabulary.own
    inside_T = (ids_T >= own.start) & (ids_T < own.stop)
    # the row of the padding token gets no gradient, as on one rank
    padding: int | None = embedding.padding_idx
    if padding is not None:
        padding = padding - own.start if own.start <= padding < own.stop else None
    found_TD = nn.functional.embedding((ids_T - own.start) * inside_T, _local(embedding.weight), padding)
    return _own_of_sum(found_TD * inside_T[:, None], vocabulary.group)[None]


def _normed(
    norm: Any,
    compute: Callable[[Any, Tensor], Tensor],
    group: ProcessGroup,
    then: Callable[[Tensor, ProcessGroup], Tensor] | None,
    x: Tensor,
) -> Tensor:
    found = compute(_Local(norm), x)
    return found if then is None else then(found, group)


def _attention(compute: Any, group: ProcessGroup, hidden_states: Tensor, **more: Any) -> Any:
    """Run attention on all tokens, for this rank's heads: its matrices take [B, L, D], whatever T is padded to."""
    rows, length = more["position_embeddings"][0].shape[:2]
    whole_TD = _all_tokens(hidden_states[0], group)[: rows * length]
    return compute(hidden_states=whole_TD.view(rows, length, -1), **more)


def _feed_forward(compute: Any, group: ProcessGroup, own_1TD: Tensor) -> Any:
    return compute(_all_tokens(own_1TD[0], group)[None])


def _collected(own_1TD: Tensor, group: ProcessGroup) -> Tensor:
    """Return the states of all tokens and those that fill T up, for what all ranks compute alike."""
    whole_TD: Tensor = _Collected.apply(own_1TD[0], group)  # type: ignore[no-untyped-call]
    return whole_TD[None]


def _local(parameter: Any, *, of_own_tokens: bool = False) -> Any:
    """Return what this rank has of a parameter.

    Args:
        parameter: A `DTensor`, or None.
        of_own_tokens: Whether all ranks have it, and each a gradient of its own tokens, heads or columns.
    """
    if parameter is None:
        return None
    return parameter.to_local(grad_placements=[Partial()] if of_own_tokens else None)


class _Local:
    """Stands for a norm with what this rank has of its weight, for its forward pass."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm
        self.weight = _local(norm.weight, of_own_tokens=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._norm, name)


# ---- what ranks send each other ------------------------------------------------------------------------


def _gathered(own_MD: Tensor, group: ProcessGroup) -> Tensor:
    """Return the rows of all ranks, in their order."""
    parts = [torch.empty_like(own_MD) for _ in range(group.size())]
    torch.distributed.all_gather(parts, own_MD.contiguous(), group=group)
    return torch.cat(parts)


def _summed(whole_TD: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks of this rank's rows; T is filled up with zeros to what the ranks divide."""
    size = group.size()
    padded_TD = nn.functional.pad(whole_TD, (0, 0, 0, -len(whole_TD) % size))
    came_TD = torch.empty_like(padded_TD)
    torch.distributed.all_to_all_single(came_TD, padded_TD.contiguous(), group=group)
    return came_TD.view(size, -1, whole_TD.shape[-1]).sum(0, dtype=torch.float32).to(whole_TD.dtype)


def _all_tokens(own_MD: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tokens of all ranks, in their order; in the backward pass their gradients are summed."""
    whole_TD: Tensor = _Gathered.apply(own_MD, group)  # type: ignore[no-untyped-call]
    return whole_TD


def _own_of_sum(whole_TD: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's tokens of a sum over ranks."""
    own_MD: Tensor = _Summed.apply(whole_TD, group)  # type: ignore[no-untyped-call]
    return own_MD


class _Gathered(torch.autograd.Function):
    """All tokens for what each rank computes a part of: gradients are partial sums."""

    @staticmethod
    def forward(ctx: Any, own_MD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own_MD, group)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient_TD, ctx.group), None


class _Collected(torch.autograd.Function):
    """All tokens for what each rank computes alike: gradients are the same on every rank."""

    @staticmethod
    def forward(ctx: Any, own_MD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own_MD, group)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, None]:
        return gradient_TD.chunk(ctx.group.size())[ctx.group.rank()], None


class _Summed(torch.autograd.Function):
    """Tokens of this rank, of a sum of which each rank has a part."""

    @staticmethod
    def forward(ctx: Any, whole_TD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.tokens = group, len(whole_TD)
        return _summed(whole_TD, group)

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient_MD, ctx.group)[: ctx.tokens], None
