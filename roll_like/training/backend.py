"""What a training backend is: what it says before its ranks start, and what trains the module of each."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

from roll_like.algorithms.lazy import torch
from roll_like.config.base import Violation
from roll_like.config.model import Precision
from roll_like.config.training import OptimizerConfig, StateBytes, StateSizes, TrainerConfig
from roll_like.errors import ConfigError
from roll_like.models.experts import refuse_undivided_experts
from roll_like.models.quantized import shape_and_dtype
from roll_like.models.tensor_plan import refuse_undivided_matrices

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

#: Time-out of collectives: longer than the watchdog lets any rank hang (`roll_like.cluster.watchdog.MOST_SECONDS`),
#: which says more of it.
COLLECTIVE_TIMEOUT = timedelta(minutes=35)
#: How far sums over all values may be apart, as a share of the sum of absolute values: they add up in another order.
SUM_TOLERANCE = 1e-9
#: What the state of a model in training consists of.
StatePart = Literal["weights", "gradients", "optimizer"]
#: What a rank holds between steps: weights; and what only training needs (gradients, master weights, moments).
State: TypeAlias = Literal["weights", "optimizer"]
#: What `forward_backward` computes the loss of.
BatchT = TypeVar("BatchT")
R = TypeVar("R")


class LazyTensors(Mapping[str, "Tensor"]):
    """Tensors that are read when they are asked for, and not kept."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one that DeepSpeed has sharded, or that is quantised."""
    return tuple(getattr(parameter, "ds_shape", shape_and_dtype(parameter)[0]))


def refuse_float16(dtype: Precision, backend: str) -> None:
    """Raise a ConfigError for float16 where a backend does not scale losses."""
    if dtype == "float16":
        raise ConfigError(
            f"the training backend {backend} does not scale losses, so gradients in float16 would underflow",
            fix="set model.dtype: bfloat16 or float32, or training.backend: deepspeed",
        )


def require_same_tensors(wanted: Collection[str], stored: Collection[str]) -> None:
    """Raise a RuntimeError that names some if a checkpoint has other tensors than are wanted."""
    missing, unexpected = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    if missing or unexpected:
        raise RuntimeError(
            "the checkpoint is of another model or of other adapters, or of another optimizer: missing tensors: "
            f"{', '.join(missing[:3]) or 'none'}; unexpected tensors: {', '.join(unexpected[:3]) or 'none'}"
        )


def require_same_sum(what: str, found: float, written: float, size: float) -> None:
    """Raise a RuntimeError if ranks together hold something else than was written.

    Args:
        size: The sum of absolute values then.
    """
    if not abs(found - written) <= SUM_TOLERANCE * max(size, 1e-30):
        raise RuntimeError(f"what was loaded is not what was written: the sum of {what} is {found}, not {written}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A rank's share of what is trained, while something else is: tensors that can be written to a file.

    Attributes:
        weights: By name.
        moments: The optimizer's states of each; empty before its first step.
        gradients: Of each; None where nothing was added up.
    """

    weights: Mapping[str, Tensor]
    moments: Mapping[str, dict[str, Any]]
    gradients: Mapping[str, Tensor | None]

    @classmethod
    def of_weights(cls, weights: Mapping[str, Tensor]) -> SetAside:
        """Return weights as they are before the first step."""
        return cls(weights=weights, moments={name: {} for name in weights}, gradients=dict.fromkeys(weights))


class Stage(Protocol):
    """Ranks that have some of a model's layers, and hand out the weights of these by themselves."""

    @property
    def number(self) -> int:
        """Which layers they have; those with the first ones are 0."""

    @property
    def rank(self) -> int:
        """Place of this rank among them."""

    def owner(self, parameter: Tensor) -> int:
        """Return the number of the stage that hands out a parameter of the module."""

    def gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[Sequence[Tensor]]:
        """Return what holds the whole of some of this stage's parameters; all its ranks must ask for the same ones."""

    def experts(self, parameter: Tensor, *, told: bool = True) -> Iterator[tuple[range, Tensor]]:
        """Yield a few experts of a parameter [E, …] at a time, with their numbers; see `TrainingBackend.experts`.

        Args:
            parameter: Of this stage where others are not told.
            told: Whether the other stages are told.
        """


def join_ranks(device: str, rank: int) -> str:
    """Make the process group of WORLD_SIZE ranks, unless this process is in one, and return its backend.

    Its store listens at MASTER_ADDR and MASTER_PORT; one that torch makes by itself would listen at all addresses.

    Args:
        device: `cpu` (gloo) or `cuda` (NCCL).
        rank: This one's place in the group; the first one is on the machine of MASTER_ADDR.
    """
    backend = "gloo" if device == "cpu" else "nccl"
    if torch.distributed.is_initialized():
        return backend
    host, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, int(port)), family=family).detach() if rank == 0 else None
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # documented, and not in `__all__`
        host, int(port), int(size), rank == 0, COLLECTIVE_TIMEOUT, wait_for_workers=False, master_listen_fd=listening
    )
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=int(size), timeout=COLLECTIVE_TIMEOUT
    )
    return backend


