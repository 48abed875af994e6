"""The last finished step in memory, and its way to disk while the run goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from roll_like.cluster.limits import available_memory
from roll_like.errors import CheckpointError, DiskFullError
from roll_like.run.checkpoint import (
    Checkpoint,
    CheckpointClock,
    CheckpointStore,
    checkpoint_name,
    read_checkpoint,
    save_checkpoint,
    size_of,
)
from roll_like.run.folder import COPY_SECONDS

#: Of what a snapshot takes, how much has to be left: sizes vary a little.
MARGIN = 1.1


class Snapshots:
    """Keeps the newest state of a run in memory: complete as a checkpoint, in a file system that has no disk.

    What is trained goes on from it when a process dies, and a thread copies it to disk while the next steps run. It is
    taken as often as that costs at most `STALL_SHARE` of the time, and where memory holds two of its size.

    Args:
        directory: A folder in memory for them; None where there is none that all ranks see.
        durable: Whether one that is not on disk is brought there when the run fails.
        warn: Called with one sentence when that was not possible.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        directory: Path | None,
        store: CheckpointStore,
        *,
        durable: bool,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._store = store
        self._durable = durable
        self._warn = warn
        self._clock = CheckpointClock(0.0, clock)
        self._room = True
        self._bytes = 0
        self._newest: Checkpoint | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copying: tuple[Checkpoint, Future[Path]] | None = None

    @property
    def stall(self) -> float:
        """Seconds that the last one kept the run waiting."""
        return self._clock.stall

    @property
    def due(self) -> bool:
        """Whether the last one is long enough ago, so that taking them costs at most `STALL_SHARE` of the time."""
        return self._directory is not None and self._room and self._clock.due

    def newest(self) -> Checkpoint | None:
        """Return the newest one, after checking it as one on disk; None if there is none.

        Raises:
            CheckpointError: It is damaged.
        """
        return None if self._newest is None else read_checkpoint(self._newest.path)

    def take(
        self,
        step: int,
        save: Callable[[Path], None],
        state: Mapping[str, Any],
        *,
        score: float | None,
        expected: Callable[[], int],
    ) -> bool:
        """Keep the state of a step, in place of the one before; return False where memory has no room.

        Args:
            step: How many steps are finished.
            save: Writes the engines' files into the directory it is given.
            state: The driver's part, plain JSON.
            score: Evaluation score, for the best checkpoint.
            expected: Returns about how many bytes the first one takes.

        Raises:
            CheckpointError: One of several ranks could not write.
        """
        if self._newest is not None and self._newest.step == step:
            return True
        if self._directory is None or not self._room or not self._has_room(self._directory, expected):
            return False
        self._directory.mkdir(parents=True, exist_ok=True)
        target, unfinished = self._directory / checkpoint_name(step), self._directory / "unfinished"
        try:
            with self._clock.attempt():
                shutil.rmtree(unfinished, ignore_errors=True)  # of a rank that died while it wrote
                save_checkpoint(unfinished, step, save, state, score=score, healthy=True)
                unfinished.rename(target)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, CheckpointError) and not isinstance(error, DiskFullError):
                raise
            self._room = False  # there was too little in spite of the check: from now on only the disk is written to
            return False
        self._newest = Checkpoint(path=target, step=step, state=state)
        self._bytes = size_of(target)
        self._drop_older()
        return True

    def copy(self) -> None:
        """Begin to copy the newest one to disk, unless a copy is under way."""
        if self._copying is None and self._newest is not None:
            self._copying = (self._newest, self._thread.submit(self._store.copy, self._newest.path))

    def copied(self, *, wait: bool = False) -> int | None:
        """Return the step of a copy that has ended since the last call; None if there is none.

        Args:
            wait: Whether to wait for one that is under way.

        Raises:
            DiskFullError: The copy failed; what is on disk is as before.
            CheckpointError: It did not end in time.
        """
        if self._copying is None or not (wait or self._copying[1].done()):
            return None
        (checkpoint, copy), self._copying = self._copying, None
        try:
            copy.result(COPY_SECONDS)
        except TimeoutError:
            raise CheckpointError(
                f"the checkpoint of step {checkpoint.step} did not come to {self._store.directory} within "
                f"{COPY_SECONDS / 60:.0f} minutes",
                fix="see whether the disk answers; the run continues with --resume",
            ) from None
        finally:
            self._drop_older()
        return checkpoint.step

    def close(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove them. Where the run failed and checkpoints are written, the newest is on disk before that."""
        del kind, at
        try:
            self.copied(wait=True)
            newest = self._newest
            if error is not None and self._durable and newest is not None and newest.step > self._store.newest_step():
                self.copy()
                self.copied(wait=True)
        except CheckpointError as failed:
            if error is None:
                raise
            self._warn(failed.message)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
            self._newest = None

    def _has_room(self, directory: Path, expected: Callable[[], int]) -> bool:
        """Return whether memory holds two: one that is whole, and the next one or the one that is copied."""
        held = len(self._held())
        if held == 2:
            return False
        if not self._bytes:
            self._bytes = expected()
        parent = next(each for each in directory.parents if each.exists())
        free = min(shutil.disk_usage(parent).free, available_memory() // 2)  # half is left to everything else
        return free >= (2 - held) * MARGIN * self._bytes

    def _held(self) -> set[Path]:
        """Return the newest one and the one that is copied, which may be the same."""
        copying = None if self._copying is None else self._copying[0]
        return {each.path for each in (self._newest, copying) if each is not None}

    def _drop_older(self) -> None:
        held = self._held()
        for path in [] if self._directory is None else self._directory.iterdir():
            if path not in held:
                shutil.rmtree(path)
