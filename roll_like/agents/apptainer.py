"""Runs an agent program in a container of Apptainer.

Apptainer has no daemon and keeps no containers: one is a tree of processes, and ends with the first of them. What it
writes is in the episode's folder: by what they have mounted, the guardian finds the processes of a killed run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll_like.agents.container import WAIT, Container, absolute_mount, limit_options, run_engine
from roll_like.cluster.guardian import remove_folder
from roll_like.config.containers import ContainerConfig

#: Nothing of this machine is in it that is not named: no variables, folders or processes.
CONTAINED = ("--cleanenv", "--containall", "--no-eval", "--no-mount=cwd,hostfs,bind-paths")
#: The folder for what a container writes outside of its mounts, `/tmp` and its home.
OVERLAY = "overlay"
#: With this name before theirs, variables are the container's.
PREFIX = "APPTAINERENV_"


class ApptainerContainer(Container):
    """One container, for one episode; its image is a file or a folder."""

    def command(
        self, command: Sequence[str], directory: str | None, variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs a program in it, and that command's environment variables."""
        theirs = self._unproxied(variables)
        if "HOME" in theirs:  # of this name Apptainer takes none
            command = ["env", f"HOME={theirs.pop('HOME')}", *command]
        options = _options(self._spec, self.folder)
        if directory is not None:
            options.append(f"--pwd={directory}")
        start = [os.path.expanduser(self._spec.image), "sh", "-c", WAIT, "sh", *command]
        return [self._spec.type, "exec", *options, *start], {
            **os.environ,
            **{PREFIX + name: value for name, value in theirs.items()},
        }

    @classmethod
    async def problem(cls, spec: ContainerConfig) -> tuple[str, str] | None:
        """Return the key of what keeps a container from running, and why; None where nothing is found."""
        image = os.path.expanduser(spec.image)
        if not os.path.exists(image):
            return "image", f"found {spec.image!r}; expected a SIF file or a folder of this machine; runs pull nothing"
        with tempfile.TemporaryDirectory(prefix="roll-") as folder:
            options = _options(spec, folder)
            code, _, said = await run_engine(spec, "--quiet", "exec", *options, image, "sh", "-c", "true")
            remove_folder(Path(folder, OVERLAY))
        if code:
            limits = (key for key in ("memory_gib", "cpus") if getattr(spec, key) is not None and "cgroups" in said)
            return next(limits, "type"), f"a container of {spec.image!r} does not start: {said[-500:]}"
        return None

    async def remove(self) -> None:
        """Do nothing: it has ended with its first process."""

    async def _process_inside(self, process: asyncio.subprocess.Process) -> int | None:
        """Return a process in the network that is entered; None where there is none yet."""
        return process.pid if self._spec.network == "host" else _inside(process.pid)


def _options(spec: ContainerConfig, folder: str) -> list[str]:
    """Return the options of `apptainer exec` for a container, and make what they need in its folder.

    What it writes is there, not in memory: of that Apptainer gives it 64 MiB.
    """
    Path(folder, OVERLAY).mkdir()
    options = [*CONTAINED, f"--workdir={folder}", f"--overlay={folder}/{OVERLAY}"]
    options += ["--net", "--network=none"] if spec.network == "none" else []
    options += [f"--bind={mount}" for mount in map(absolute_mount, spec.mounts)]
    return [*options, *limit_options(spec), *spec.options]


def _inside(pid: int) -> int | None:
    """Return a child of a process that has a network of its own; None where there is none yet."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return next((int(each) for each in children if _network(each) != _network("self")), None)
    except OSError:  # it ended meanwhile
        return None


def _network(process: str) -> str:
    return os.readlink(f"/proc/{process}/ns/net")
