"""Models that are made from others once, and kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from roll_like.errors import ConfigError


def made_once(name: str, make: Callable[[Path], object], cache_dir: Path | None) -> Path:
    """Return the directory of a model, making it at the first call.

    Two processes may ask at once: one makes it, the other waits and takes the result.

    Args:
        name: Name of the directory; says what it is made of, so that equal names mean equal models.
        make: Writes the model into the directory that it is given, all of it or nothing.
        cache_dir: Default: `~/.cache/roll_like`.

    Raises:
        ConfigError: The cache directory cannot be made.
    """
    from filelock import FileLock

    models = (cache_dir or Path.home() / ".cache" / "roll_like").expanduser().resolve() / "models"
    target = models / name
    if target.is_dir():
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder for converted models {models} cannot be made: {error}",
            fix="set model.cache_dir to a folder that can be written",
        ) from error
    with FileLock(str(target) + ".lock"):
        if not target.is_dir():
            for left_over in models.glob(f".{target.name}.*"):  # of a process that was killed
                shutil.rmtree(left_over)
            make(target)
    return target
