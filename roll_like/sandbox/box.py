"""What a box is: a place where a program runs without reaching anything outside.

A box never sees expected values or the text of tests. Programs, standard input and call arguments go in;
bytes, call results (through the strict codec) and a report of the end come out. What a program writes is
untrusted data; how it ended is reported by the box, never by the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from roll_like.errors import SandboxError
from roll_like.sandbox.types import Limits


class SandboxUnavailable(SandboxError):
    """No sandbox can isolate on this machine; the message says why and `fix` which command helps."""


class Ended(StrEnum):
    """How an execution ended, as the box saw it."""

    EXITED = "exited"  #: exit status 0
    ERROR = "error"  #: another exit status, a signal, or an uncaught exception
    TIMEOUT = "timeout"  #: wall clock or CPU seconds used up
    MEMORY = "memory"  #: memory limit reached
    OUTPUT = "output"  #: wrote more than `Limits.output_bytes`
    COMPILE_ERROR = "compile_error"  #: source does not compile
    BROKEN = "broken"  #: the sandbox itself failed; says nothing about the program


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run.

    Args:
        source: Its whole text.
        language: "python", "cpp" or "javascript".
    """

    source: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class BoxReport:
    """The end of an execution.

    Args:
        exit_code: Exit status, -N for signal N, None where there was none.
        stdout: What it wrote, at most `Limits.output_bytes`.
        stderr: Last part of what it wrote to standard error, decoded with replacement.
        cpu_seconds: User and system seconds of all its processes.
        peak_memory_bytes: Largest resident size seen of all its processes together.
    """

    ended: Ended
    exit_code: int | None
    stdout: bytes
    stderr: str
    cpu_seconds: float
    peak_memory_bytes: int
    detail: str


class CallFailed(Exception):
    """A call into a box brought no value.

    Args:
        kind: `ERROR` where the solution raised or returned what the codec refuses, otherwise how the worker ended.
    """

    def __init__(self, kind: Ended, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class BoxSession(Protocol):
    """A worker that has executed a program once and answers calls into it."""

    async def call(self, entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Call a function of the program and return its decoded value.

        Args:
            entry_point: A name, or "Class.method": the class is instantiated without arguments.
            args: Positional arguments, of types that the codec knows.
            kwargs: Keyword arguments, likewise.

        Raises:
            CallFailed: The solution raised, ran out of a limit, or returned what the codec refuses.
        """
        ...

    async def close(self) -> BoxReport:
        """End the worker; `EXITED` only where it acknowledged the end itself and left with status 0.

        Safe to call after a failed call: the report then says how the worker ended. Called twice, the
        same report comes back.
        """
        ...


class Box(Protocol):
    """A backend."""

    name: str

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        """Run a whole program on standard input. Never raises for what the program does."""
        ...

    async def open(self, program: Program, limits: Limits) -> BoxSession:
        """Execute a program once in a fresh worker that then answers calls (Python only).

        Raises:
            CallFailed: Executing the program failed; `kind` says how.
        """
        ...

    async def close(self) -> None:
        """End every process of this box."""
        ...
