"""What runs and services have: a name, a folder and a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from roll_like.config.base import ConfigModel
from roll_like.config.model import ModelConfig

#: What a folder may be called.
NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$"


def known_home(path: Path) -> Path:
    """Return a path as it is.

    Raises:
        ValueError: The home that its `~` means is not known.
    """
    if os.path.expanduser(path).startswith("~"):
        raise ValueError(f"the home in {path} is not known; write the path in full")
    return path


class NamedConfig(ConfigModel):
    """Base of the configurations of runs and services."""

    name: str = Field(default="run", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    output_dir: Annotated[Path, AfterValidator(known_home)] = Field(
        default=Path("runs"), description="Folder of runs; this one is `output_dir/name`."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=0, description="Seed of data order, sampling and training."
    )
    import_: tuple[str, ...] = Field(
        default=(), alias="import", description="Modules to import first; they register plugins."
    )
    model: ModelConfig

    @property
    def runs_dir(self) -> Path:
        """The folder of runs on this machine: `output_dir` with `~` replaced."""
        return self.output_dir.expanduser()
