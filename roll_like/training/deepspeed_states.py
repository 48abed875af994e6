"""What a DeepSpeed engine has learned, written so that any number of ranks with any ZeRO stage can take it back.

Each rank writes the stretches of parameters that it keeps: master weights and the optimizer's running means in float32,
by name and place. A rank that reads takes from all files what it keeps now.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.algorithms.lazy import torch  # the registry imports the backend's file to know its name
from roll_like.training.backend import LazyTensors, require_same_sum, require_same_tensors, whole_shape

if TYPE_CHECKING:
    from torch import Tensor, nn

    from roll_like.training.muon import MatrixPiece, Muon

WEIGHT = "weight"
#: Running means of AdamW and of Muon; a parameter has those of one of them.
MEANS = (("exp_avg", "exp_avg_sq"), ("momentum_buffer",))
MOMENTS = tuple(key for keys in MEANS for key in keys)
#: Of one rank: a stretch of a parameter.
_Record = Mapping[str, Any]


@dataclass(frozen=True)
class Stretch:
    """Values of a parameter that a rank keeps.

    Attributes:
        name: Of the parameter.
        parameter: The module's own, in the precision of the forward pass.
        start: Where they begin in the parameter, flat.
        numel: How many they are.
        master: What the optimizer moves, in float32; its state is kept under it.
        offset: Where they begin in `master`, flat.
    """

    name: str
    parameter: nn.Parameter
    start: int
    numel: int
    master: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the values' part of the master weights, or of a tensor of the same layout; a view."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.numel]


def stretches(engine: Any) -> Iterator[Stretch]:
    """Yield what this rank keeps of each trained parameter; nothing of some, where the optimizer is sharded."""
    optimizer: Any = engine.optimizer
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3
        rank = torch.distributed.get_rank(engine.data_parallel_group)
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            offset = 0
            for parameter in group:
                width = parameter.partition_numel()
                numel = max(min(width, parameter.ds_numel - rank * width), 0)  # what is beyond the end is padding
                yield Stretch(names[parameter], parameter, rank * width, numel, flat, offset)
                offset += width
    elif is_sharded(engine):  # ZeRO 1 has an optimizer of its own for bfloat16
        own = hasattr(optimizer, "bf16_groups")
        groups = optimizer.bf16_groups if own else optimizer.bit16_groups
        flats = optimizer.fp32_groups_flat_partition if own else optimizer.single_partition_of_fp32_groups
        for group, flat in zip(groups, flats, strict=True):
            for parameter in group:
                if (link := parameter._hp_mapping) is not None:
                    kept, origin = link.hp_fragment_address, link.lp_fragment_address
                    yield Stretch(names[parameter], parameter, origin.start, kept.numel, flat, kept.start)
    else:
        trained = [[parameter for parameter in names if parameter.requires_grad]]
        groups = getattr(optimizer, "fp16_groups", trained)
        masters = getattr(optimizer, "fp32_groups", trained)  # in float32 parameters are their own masters
        for group, copies in zip(groups, masters, strict=True):
            for parameter, master in zip(group, copies, strict=True):
                yield Stretch(names[parameter], parameter, 0, parameter.numel(), master, 0)


def trained_shares(engine: Any, *, divided: bool) -> dict[str, Tensor]:
    """Return what this rank computes with of each trained parameter, as views, in the forward pass's precision.

    Args:
        divided: Whether ranks divide the parameters (ZeRO 3); else each has them whole.
    """
    trained = {name: each for name, each in engine.module.named_parameters() if each.requires_grad}
    if not divided:
        return {name: each.data for name, each in trained.items()}
    rank, shares = torch.distributed.get_rank(engine.data_parallel_group), {}
    for name, each in trained.items():
        partition: Any = each
        width = partition.partition_numel()
        numel = max(min(width, partition.ds_numel - rank * width), 0)  # what is beyond the end is padding
        shares[name] = partition.ds_tensor.data.view(-1)[:numel]
    return shares


def forget_moments(engine: Any) -> None:
    """Let the optimizer begin anew: without running means, and with its first step to come."""
    _adam(engine).state.clear()


def pieces_of_matrices(engine: Any, muon: Muon) -> Iterator[MatrixPiece]:
    """Yield what this rank keeps of the matrices that Muon moves: of each a piece, which may have no elements."""
    from roll_like.training.muon import matrices_within

    missing = {name: muon.shapes[name] for name in muon.shapes}
    for each in stretches(engine):
        if each.name in muon.shapes:
            shape = missing.pop(each.name)
            yield from matrices_within(
                each.name, shape, each.master, offset=each.offset, start=each.start, numel=each.numel
            )
    for name, shape in missing.items():  # other ranks have it; ZeRO 1 and 2 keep all matrices in one tensor
        (flat,) = muon.param_groups[0]["params"]
        yield from matrices_within(name, shape, flat, offset=0, start=0, numel=0)


def forget_first_step(engine: Any) -> None:
    """Undo the step without gradients that DeepSpeed 0.19 takes at the start of 16-bit training without ZeRO.

    It would decay the weights once, and count as an update in Adam's correction of its bias.
    """
    masters = getattr(engine.optimizer, "fp32_groups", None)
    if masters is not None:
        _adam(engine).state.clear()
        for parameters, copies in zip(engine.optimizer.fp16_groups, masters, strict=True):
            for parameter, master in zip(parameters, copies, strict=True):
                master.data.copy_(parameter.data)


def save(engine: Any, directory: Path, precision: str) -> None:
    """Write this rank's share into a directory that all ranks see.

    Args:
        directory: Where.
    """
    if not is_sharded(engine) and torch.distributed.get_rank() > 0:
        return  # rank 0 keeps the same
    states = _adam(engine).state
    records: dict[str, dict[str, Any]] = {}
    for each in stretches(engine):
        if each.numel:
            moments = {key: each.of(value) for key, value in states.get(each.master, {}).items() if key in MOMENTS}
            records[each.name] = {
                "start": each.start,
                "shape": whole_shape(each.parameter),
                WEIGHT: each.of(each.master),
                **moments,
            }
    step = max((int(state.get("step", 1)) for state in states.values()), default=0)
    content = {
        "step": step,
        "parameters": records,
        "sums": _sums(records.values()),
        "scaler": _plain(_scaler(engine)),
        "precision": precision,
    }
    torch.save(content, directory / f"states_{torch.distributed.get_rank()}.pt")


def load(engine: Any, directory: Path, precision: str) -> None:
    """Take back what any number of ranks have written; every rank must call it together. Arguments as for `save`.

    Raises:
        RuntimeError: It is of another model or of other adapters, incomplete, or did not arrive as it was.
    """
    files = read_states(directory)
    pieces = pieces_of(files)
    own = list(stretches(engine))
    optimizer, adam = engine.optimizer, _adam(engine)
    shapes = {
        name: whole_shape(parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad
    }
    _require_same(shapes, pieces)
    in_partitions = hasattr(optimizer, "checkpoint_event_prologue")
    if in_partitions:
        optimizer.checkpoint_event_prologue()
    step = files[0]["step"]
    adam.state.clear()
    of_muon: Collection[str] = getattr(adam, "shapes", ())
    for each in own:
        keys = MEANS[each.name in of_muon] if step else ()
        _require_means(each.name, keys, pieces[each.name])
        if step and each.master not in adam.state:
            adam.state[each.master] = {key: torch.zeros_like(each.master) for key in keys}
            if each.name not in of_muon:
                adam.state[each.master]["step"] = torch.tensor(float(step), device=each.master.device)
        for key in (WEIGHT, *keys):
            target = each.master if key == WEIGHT else adam.state[each.master][key]
            _copy(pieces[each.name], key, each.of(target), each.start)
        if in_partitions:
            partition: Any = each.parameter
            partition.ds_tensor.data.view(-1)[: each.numel].copy_(each.of(each.master))
    if in_partitions:
        optimizer.checkpoint_event_epilogue()
    else:
        for name, parameter in engine.module.named_parameters():
            if name in shapes:
                _copy(pieces[name], WEIGHT, parameter.detach().view(-1), 0)
    scaler = _scaler(engine)
    if scaler is not None and files[0]["precision"] == precision:
        vars(scaler).update(files[0]["scaler"])
    _compare(engine, own, files)


def read_states(directory: Path) -> list[Mapping[str, Any]]:
    """Return the contents of all ranks' files, which are mapped and not read. Nothing of them is run.

    Raises:
        FileNotFoundError: There are none.
    """
    paths = sorted(directory.glob("states_*.pt"))
    if not paths:
        raise FileNotFoundError(
            f"there are no states_*.pt in {directory}: another training backend or an earlier version wrote it"
        )
    return [torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in paths]


def pieces_of(files: Sequence[Mapping[str, Any]]) -> dict[str, list[_Record]]:
    """Return the stretches of each parameter, in their order."""
    pieces: dict[str, list[_Record]] = defaultdict(list)
    for file in files:
        for name, record in file["parameters"].items():
            pieces[name].append(record)
    return {name: sorted(records, key=lambda record: int(record["start"])) for name, records in pieces.items()}


def merged(directory: Path) -> Mapping[str, Tensor]:
    """Return whole weights by name, each put together when it is asked for."""

    def whole(records: Sequence[_Record]) -> Callable[[], Tensor]:
        return lambda: torch.cat([record[WEIGHT] for record in records]).view(records[0]["shape"])

    return LazyTensors({name: whole(records) for name, records in pieces_of(read_states(directory)).items()})


def is_sharded(engine: Any) -> bool:
    """Return whether each rank keeps another part of the optimizer."""
    return bool(engine.zero_optimization_stage())


def _adam(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _scaler(engine: Any) -> Any:
    """What scales losses, in 16-bit training."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _plain(scaler: Any) -> dict[str, float]:
    return {} if scaler is None else {key: each for key, each in vars(scaler).items() if isinstance(each, int | float)}


