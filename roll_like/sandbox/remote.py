"""A box elsewhere: a server with SandboxFusion's HTTP interface (`POST /run_code`).

The programs run on that server, so this machine is safe from them by construction; what keeps programs apart
from each other there, and how hard limits are, is the server's business. A session is one request for each call:
the program is executed anew for every one of them, and keeps no state in between.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from typing import Any

from roll_like.errors import ConfigError
from roll_like.sandbox import codec
from roll_like.sandbox.box import BoxReport, CallFailed, Ended, Program, SandboxUnavailable
from roll_like.sandbox.types import Limits

#: Our names of languages → the server's.
LANGUAGES = {"python": "python", "cpp": "cpp", "javascript": "nodejs"}
_STDERR_KEPT = 4096
_COMPILE_SECONDS = 30.0
_SPARE_SECONDS = 30.0
_LARGEST_REPLY = 64 << 20


class RemoteBox:
    """A `Box` on a SandboxFusion-compatible server.

    Raises:
        ConfigError: `url` is no HTTP address.
    """

    name = "remote"

    def __init__(self, url: str, *, workers: int = 2) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the address of a remote sandbox should begin with http:// or https://, found {url!r}")
        self._url = url.rstrip("/") + "/run_code"
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="remote-sandbox")

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        """Run a whole program on standard input.

        Raises:
            SandboxUnavailable: The language is not known, or the server cannot be reached.
        """
        if program.language not in LANGUAGES:
            raise SandboxUnavailable(f"no sandbox runs {program.language!r}; there are {', '.join(LANGUAGES)}")
        request = {
            "code": program.source,
            "language": LANGUAGES[program.language],
            "stdin": stdin,
            "compile_timeout": _COMPILE_SECONDS,
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": math.ceil(limits.memory_bytes / (1 << 20)),
        }
        patience = limits.wall_seconds + _COMPILE_SECONDS + _SPARE_SECONDS
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(self._threads, self._post, request, patience)
        return report_of(reply, limits)

    async def open(self, program: Program, limits: Limits) -> RemoteSession:
        """Execute a Python program once, to see that it can be, and return a session."""
        session = RemoteSession(self, program, limits)
        await session.request(b"")
        return session

    async def close(self) -> None:
        """Forget requests that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        data = json.dumps(request).encode()
        message = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(message, timeout=patience) as answer:
                text = answer.read(_LARGEST_REPLY + 1)
        except (urllib.error.URLError, OSError) as error:
            raise SandboxUnavailable(
                f"the sandbox server at {self._url} does not answer: {error}", fix="start it, or change its address"
            ) from error
        try:
            reply = json.loads(text) if len(text) <= _LARGEST_REPLY else None
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise SandboxUnavailable(f"the server at {self._url} does not speak SandboxFusion: {text[:200]!r}")
        return reply


