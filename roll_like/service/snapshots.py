"""Weights for samplers: what they are, and the files that ranks wrote of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from roll_like.service.checkpoints import read_about
from roll_like.service.types import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights for samplers.

    Attributes:
        file: What ranks wrote, each beside it; None for the model before any training.
        model_id: Whose they are; None for the model before any training.
        updates: How often its weights had changed.
        saved: When they were written, where they are a checkpoint's; another one may have its name later.
    """

    file: Path | None = None
    model_id: str | None = None
    updates: int = 0
    saved: datetime | None = None

    def require(self) -> None:
        """Raise where the files are not there any more.

        Raises:
            RequestError: They were deleted or overwritten.
        """
        if self.file is None:
            return
        about = None if self.saved is None else read_about(self.file.parent)
        if self.saved != (None if about is None else about.time) or not [*files_of(self.file)]:
            raise RequestError(
                f"the weights of this sampler are gone: {self.file} was deleted or overwritten after it was made",
                fix="create another sampling client",
            )


#: The model before any training.
UNTRAINED = Snapshot()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLoad:
    """Weights that engines are to get.

    Attributes:
        snapshot: The weights.
        name: How requests call them: an adapter's name, or `POLICY` for whole weights.
        dropped: Adapters that go to make room.
    """

    snapshot: Snapshot
    name: str
    dropped: tuple[str, ...] = ()


def files_of(prefix: Path) -> Iterator[Path]:
    """Yield what ranks wrote beside a name."""
    return prefix.parent.glob(f"{prefix.name}.rank_*.pt")


def delete_files(prefix: Path) -> None:
    """Delete what ranks wrote beside a name."""
    for file in files_of(prefix):
        file.unlink(missing_ok=True)


def link_files(prefix: Path, other: Path) -> None:
    """Give what ranks wrote another name too, under which it stays when it is deleted under the first."""
    for file in files_of(prefix):
        link = other.parent / f"{other.name}{file.name.removeprefix(prefix.name)}"
        try:
            link.hardlink_to(file)
        except OSError:  # some file systems have no links
            shutil.copyfile(file, link)
