"""Plays an episode by running a program: an agent that gets a base URL and an API key.

The program is started in a session of its own, with these environment variables:

    OPENAI_BASE_URL, OPENAI_API_KEY    address and key of the policy; OpenAI's clients read them
    ROLL_LIKE_SEED                     the same for all members of a group
    ROLL_LIKE_TASK                     JSON: name, seed, and the environment's messages; also served at GET /task
    ROLL_LIKE_EPISODE                  unique; processes that have it are killed when the program ends

It exits by itself, or is killed: at its deadline, when the episode fails or is cancelled, and a little after it has
reported the end. Its child processes are killed with it. A program that fails is an `EnvError`: counted, never
trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from roll_like.agents.apptainer import ApptainerContainer
from roll_like.agents.container import Container
from roll_like.agents.episode import EnvironmentPool, EnvironmentSpec, EpisodeSettings, ProgramSpec
from roll_like.agents.proxy import Proxy
from roll_like.agents.proxy_episode import ProxyEpisode
from roll_like.cluster.guardian import remove_folder, sweep, temporary_folder
from roll_like.config.containers import ContainerConfig
from roll_like.data.chat import ChatMessage
from roll_like.errors import ConfigError, EnvError
from roll_like.types import Scored

#: How long a program may go on after it reported the end of its episode. Seconds.
LINGER_SECONDS = 10.0
#: The end of a program's output that is kept. Bytes.
KEPT_OUTPUT = 8192
#: How often a pipe is read after its program ended, in case a process that was not killed still writes to it.
MOST_READS = 32
#: Longest `ROLL_LIKE_TASK`: Linux takes no more than 128 KiB in one variable. Bytes.
MAX_TASK_BYTES = 100_000
#: Status of an engine's command whose container's program was killed, as for its memory.
KILLED = 137
EPISODE_VARIABLE = "ROLL_LIKE_EPISODE"


class _Closable(Protocol):
    async def close(self) -> None: ...


_ClosableT = TypeVar("_ClosableT", bound=_Closable)


class AgentPrograms:
    """Runs agent programs, at most `max_programs` of each at a time.

    Args:
        proxy: Started; serves the policy to programs.
        environments: Hosts the environments that score answers; None if there are none.
    """

    def __init__(self, proxy: Proxy, environments: EnvironmentPool | None = None) -> None:
        self._proxy = proxy
        self._environments = environments
        self._room: dict[str, asyncio.Semaphore] = {}

    async def play(self, spec: ProgramSpec, settings: EpisodeSettings) -> Scored:
        """Play one episode to its end and return it with its reward.

        Raises:
            EnvError: The program or its environment failed.
            SampleLost: An answer could not be sampled.
            GenerationError: No replica is left.
        """
        async with self._room.setdefault(spec.name, asyncio.Semaphore(spec.max_programs)):
            if spec.environment is None:
                async with _closing(self._open(spec, settings)) as episode:
                    await self._run(spec, episode)
                    if episode.truncated and not episode.rewarded and episode.turns and spec.limit_reward is not None:
                        episode.add_reward(spec.limit_reward, None)
                    return episode.scored()
            return await self._play_in_environment(spec, spec.environment, settings)

    async def _play_in_environment(
        self, spec: ProgramSpec, environment_spec: EnvironmentSpec, settings: EpisodeSettings
    ) -> Scored:
        if self._environments is None:
            raise ConfigError(f"the program {spec.name!r} has an environment, and there is nothing to host it")
        async with _closing(self._environments.open(environment_spec)) as environment:
            started = await environment.reset(settings.seed)
            if started.agent:
                raise EnvError(
                    f"the environment {environment_spec.env_id!r} has several agents; only one that scores a single "
                    "answer can score a program",
                    fix="take another `id`, or remove `program`, so that the policy plays all of them",
                )
            async with _closing(self._open(spec, settings, started.messages)) as episode:
                await self._run(spec, episode)
                if episode.error is None and episode.turns:
                    stepped = await environment.step(episode.final)
                    if not (stepped.terminated or stepped.truncated):
                        raise EnvError(
                            f"the environment {environment_spec.env_id!r} did not end with the answer; only one that "
                            "scores a single answer can score a program",
                            fix="take another `id`, or none, and let the program post its reward",
                        )
                    episode.add_reward(stepped.reward, stepped.success)
                return episode.scored()

    def _open(
        self, spec: ProgramSpec, settings: EpisodeSettings, shown: Sequence[ChatMessage] | None = None
    ) -> ProxyEpisode:
        return self._proxy.open(settings, shown, reasoning_apart=spec.reasoning_apart, models=spec.models)

    async def _run(self, spec: ProgramSpec, episode: ProxyEpisode) -> None:
        mark = secrets.token_hex(16)
        if spec.container is None:
            await _run_program(spec, episode, mark, None)
            return
        folder = temporary_folder(mark)
        try:
            kind = container_class(spec.container)
            container = kind(spec.container, f"roll-like-{mark}", self._proxy, str(folder))
            await _run_program(spec, episode, mark, container)
        finally:
            await uncancelled(asyncio.to_thread(remove_folder, folder))


async def _run_program(spec: ProgramSpec, episode: ProxyEpisode, mark: str, container: Container | None) -> None:
    """Run a program until it exits, its episode ends, or its deadline.

    Raises:
        EnvError: It cannot be started, took too long, or failed.
    """
    what = f"the program `{shlex.join(spec.command)}`"
    code, late = None, False
    command: Sequence[str] = spec.command
    told, cwd = _told(spec, episode, mark), spec.directory
    if container is None:
        variables = _environment(spec, episode, told)
    else:
        command, variables = container.command(command, cwd, {**told, "OPENAI_BASE_URL": container.base_url})
        cwd = container.folder
    with OutputTail("stderr") as stderr, OutputTail("stdout") as stdout:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL if container is None else asyncio.subprocess.PIPE,
                stdout=stdout.write_end,
                stderr=stderr.write_end,
                cwd=cwd,
                env=variables,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise EnvError(f"{what} cannot be started: {error}", fix="correct `program.command`") from error
        try:
            async with asyncio.timeout(spec.timeout_seconds), _serving(container, process):
                code = await _ended(process, episode)
        except TimeoutError:
            late = not episode.over
        finally:
            await uncancelled(_end(process, mark, container))
        details = f", with {episode.turns} turns taken{_quoted(stderr, stdout)}"
    if late:
        raise EnvError(
            f"{what} did not end within {spec.timeout_seconds:g} s{details}",
            fix="raise `program.timeout_seconds`, or end the program sooner",
        )
    # a program that was refused another turn may fail because of that; the policy used up the limit
    if code and episode.error is None and not episode.truncated:
        raise EnvError(
            f"{what} ended with status {code}{details}",
            fix="raise `program.runtime.memory_gib`, or have it need less memory"
            if code == KILLED and spec.container is not None and spec.container.memory_gib is not None
            else "correct the program; `docs/agents.md` shows how to run it by hand",
        )


def container_class(spec: ContainerConfig) -> type[Container]:
    """Return what runs containers of a kind."""
    return ApptainerContainer if spec.type == "apptainer" else Container


async def container_problem(spec: ContainerConfig) -> tuple[str, str] | None:
    """Return the key of what keeps a container from running, and why; None where nothing is found."""
    if shutil.which(spec.type) is None:
        return "type", f"there is no {spec.type!r} on this machine; install it, or set another one"
    if spec.network != "host" and shutil.which("nsenter") is None:
        return "network", f"{spec.network!r} needs the program `nsenter` of util-linux; install it, or use `host`"
    return await container_class(spec).problem(spec)


def search_path() -> str:
    """Return where programs are looked for: beside the run's own Python first."""
    return os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))))