def _copy(records: Sequence[_Record], key: str, target: Tensor, start: int) -> None:
    """Fill a stretch that begins at `start` of a parameter."""
    end = start + target.numel()
    for record in records:
        first, source = int(record["start"]), record[key]
        low, high = max(start, first), min(end, first + source.numel())
        if low < high:
            target[low - start : high - start].copy_(source[low - first : high - first])


def _require_same(shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, Sequence[_Record]]) -> None:
    require_same_tensors(shapes, pieces)
    for name, shape in shapes.items():
        found = tuple(pieces[name][0]["shape"])
        if found != shape:
            raise RuntimeError(f"{name} has the shape {found} in the checkpoint, and {shape} in the model")
        position = 0
        for record in pieces[name]:
            if record["start"] != position:
                raise RuntimeError(f"the checkpoint lacks a part of {name}: values from {position} on")
            position += record[WEIGHT].numel()
        if position != math.prod(shape):
            raise RuntimeError(f"the checkpoint lacks a part of {name}: values from {position} on")


def _require_means(name: str, keys: Collection[str], records: Sequence[_Record]) -> None:
    found = {key for record in records for key in MOMENTS if key in record}
    if found != set(keys):
        raise RuntimeError(
            f"the checkpoint is of another optimizer: of {name} it has {', '.join(sorted(found)) or 'no moments'}, "
            f"expected {', '.join(keys) or 'none'}"
        )


