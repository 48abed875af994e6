"""One atomic directory per checkpoint: all of it is there and whole, or it does not count.

    checkpoints/
      step_000010/
        engine/           shards of model and optimizer, which the training backend writes
        rank_0.pt …       random states and updates of each rank
        critic/           the same of a critic
        state.json        the driver's parts: data position, metrics, ids of trackers
        rollouts.npz      groups that an asynchronous run has not trained yet
        config.yaml       the resolved configuration
        manifest.json     every file with its size and checksum
      step_000020/
      best -> step_000010

A checkpoint is written under a temporary name, synced to disk and renamed. A directory that a
killed run left half-written never has a final name; one that the disk damaged fails its checksums,
and the one before it is used. One that was made in memory (`snapshots`) is complete there already,
and is copied.

`RunState.write_checkpoint` (`run/state.py`) asks each part for its files and its state.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roll_like.cluster.guardian import TEMPORARY, copy_to_disk, publish
from roll_like.errors import CheckpointError, ConfigError, DiskFullError

_NAME = re.compile(r"step_(\d{6,})")
FORMAT = 1
MANIFEST = "manifest.json"
_DESCRIBES = (".json", ".yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: Its directory.
        step: How many steps were finished when it was written.
        state: What the driver's parts had to say, by part.
        healthy: Whether guards found nothing wrong with the policy.
    """

    path: Path
    step: int
    state: Mapping[str, Any]
    healthy: bool = True


#: Share of a run's time that checkpoints by the clock may take.
STALL_SHARE = 0.02


class CheckpointClock:
    """Says when a checkpoint is due by the clock.

    Args:
        minutes: Age of the last one; infinite for never, 0 for as often as `STALL_SHARE` lets.
        clock: Seconds, monotonic.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 60 * minutes
        self._clock = clock
        self._written = self._attempted = clock()
        #: How long the last attempt took. Seconds.
        self.stall = 0.0

    @property
    def age(self) -> float:
        """Seconds since the last one was written, or since the start: what would have to run again."""
        return self._clock() - self._written

    @property
    def due(self) -> bool:
        """Whether the last attempt is long enough ago, so that writing takes at most `STALL_SHARE` of the time."""
        since = self._clock() - self._attempted
        return since >= max(self._seconds, self.stall / STALL_SHARE)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Time an attempt to write one; it failed if the block raises."""
        began = self._clock()
        try:
            yield
            self._written = self._clock()
        finally:
            self._attempted = self._clock()
            self.stall = self._attempted - began

    def begin(self) -> None:
        """Note that one begins to be written while the run goes on."""
        self._attempted = self._clock()

    def written(self) -> None:
        """Note that it is on disk."""
        self._written = self._attempted


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: Annotated[int, Field(ge=0)]
    xxh3: str


