"""Muon: momentum of weight matrices, made orthogonal, beside AdamW for everything else.

    b ← μ·b + (1 − μ)·g        u ← (1 − μ)·g + μ·b        w ← (1 − η·λ)·w − η·s·NS(u)

(Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the scale s is that of Liu et al. 2025,
arXiv:2502.16982.) NS is Newton-Schulz's iteration, in bfloat16 and with the coefficients of `torch.optim.Muon`.

Momentum works element by element, so it lies where a rank keeps the weights. NS needs whole matrices: each has an
owner, to which the other ranks send their pieces of u, and which sends them theirs of NS(u). These are the numbers that
one rank computes, whatever the ranks and the pieces.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from roll_like.config.training import MUON_ROUND, MuonConfig, OptimizerConfig
from roll_like.errors import ConfigError
from roll_like.training.backend import whole_shape
from roll_like.training.exchange import exchange

#: Of `torch.optim.Muon`: coefficients of the iteration, and the least norm that a matrix is divided by.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7
MOMENTUM = "momentum_buffer"
#: Of a parameter: its name, and the place of the matrix in its stack.
MatrixName = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPiece:
    """Elements of a matrix that a rank keeps, in the order of the matrix.

    Attributes:
        matrix: Which.
        kept: What the optimizer moves: a parameter, or a tensor with pieces of several.
        offset: Where they begin in `kept`, flat.
        start: Where they begin in the matrix, flat.
        numel: How many they are; 0 where other ranks have the matrix, and `kept` moves together with theirs.
    """

    matrix: MatrixName
    kept: Tensor
    offset: int
    start: int
    numel: int


def weight_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what Muon moves, by name: trained weights of linear layers within the model's layers, and of experts.

    Embeddings, the output head, routers, norms, biases and convolutions are left to AdamW.

    Raises:
        ConfigError: The model trains no such weights.
    """
    found: set[Any] = set()
    for layer in (each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                found.add(module.weight)
            elif hasattr(module, "_apply_gate") and hasattr(module, "num_experts"):  # [E, …] for all experts
                found |= {each for each in module.parameters(recurse=False) if len(whole_shape(each)) == 3}
    matrices = {
        name: each
        for name, each in model.named_parameters()
        if each in found and each.requires_grad and min(whole_shape(each)[-2:]) > 1
    }
    if not matrices:
        raise ConfigError(
            f"Muon moves the weights of linear layers, and the layers of {type(model).__name__} train none",
            fix="remove optimizer.muon",
        )
    return matrices


def with_inputs_first(model: nn.Module) -> frozenset[Tensor]:
    """Return the experts' weights that are [E, inputs, outputs], as gpt-oss's; others' are [E, outputs, inputs]."""
    experts = (module for module in model.modules() if getattr(module, "is_transposed", False))
    return frozenset(each for module in experts for each in module.parameters(recurse=False))


def matrices_within(
    name: str, shape: Sequence[int], kept: Tensor, *, offset: int, start: int, numel: int
) -> Iterator[MatrixPiece]:
    """Yield the matrices' parts of a stretch of a parameter.

    Args:
        shape: Of the whole parameter: [A, B], or [E, A, B].
        offset: Where the stretch begins in `kept`, flat.
        start: Where it begins in the parameter, flat.
        numel: Its length.
    """
    size = shape[-2] * shape[-1]
    for index in range(math.prod(shape) // size):
        low, high = max(start, index * size), min(start + numel, (index + 1) * size)
        inside = max(high - low, 0)
        yield MatrixPiece(
            matrix=(name, index),
            kept=kept,
            offset=offset + low - start if inside else 0,
            start=low - index * size if inside else 0,
            numel=inside,
        )


def shards_of(name: str, parameter: Tensor) -> Iterator[MatrixPiece]:
    """Yield the pieces of a parameter that `fully_shard` has divided by rows, or whose experts ranks divide too."""
    assert isinstance(parameter, DTensor), "what is trained is sharded"
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    rows, columns = local[-2], parameter.shape[-1]
    assert local[-1] == columns, f"columns of {name} are divided, which the rules of `optimizer.muon` do not let pass"
    stacked = parameter.ndim == 3
    for index in range(parameter.shape[0] if stacked else 1):
        place = index - first[0] if stacked else 0
        here = rows * columns if 0 <= place < (local[0] if stacked else 1) else 0
        yield MatrixPiece(
            matrix=(name, index),
            kept=parameter,
            offset=place * rows * columns if here else 0,
            start=first[-2] * columns if here else 0,
            numel=here,
        )


def orthogonalised(x_AB: Tensor, steps: int) -> Tensor:
    """Return about U·Vᵀ of a matrix U·S·Vᵀ, or of several of a shape: its singular values become 0.7 to 1.2.

    Newton-Schulz: from X / ‖X‖ on, X ← a·X + (b·X·Xᵀ + c·(X·Xᵀ)²)·X.

    Args:
        x_AB: In bfloat16, shape [A, B] or [N, A, B]; it is used up.
    """
    a, b, c = COEFFICIENTS
    plus_product = torch.addmm if x_AB.ndim == 2 else torch.baddbmm
    x = x_AB.mT if x_AB.size(-2) > x_AB.size(-1) else x_AB
    norm = x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x.div_(norm.clamp(min=LEAST_NORM))
    for _ in range(steps):
        gram = x @ x.mT
        x = plus_product(x, plus_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if x_AB.size(-2) > x_AB.size(-1) else x


def scale(config: MuonConfig, outputs: int, inputs: int) -> float:
    """Return what the learning rate is multiplied by for the matrix of a linear map."""
    if config.adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(outputs, inputs))
    return math.sqrt(max(1, outputs / inputs))


class Muon(torch.optim.AdamW):
    """Muon over weight matrices, and AdamW over the rest: see the module. Ranks take its steps together.

    It moves nothing of the matrices before `lay_out`.

    Args:
        matrices: What Muon moves, by name; the same on every rank, and in this order.
        inputs_first: Those of the matrices that are [inputs, outputs].
    """

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        others: Sequence[Sequence[nn.Parameter]],
        config: OptimizerConfig,
        inputs_first: Set[Tensor] = frozenset(),
    ) -> None:
        assert config.muon is not None, "what chooses the optimizer looks"
        self._config, self._settings = config, config.muon
        #: Whole shapes of what Muon moves, by name.
        self.shapes = {name: whole_shape(parameter) for name, parameter in matrices.items()}
        self._inputs_first = {name for name, parameter in matrices.items() if parameter in inputs_first}
        self._names = [(name, i) for name, shape in self.shapes.items() for i in range(math.prod(shape[:-2]))]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._sizes = [math.prod(self._shape(number)) for number in range(len(self._names))]
        self._pieces: dict[Tensor, list[MatrixPiece]] = {}
        #: Where each matrix lies: [ranks, matrices, 2], the first element of a rank's piece and its length.
        self._held: list[list[list[int]]] = []
        self._plans: dict[tuple[int, ...], list[list[list[int]]]] = {}
        groups: list[dict[str, Any]] = [{"params": [*each]} for each in others]
        groups.insert(0, {"params": [*matrices.values()], "orthogonal": True})
        super().__init__(
            groups,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def lay_out(self, pieces: Iterable[MatrixPiece], device: str) -> None:
        """Say which pieces this rank keeps, one of every matrix; all ranks do so together.

        Args:
            device: Where ranks send each other what.
        """
        own = torch.zeros(len(self._names), 2, dtype=torch.int64)
        by_kept: dict[Tensor, list[MatrixPiece]] = defaultdict(list)
        for piece in pieces:
            own[self._numbers[piece.matrix]] = torch.tensor([piece.start, piece.numel])
            by_kept[piece.kept].append(piece)
        ranks = torch.distributed.get_world_size()
        held = [torch.empty_like(own, device=device) for _ in range(ranks)]
        torch.distributed.all_gather(held, own.to(device))
        self._held = [each.tolist() for each in held]
        self._pieces = dict(by_kept)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move what has gradients."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group.get("orthogonal")]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("orthogonal") and self._held:
                self._move(group)
        return loss

    def _move(self, group: Mapping[str, Any]) -> None:
        pieces: dict[int, MatrixPiece] = {}
        for kept in group["params"]:
            if kept.grad is None:
                continue
            state = self.state[kept]
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(kept)
            _own(state[MOMENTUM]).lerp_(_own(kept.grad), 1 - self._settings.momentum)
            pieces |= {self._numbers[piece.matrix]: piece for piece in self._pieces[kept]}
        numbers = tuple(sorted(pieces))
        if numbers not in self._plans:
            self._plans[numbers] = self._rounds(numbers)
        for owners in self._plans[numbers]:
            self._round(owners, pieces, group)

    def _round(
        self, owners: Sequence[Sequence[int]], pieces: Mapping[int, MatrixPiece], group: Mapping[str, Any]
    ) -> None:
        """Gather matrices at their owners, which make them orthogonal; each rank moves its pieces by what comes back.

        Args:
            owners: The matrices of each rank, by number.
            pieces: What this rank keeps of each.
        """
        rank, ranks = torch.distributed.get_rank(), range(len(self._held))
        device = next(iter(pieces.values())).kept.device
        mine = owners[rank]
        alone = [number for number in mine if self._whole(rank, number)]
        others = [[number for number in each if not self._whole(owner, number)] for owner, each in enumerate(owners)]
        sent = [self._update(pieces[number]) for each in others for number in each]
        came = self._swap(
            sent,
            [sum(self._held[rank][number][1] for number in each) for each in others],
            [sum(self._held[other][number][1] for number in others[rank]) for other in ranks],
            device,
        )
        whole = {number: self._update(pieces[number]) for number in alone}
        whole |= {number: came.new_empty(self._sizes[number]) for number in others[rank]}
        place = 0
        for other in ranks:
            for number in others[rank]:
                start, numel = self._held[other][number]
                whole[number][start : start + numel] = came[place : place + numel]
                place += numel
        results = self._results(whole)
        back = self._swap(
            [
                results[number][self._held[other][number][0] :][: self._held[other][number][1]]
                for other in ranks
                for number in mine
                if other != rank
            ],
            [sum(self._held[other][number][1] for number in mine) if other != rank else 0 for other in ranks],
            [sum(self._held[rank][number][1] for number in each) if o != rank else 0 for o, each in enumerate(owners)],
            device,
        )
        place = 0
        for owner, each in enumerate(owners):
            for number in each:
                start, numel = self._held[rank][number]
                if owner == rank:
                    moved = results[number][start : start + numel]
                else:
                    moved, place = back[place : place + numel], place + numel
                self._apply(pieces[number], moved, group)

    def _update(self, piece: MatrixPiece) -> Tensor:
        """Return what is made orthogonal, of a piece, flat, in bfloat16."""
        gradient = _part(piece.kept.grad, piece)
        momentum = _part(self.state[piece.kept][MOMENTUM], piece)
        update = gradient.lerp(momentum, self._settings.momentum) if self._settings.nesterov else momentum
        return update.to(torch.bfloat16, copy=True)

    def _results(self, whole: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return NS of matrices, flat; of experts many at a time."""
        together: dict[Any, list[int]] = defaultdict(list)
        for number in whole:
            name, _ = self._names[number]
            together[name if len(self.shapes[name]) == 3 else number].append(number)
        results = {}
        for numbers in together.values():
            shape, steps = self._shape(numbers[0]), self._settings.ns_steps
            if len(numbers) == 1:
                results[numbers[0]] = orthogonalised(whole[numbers[0]].view(shape), steps).reshape(-1)
            else:
                stack = orthogonalised(torch.stack([whole[number].view(shape) for number in numbers]), steps)
                results |= {number: each.reshape(-1) for number, each in zip(numbers, stack, strict=True)}
        return results

    def _apply(self, piece: MatrixPiece, moved: Tensor, group: Mapping[str, Any]) -> None:
        rate = group["lr"] * (1.0 if self._settings.lr is None else self._settings.lr / self._config.lr)
        weights = _own(piece.kept).view(-1)[piece.offset : piece.offset + piece.numel]
        weights.mul_(1 - rate * group["weight_decay"])
        outputs, inputs = self._shape(self._numbers[piece.matrix])
        if piece.matrix[0] in self._inputs_first:
            outputs, inputs = inputs, outputs
        weights.add_(moved, alpha=-rate * scale(self._settings, outputs, inputs))

    def _rounds(self, numbers: Sequence[int]) -> list[list[list[int]]]:
        """Return the matrices of each rank, round after round, so that none holds more than a few.

        A rank that keeps all of a matrix computes it; other matrices go where least is computed.
        """
        ranks = range(len(self._held))
        load = [0] * len(ranks)
        room = [0] * len(ranks)
        waiting: list[list[list[int]]] = [[] for _ in ranks]
        for number in sorted(numbers, key=lambda each: -self._sizes[each]):
            size = self._sizes[number]
            complete = [rank for rank in ranks if self._whole(rank, number)]
            owner = min(complete or ranks, key=lambda rank: load[rank])
            load[owner] += size
            if room[owner] < size:
                waiting[owner].append([])
                room[owner] = MUON_ROUND
            waiting[owner][-1].append(number)
            room[owner] -= size
        turns = range(max((len(each) for each in waiting), default=0))
        return [[each[turn] if turn < len(each) else [] for each in waiting] for turn in turns]

    def _swap(self, parts: Sequence[Tensor], sent: Sequence[int], came: Sequence[int], device: torch.device) -> Tensor:
        nothing = torch.empty(0, dtype=torch.bfloat16, device=device)
        if len(self._held) == 1:
            return nothing
        everyone = torch.distributed.group.WORLD
        assert everyone is not None, "ranks have met"
        return exchange(torch.cat([nothing, *parts]), everyone, sent, came)

    def _whole(self, rank: int, number: int) -> bool:
        return self._held[rank][number][1] == self._sizes[number]

    def _shape(self, number: int) -> Sequence[int]:
        return self.shapes[self._names[number][0]][-2:]


def _own(tensor: Any) -> Tensor:
    """Return a rank's share of a sharded tensor, or a tensor that is not."""
    share: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return share


def _part(tensor: Any, piece: MatrixPiece) -> Tensor:
    return _own(tensor).reshape(-1)[piece.offset : piece.offset + piece.numel]