def _sums(records: Iterable[_Record]) -> dict[str, list[float]]:
    """Return sums of the values and of their sizes, by kind."""
    sums: dict[str, list[float]] = {key: [0.0, 0.0] for key in (WEIGHT, *MOMENTS)}
    for record in records:
        for key, total in sums.items():
            if key in record:
                total[0] += float(record[key].sum(dtype=torch.float64))
                total[1] += float(torch.linalg.vector_norm(record[key], 1, dtype=torch.float64))
    return sums


def _compare(engine: Any, own: Sequence[Stretch], files: Sequence[Mapping[str, Any]]) -> None:
    """Raise if all ranks together do not hold what was written."""
    states = _adam(engine).state
    held = _sums(
        {
            WEIGHT: each.of(each.master),
            **{key: each.of(value) for key, value in states.get(each.master, {}).items() if key in MOMENTS},
        }
        for each in own
        if each.numel
    )
    found = torch.tensor([held[key] for key in (WEIGHT, *MOMENTS)], dtype=torch.float64)
    if is_sharded(engine):
        found = found.to(engine.device)
        torch.distributed.all_reduce(found, group=engine.data_parallel_group)
    for index, key in enumerate((WEIGHT, *MOMENTS)):
        expected, size = (
            math.fsum(file["sums"].get(key, (0.0, 0.0))[place] for file in files) for place in (0, 1)
        )  # earlier versions wrote none of Muon
        require_same_sum(key, float(found[index, 0]), expected, size)
