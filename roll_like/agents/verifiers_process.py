"""A process that plays the episodes of one verifiers environment, and what the driver asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from roll_like.agents.agent_program import OutputTail, uncancelled
from roll_like.agents.episode import VerifiersLost, VerifiersSpec
from roll_like.agents.verifiers_server import KEY_VARIABLE, MOST_BYTES
from roll_like.cluster.guardian import MARKER, remove_containers, remove_folder, sweep, temporary_folder
from roll_like.errors import EnvError

#: Processes that have this variable with the server's own value end with it.
MARK_VARIABLE = "ROLL_LIKE_VERIFIERS"
#: verifiers labels containers with its value: by it they are found when their server, or the run, was killed.
RUN_VARIABLE = "VF_RUN_ID"
#: verifiers' runtimes that are containers on this machine.
ENGINES = ("docker", "podman", "apptainer")
#: Longest silence of a server: its event loop answers while episodes wait. Seconds.
SILENCE_SECONDS = 60.0
#: How often it is asked. Seconds.
PING_SECONDS = 10.0
#: Longest start: imports, a first download of data. Seconds.
START_SECONDS = 600.0
#: Longest time that a server has to end its episodes' processes. Seconds.
END_SECONDS = 10.0
_PYTHON_FIX = (
    "set `verifiers.python` to the Python of an environment that has verifiers; `roll-like init verifiers` makes one"
)
SERVER = Path(__file__).with_name("verifiers_server.py")


class VerifiersRefusal(EnvError):
    """verifiers or an environment raised.

    Args:
        message: In its own words.
        problems: Keys of the configuration and what is wrong with them, where it was a configuration.
    """

    def __init__(self, message: str, problems: Sequence[tuple[tuple[str | int, ...], str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class VerifiersProcess:
    """A running server of one environment. Runs on the event loop that it is started on."""

    def __init__(self, spec: VerifiersSpec, key: str) -> None:
        self.spec = spec
        self._key = key
        self._mark = secrets.token_hex(8)
        self._folder: Path | None = None
        self._engines: list[str] = []
        self._numbers = 0
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any]], Callable[[dict[str, Any]], None]]] = {}
        self._output = OutputTail("output")
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lost: str | None = None
        #: Whether it ran at all: what ends it before is the interpreter.
        self.answered = False
        self._closed = False

    async def start(self, *, serve: bool = True, max_turns: int | None = None) -> dict[str, Any]:
        """Start it and have it make its environment; return what verifiers says of that.

        Args:
            serve: Whether episodes are going to be played, and not only its tasks looked at.
            max_turns: Turns of an agent that has no limit of its own.

        Raises:
            VerifiersLost: It cannot be started, or ended.
            VerifiersRefusal: verifiers does not take the configuration.
        """
        self._folder = temporary_folder(self._mark, self.spec.env.get("TMPDIR"))
        ours, theirs = socket.socketpair()
        with theirs:
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=MOST_BYTES)
            self._output.__enter__()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    self.spec.python,
                    "-P",  # the folder of this file has modules of other names' names
                    str(SERVER),
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=self._output.write_end,
                    stderr=self._output.write_end,
                    env={**self._environment(), "TMPDIR": str(self._folder)},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                await self.close()
                raise VerifiersLost(
                    f"the interpreter {self.spec.python!r} of {self.spec.name!r} cannot be started: {error}",
                    fix=_PYTHON_FIX,
                ) from error
        self._tasks.append(asyncio.ensure_future(self._read(reader)))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.ask("ping")
                self.answered = True
                seats = {**self.spec.seats, "max_turns": max_turns}
                about: dict[str, Any] = await self.ask("open", config=dict(self.spec.config), seats=seats, serve=serve)
        except BaseException as error:
            why = self._ended(f"did not start within {START_SECONDS:g} s")
            await uncancelled(self.close())
            if isinstance(error, TimeoutError | VerifiersLost):
                fix = (
                    "fix what `verifiers.taskset` and `verifiers.harness` import there"
                    if self.answered
                    else _PYTHON_FIX
                )
                raise VerifiersLost(why if isinstance(error, TimeoutError) else error.message, fix=fix) from error
            raise
        self._tasks.append(asyncio.ensure_future(self._watch()))
        runtimes = {agent["runtime"] for agent in about["agents"].values()}
        self._engines = [engine for engine in ENGINES if engine in runtimes]
        return about

    @property
    def pid(self) -> int | None:
        """Its process; None where it is not started."""
        return None if self._process is None else self._process.pid

    @property
    def why(self) -> str:
        """How it was lost."""
        return self._lost or ""

    @property
    def lost(self) -> bool:
        """Whether it has ended or hung."""
        return self._lost is not None

    async def ask(self, do: str, on_note: Callable[[dict[str, Any]], None] = lambda _: None, **request: Any) -> Any:
        """Send a request and wait for its result.

        Args:
            do: What to do (`verifiers_server.py`).
            on_note: Told what comes before the result.

        Raises:
            VerifiersLost: The process ended or hung.
            VerifiersRefusal: It could not be done.
        """
        if self._lost is not None or self._writer is None:
            raise VerifiersLost(self._lost or f"the server of {self.spec.name!r} is not started")
        self._numbers += 1
        number, future = self._numbers, asyncio.get_running_loop().create_future()
        self._waiting[number] = future, on_note
        try:
            self._writer.write(json.dumps({"id": number, "do": do, **request}).encode() + b"\n")
            answer = await future
        except asyncio.CancelledError:
            if do == "play" and not self.lost:
                await uncancelled(self._stopped(number))
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise _refusal(answer["error"])
        return answer["result"]

    async def read(self, do: Literal["count", "tasks"], **request: Any) -> dict[str, Any]:
        """Ask for what the selected tasks are known by; the taskset loads them first.

        Raises:
            EnvError: That takes too long, or as `ask`.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                found: dict[str, Any] = await self.ask(do, select=dict(self.spec.select), **request)
                return found
        except TimeoutError as error:
            raise EnvError(
                f"the tasks of {self.spec.name!r} were not read within {START_SECONDS:g} s",
                fix="fix `load` of `verifiers.taskset`, or have it yield tasks of which `verifiers.select` takes some",
            ) from error

    async def _stopped(self, number: int) -> None:
        with contextlib.suppress(EnvError, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self.ask("cancel", play=number)

    async def close(self) -> None:
        """End it and everything that it started."""
        if self._closed:
            return
        self._closed = True
        self._lose(f"the server of {self.spec.name!r} was closed")
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
            await asyncio.to_thread(sweep, self._mark, name=MARK_VARIABLE, patience=0.0)
            if self._engines:  # a server that is killed leaves its containers
                await asyncio.to_thread(remove_containers, self._mark, self._engines)
            await self._process.wait()
        if self._folder is not None:
            await asyncio.to_thread(remove_folder, self._folder)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._output.close()

    def _environment(self) -> dict[str, str]:
        variables = {**os.environ, **self.spec.env, KEY_VARIABLE: self._key, MARK_VARIABLE: self._mark}
        variables[RUN_VARIABLE] = f"{os.environ.get(MARKER, '')}-{self._mark}"
        variables.pop("PYTHONHOME", None)
        if "PYTHONPATH" in variables:  # what it starts runs in other folders
            places = filter(None, variables["PYTHONPATH"].split(os.pathsep))
            variables["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places))
        if "PATH" not in self.spec.env:  # as in an activated environment: harnesses look for uv and others there
            folder = str(Path(self.spec.python).parent.absolute()) if os.sep in self.spec.python else ""
            variables["PATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PATH", os.defpath))))
        return variables

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):  # it ended before it read everything
            while line := await reader.readline():
                self._take(json.loads(line))
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        self._lose(self._ended(f"ended with status {self._process.returncode}"))

    def _take(self, message: dict[str, Any]) -> None:
        """Give a message to what waits for it."""
        future, on_note = self._waiting.get(message["id"], (None, None))
        if future is None or future.done():
            return
        if "result" in message or "error" in message:
            future.set_result(message)
        elif on_note is not None:
            on_note(message)

    async def _watch(self) -> None:
        """Kill the process when it answers nothing for long."""
        while not self.lost:
            await asyncio.sleep(PING_SECONDS)
            try:
                if await self._answers():
                    continue
            except EnvError:
                return
            self._lose(self._ended(f"answered nothing for {SILENCE_SECONDS:g} s and was killed"))
            assert self._process is not None
            self._process.kill()

    async def _answers(self) -> bool:
        """Ask for a sign of life, twice: of a machine that was suspended the first time is over at once."""
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_SECONDS / 2):
                    await self.ask("ping")
                return True
        return False

    def _lose(self, why: str) -> None:
        """Fail what waits for an answer."""
        if self._lost is None:
            self._lost = why
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(VerifiersLost(self._lost))

    def _ended(self, how: str) -> str:
        written = self._output.text()
        quoted = f"; its output ends with:\n{written}" if written else "; it wrote nothing"
        return f"the verifiers server of {self.spec.name!r} {how}{quoted}"


def _refusal(error: Mapping[str, Any]) -> VerifiersRefusal:
    problems = [(tuple(each["key"]), each["message"]) for each in error.get("problems") or ()]
    return VerifiersRefusal(f"{error['type']}: {error['message']}", problems)