class TrainingBackend(ABC):
    """One rank's module in the hands of a training library, registered in `TRAINING_BACKENDS`: `training.backend`.

    Configuration rules, the planner and the export use the static methods and never the backend's name. The module of a
    backend imports neither torch nor the training library, because it is imported to validate a configuration.

    Every rank calls the same of the other methods at the same time.

    Args:
        settings: The section of the model.
        dtype: Precision of the forward pass; master weights are float32.
        device: `cpu` or `cuda`.
        world_size: Number of ranks.
    """

    #: The module that is trained; set by `wrap`.
    module: nn.Module
    #: Keys of its section to check when a rank does not start.
    start_keys: ClassVar[tuple[str, ...]] = ()
    #: Whether `wrap` calls `models.unread.materialise` on each parameter before it uses it, where weights are divided.
    reads_late: ClassVar[bool] = False
    #: Whether ranks can divide the experts of a layer (`expert_parallel`).
    divides_experts: ClassVar[bool] = False
    #: Whether it can put what is trained aside and go on with something else of the same shapes (`set_aside`).
    switches_models: ClassVar[bool] = False
    #: Whether ranks keep what is trained in float32, whatever the forward pass computes in.
    trains_in_float32: ClassVar[bool] = False
    #: Whether it tells `trained_shares` and can `reset_optimizer`: ranks may keep copies of what is trained.
    keeps_copies: ClassVar[bool] = False
    #: Whether ranks can divide the matrices of a layer (`tensor_parallel`).
    divides_matrices: ClassVar[bool] = False
    #: Whether it steps with Muon (`optimizer.muon`).
    orthogonalises: ClassVar[bool] = False
    #: Whether ranks can divide the layers (`pipeline_parallel`).
    divides_layers: ClassVar[bool] = False
    #: Whether engines are sent a few experts of a layer at a time (`experts`); else all are put together first.
    streams_experts: ClassVar[bool] = False
    #: Whether its attention needs joined rows: `varlen` where `attention` is auto.
    joins_rows: ClassVar[bool] = False

    @staticmethod
    def environment(device: str) -> Mapping[str, str]:
        """Return what a rank's process needs in its environment before it imports torch.

        Args:
            device: `cpu` or `cuda`.
        """
        del device
        return {}

    @staticmethod
    def violations(settings: TrainerConfig) -> Iterator[Violation]:
        """Yield what the backend cannot do; paths start within the section."""
        del settings
        yield from ()

    @staticmethod
    def refuse_model(config: PretrainedConfig, settings: TrainerConfig) -> None:
        """Raise a ConfigError for a model that ranks cannot divide as the section asks."""
        refuse_undivided_experts(config, settings.expert_parallel)
        refuse_undivided_matrices(config, settings.tensor_parallel)

    @staticmethod
    def divided(settings: TrainerConfig) -> frozenset[StatePart]:
        """Return what ranks divide among themselves; each rank holds the rest whole."""
        del settings
        return frozenset()

    @staticmethod
    def data_ranks(settings: TrainerConfig) -> int:
        """Return how many groups of neighbouring ranks have rows of their own; the ranks of a group get the same rows.

        All ranks of a group return the same log-probabilities and metrics for them.
        """
        return settings.workers // (settings.sequence_parallel * settings.tensor_parallel)

    @classmethod
    def state_bytes(cls, settings: TrainerConfig, sizes: StateSizes) -> StateBytes:
        """Return the memory of one rank of a model in training, on its device."""
        divided = cls.divided(settings)

        def share(part: StatePart, size: int) -> int:
            return size // (settings.workers if part in divided else 1)

        # a float32 copy of weights that are kept in less
        masters = 0 if sizes.width == 4 else 4 * sizes.trained
        return StateBytes(
            weights=share("weights", sizes.parameters * sizes.width),
            gradients=share("gradients", sizes.trained * sizes.width),
            optimizer=share("optimizer", masters + settings.optimizer.moment_bytes(sizes)),
            # of weights that are divided, one layer is gathered while the next one travels
            buffers=2 * sizes.largest * sizes.width if "weights" in divided and settings.workers > 1 else 0,
        )

    @staticmethod
    def merged(directory: Path) -> Mapping[str, Tensor] | None:
        """Return whole parameters, by their names in the module, of what all ranks saved in a directory.

        Without ranks, for `roll-like export`; None if the backend cannot do that. With adapters only what was trained
        needs to be in it. `LazyTensors` where the format allows it: then the whole model is never in memory.

        Raises:
            OSError, RuntimeError, ValueError, KeyError, AssertionError: The files are missing or damaged.
        """
        del directory
        return None

    def __init__(self, settings: TrainerConfig, *, dtype: Precision, device: str, world_size: int) -> None:
        self._settings = settings
        self._dtype = dtype
        self._device = device
        self._world_size = world_size

    @abstractmethod
    def join(self) -> None:
        """Meet the other ranks; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. Also for frozen models."""

    @abstractmethod
    def wrap(self, module: nn.Module) -> None:
        """Take a module on the CPU, to train it on the device; where `sharded`, also one that is frozen.

        Its parameters may be views of the model's files. A backend that shards moves them piece by piece, so that no
        device ever holds them all. Where it `reads_late`, some are still in the files.
        """

    @abstractmethod
    def forward(self, *inputs: Any) -> Any:
        """Run the module; dropout is on where there are gradients only."""

    @abstractmethod
    def forward_backward(self, batches: Sequence[BatchT], loss_of: Callable[[BatchT], Tensor]) -> None:
        """Add the gradient of the next optimizer step: gradients of micro-batches and ranks are summed.

        Args:
            batches: All micro-batches of this rank before `optimizer_step`; all ranks have equally many.
            loss_of: Runs `forward` for a micro-batch and returns its share of the loss; called once for each, in order.
        """

    def forward_only(self, batches: Sequence[BatchT], result_of: Callable[[BatchT], R]) -> list[R]:
        """Return what becomes of each micro-batch, without gradients, on all ranks that have the same rows.

        Args:
            batches: Of this rank; all ranks have equally many.
            result_of: Runs `forward` for a micro-batch; called once for each, in order.
        """
        return [result_of(batch) for batch in batches]

    def of_last_layers(self, found: list[R]) -> list[R]:
        """Return what a pass over micro-batches found, on ranks that have not the last layers, too.

        Args:
            found: What `loss_of` of the last `forward_backward` found: one for each micro-batch it finished.
        """
        return found

    @abstractmethod
    def optimizer_step(self, learning_rate: float) -> float:
        """Move the weights by the gradients since the last step; return the norm of the gradient before clipping.

        Where that norm is not finite, the gradients are forgotten on every rank, and nothing else may have changed:
        weights, moments and the optimizer's count of steps are those of before.

        Returns:
            The norm over all ranks, the same on each; infinite or NaN where the step was not taken.
        """

    def adjust(self, optimizer: OptimizerConfig) -> None:
        """Take the next optimizer steps with these settings; for backends that declare `switches_models`."""
        raise NotImplementedError(f"{type(self).__name__} keeps the settings of its start")

    def set_aside(self) -> SetAside:
        """Return this rank's share of what is trained, with moments and gradients, for `put_back`.

        Then it has no moments and no gradients; weights keep their numbers. For backends that declare
        `switches_models`, as the following methods.
        """
        raise NotImplementedError(f"{type(self).__name__} does not switch between models")

    def put_back(self, share: SetAside) -> None:
        """Go on with what `set_aside` returned."""
        raise NotImplementedError(f"{type(self).__name__} does not switch between models")

    def trained_shares(self) -> dict[str, Tensor]:
        """Return this rank's shares of what is trained, by name; they change as it is trained.

        What is written to them is computed with until the next optimizer step. For backends that declare
        `keeps_copies` or `switches_models`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not tell what it trains")

    def reset_optimizer(self) -> None:
        """Forget moments and their count of steps; for backends that declare `keeps_copies`."""
        raise NotImplementedError(f"{type(self).__name__} keeps its optimizer's states")

    def write(self, parameter: Tensor, whole: Tensor) -> None:
        """Give a parameter other numbers; every rank has the whole of them."""
        raise NotImplementedError(f"{type(self).__name__} does not switch between models")

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part of each parameter only."""
        return "weights" in self.divided(self._settings)

    @abstractmethod
    def gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[Sequence[Tensor]]:
        """Return what holds the whole of sharded parameters, in their order; every rank must ask for the same ones."""

    def experts(self, parameter: Tensor) -> Iterator[tuple[range, Tensor]]:
        """Yield a few experts of a parameter [E, …] at a time, with their numbers; for backends that `streams_experts`.

        Every rank must ask for the same parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} puts all experts of a layer together")

    @property
    def stage(self) -> Stage | None:
        """Which of the layers this rank has; None where it has its share of all."""
        return None

    @abstractmethod
    def save(self, directory: str) -> None:
        """Write this rank's share of model and optimizer; OSError or RuntimeError where that fails."""

    @abstractmethod
    def load(self, directory: str) -> None:
        """Take back what `save` wrote; OSError, RuntimeError, ValueError or KeyError where that fails."""

    @abstractmethod
    def tensors(self, part: State) -> Iterator[Tensor]:
        """Yield the tensors that hold a part of what is trained, more than once if that is easier.

        What is not yielded stays on the GPU while other roles use it.
        """

    def close(self) -> None:
        """Leave the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
