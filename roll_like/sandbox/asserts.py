"""Assert tests: a trusted process runs the test, and what it asks of the program is carried into the sandbox.

    evaluator (here) ──frames──▶ assert_process.py      the test, the expected values
          └──────────BoxSession──▶ sandbox              the program and `remote_objects.py`

Both talk to this side alone, and this side carries plain values only.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_like.errors import ConfigError, SandboxError
from roll_like.sandbox import codec
from roll_like.sandbox.box import BoxSession, CallFailed, Ended, Program
from roll_like.sandbox.types import AssertTest

_FOLDER = Path(__file__).parent
_REMOTE = (_FOLDER / "remote_objects.py").read_text(encoding="utf-8")
#: Memory of the trusted process: the test's own values and what comes back.
_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a test ended.

    Attributes:
        passed: The test ran to its end.
        assertion: It ended with an AssertionError, not with another exception.
        detail: Where and why it did not pass.
        failure: What kept a call from bringing a value; the session is of no use then.
    """

    passed: bool
    assertion: bool = False
    detail: str = ""
    failure: Ended | None = None


class Pipes:
    """Frames to and from the trusted process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: object) -> None:
        """Write one message."""
        data = codec.encode(message)
        self._writer.write(len(data).to_bytes(4, "big") + data)
        await self._writer.drain()

    async def receive(self) -> Any:
        """Return the next message."""
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        return codec.decode(await self._reader.readexactly(size))


def with_remote_objects(program: Program) -> Program:
    """Return the program with the part that answers a test's questions behind it."""
    return Program(f"{program.source}\n\n{_REMOTE}", program.language)


async def judge(session: BoxSession, program: Program, test: AssertTest, seconds: float) -> Judgement:
    """Run one test against a session that executes `with_remote_objects(program)`.

    Args:
        session: Where the program runs.
        program: The program; the names that it defines are the test's stubs.
        test: The test.
        seconds: Wall-clock limit of the whole test.

    Raises:
        ConfigError: The test itself cannot be judged.
        SandboxError: The trusted process died.
    """
    process, ours = _start()
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        async with asyncio.timeout(seconds):
            return await _converse(Pipes(reader, writer), session, program, test, seconds)
    except TimeoutError:
        return Judgement(passed=False, detail=f"the test took more than {seconds:g} s", failure=Ended.TIMEOUT)
    except CallFailed as failure:
        return Judgement(passed=False, detail=failure.message, failure=failure.kind)
    except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
        status = await asyncio.to_thread(process.wait)
        if status == -signal.SIGXCPU:
            return Judgement(passed=False, detail="the test used up its CPU time", failure=Ended.TIMEOUT)
        raise SandboxError(f"the trusted process of an assert test died with status {status}") from None
    finally:
        writer.close()
        process.kill()
        process.wait()  # at once: nothing outlives SIGKILL but what waits for a disk


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the trusted process; return it with this end of the socket that is its input and output."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-W", "ignore", str(_FOLDER / "assert_process.py")],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


async def _converse(pipes: Pipes, session: BoxSession, program: Program, test: AssertTest, seconds: float) -> Judgement:
    """Carry questions and answers until the test ends."""
    limits = {"RLIMIT_AS": _MEMORY_BYTES, "RLIMIT_CPU": int(seconds) + 1, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    await pipes.send((program.source, test.code, list(test.names), limits))
    while True:
        message = await pipes.receive()
        if message[0] == "ask":
            answer = await session.call("_remote_ask", message[1:], {})
            try:
                await pipes.send(answer)
            except codec.CodecError as error:
                raise CallFailed(Ended.ERROR, f"the program's answer cannot be carried: {error}") from None
        elif message[0] == "passed":
            return Judgement(passed=True)
        elif message[0] == "unjudged":
            raise ConfigError(f"an assert test cannot be evaluated: {message[1]}", fix="change the test's code")
        else:
            _, kind, text = message
            return Judgement(passed=False, assertion=kind == "AssertionError", detail=f"{kind}: {text}".rstrip(": "))


__all__ = ["Judgement", "judge", "with_remote_objects"]
