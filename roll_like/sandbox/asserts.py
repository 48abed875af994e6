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
from pathlib import Path
from typing import Any

from roll_like.errors import ConfigError, SandboxError
from roll_like.sandbox import codec
from roll_like.sandbox.box import BoxSession, CallFailed, Ended, Program
from roll_like.sandbox.fair import Measured, waited, within
from roll_like.sandbox.numpy_only import numpy_folder
from roll_like.sandbox.types import AssertTest, TestResult, TestStatus

_FOLDER = Path(__file__).parent
_REMOTE = (_FOLDER / "remote_objects.py").read_text(encoding="utf-8")
#: Memory of the trusted process: the test's own values and what comes back.
_MEMORY_BYTES = 2 << 30
#: Longest test, in characters: the largest of EvalPlus hold millions.
MAX_TEST = 1 << 23
#: Longest message to it: a character takes up to 12 bytes, and a program is shorter than a test.
_MESSAGE_BYTES = 24 * MAX_TEST


def with_remote_objects(program: Program) -> Program:
    """Return the program with the part that answers a test's questions behind it."""
    return Program(f"{program.source}\n\n{_REMOTE}", program.language)


async def run_assert_test(
    session: BoxSession, program: Program, test: AssertTest, seconds: float, *, numpy: bool = False
) -> TestResult:
    """Run one test against a session that executes `with_remote_objects(program)`.

    Args:
        session: Where the program runs.
        program: The program; the names that it defines are the test's stubs.
        seconds: Wall-clock limit of the whole test.
        numpy: Whether the test may import NumPy.

    Returns:
        `passed` where the test ran to its end, `wrong_answer` where it ended with an AssertionError,
        `runtime_error` where it ended with another exception.

    Raises:
        CallFailed: A call brought no value, or the test ran out of time; the session is of no use then.
        ConfigError: The test itself cannot be evaluated.
        SandboxError: The trusted process died.
    """
    process, ours = _start()
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        talk = _converse(reader, writer, session, program, test, seconds, numpy_folder() if numpy else None)
        own = (lambda: session.own_seconds() - waited(process.pid)) if isinstance(session, Measured) else None
        return await within(talk, seconds, own)
    except TimeoutError:
        raise CallFailed(Ended.TIMEOUT, f"the test took more than {seconds:g} s") from None
    except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
        status = await asyncio.to_thread(process.wait)
        if status == -signal.SIGXCPU:
            raise CallFailed(Ended.TIMEOUT, "the test used up its CPU time") from None
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


async def _converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    session: BoxSession,
    program: Program,
    test: AssertTest,
    seconds: float,
    numpy: str | None,
) -> TestResult:
    """Carry requests and answers until the test ends."""

    async def send(message: object) -> None:
        data = codec.encode(message, max_bytes=_MESSAGE_BYTES)
        writer.write(len(data).to_bytes(4, "big") + data)
        await writer.drain()

    limits = {"RLIMIT_AS": _MEMORY_BYTES, "RLIMIT_CPU": int(seconds) + 1, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    await send((program.source, test.code, list(test.names), limits, numpy))
    while True:
        size = int.from_bytes(await reader.readexactly(4), "big")
        message: Any = codec.decode(await reader.readexactly(size))
        if message[0] == "ask":
            answer = await session.call("_remote_ask", message[1:], {})
            try:
                await send(answer)
            except codec.CodecError as error:
                raise CallFailed(Ended.ERROR, f"the program's answer cannot be carried: {error}") from None
        elif message[0] == "passed":
            return TestResult(TestStatus.PASSED)
        elif message[0] == "refused":
            raise ConfigError(f"an assert test cannot be evaluated: {message[1]}", fix="change the test's code")
        else:
            _, kind, text = message
            status = TestStatus.WRONG_ANSWER if kind == "AssertionError" else TestStatus.RUNTIME_ERROR
            return TestResult(status, f"{kind}: {text}".rstrip(": "))
