"""Runs an agent program in a container of Docker or Podman; `apptainer.py` in one of Apptainer.

The container has a network namespace of its own, in which the policy's endpoint is reachable at 127.0.0.1: a short
process enters the namespace, listens there, and hands the listening socket to the run. So no address of this machine
has to be reachable from the container, and with `network: none` nothing else is.

The container's shell waits for a line before it starts the program, which is sent when the endpoint listens. Images
need `sh`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from urllib.parse import urlsplit

from roll_like.agents.proxy import BACKLOG, Proxy
from roll_like.cluster.guardian import MARKER
from roll_like.config.containers import ContainerConfig
from roll_like.errors import EnvError

#: Longest start of a container, and longest command of an engine. Seconds.
START_SECONDS = 60.0
#: How long an engine may take to make a container whose command has been killed. Seconds.
SETTLE_SECONDS = 3.0
#: How often an engine is asked whether a container has started. Seconds.
POLL_SECONDS = 0.05
#: What a container's shell does: it waits for a line, then becomes the program.
WAIT = 'read -r _ && exec "$@"'
#: The label of the run that a container is of.
LABEL = "roll-like.run"
_LISTEN = """
import socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen(int(sys.argv[2]))
socket.send_fds(socket.socket(fileno=int(sys.argv[3])), [b"listening"], [listener.fileno()])
"""


class Container:
    """One container, for one episode.

    Args:
        name: Of the container; unique on this machine.
        folder: Where the engine's command is started; Podman leaves notes of killed programs there.
    """

    def __init__(self, spec: ContainerConfig, name: str, proxy: Proxy, folder: str) -> None:
        self._spec = spec
        self._name = name
        self._proxy = proxy
        self.folder = folder
        self._ran = False

    @property
    def base_url(self) -> str:
        """Where programs in it find the policy, `/v1` included."""
        if self._spec.network == "host":
            return self._proxy.base_url
        return f"http://127.0.0.1:{urlsplit(self._proxy.base_url).port}/v1"

    def command(
        self, command: Sequence[str], directory: str | None, variables: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the engine's command that runs a program in it, and that command's environment variables.

        Args:
            directory: Where the program is started in the container; None: where the image says.
        """
        spec, variables = self._spec, self._unproxied(variables)
        options = [f"--name={self._name}", "--rm", "--interactive", "--pull=never", f"--network={spec.network}"]
        options.append(f"--label={LABEL}={os.environ.get(MARKER, '')}")  # the guardian removes what a killed run leaves
        # values are in no command line, but for those that would change the engine's own environment
        theirs = {name: value for name, value in variables.items() if name not in os.environ}
        options += [f"--env={name}" if name in theirs else f"--env={name}={variables[name]}" for name in variables]
        options += [f"--volume={mount}" for mount in map(absolute_mount, spec.mounts)]
        if directory is not None:
            options.append(f"--workdir={directory}")
        options += limit_options(spec)
        start = ["--entrypoint=sh", spec.image, "-c", WAIT, "sh", *command]
        return [spec.type, "run", *options, *spec.options, *start], {**os.environ, **theirs}

    def _unproxied(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return variables with which the policy is asked directly: there may be a network proxy."""
        host = urlsplit(self.base_url).hostname
        names = ("NO_PROXY", "no_proxy")
        return {**variables, **{name: ",".join(filter(None, (variables.get(name), host))) for name in names}}

    @contextlib.asynccontextmanager
    async def serving(self, process: asyncio.subprocess.Process) -> AsyncIterator[None]:
        """Let its program begin, and answer its requests meanwhile.

        Args:
            process: What `command` started, with a pipe to its standard input.

        Raises:
            EnvError: It does not start, or its namespace cannot be entered.
        """
        async with contextlib.AsyncExitStack() as stack:
            pid = await self._started(process)
            if pid is not None:  # else it has ended, and its output says why
                if self._spec.network != "host":
                    await stack.enter_async_context(self._proxy.listening(await self._listener(pid)))
                assert process.stdin is not None
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(b"\n")
                    await process.stdin.drain()
                process.stdin.close()
            yield

    @classmethod
    async def problem(cls, spec: ContainerConfig) -> tuple[str, str] | None:
        """Return the key of what keeps a container from running, and why; None where nothing is found."""
        code, _, said = await run_engine(spec, "image", "inspect", spec.image)
        if code:
            return "image", f"{spec.type} has no image {spec.image!r}: {said}; pull or build it, runs do not"
        if spec.type == "podman" and os.geteuid() != 0:
            code, found, _ = await run_engine(spec, "info", "--format={{.Host.CgroupsVersion}}")
            for key in ("memory_gib", "cpus"):
                if found == "v1" and getattr(spec, key) is not None:
                    return key, "rootless Podman ignores it here, as the kernel has control groups v1; remove it"
        return None

    async def remove(self) -> None:
        """Remove the container and everything that runs in it.

        Raises:
            EnvError: The engine says that it cannot.
        """
        await run_engine(self._spec, "kill", self._name)
        until = time.monotonic() + START_SECONDS
        # one that was never seen may still be made, by an engine that has been asked for it
        settled = time.monotonic() + (0.0 if self._ran else SETTLE_SECONDS)
        while True:
            code, _, said = await run_engine(self._spec, "rm", "--force", "--volumes", self._name)
            gone = code == 0 or re.search("no such container|no container with", said, re.IGNORECASE)
            if gone and time.monotonic() > settled:
                return
            if time.monotonic() > until:
                raise EnvError(f"the container {self._name} could not be removed: {said}", fix="remove it by hand")
            await asyncio.sleep(POLL_SECONDS)  # Docker says so while it removes one itself

    async def _started(self, process: asyncio.subprocess.Process) -> int | None:
        """Wait until it runs; return a process in it, as this machine numbers it, or None if it ended."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while process.returncode is None:
                    if (pid := await self._process_inside(process)) is not None:
                        return pid
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError as error:
            raise EnvError(
                f"a container of {self._spec.image!r} did not start within {START_SECONDS:g} s",
                fix=f"look whether {self._spec.type} works: run the image by hand",
            ) from error
        return None

    async def _process_inside(self, process: asyncio.subprocess.Process) -> int | None:
        """Return a process in it, as this machine numbers it; None where there is none yet."""
        del process
        code, found, _ = await run_engine(self._spec, "inspect", "--format={{.State.Pid}}", self._name)
        if code != 0 or not (pid := int(found)):
            return None
        self._ran = True
        return pid

    async def _listener(self, pid: int) -> socket.socket:
        """Return a socket that listens in the network namespace of a process."""
        ours, theirs = socket.socketpair()
        # who is not root may enter the namespaces of containers that are its own
        joined = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        port = urlsplit(self.base_url).port
        arguments = [sys.executable, "-I", "-S", "-c", _LISTEN, str(port), str(BACKLOG), str(theirs.fileno())]
        with ours, theirs:
            entering = await asyncio.create_subprocess_exec(
                "nsenter",
                f"--target={pid}",
                "--net",
                *joined,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
            _, said = await entering.communicate()
            if entering.returncode:
                raise EnvError(
                    f"the policy cannot be reached from a container: its network cannot be entered: "
                    f"{said.decode(errors='replace').strip()[-500:]}",
                    fix="use rootless Podman or Apptainer, start the run as root, or set `program.runtime.network` to "
                    "`host`",
                )
            _, (descriptor,), _, _ = socket.recv_fds(ours, 16, 1)
        return socket.socket(fileno=descriptor)


async def run_engine(spec: ContainerConfig, *arguments: str) -> tuple[int, str, str]:
    """Run a command of a container's engine; return its status and what it wrote.

    One that does not end is killed, and has a status below 0.
    """
    process = await asyncio.create_subprocess_exec(
        spec.type,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            out, said = await process.communicate()
    except TimeoutError:
        return -1, "", f"`{spec.type} {arguments[0]}` did not end within {START_SECONDS:g} s"
    finally:
        if process.returncode is None:  # what it started holds its pipes
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode or 0, out.decode(errors="replace").strip(), said.decode(errors="replace").strip()


def limit_options(spec: ContainerConfig) -> list[str]:
    """Return the options of a container's limits, which all engines call the same. Memory is in bytes."""
    options = []
    if spec.memory_gib is not None:
        memory = round(spec.memory_gib * 2**30)
        options += [f"--memory={memory}", f"--memory-swap={memory}"]
    if spec.cpus is not None:
        options.append(f"--cpus={spec.cpus:g}")
    return options


def absolute_mount(mount: str) -> str:
    """Return a mount with its folder from the root on, read-only unless it says otherwise.

    >>> absolute_mount("/data:/data"), absolute_mount("/out:/out:rw")
    ('/data:/data:ro', '/out:/out:rw')
    """
    source, target, *how = mount.split(":")
    return ":".join([os.path.abspath(os.path.expanduser(source)), target, *(how or ["ro"])])
