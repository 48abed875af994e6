"""The training backend `fsdp2`: PyTorch's fully sharded data parallelism, and its distributed checkpoints.

Each of the model's layers is one unit: its parameters are gathered for the layer's forward and backward pass and are
sharded at all other times. What is outside the layers, such as embeddings and the output head, is a unit with them all.
With `expert_parallel` a layer's experts are a unit of their own, sharded among the ranks that have the same ones. With
`tensor_parallel` all parameters are divided first, and what a rank has is sharded among those that have the same part.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from roll_like.algorithms.lazy import torch  # the registry imports this file to know the names of backends
from roll_like.config.base import Violation
from roll_like.config.model import Precision
from roll_like.config.training import OptimizerConfig, StateBytes, StateSizes, TrainerConfig
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.backend import (
    COLLECTIVE_TIMEOUT,
    BatchT,
    LazyTensors,
    SetAside,
    State,
    StatePart,
    TrainingBackend,
    join_ranks,
    refuse_float16,
    require_same_sum,
    require_same_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


#: Name of the folder of weights and optimizer within a checkpoint.
TAG = "engine"
_WEIGHT, _OPTIMIZER = "weight.", "optimizer."
#: Sums of what a checkpoint holds, by kind; and the kinds.
_SUMS = "sums"
_KINDS = (_WEIGHT, f"{_OPTIMIZER}exp_avg.", f"{_OPTIMIZER}exp_avg_sq.")
_MOMENTUM = f"{_OPTIMIZER}momentum_buffer."


@TRAINING_BACKENDS.register("fsdp2")
class FSDP2Backend(TrainingBackend):
    """One rank's module under `torch.distributed.fsdp.fully_shard`: a `TrainingBackend`.

    Trained weights are sharded in float32, frozen ones in the precision of the forward pass.

    Raises:
        ConfigError: The precision is float16, whose gradients would have to be scaled.
    """

    start_keys: ClassVar[tuple[str, ...]] = ("zero_stage", "expert_parallel", "tensor_parallel")
    reads_late: ClassVar[bool] = True
    divides_experts: ClassVar[bool] = True
    switches_models: ClassVar[bool] = True
    trains_in_float32: ClassVar[bool] = True
    keeps_copies: ClassVar[bool] = True
    divides_matrices: ClassVar[bool] = True
    orthogonalises: ClassVar[bool] = True

    def __init__(self, settings: TrainerConfig, *, dtype: Precision, device: str, world_size: int) -> None:
        refuse_float16(dtype, "fsdp2")
        super().__init__(settings, dtype=dtype, device=device, world_size=world_size)
        self._optimizer: torch.optim.AdamW
        self._unit: Any  # the module, as `fully_shard` has made it

    @staticmethod
    def violations(settings: TrainerConfig) -> Iterator[Violation]:
        """Yield a `zero_stage` that leaves something whole, and any `offload`."""
        if settings.zero_stage != 3:
            yield Violation(
                ("zero_stage",),
                "the backend fsdp2 shards weights, gradients and optimizer, which is zero_stage: 3; found zero_stage: "
                f"{settings.zero_stage}",
            )
        if settings.offload != "none":
            yield Violation(
                ("offload",),
                f"the backend fsdp2 keeps no states in host memory during a step; found {settings.offload}. Set it to "
                "none, or backend to deepspeed",
            )

    @staticmethod
    def divided(settings: TrainerConfig) -> frozenset[StatePart]:
        """Return what ranks divide: all of it, unless a frozen model is whole."""
        return frozenset[StatePart](("weights", "gradients", "optimizer") if settings.zero_stage == 3 else ())

    @classmethod
    def state_bytes(cls, settings: TrainerConfig, sizes: StateSizes) -> StateBytes:
        """Return the memory of one rank, as counted in PyTorch 2.13 (`tests/integration/test_state_bytes.py`).

        What is trained is kept and summed in float32, whatever the forward pass computes in, so that the optimizer has
        no weights of its own. What is outside of the layers stays gathered from the forward to the backward pass, one
        layer is while the next one travels, and a gradient is whole in both precisions while ranks reduce it.
        """
        trained, width = sizes.trained, sizes.width
        divided, outside = (each // settings.tensor_parallel for each in (sizes.layer - sizes.experts, sizes.outside))
        layer = divided + sizes.experts // settings.expert_parallel
        frozen = (sizes.parameters - trained) * width
        if settings.zero_stage != 3:
            return StateBytes(weights=frozen)
        shard = 4 * trained // settings.workers
        of_layer, of_outside = (layer, outside) if trained == sizes.parameters else (0, 0)  # of adapters little
        gathered = (outside + 2 * layer) * width
        reduced = of_outside * width + max(of_layer * (width + 4), of_outside * 4)
        return StateBytes(
            weights=shard + frozen // settings.workers,
            gradients=shard,
            optimizer=settings.optimizer.moment_bytes(sizes) // settings.workers,
            buffers=gathered + (reduced if trained else 0),
            step=settings.optimizer.step_bytes(sizes),
        )

    @staticmethod
    def merged(directory: Path) -> Mapping[str, Tensor]:
        """Return whole parameters from the files of any number of ranks, each read when it is asked for."""
        from torch.distributed.checkpoint.state_dict_loader import load

        from roll_like.training.checkpoint_reader import TensorReader

        folder = directory / TAG

        def read(key: str, stored: Any) -> Tensor:
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            with _plain_errors(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
                load({key: tensor}, storage_reader=TensorReader(folder), no_dist=True)
            return tensor

        stored = TensorReader(folder).read_metadata().state_dict_metadata
        return LazyTensors(
            {
                key.removeprefix(_WEIGHT): partial(read, key, entry)
                for key, entry in stored.items()
                if key.startswith(_WEIGHT)
            }
        )

    def join(self) -> None:
        if self._device == "cuda":
            torch.cuda.set_device(0)  # each rank's process sees one
        join_ranks(self._device, int(os.environ["RANK"]))

    def wrap(self, module: nn.Module) -> None:
        """Take a module on the CPU, to train it on the device, or to compute with one that is frozen.

        A device holds its share, and one layer in full precision at a time.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        from roll_like.models.unread import materialise
        from roll_like.training.expert_parallel import ExpertParallel
        from roll_like.training.muon import Muon, shards_of
        from roll_like.training.optimizer import optimizer_of
        from roll_like.training.tensor_parallel import TensorParallel

        dtype = getattr(torch, self._dtype)
        kept_as = {True: torch.float32, False: dtype}
        # inputs keep their precision: some are a loss's own float32 figures
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = everyone = init_device_mesh(self._device, (self._world_size,))
        apart: list[nn.Module] = []
        if self._settings.tensor_parallel > 1:
            # whole tensors are gathered over two dimensions one after the other, of which torch would warn
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            mesh, divided = self._mesh_of("data", "tensor", self._settings.tensor_parallel)
            apart = TensorParallel(divided, kept_as).divide(module)
        layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]

        def shard(part: nn.Module, **options: Any) -> None:
            unit: Any = fully_shard(part, mp_policy=policy, **options)
            unit.set_gradient_divide_factor(1.0)  # losses add up over ranks
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.11 has not
                unit.set_reduce_scatter_unused_params(True)  # a rank's tokens may miss experts that another's reach

        if self._settings.expert_parallel > 1:
            same, divided = self._mesh_of("same", "divided", self._settings.expert_parallel)
            for experts in ExpertParallel(divided).divide(module, kept_as):
                shard(experts, mesh=same, shard_placement_fn=_second_dimension)
            apart = []
        for part in (*apart, *layers, module):
            for parameter in part.parameters():
                materialise(parameter)
                if not isinstance(parameter, torch.distributed.tensor.DTensor) and parameter.is_floating_point():
                    parameter.data = parameter.data.to(kept_as[parameter.requires_grad])
            shard(part, mesh=everyone if part in apart else mesh)
        self.module = self._unit = module
        if trained := self._trained():
            self._optimizer = optimizer_of(module, self._settings.optimizer)
            if isinstance(self._optimizer, Muon):
                shards = (piece for name in self._optimizer.shapes for piece in shards_of(name, trained[name]))
                self._optimizer.lay_out(shards, self._device)

    def _mesh_of(self, same: str, divided: str, size: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Return this rank's place among those that have the same parts, and among the `size` that divide them."""
        from torch.distributed.device_mesh import init_device_mesh

        shape, names = (self._world_size // size, size), (same, divided)
        mesh = init_device_mesh(self._device, shape, mesh_dim_names=names)
        for group in mesh.get_all_groups():
            torch.distributed.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)
        return mesh[same], mesh[divided]

    def forward(self, *inputs: Any) -> Any:
        learning = torch.is_grad_enabled()
        if self.module.training != learning:
            self.module.train(learning)
        outputs = self._unit(*inputs)
        if not learning:
            self._unit.reshard()  # what is outside the layers stays whole for a backward pass, which does not come
        return outputs

    def forward_backward(self, batches: Sequence[BatchT], loss_of: Callable[[BatchT], Tensor]) -> None:
        """Add the gradients, over all ranks after each micro-batch: whole sums would need a whole model's memory."""
        for batch in batches:
            torch.autograd.backward(loss_of(batch))

    def optimizer_step(self, learning_rate: float) -> float:
        gradients: list[Tensor] = []
        # all ranks do the same, each with its elements; squares of float32 may not fit into it
        squared = torch.zeros((), dtype=torch.float64, device=self._device)
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in self._trained().values():
            if parameter.grad is not None:
                gradients.append(_local(parameter.grad))
                by_copies.setdefault(self._copies(parameter), []).append(gradients[-1])
        for copies, alike in by_copies.items():
            squared += torch.nn.utils.get_total_norm(alike).double().square() / copies
        torch.distributed.all_reduce(squared)
        norm = float(squared.sqrt())
        if math.isfinite(norm):
            torch._foreach_mul_(gradients, min(1.0, self._settings.optimizer.max_grad_norm / (norm + 1e-6)))
            self._step(learning_rate)
        else:
            self._optimizer.zero_grad()
        return norm

    def adjust(self, optimizer: OptimizerConfig) -> None:
        self._settings = self._settings.model_copy(update={"optimizer": optimizer})
        for group in self._optimizer.param_groups:
            group.update(betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)

    def set_aside(self) -> SetAside:
        """Return this rank's share of what is trained, with moments and gradients; it keeps the weights alone."""
        trained = self._trained()
        states = {name: self._optimizer.state.pop(parameter, {}) for name, parameter in trained.items()}
        share = SetAside(
            weights={name: _local(parameter).clone() for name, parameter in trained.items()},
            moments={name: {key: _local(each) for key, each in state.items()} for name, state in states.items()},
            gradients={name: None if each.grad is None else _local(each.grad) for name, each in trained.items()},
        )
        self._optimizer.zero_grad()
        return share

    def put_back(self, share: SetAside) -> None:
        with torch.no_grad():
            for name, parameter in self._trained().items():
                _local(parameter).copy_(share.weights[name])
                gradient, moments = share.gradients[name], share.moments[name]
                parameter.grad = None if gradient is None else _like(parameter, gradient)
                self._optimizer.state.pop(parameter, None)
                if moments:
                    self._optimizer.state[parameter] = {key: _like(parameter, each) for key, each in moments.items()}

    def trained_shares(self) -> dict[str, Tensor]:
        return {name: _local(parameter) for name, parameter in self._trained().items()}

    def reset_optimizer(self) -> None:
        self._optimizer.state.clear()

    def write(self, parameter: Tensor, whole: Tensor) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor), "what is trained is sharded"
        sharded = distribute_tensor(whole.to(self._device), parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            _local(parameter).copy_(_local(sharded))

    @contextmanager
    def gathered(self, parameters: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        yield [_whole(parameter) for parameter in parameters]

    def save(self, directory: str) -> None:
        """Write this rank's share of model and optimizer; any number of ranks can take it back."""
        from torch.distributed.checkpoint.state_dict_saver import save

        with _plain_errors():
            save({**self._weights(), **self._states(), _SUMS: self._sums()}, checkpoint_id=Path(directory) / TAG)

    def load(self, directory: str) -> None:
        """Take back what `save` wrote, on any number of ranks, and compare the sums over all of them."""
        from torch.distributed.checkpoint.state_dict_loader import load

        from roll_like.training.checkpoint_reader import TensorReader

        reader = TensorReader(Path(directory) / TAG)
        stored = reader.read_metadata().state_dict_metadata.keys()
        if any(key.startswith(_OPTIMIZER) for key in stored):
            self._fill_states()
        else:  # it was saved before the first step
            self._optimizer.state.clear()
        wanted = {**self._weights(), **self._states()}
        if _SUMS in stored:  # earlier versions wrote none
            wanted[_SUMS] = self._zeros()
        require_same_tensors(wanted, stored)
        with _plain_errors():
            load(wanted, storage_reader=reader)
        if _SUMS in wanted:
            for kind, found, (written, size) in zip(self._kinds, self._sums()[:, 0], wanted[_SUMS], strict=True):
                require_same_sum(kind.removeprefix(_OPTIMIZER).rstrip("."), float(found), float(written), float(size))

    def tensors(self, part: State) -> Iterator[Tensor]:
        """Yield this rank's shares of parameters, and buffers; or the optimizer's states and gradients."""
        if part == "weights":
            yield from (_local(parameter) for parameter in self.module.parameters())
            yield from self.module.buffers()
            return
        yield from (_local(value) for states in self._optimizer.state.values() for value in states.values())
        yield from (_local(each.grad) for each in self.module.parameters() if each.grad is not None)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def _step(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _weights(self) -> dict[str, Tensor]:
        return {f"{_WEIGHT}{name}": parameter.detach() for name, parameter in self._trained().items()}

    def _states(self) -> dict[str, Tensor]:
        return {
            f"{_OPTIMIZER}{key}.{name}": value
            for name, parameter in self._trained().items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _sums(self) -> Tensor:
        """Return sums over all ranks of the values of each kind, and of their sizes, shape [kinds, 2]; all must ask."""
        sums = self._zeros()
        for name, tensor in {**self._weights(), **self._states()}.items():
            for kind, row in zip(self._kinds, sums, strict=True):
                if name.startswith(kind):
                    share, copies = _local(tensor), self._copies(tensor)
                    row[0] += share.sum(dtype=torch.float64) / copies
                    row[1] += torch.linalg.vector_norm(share, 1, dtype=torch.float64) / copies
        torch.distributed.all_reduce(sums)
        return sums

    @property
    def _kinds(self) -> tuple[str, ...]:
        return _KINDS if self._settings.optimizer.muon is None else (*_KINDS, _MOMENTUM)

    def _copies(self, tensor: Any) -> int:
        """Return how many ranks hold each element of a parameter, or of what is sharded as one."""
        mesh: DeviceMesh = tensor.device_mesh
        parts = [mesh.size(i) for i, each in enumerate(tensor.placements) if not each.is_replicate()]
        return self._world_size // math.prod(parts)

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self._kinds), 2, dtype=torch.float64, device=self._device)

    def _fill_states(self) -> None:
        """Let the optimizer make its states, for them to be loaded: a step that moves nothing."""
        for parameter in self._trained().values():
            parameter.grad = torch.zeros_like(parameter)
        self._step(0.0)


def _sharded(tensor: Tensor) -> Any:
    """Return a sharded tensor, without its history."""
    return tensor.detach()


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, or one that is not; every rank must ask for the same one."""
    if not isinstance(tensor, torch.distributed.tensor.DTensor):
        return tensor.detach()  # a buffer
    whole: Tensor = _sharded(tensor).full_tensor()
    return whole


def _second_dimension(parameter: nn.Parameter) -> Any:
    """Return where ranks with the same experts shard them: the first dimension is divided already."""
    del parameter
    return torch.distributed.tensor.Shard(1)


def _local(tensor: Tensor) -> Tensor:
    """Return a rank's share of a sharded tensor, or a tensor that is not."""
    share: Tensor = _sharded(tensor).to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    return share


def _like(parameter: nn.Parameter, share: Tensor) -> Tensor:
    """Return what a rank's share is a share of, sharded as a parameter; the number of steps is not divided."""
    if not share.ndim or not isinstance(parameter, torch.distributed.tensor.DTensor):
        return share
    whole: Tensor = torch.distributed.tensor.DTensor.from_local(
        share,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise RuntimeError where distributed checkpoints raise what is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error
