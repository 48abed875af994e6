"""The folder of a run: which one it is, and that only one process writes into it."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll_like.config.run import RunConfig
from roll_like.errors import CheckpointError, ConfigError


def find_run(config: RunConfig, resume: str | None) -> tuple[Path, bool]:
    """Return the run's folder and whether it is continued.

    A new run never writes into an old one's folder: the name gets `-2`, `-3`, … A bare `--resume`
    continues the latest of them.

    Raises:
        ConfigError: The run to continue does not exist.
    """
    if resume:
        named = Path(resume) if Path(resume).is_dir() else config.output_dir / resume
        if not (named / "config.yaml").is_file():
            raise ConfigError(
                f"--resume {resume}: there is no run in {named}",
                fix=f"name one of: {', '.join(_runs(config.output_dir)) or 'none yet'}",
            )
        return named, True
    pattern = re.compile(rf"{re.escape(config.name)}(?:-(\d+))?")
    numbers = [int(match[1] or 1) for name in _runs(config.output_dir) if (match := pattern.fullmatch(name))]
    last = max(numbers, default=0)
    if resume == "" and last:
        return config.output_dir / (config.name if last == 1 else f"{config.name}-{last}"), True
    directory = config.output_dir / (config.name if last == 0 else f"{config.name}-{last + 1}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory, False


def _runs(output_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in output_dir.glob("*/config.yaml"))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a run's folder; the lock goes with the process, even a killed one.

    Raises:
        CheckpointError: Another process runs in it.
    """
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is running in {directory}", fix="wait for it, or choose another `name`"
            ) from error
        yield
