"""Plays an episode by running a program: an agent that only knows a base URL and a key.

The program is started in a session of its own, with these in its environment:

    OPENAI_BASE_URL, OPENAI_API_KEY    where the policy answers; both OpenAI clients read them
    ROLL_LIKE_SEED                     the same for all members of a group
    ROLL_LIKE_TASK                     JSON: name, seed, and the environment's messages; also served at GET /task
    ROLL_LIKE_EPISODE                  unique; what has it is ended with the program

It ends by itself, or is ended: at its deadline, when the episode fails or is taken back, and a little after it has said
that it is done. Whatever it started goes with it. A program that fails is an `EnvError`: counted, never trained on.
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
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from roll_like.agents.episode import EpisodeLimits, ProgramSpec, Started
from roll_like.agents.proxy import Proxy
from roll_like.agents.proxy_episode import EpisodeSettings, ProxyEpisode
from roll_like.cluster.guardian import sweep
from roll_like.errors import ConfigError, EnvError
from roll_like.inference.interface import Sampling
from roll_like.types import Scored, Task

if TYPE_CHECKING:
    from roll_like.agents.env_manager import EnvironmentPool

#: How long a program may go on after it said that the episode is done. Seconds.
LINGER_SECONDS = 10.0
#: The end of a program's output that is kept. Bytes.
KEPT_OUTPUT = 8192
#: How often a pipe is read when its program has ended, in case something that got away still writes to it.
MOST_READS = 32
#: Longest `ROLL_LIKE_TASK`: Linux takes no more than 128 KiB in one variable. Bytes.
MAX_TASK_BYTES = 100_000
EPISODE_VARIABLE = "ROLL_LIKE_EPISODE"


class AgentPrograms:
    """Runs agent programs, so many of each at a time.

    Args:
        proxy: Started; where programs find the policy.
        environments: Where the environments that score answers live; None where none does.
    """

    def __init__(self, proxy: Proxy, environments: EnvironmentPool | None = None) -> None:
        self._proxy = proxy
        self._environments = environments
        self._room: dict[str, asyncio.Semaphore] = {}

    async def play(
        self,
        spec: ProgramSpec,
        task: Task,
        *,
        sampling: Sampling,
        limits: EpisodeLimits,
        name: str,
        sample_index: int,
        affinity_key: Any,
        sampling_seed: int | None,
    ) -> Scored:
        """Play one episode to its end and return it with its reward.

        Args:
            spec: The program.
            task: What it attempts: `metadata["seed"]` is its seed.
            sampling: How each answer is drawn; `max_tokens` is the limit of one.
            limits: Where it ends at the latest.
            name: Prefix of request ids.
            sample_index: Its place in the group.
            affinity_key: What the engine's prompt cache is shared by.
            sampling_seed: Seed of its answers; None leaves them unseeded.

        Raises:
            EnvError: The program or its environment failed.
            SampleLost: An answer could not be sampled.
            GenerationError: No replica is left.
        """
        settings = EpisodeSettings(
            task=task,
            sample_index=sample_index,
            sampling=sampling,
            limits=limits,
            name=name,
            affinity_key=affinity_key,
            sampling_seed=sampling_seed,
            about={"name": spec.name, "seed": int(task.metadata["seed"])},
            scored_by="agent" if spec.environment is None else "environment",
        )
        async with self._room.setdefault(spec.name, asyncio.Semaphore(spec.max_programs)):
            if spec.environment is None:
                return await self._run(spec, settings)
            return await self._run_in_environment(spec, settings)

    async def _run(self, spec: ProgramSpec, settings: EpisodeSettings) -> Scored:
        episode = self._proxy.open(settings)
        try:
            await _run_program(spec, episode)
            if episode.truncated and not episode.rewarded and episode.turns and spec.limit_reward is not None:
                episode.judged(spec.limit_reward, None)
            return episode.scored()
        finally:
            await _surely(episode.close())

    async def _run_in_environment(self, spec: ProgramSpec, settings: EpisodeSettings) -> Scored:
        if self._environments is None or spec.environment is None:
            raise ConfigError(f"the program {spec.name!r} has an environment, and there is nothing to host it")
        environment = self._environments.open(spec.environment)
        try:
            started = await environment.reset(settings.about["seed"])
            episode = self._proxy.open(_told(settings, started))
            try:
                await _run_program(spec, episode)
                if episode.error is None and episode.turns:
                    answer = episode.last_content if episode.answer is None else episode.answer
                    stepped = await environment.step(answer)
                    if not (stepped.terminated or stepped.truncated):
                        raise EnvError(
                            f"the environment {spec.environment.env_id!r} did not end with the answer; only one that "
                            "scores a single answer can score a program",
                            fix="take another `id`, or none, and let the program post its reward",
                        )
                    episode.judged(stepped.reward, stepped.success)
                return episode.scored()
            finally:
                await _surely(episode.close())
        finally:
            await _surely(environment.close())


def _told(settings: EpisodeSettings, started: Started) -> EpisodeSettings:
    """Return settings that tell the agent the environment's first messages."""
    return replace(settings, about={**settings.about, "messages": [dict(message) for message in started.messages]})