def found_program(spec: ProgramSpec) -> str | None:
    """Return the file that a program's command names, or None where there is none that can be run."""
    name = spec.command[0]
    if os.sep in name:
        return shutil.which(os.path.join(spec.directory or os.curdir, name))
    return shutil.which(name, path=spec.env.get("PATH", search_path()))


def _told(spec: ProgramSpec, episode: ProxyEpisode, mark: str) -> dict[str, str]:
    """Return what a program is told in environment variables, wherever it runs."""
    told = {
        **spec.env,
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.key,
        "ROLL_LIKE_SEED": str(episode.settings.seed),
        EPISODE_VARIABLE: mark,
    }
    task = json.dumps(episode.about)
    return told if len(task) > MAX_TASK_BYTES else {**told, "ROLL_LIKE_TASK": task}


def _environment(spec: ProgramSpec, episode: ProxyEpisode, told: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a program on this machine."""
    variables = {**os.environ, **told}
    if "PATH" not in spec.env:  # as in an activated environment
        variables["PATH"] = search_path()
    for name in ("NO_PROXY", "no_proxy"):  # requests to the run must not go through a network proxy
        variables[name] = ",".join(filter(None, (variables.get(name), urlsplit(episode.base_url).hostname)))
    return variables


def _serving(
    container: Container | None, process: asyncio.subprocess.Process
) -> contextlib.AbstractAsyncContextManager[None]:
    return contextlib.nullcontext() if container is None else container.serving(process)


async def _ended(process: asyncio.subprocess.Process, episode: ProxyEpisode) -> int | None:
    """Wait for a program, or for its episode and then a little for the program; return its status if it has one."""
    exited, over = asyncio.ensure_future(process.wait()), asyncio.ensure_future(episode.finished())
    try:
        await asyncio.wait({exited, over}, return_when=asyncio.FIRST_COMPLETED)
        if episode.error is None:
            await asyncio.wait({exited}, timeout=LINGER_SECONDS)
        return exited.result() if exited.done() else None
    finally:
        exited.cancel()
        over.cancel()
        await asyncio.gather(exited, over, return_exceptions=True)


async def _end(process: asyncio.subprocess.Process, mark: str, container: Container | None) -> None:
    """End a program and everything that it started."""
    # processes that inherited the mark, in any session; then the rest of the group, which may have unset it
    await asyncio.to_thread(sweep, mark, name=EPISODE_VARIABLE, patience=0.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    if container is not None:  # only now: what starts one has ended
        await container.remove()


class OutputTail:
    """Reads a program's output as it comes and keeps its end.

    A pipe of its own: waiting for a program with asyncio's pipes is waiting for everything that inherited them.

    Args:
        name: Its name in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._kept = b""
        self._read_end, self.write_end = os.pipe()

    def __enter__(self) -> Self:
        os.set_blocking(self._read_end, False)
        asyncio.get_running_loop().add_reader(self._read_end, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the pipe."""
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self.write_end)

    def text(self) -> str:
        """Return the end of what was written so far."""
        for _ in range(MOST_READS):
            if not self._read():
                break
        return self._kept.decode(errors="replace").strip()

    def _read(self) -> bool:
        """Take what is there, and return whether there was anything."""
        try:
            chunk = os.read(self._read_end, 65536)
        except BlockingIOError:
            return False
        self._kept = (self._kept + chunk)[-KEPT_OUTPUT:]
        return bool(chunk)


def _quoted(*tails: OutputTail) -> str:
    """Return the end of the first output that is not empty, for a message."""
    for tail in tails:
        if text := tail.text():
            return f"; its {tail.name} ends with:\n{text}"
    return "; it wrote nothing"


@contextlib.asynccontextmanager
async def _closing(what: _ClosableT) -> AsyncIterator[_ClosableT]:
    """Close something at the end, also if the caller is cancelled meanwhile."""
    try:
        yield what
    finally:
        await uncancelled(what.close())


async def uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, however often the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = not task.cancelled()
    task.result()
    if cancelled:
        raise asyncio.CancelledError
