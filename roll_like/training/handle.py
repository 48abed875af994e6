"""What the driver's handles on the ranks of a trained model have in common: their states, and their place on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from roll_like.cluster import Cluster
from roll_like.training.rank import DeepSpeedRank

RankT = TypeVar("RankT", bound=DeepSpeedRank)


class RanksHandle(Generic[RankT]):
    """Speaks for started ranks.

    Args:
        cluster: The ranks.
    """

    #: Folder of a checkpoint that has its files: those of two models are called alike.
    folder: ClassVar[str] = "."

    def __init__(self, cluster: Cluster[RankT]) -> None:
        self.cluster = cluster

    def save(self, directory: Path) -> None:
        """Write every rank's states under a directory that all ranks see."""
        (directory / self.folder).mkdir(exist_ok=True)
        self.cluster.everywhere(DeepSpeedRank.save, str(directory / self.folder))

    def load(self, directory: Path) -> None:
        """Take back what `save` wrote."""
        self.cluster.everywhere(DeepSpeedRank.load, str(directory / self.folder))

    def offload(self) -> None:
        """Make room on GPUs that are shared with other roles."""
        self.cluster.everywhere(DeepSpeedRank.offload)

    def reload(self) -> None:
        """Take the room back."""
        self.cluster.everywhere(DeepSpeedRank.reload)
