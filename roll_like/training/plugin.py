"""What a training backend says before its ranks start, and what it does without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from roll_like.config.sections import TrainerConfig
from roll_like.config.violations import Violation

if TYPE_CHECKING:
    from torch import Tensor

#: What the state of a model in training consists of.
Part = Literal["weights", "gradients", "optimizer"]


class BackendPlugin:
    """Base of what is registered in `TRAINING_BACKENDS`, with defaults; its ranks need the verbs of `TrainingBackend`.

    Configuration rules, the planner and the export use these methods and never the backend's name. The module of a
    backend imports neither torch nor the training library, because it is imported to validate a configuration.
    """

    #: Keys of its section to check when a rank does not start.
    start_keys: ClassVar[tuple[str, ...]] = ()

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
    def divided(settings: TrainerConfig) -> frozenset[Part]:
        """Return what ranks divide among themselves; each rank holds the rest whole."""
        del settings
        return frozenset()

    @staticmethod
    def merged(directory: Path) -> dict[str, Tensor] | None:
        """Return whole parameters, by their names in the module, of what all ranks saved in a directory.

        Without ranks, for `roll-like export`; None if the backend cannot do that. With adapters only what was trained
        needs to be in it.

        Raises:
            OSError, RuntimeError, ValueError, KeyError, AssertionError: The files are missing or damaged.
        """
        del directory
        return None
