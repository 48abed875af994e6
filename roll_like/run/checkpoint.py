"""One atomic directory per checkpoint: all of it is there and whole, or it does not count.

    checkpoints/
      step_000010/        manifest.json names every file with its size and checksum
      step_000020/
      best -> step_000010

A checkpoint is written under a temporary name, synced to disk and renamed. A directory that a
killed run left half-written never has a final name; one that the disk damaged fails its checksums,
and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from roll_like.errors import CheckpointError

_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY = ".writing-"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: Its directory.
        step: How many steps were finished when it was written.
        state: What the driver's parts had to say, by part.
    """

    path: Path
    step: int
    state: Mapping[str, Any]


class CheckpointStore:
    """Writes, finds and prunes the checkpoints of one run.

    Args:
        directory: The run's `checkpoints` folder.
        keep: How many of the latest to keep.
        keep_best: Whether the one with the best score is kept as well.
        warn: Called with one sentence when a damaged checkpoint is passed over.
    """

    def __init__(self, directory: Path, *, keep: int, keep_best: bool, warn: Callable[[str], None]) -> None:
        self.directory = directory
        self._keep = keep
        self._keep_best = keep_best
        self._warn = warn

    def write(
        self, step: int, save: Callable[[Path], None], state: Mapping[str, Any], *, score: float | None = None
    ) -> Checkpoint:
        """Write a checkpoint; the run can be killed at any moment of it.

        Args:
            step: How many steps are finished.
            save: Writes the engines' files into the directory it is given.
            state: The driver's part, plain JSON.
            score: Evaluation score, for `best`.

        Raises:
            CheckpointError: The disk is full or not writable; earlier checkpoints stay as they are.
        """
        final = self.directory / f"step_{step:06d}"
        temporary = self.directory / f"{_TEMPORARY}{final.name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._refuse_full_disk()
            temporary.mkdir()
            save(temporary)
            (temporary / "state.json").write_text(json.dumps(dict(state), indent=1))
            manifest = {"format": FORMAT, "step": step, "score": score, "files": _describe(temporary)}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            _sync_tree(temporary)
            if final.exists():  # a resumed run reached this step again
                shutil.rmtree(final)
            temporary.rename(final)
            _sync(self.directory)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.directory}: {error.strerror or error}",
                fix="free disk space, lower checkpoint.keep, or set output_dir to another disk; then continue "
                "with --resume",
            ) from error
        if self._keep_best and score is not None:
            self._remember_best(final, score)
        self._prune()
        return Checkpoint(path=final, step=step, state=state)

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None when there is none at all.

        Raises:
            CheckpointError: There are checkpoints, and every one is damaged.
        """
        found = self._all()
        for path in reversed(found):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                self._warn(f"{error.message}; the checkpoint before it is used")
        if found:
            raise CheckpointError(
                f"every checkpoint in {self.directory} is damaged",
                fix="restore one from a backup, or start anew without --resume",
            )
        return None

    def _all(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())

    def _prune(self) -> None:
        best = self.directory / "best"
        kept = {path.resolve() for path in self._all()[-self._keep :]}
        if best.is_symlink():
            kept.add(best.resolve())
        for path in self._all():
            if path.resolve() not in kept:
                # the rename makes the removal atomic: a half-removed checkpoint has no valid name
                doomed = path.rename(path.with_name(f"{_TEMPORARY}old-{path.name}"))
                shutil.rmtree(doomed)

    def _remember_best(self, path: Path, score: float) -> None:
        best = self.directory / "best"
        if best.exists():
            known = json.loads((best / "manifest.json").read_text())["score"]
            if known is not None and known >= score:
                return
        fresh = self.directory / f"{_TEMPORARY}best"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.name)
        fresh.replace(best)

    def _remove_leftovers(self) -> None:
        for path in self.directory.glob(f"{_TEMPORARY}*"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)

    def _refuse_full_disk(self) -> None:
        """The last checkpoint's size says what the next one needs."""
        found = self._all()
        if not found:
            return
        needed = sum(file.stat().st_size for file in found[-1].rglob("*") if file.is_file())
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise CheckpointError(
                f"a checkpoint takes {needed / 2**30:.1f} GiB, and {self.directory} has {free / 2**30:.1f} GiB free",
                fix="free disk space, lower checkpoint.keep, or set output_dir to another disk; then continue "
                "with --resume",
            )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's state after checking every file against the manifest.

    Raises:
        CheckpointError: Something is missing, of another size, or has another checksum.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        described: Mapping[str, Mapping[str, Any]] = manifest["files"]
        for name, expected in described.items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"{path / name} has {size} bytes; {expected['bytes']} were written")
            if _checksum(path / name) != expected["xxh3"]:
                raise CheckpointError(f"{path / name} is damaged: its checksum differs from the manifest's")
        state = json.loads((path / "state.json").read_text())
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint: {error}") from error
    return Checkpoint(path=path, step=manifest["step"], state=state)


def _describe(directory: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): {"bytes": path.stat().st_size, "xxh3": _checksum(path)} for path in files}


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
