"""The section `program.runtime` of an environment: the container that an agent program runs in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from roll_like.config.base import ConfigModel, PositiveFloat, Violation


class ContainerConfig(ConfigModel):
    """The container that a program runs in: `sh` has to be in its image, and the program."""

    type: Literal["docker", "podman", "apptainer"] = Field(description="The engine that runs it.")
    image: str = Field(
        description="What it is made from; runs use it as it is on this machine, and pull none. For Apptainer a SIF "
        "file or a folder."
    )
    mounts: tuple[str, ...] = Field(
        default=(), description="Folders of this machine in it: `source:target`, read-only, or `source:target:rw`."
    )
    network: str = Field(
        default="none",
        description="`none`: only the policy can be reached. `bridge`, or another network of the engine: that and the "
        "policy. `host`: this machine's network. Apptainer has `none` and `host`.",
    )
    memory_gib: PositiveFloat | None = Field(
        default=None, description="Most memory; default: no limit. GiB. A program that needs more is killed."
    )
    cpus: PositiveFloat | None = Field(default=None, description="Most processors; default: no limit.")
    options: tuple[str, ...] = Field(
        default=(), description="Further options of the engine's `run` (Apptainer's `exec`), such as `--user=1000`."
    )

    def violations(self, path: tuple[str | int, ...]) -> Iterator[Violation]:
        """Yield what an engine does not take."""
        if self.type == "apptainer" and self.network not in ("none", "host"):
            yield Violation((*path, "network"), f"found {self.network!r}; with Apptainer expected `none` or `host`")
        for index, mount in enumerate(self.mounts):
            if re.fullmatch(r"[^:]+:/[^:]*(:(ro|rw))?", mount) is None:
                text = (
                    f"found {mount!r}; expected `source:target` with a target from the root on, or `source:target:rw`"
                )
                yield Violation((*path, "mounts", index), text)