class _Manifest(BaseModel):
    """What `manifest.json` holds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    step: Annotated[int, Field(ge=0)]
    score: float | None
    healthy: bool = True  # before guards there was no such key
    files: dict[str, _File]


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
        #: Told about what is passed over.
        self.warn = warn

    def write(
        self,
        step: int,
        save: Callable[[Path], None],
        state: Mapping[str, Any],
        *,
        score: float | None = None,
        healthy: bool = True,
    ) -> Path:
        """Write a checkpoint and return its directory; the run can be killed at any moment of it.

        Args:
            step: How many steps are finished.
            save: Writes the engines' files into the directory it is given.
            state: The driver's part, plain JSON.
            score: Evaluation score, for `best`.
            healthy: Whether the policy is one to go on from.

        Raises:
            DiskFullError: The disk is full or not writable; everything is as before.
            CheckpointError: The same, found by one of several ranks.
        """
        temporary = self.directory / f"{TEMPORARY}{checkpoint_name(step)}"
        with self._making_room(step, temporary):
            save_checkpoint(temporary, step, save, state, score=score, healthy=healthy)
            publish(temporary, self.directory / checkpoint_name(step))
        return self._written(step, score)

    def copy(self, snapshot: Path) -> Path:
        """Write a checkpoint that is complete in another directory; the run can be killed at any moment of it.

        Raises:
            DiskFullError: The disk is full or not writable; everything is as before.
        """
        manifest = _manifest(snapshot)
        target = self.directory / checkpoint_name(manifest.step)
        with self._making_room(manifest.step, self.directory / f"{TEMPORARY}{target.name}"):
            copy_to_disk(snapshot, target)
        return self._written(manifest.step, manifest.score)

    @contextmanager
    def _making_room(self, step: int, temporary: Path) -> Iterator[None]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._refuse_full_disk()
            yield
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise DiskFullError(
                f"the checkpoint of step {step} cannot be written to {self.directory}: {error.strerror or error}",
                fix="free disk space, lower checkpoint.keep, or set output_dir to another disk; then continue "
                "with --resume",
            ) from error

    def _written(self, step: int, score: float | None) -> Path:
        path = self.directory / checkpoint_name(step)
        if self._keep_best and score is not None:
            self._remember_best(path, score)
        self._prune()
        return path

    def latest(self, *, checksums: bool = True) -> Checkpoint | None:
        """Return the newest whole and healthy checkpoint, or None when there is none at all.

        Args:
            checksums: As for `read_checkpoint`.

        Raises:
            CheckpointError: There are checkpoints, and every one is damaged or unhealthy.
        """
        found = self._all()
        damaged = 0
        for path in reversed(found):
            try:
                checkpoint = read_checkpoint(path, checksums=checksums)
                if path.name != checkpoint_name(checkpoint.step):
                    raise CheckpointError(f"{path} holds the checkpoint of step {checkpoint.step}")
            except CheckpointError as error:
                if not path.is_dir():  # a run that goes on has removed it, and has written another one
                    return self.latest(checksums=checksums)
                damaged += 1
                self.warn(f"{error.message}; the checkpoint before it is used")
                continue
            if checkpoint.healthy:
                return checkpoint
            self.warn(
                f"{path} was written while a guard found the policy unhealthy (events.jsonl says why); the checkpoint "
                "before it is used"
            )
        if found:
            state = "damaged" if damaged == len(found) else "damaged or unhealthy" if damaged else "unhealthy"
            raise CheckpointError(
                f"every checkpoint in {self.directory} is {state}",
                fix="restore one from a backup, or start anew without --resume",
            )
        return None

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none."""
        return newest_step(self.directory)

    def _all(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir() if path.is_dir())
        return [path for _, path in sorted((int(name[1]), path) for name, path in found if name)]

    def _prune(self) -> None:
        best = self.directory / "best"
        kept = {path.resolve() for path in self._all()[-self._keep :]}
        if best.is_symlink():
            kept.add(best.resolve())
        healthy = next((path for path in reversed(self._all()) if _is_healthy(path)), None)
        if healthy is not None:
            kept.add(healthy.resolve())
        for path in self._all():
            if path.resolve() not in kept:
                # the rename makes the removal atomic: a half-removed checkpoint has no valid name
                outdated = path.rename(path.with_name(f"{TEMPORARY}old-{path.name}"))
                shutil.rmtree(outdated)

    def _remember_best(self, path: Path, score: float) -> None:
        if math.isnan(score):
            return
        best = self.directory / "best"
        if best.exists():
            try:
                known = _manifest(best).score
            except (OSError, ValueError):
                known = None
                self.warn(f"{best / MANIFEST} is damaged; {path.name} is the best checkpoint from now on")
            if known is not None and known >= score:
                return  # so NaN is not, which an older version may have kept
        _linked(self.directory, path.name).replace(best)

    def require_links(self) -> None:
        """Try what naming the best checkpoint needs, in the run's folder.

        Raises:
            ConfigError: The file system has no symbolic links.
        """
        if not self._keep_best:
            return
        try:
            _linked(self.directory.parent, checkpoint_name(0)).unlink()
        except OSError as error:
            raise ConfigError(
                f"{self.directory.parent} takes no symbolic link, which names the best checkpoint: {error.strerror}",
                fix="set checkpoint.keep_best: false, or output_dir to a folder of another file system",
            ) from error

    def _remove_leftovers(self) -> None:
        for path in self.directory.glob(f"{TEMPORARY}*"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)

    def _refuse_full_disk(self) -> None:
        """The last checkpoint's size says what the next one needs."""
        found = self._all()
        if not found:
            return
        needed = size_of(found[-1])
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise DiskFullError(
                f"a checkpoint takes {needed / 2**30:.1f} GiB, and {self.directory} has {free / 2**30:.1f} GiB free",
                fix="free disk space, lower checkpoint.keep, or set output_dir to another disk; then continue "
                "with --resume",
            )