class RemoteSession:
    """A program of which every call is an execution of its own; see `BoxSession`."""

    def __init__(self, box: RemoteBox, program: Program, limits: Limits) -> None:
        self._box = box
        self._program = program
        self._limits = limits
        self._last: BoxReport | None = None

    async def call(self, entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Call a function of the program and return its decoded value."""
        answer = await self.request(codec.encode((entry_point, tuple(args), dict(kwargs))))
        try:
            return codec.decode(answer)
        except codec.CodecError as error:
            raise CallFailed(Ended.ERROR, f"the value that came back is refused: {error}") from None

    async def close(self) -> BoxReport:
        """Return the report of the last execution; it is `EXITED` where that ended cleanly."""
        assert self._last is not None
        return self._last

    async def request(self, request: bytes) -> bytes:
        """Execute the program and one encoded call, none where it is empty; return the encoded value.

        Raises:
            CallFailed: The program or the call raised, or ran out of a limit.
        """
        mark = secrets.token_hex(16)
        harness = Program(_harness(self._program.source, request, mark))
        report = await self._box.run(harness, "", self._limits)
        before, found, after = report.stdout.rpartition(f"{mark} ".encode())
        kind, answer = after[:1], after[1:].strip()
        clean = report.ended is Ended.EXITED and bool(found)
        if clean and kind == b"V":
            self._last = replace(report, stdout=before)
            return answer
        if clean and kind in {b"E", b"M"}:  # the call failed, the program did not
            self._last = replace(report, stdout=before)
            text = answer.decode("utf-8", "replace").replace("\\n", "\n")
            raise CallFailed(Ended.MEMORY if kind == b"M" else Ended.ERROR, text)
        self._last = report if report.ended is not Ended.EXITED else replace(report, ended=Ended.ERROR)
        last_line = (report.stderr.strip().splitlines() or [report.detail])[-1]
        raise CallFailed(self._last.ended, last_line or "the program left before it answered")


def report_of(reply: Mapping[str, Any], limits: Limits) -> BoxReport:  # noqa: PLR0911 - a table
    """Return what a server's reply says, in our terms; a reply that makes no sense is a broken sandbox."""
    compiled, ran = reply.get("compile_result"), reply.get("run_result")
    if reply.get("status") == "SandboxError" or reply.get("status") not in {"Success", "Failed"}:
        return _report(None, Ended.BROKEN, f"the server says {reply.get('status')}: {reply.get('message') or ''}")
    if isinstance(compiled, dict) and (compiled.get("status") != "Finished" or compiled.get("return_code") != 0):
        return _report(compiled, Ended.COMPILE_ERROR, "does not compile")
    if not isinstance(ran, dict):
        return _report(None, Ended.BROKEN, "the server says nothing of the program's run")
    if ran.get("status") == "TimeLimitExceeded":
        return _report(ran, Ended.TIMEOUT, f"ran for more than {limits.wall_seconds} s")
    if ran.get("status") != "Finished" or not isinstance(ran.get("return_code"), int):
        return _report(ran, Ended.BROKEN, f"the server says {ran.get('status')}")
    code = ran["return_code"]
    error = str(ran.get("stderr") or "")
    if len(str(ran.get("stdout") or "").encode()) + len(error.encode()) > limits.output_bytes:
        report = _report(ran, Ended.OUTPUT, f"wrote more than {limits.output_bytes} bytes")
        return replace(report, stdout=report.stdout[: limits.output_bytes])
    if code and "MemoryError" in error.strip().rpartition("\n")[2]:
        return _report(ran, Ended.MEMORY, f"needs more than {limits.memory_bytes} bytes of memory")
    return _report(ran, Ended.ERROR if code else Ended.EXITED, f"exit status {code}" if code else "")


def _report(part: Mapping[str, Any] | None, ended: Ended, detail: str) -> BoxReport:
    part = part or {}
    code = part.get("return_code")
    return BoxReport(
        ended=ended,
        exit_code=code if isinstance(code, int) else None,
        stdout=str(part.get("stdout") or "").encode("utf-8", "surrogatepass"),
        stderr=str(part.get("stderr") or "")[-_STDERR_KEPT:],
        cpu_seconds=float(part.get("execution_time") or 0.0),
        peak_memory_bytes=0,
        detail=detail,
    )


def _harness(source: str, request: bytes, mark: str) -> str:
    """Return a program that executes `source`, makes one call and prints the answer behind `mark`."""
    codec_text = files("roll_like.sandbox").joinpath("codec.py").read_text(encoding="utf-8")
    packed = {
        name: base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()
        for name, text in (("CODEC", codec_text), ("SOURCE", source), ("REQUEST", request.decode("ascii")))
    }
    return "\n".join([*(f"{name} = {text!r}" for name, text in packed.items()), f"MARK = {mark!r}", _HARNESS])


_HARNESS = """
import base64, os, sys, traceback, types
def text(packed): return base64.b64decode(packed).decode("utf-8", "surrogatepass")
codec, solution = types.ModuleType("codec"), types.ModuleType("solution")
sys.modules["codec"] = codec
exec(compile(text(CODEC), "codec.py", "exec"), codec.__dict__)
request, mark = text(REQUEST).encode(), MARK
sys.modules["solution"] = solution
code = compile(text(SOURCE), "main.py", "exec")
exec(code, solution.__dict__)
kind, answer = b"V", b""
if request:
    try:
        entry_point, args, kwargs = codec.decode(request)
        first, *rest = entry_point.split(".")
        if first not in solution.__dict__: raise NameError(f"name '{first}' is not defined by the program")
        value = solution.__dict__[first]
        for name in rest: value = getattr(value() if isinstance(value, type) else value, name)
        answer = codec.encode(value(*args, **kwargs))
    except BaseException as error:
        kind = b"M" if isinstance(error, MemoryError) else b"E"
        answer = "".join(traceback.format_exception_only(type(error), error)).strip().replace("\\n", "\\\\n").encode()
sys.stdout.flush()
line = mark.encode() + b" " + kind + answer + b"\\n"
while line: line = line[os.write(1, line):]
"""
