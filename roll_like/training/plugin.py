"""What a training backend says before its ranks start, and what it does without them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from roll_like.config.base import Violation
from roll_like.config.training import StateBytes, StateSizes, TrainerConfig
from roll_like.models.quantized import shape_and_dtype

if TYPE_CHECKING:
    from torch import Tensor

#: Time-out of collectives: longer than the watchdog lets any rank hang (`roll_like.cluster.watchdog.MOST_SECONDS`),
#: which says more of it.
COLLECTIVE_TIMEOUT = timedelta(minutes=35)
#: How far sums over all values may be apart, as a share of the sum of absolute values: they add up in another order.
SUM_TOLERANCE = 1e-9
#: What the state of a model in training consists of.
StatePart = Literal["weights", "gradients", "optimizer"]


class LazyTensors(Mapping[str, "Tensor"]):
    """Tensors that are read when they are asked for, and not kept.

    Args:
        readers: What reads each.
    """

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


def require_same_tensors(wanted: Collection[str], stored: Collection[str]) -> None:
    """Raise a RuntimeError that names some if a checkpoint has other tensors than are wanted."""
    missing, unexpected = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    if missing or unexpected:
        raise RuntimeError(
            "the checkpoint is of another model or of other adapters: missing tensors: "
            f"{', '.join(missing[:3]) or 'none'}; unexpected tensors: {', '.join(unexpected[:3]) or 'none'}"
        )


def require_same_sum(what: str, found: float, written: float, size: float) -> None:
    """Raise a RuntimeError if ranks together hold something else than was written.

    Args:
        what: What was added up, for the message.
        found: Its sum over all ranks.
        written: What that was when it was saved.
        size: The sum of absolute values then.
    """
    if not abs(found - written) <= SUM_TOLERANCE * max(size, 1e-30):
        raise RuntimeError(f"what was loaded is not what was written: the sum of {what} is {found}, not {written}")


class BackendPlugin:
    """Base of what is registered in `TRAINING_BACKENDS`, with defaults; its ranks need the verbs of `TrainingBackend`.

    Configuration rules, the planner and the export use these methods and never the backend's name. The module of a
    backend imports neither torch nor the training library, because it is imported to validate a configuration.
    """

    #: Keys of its section to check when a rank does not start.
    start_keys: ClassVar[tuple[str, ...]] = ()
    #: Whether `wrap` calls `models.unread.materialise` on each parameter before it uses it, where weights are divided.
    reads_late: ClassVar[bool] = False
    #: Whether ranks can divide the experts of a layer (`expert_parallel`).
    divides_experts: ClassVar[bool] = False

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
    def divided(settings: TrainerConfig) -> frozenset[StatePart]:
        """Return what ranks divide among themselves; each rank holds the rest whole."""
        del settings
        return frozenset()

    @classmethod
    def state_bytes(cls, settings: TrainerConfig, sizes: StateSizes) -> StateBytes:
        """Return the memory of one rank of a model in training, on its device."""
        divided = cls.divided(settings)

        def share(part: StatePart, size: int) -> int:
            return size // (settings.workers if part in divided else 1)

        # AdamW's two moments in float32, and a float32 copy of weights that are kept in less
        moments = 8 if sizes.width == 4 else 12
        return StateBytes(
            weights=share("weights", sizes.parameters * sizes.width),
            gradients=share("gradients", sizes.trained * sizes.width),
            optimizer=share("optimizer", sizes.trained * moments),
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