async def _run_program(spec: ProgramSpec, episode: ProxyEpisode) -> None:
    """Run a program until it ends, is done, or has to be ended.

    Raises:
        EnvError: It cannot be started, took too long, or failed.
    """
    what = f"the program `{shlex.join(spec.command)}`"
    mark = secrets.token_hex(16)
    code, late = None, False
    with _Tail("stderr") as stderr, _Tail("stdout") as stdout:
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout.write_end,
                stderr=stderr.write_end,
                cwd=spec.directory,
                env=_environment(spec, episode, mark),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise EnvError(f"{what} cannot be started: {error}", fix="correct `program.command`") from error
        try:
            async with asyncio.timeout(spec.timeout_seconds):
                code = await _ended(process, episode)
        except TimeoutError:
            late = not episode.over
        finally:
            await _surely(_end(process, mark))
        said = f", with {episode.turns} turns taken{_quoted(stderr, stdout)}"
    if late:
        raise EnvError(
            f"{what} did not end within {spec.timeout_seconds:g} s{said}",
            fix="raise `program.timeout_seconds`, or end the program sooner",
        )
    # a program that was refused another turn may well fail; that is the policy's doing
    if code and episode.error is None and not episode.truncated:
        raise EnvError(
            f"{what} ended with status {code}{said}",
            fix="correct the program; `docs/agents.md` says how to run it by hand",
        )


def search_path() -> str:
    """Return where programs are looked for: beside the run's own Python first."""
    return os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))))


def found_program(spec: ProgramSpec) -> str | None:
    """Return the file that a program's command names, or None where there is none that can be run."""
    name = spec.command[0]
    if os.sep in name:
        return shutil.which(os.path.join(spec.directory or os.curdir, name))
    return shutil.which(name, path=spec.env.get("PATH", search_path()))


def _environment(spec: ProgramSpec, episode: ProxyEpisode, mark: str) -> dict[str, str]:
    """Return the environment variables of a program."""
    about = episode.settings.about
    variables = {
        **os.environ,
        **spec.env,
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.key,
        "ROLL_LIKE_SEED": str(about["seed"]),
        EPISODE_VARIABLE: mark,
    }
    if "PATH" not in spec.env:  # as in an activated environment
        variables["PATH"] = search_path()
    for name in ("NO_PROXY", "no_proxy"):  # a proxy of the network has no business between a program and its run
        variables[name] = ",".join(filter(None, (variables.get(name), urlsplit(episode.base_url).hostname)))
    task = json.dumps(about)
    return variables if len(task) > MAX_TASK_BYTES else {**variables, "ROLL_LIKE_TASK": task}


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


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """End a program and everything that it started."""
    # what inherited the mark, wherever it went; then what is left of the group, whatever it did to its environment
    await asyncio.to_thread(sweep, mark, name=EPISODE_VARIABLE, patience=0.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


class _Tail:
    """Reads a program's output as it comes and keeps its end.

    A pipe of its own: waiting for a program with asyncio's pipes is waiting for everything that inherited them.

    Args:
        name: What it is called in messages.
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


def _quoted(*tails: _Tail) -> str:
    """Return the end of the first output that is not empty, for a message."""
    for tail in tails:
        if text := tail.text():
            return f"; its {tail.name} ends with:\n{text}"
    return "; it wrote nothing"


async def _surely(work: Coroutine[Any, Any, None]) -> None:
    """Do work to its end, however often the caller is cancelled meanwhile."""
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
