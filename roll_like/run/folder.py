"""The folder of a run: which one it is, and that only one process writes into it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import IO, TypeVar

import yaml

from roll_like.config.run import RunConfig
from roll_like.errors import CheckpointError, ConfigError
from roll_like.metrics import files

RunConfigT = TypeVar("RunConfigT", bound=RunConfig)

#: How long a checkpoint may take from memory to disk, for those that wait for it. Seconds.
COPY_SECONDS = 1800.0
#: How long the lock of a killed process is waited for: what it started is ended, and its newest checkpoint may still be
#: on its way to disk. Seconds.
CLEARING_SECONDS = COPY_SECONDS + 300.0
#: After how long the reason for the wait is said. Seconds.
SILENT_SECONDS = 10.0
#: `--resume auto`.
AUTO = "auto"


def resolve_run_folder(config: RunConfig, resume: str | None) -> tuple[Path, bool]:
    """Return the run's folder and whether it is continued.

    A new run never writes into an old one's folder: the name gets `-2`, `-3`, …

    Args:
        resume: None starts anew; "" and `AUTO` continue the latest of that name, or start the first; else the run to
            continue, by its name or folder.

    Raises:
        ConfigError: The run to continue does not exist.
    """
    directory, resumed = next_run(config, resume)
    directory.mkdir(parents=True, exist_ok=True)
    return directory, resumed


def next_run(config: RunConfig, resume: str | None) -> tuple[Path, bool]:
    """Return the same without making the folder."""
    if (named := require_run(config, resume)) is not None:
        return named, True
    last = _latest(config)
    if resume is not None and last:
        return _folder(config, last), True
    return _folder(config, last + 1), False


def as_begun(config: RunConfigT, resume: str | None) -> RunConfigT:
    """Return the configuration with what the run that it continues had measured and looked up: precision and date.

    Another machine may compute fastest in another precision, and templates that write the date give other prompts on
    another day; the numbers of a run stay its own. What the configuration states stays, too.
    """
    directory, resumed = next_run(config, resume)
    if not resumed:
        return config
    was = yaml.safe_load((directory / "config.yaml").read_text())
    begun, stated = was["model"], config.model
    values = {
        "dtype": begun["dtype"] if stated.dtype == "auto" else stated.dtype,
        "date": date.fromisoformat(begun["date"]) if stated.date is None and "date" in begun else stated.date,
    }
    return config.model_copy(update={"model": stated.model_copy(update=values)})


def announcement(config: RunConfig, resume: str | None) -> str:
    """Return in which folder a run will be, and how to follow it.

    Raises:
        ConfigError: The run to continue does not exist.
    """
    directory, resumed = next_run(config, resume)
    renamed = directory.name != config.name and not resumed
    why = f" ({config.runs_dir / config.name} exists)" if renamed else ""
    return f"{'continuing' if resumed else 'run'} {directory}{why}; follow it with: roll-like watch {directory}"


def require_run(config: RunConfig, resume: str | None) -> Path | None:
    """Return the folder of the run that is named; None where none is.

    Raises:
        ConfigError: It does not exist.
    """
    if resume is None or resume in ("", AUTO):
        return None
    named = Path(resume) if Path(resume).is_dir() else config.runs_dir / resume
    if not (named / "config.yaml").is_file():
        runs = _runs(config.runs_dir)
        raise ConfigError(
            f"--resume {resume}: there is no run in {named}",
            fix=f"name one of: {', '.join(runs)}"
            if runs
            else f"{config.runs_dir} holds no runs yet: leave --resume out, or set output_dir to where the run is",
        )
    return named


def latest_run(config: RunConfig) -> Path | None:
    """Return the folder of the latest run of this name, or None."""
    last = _latest(config)
    return _folder(config, last) if last else None


def is_finished(directory: Path, config: RunConfig) -> bool:
    """Return whether a run has taken all steps of a configuration and ended well."""
    events, runs = files.read_jsonl(directory / files.EVENTS), files.read_jsonl(directory / files.RUN)
    if not events or not runs or (events[-1]["kind"], events[-1].get("status")) != ("end", "finished"):
        return False
    steps = getattr(config, "steps", None)  # None where epochs say how many
    return steps is None or runs[0]["total_steps"] >= steps


def _latest(config: RunConfig) -> int:
    pattern = re.compile(rf"{re.escape(config.name)}(?:-(\d+))?")
    numbers = [int(match[1] or 1) for name in _runs(config.runs_dir) if (match := pattern.fullmatch(name))]
    return max(numbers, default=0)


def _folder(config: RunConfig, number: int) -> Path:
    return config.runs_dir / (config.name if number == 1 else f"{config.name}-{number}")


def _runs(output_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in output_dir.glob("*/config.yaml"))


@contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold a run's folder; the lock goes with the process, even a killed one. Yield the descriptor of its file.

    What clears up after a killed process holds its lock until that is done, and is waited for.

    Raises:
        CheckpointError: Another process runs in it.
    """
    with (directory / files.LOCK).open("a+") as file:
        began, silent = time.monotonic(), True
        while not _taken(file):
            holder, _, machine = _content(file).partition(" ")
            here = machine in ("", socket.gethostname())
            alive = not here or not holder.isdigit() or Path("/proc", holder).exists()
            if alive or time.monotonic() > began + CLEARING_SECONDS:
                raise CheckpointError(
                    f"another process is running in {directory}" + ("" if here else f", on {machine}"),
                    fix="wait for it, or choose another `name`",
                )
            if silent and time.monotonic() > began + SILENT_SECONDS:
                silent = False
                print(
                    f"waiting for what process {holder} left in {directory}: its newest checkpoint is written to disk",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}")
        file.flush()
        yield file.fileno()


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # ENOLCK, EOPNOTSUPP, ENOSYS
        raise ConfigError(
            f"{file.name} cannot be locked: {error.strerror}; two runs could write into one folder",
            fix="set output_dir to a folder of a file system with locks, such as a local disk",
        ) from error
    return True


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()