def _linked(folder: Path, name: str) -> Path:
    """Return a new symbolic link in a folder, which replaces one that was left there."""
    link = folder / f"{TEMPORARY}best"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    return link


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step_{step:06d}"


def size_of(checkpoint: Path) -> int:
    """Return how many bytes a checkpoint's files hold."""
    return sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())


def save_checkpoint(
    directory: Path,
    step: int,
    save: Callable[[Path], None],
    state: Mapping[str, Any],
    *,
    score: float | None,
    healthy: bool,
) -> None:
    """Make a complete checkpoint in a directory that is not there yet; arguments as for `CheckpointStore.write`."""
    directory.mkdir()
    save(directory)
    (directory / "state.json").write_text(json.dumps(dict(state), indent=1))
    manifest = {
        "format": FORMAT,
        "step": step,
        "score": score,
        "healthy": healthy,
        "files": _describe(directory),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


def newest_step(directory: Path) -> int:
    """Return the step of the newest checkpoint in a run's `checkpoints` folder, 0 if there is none."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return max((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), default=0)


def require_checkpoint(path: Path) -> None:
    """Raise an error that names the checkpoints there are, where `path` is none.

    Raises:
        CheckpointError: There is no manifest in it.
    """
    if (path / MANIFEST).is_file():
        return
    for folder in (path.parent, path, path / "checkpoints"):
        if names := sorted(found.parent.name for found in folder.glob(f"*/{MANIFEST}")):
            raise CheckpointError(f"{path} is no checkpoint", fix=f"name one of those in {folder}: {', '.join(names)}")
    run = next((folder for folder in (path, *path.parents[:2]) if (folder / "config.yaml").is_file()), None)
    if run is None:
        raise CheckpointError(
            f"{path} is no checkpoint",
            fix="name a folder such as runs/NAME/checkpoints/step_000010, or checkpoints/best",
        )
    exported = f"its model after the last step is in {run / 'model'}; " * (run / "model" / "config.json").is_file()
    raise CheckpointError(
        f"{path} is no checkpoint: {run} has written none",
        fix=f"{exported}set checkpoint.every: N for checkpoints in a run of less than checkpoint.every_minutes",
    )


def _is_healthy(path: Path) -> bool:
    try:
        return _manifest(path).healthy
    except (OSError, ValueError):
        return False


def _manifest(path: Path) -> _Manifest:
    if not (path / MANIFEST).is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"there is no file {MANIFEST}")
    return _Manifest.model_validate_json((path / MANIFEST).read_text())


def read_checkpoint(path: Path, *, checksums: bool = True) -> Checkpoint:
    """Read a checkpoint's state after checking every file against the manifest. Nothing of it is run or unpickled.

    Args:
        checksums: Whether every file is read and its checksum compared; else sizes are, and the checksums of those
            files that say what it is (JSON and YAML), which takes milliseconds whatever the model's size.

    Raises:
        CheckpointError: Something is missing, was not written with it, is of another size, or has another checksum.
    """
    try:
        manifest = _manifest(path)
        there = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()} - {MANIFEST}
        strange = sorted(there.symmetric_difference(manifest.files))
        if strange:
            what = "is missing" if strange[0] in manifest.files else "was not written with it"
            raise CheckpointError(f"{path} is damaged: its file {strange[0]} {what}")
        for name, expected in manifest.files.items():
            file = path / name
            size = file.lstat().st_size
            if size != expected.bytes:
                raise CheckpointError(f"{file} has {size} bytes; {expected.bytes} were written")
            if (checksums or file.suffix in _DESCRIBES) and _checksum(file) != expected.xxh3:
                raise CheckpointError(f"{file} is damaged: its checksum differs from the manifest's")
        state = json.loads((path / "state.json").read_text())
        if not isinstance(state, dict):
            raise CheckpointError(f"{path / 'state.json'} holds {type(state).__name__}; an object was expected")
    except CheckpointError:
        raise
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise CheckpointError(
            f"{path / MANIFEST} is damaged: {f'{where}: ' if where else ''}{problem['msg']}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint: {error}") from error
    return Checkpoint(path=path, step=manifest.step, state=state, healthy=manifest.healthy)


def _describe(directory: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): {"bytes": path.stat().st_size, "xxh3": _checksum(path)} for path in files}


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
