"""Where a service keeps weights: one folder each, complete or not there.

models/MODEL/weights/NAME/state/       a model and its optimizer: a checkpoint as runs write them, with a manifest
models/MODEL/sampler_weights/NAME/     weights for samplers
…/checkpoint.json                      what it is of
…/config.yaml                          the configuration of the service
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from roll_like.errors import CheckpointError
from roll_like.service.types import RequestError

#: The protocol's kinds, and the part of a path that says which.
CheckpointKind: TypeAlias = Literal["weights", "sampler_weights"]
KINDS: dict[CheckpointKind, str] = {"weights": "training", "sampler_weights": "sampler"}
SCHEME = "tinker://"
#: Within one that can be trained on: what ranks wrote, and the configuration of the service.
STATE, CONFIG = "state", "config.yaml"
#: Name of the file with what is said of a checkpoint, and prefix of what is not complete.
ABOUT, _PARTIAL = "checkpoint.json", ".partial-"
_MODEL = r"\w[\w:.-]*"
_PATH = re.compile(rf"{SCHEME}({_MODEL})/(weights|sampler_weights)/([\w-][\w.-]*)")


class StoredCheckpoint(BaseModel):
    """What is said of a checkpoint.

    Attributes:
        model_id: Whose weights they are.
        kind: Whether they can be trained on, or are for samplers.
        name: Unique among those of the model and kind.
        time: When they were written.
        base_model: What clients call the model below.
        lora_rank: Of the adapters; None for a whole model.
        updates: How often its weights had changed.
        size_bytes: Of all files.
        user_metadata: What the client says of it.
        expires_at: When it is deleted; None for never.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_id: str
    kind: CheckpointKind
    name: str
    time: datetime
    base_model: str
    lora_rank: int | None
    updates: int = 0
    size_bytes: int = 0
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None

    @property
    def path(self) -> str:
        """How clients name it."""
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @property
    def answer(self) -> dict[str, Any]:
        """What clients are told of it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": self.time.isoformat(),
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires_at is None else self.expires_at.isoformat(),
        }


class CheckpointShelf:
    """The checkpoints of a service.

    Args:
        directory: Its `models` folder.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for partial in directory.glob(f"*/*/{_PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)  # of a service that was killed

    def folder(self, about: StoredCheckpoint) -> Path:
        """Return where a checkpoint is."""
        return self._directory / about.model_id / about.kind / about.name

    def write(self, about: StoredCheckpoint, fill: Callable[[Path], None], *, overwrite: bool = False) -> str:
        """Write a checkpoint, and return its path.

        Args:
            fill: Writes its files into a folder that is there not yet.
            overwrite: Whether it may take the place of one of this name.

        Raises:
            RequestError: There is one of this name.
            CheckpointError: It cannot be written.
        """
        folder = self.folder(about)
        if folder.exists() and not overwrite:
            raise RequestError(f"{about.path} is there already; save with overwrite=True, or with another name")
        partial = folder.with_name(f"{_PARTIAL}{about.name}-{secrets.token_hex(4)}")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            fill(partial)
            size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
            (partial / ABOUT).write_text(about.model_copy(update={"size_bytes": size}).model_dump_json(indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{about.path} cannot be written: {error}", fix="free disk space") from error
        return about.path

    def change(self, about: StoredCheckpoint, **said: Any) -> None:
        """Say something else of a checkpoint."""
        (self.folder(about) / ABOUT).write_text(about.model_copy(update=said).model_dump_json(indent=1))

    def find(self, path: str, kind: CheckpointKind | None = None) -> StoredCheckpoint:
        """Return the checkpoint that a client names.

        Args:
            path: `tinker://MODEL/weights/NAME`, or with `sampler_weights`.
            kind: What is needed; None for any.

        Raises:
            RequestError: There is none, or it is of the other kind.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise RequestError(
                f"{path!r} names no checkpoint; expected {SCHEME}MODEL/weights/NAME, or sampler_weights for weights"
            )
        found = read_about(self._directory / match[1] / match[2] / match[3])
        if found is None:
            raise RequestError(f"there is no checkpoint {path}; list_checkpoints shows those that are there")
        if kind is not None and found.kind != kind:
            verb = {"weights": "save_state", "sampler_weights": "save_weights_for_sampler"}[kind]
            raise RequestError(f"{path} is a checkpoint of the other kind; this needs one that {verb} has written")
        return found

    def delete(self, about: StoredCheckpoint) -> None:
        """Delete a checkpoint."""
        folder = self.folder(about)
        gone = folder.with_name(f"{_PARTIAL}{about.name}-{secrets.token_hex(4)}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def all(self, model_id: str | None = None) -> list[StoredCheckpoint]:
        """Return the checkpoints of a model, or of all, the newest first; what has expired is deleted."""
        if model_id is not None and re.fullmatch(_MODEL, model_id) is None:
            return []
        now, found = datetime.now(UTC), list[StoredCheckpoint]()
        for about in self._stored(model_id or "*"):
            if about.expires_at is not None and about.expires_at <= now:
                self.delete(about)
            else:
                found.append(about)
        return sorted(found, key=lambda about: about.time, reverse=True)

    def _stored(self, model: str) -> Iterator[StoredCheckpoint]:
        for folder in self._directory.glob(f"{model}/*/*"):
            about = None if folder.name.startswith(_PARTIAL) else read_about(folder)
            if about is not None:
                yield about


def read_about(folder: Path) -> StoredCheckpoint | None:
    """Return what is said of the checkpoint in a folder; None where there is none.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        return StoredCheckpoint.model_validate_json((folder / ABOUT).read_text())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise CheckpointError(f"{folder / ABOUT} is damaged: {error}") from error


def expiry(seconds: int | None) -> datetime | None:
    """Return when something expires that lives for so many seconds; None for ever."""
    return None if seconds is None else datetime.now(UTC) + timedelta(seconds=seconds)
