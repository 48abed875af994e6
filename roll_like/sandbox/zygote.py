"""The outside of a zygote: starts it, hands executions in, reads what comes out under hard caps.

What a worker writes is bytes that are counted and cut off; how it ended is what the zygote says and what the
clock here says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from roll_like.sandbox.box import BoxReport, Ended, SandboxUnavailable
from roll_like.sandbox.codec import MAX_BYTES
from roll_like.sandbox.fair import FAIR_SHARE, PATIENCE, CpuShare, too_busy
from roll_like.sandbox.types import Limits
from roll_like.sandbox.worker import COMPILE_ERROR, NOT_STARTED

_CHUNK = 1 << 16
_STDERR_KEPT = 4096
_START_SECONDS = 30.0
#: How long a zygote may take to report after it was told to kill.
_KILL_SECONDS = 5.0
_STOP_SECONDS = 2.0
_SIGXCPU, _SIGKILL = 24, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is to do.

    Attributes:
        kind: "run" a Python program, "serve" calls into one, or "exec" another program.
        source: The program, or the contents of the file at `path`.
        limits: What it may use.
        path: For "exec": where the contents go.
        arguments: For "exec": the command.
        address_space: For "exec": limit on virtual memory in bytes, None for none.
        extra_processes: Threads that a language's runtime starts by itself.
    """

    kind: str
    source: bytes
    limits: Limits
    path: str = ""
    arguments: tuple[str, ...] = ()
    address_space: int | None = None
    extra_processes: int = 0

    def message(self) -> bytes:
        """Return what the zygote is told; the source goes beside it."""
        fields = {key: value for key, value in asdict(self).items() if key != "source"}
        return json.dumps(fields).encode()


class Zygote:
    """A zygote process. Not for several threads; one execution at a time."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, ready: dict[str, Any]) -> None:
        self.process = process
        self.channel = channel
        self.executions = 0
        self.nested: bool = ready["nested"]
        self.own = {process.pid, *self._below()}

    def programs(self) -> list[int]:
        """Return the ids of the processes that are an execution's, its first one included."""
        return [pid for pid in self._below() if pid not in self.own]

    def _below(self) -> list[int]:
        try:
            return [process.pid for process in psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @classmethod
    def start(cls, command: Sequence[str], *, seccomp: bytes, control: str, config: dict[str, Any]) -> Zygote:
        """Start a zygote and wait until it is ready. Blocks; call it in a thread that outlives the zygote.

        Args:
            command: What to run; `control` in it is replaced by the number of the control socket.
            config: First packet (see `zygote_main`).

        Raises:
            SandboxUnavailable: It ended or did not answer for 30 seconds.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [word.replace(control, str(theirs.fileno())) for word in command]
        with theirs:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={},
                cwd="/",
            )
        assert process.stderr is not None
        try:
            ours.settimeout(_START_SECONDS)
            ours.send(json.dumps(config).encode())
            ours.send(seccomp)
            ready = ours.recv(_CHUNK)
        except OSError as error:
            ready, reason = b"", f"{error}"
        else:
            reason = ""
        if not ready:
            ours.close()
            process.kill()
            reason = " ".join([reason, process.stderr.read().decode("utf-8", "replace")[-2000:].strip()]).strip()
            process.stderr.close()
            process.wait()
            raise SandboxUnavailable(f"{words[0]} could not start a sandbox: {reason or process.returncode}")
        process.stderr.close()
        ours.setblocking(False)
        return cls(process, ours, json.loads(ready))

    def stop(self) -> None:
        """End it with everything inside. Blocks until all is gone."""
        self.channel.close()  # it leaves at the end of its input, and is waited for by its parent
        try:
            self.process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # --die-with-parent is not enough: as root, what is inside has another user id than bubblewrap
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            try:
                self.process.wait(timeout=_STOP_SECONDS)  # bubblewrap leaves when it has reaped what was inside
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Execution:
    """One job in a zygote, from its start to its report.

    Args:
        zygote: Idle; it is this execution's until `finished` is done.
    """

    def __init__(self, zygote: Zygote, job: Job, stdin: bytes = b"") -> None:
        self._loop = asyncio.get_running_loop()
        self._zygote = zygote
        self._job = job
        self._why: Ended | None = None
        self._report: dict[str, Any] | None = None
        self._broken = ""
        self._written = 0
        self._kept: dict[int, bytearray] = {}
        self._open: dict[int, Callable[[int], None]] = {}
        self._answer_buffer = bytearray()
        self._waiter: asyncio.Future[bytes | None] | None = None
        self._to_write = b""
        self._calls: int | None = None
        self.finished: asyncio.Future[BoxReport] = self._loop.create_future()
        self._begin(stdin)

    def _begin(self, stdin: bytes) -> None:
        self._zygote.executions += 1
        given = [_in_memory(self._job.source), _in_memory(stdin)]
        for read in (self._read_output, self._read_output):
            reading, writing = os.pipe()
            given.append(writing)
            self._kept[reading] = bytearray()
            self._watch(reading, read)
        self._stdout, self._stderr = self._kept
        if self._job.kind == "serve":
            inside, self._calls = os.pipe()
            os.set_blocking(self._calls, False)
            reading, writing = os.pipe()
            given += [inside, writing]
            self._watch(reading, self._read_answers)
        self.share = CpuShare(self._zygote.programs, self._zygote.own)
        self._began, self._starved = self._loop.time(), 0.0
        self._clock = self._loop.call_later(self._job.limits.wall_seconds, self._expire)
        try:
            socket.send_fds(self._zygote.channel, [self._job.message()], given)
        except OSError as error:
            self._fail(f"the zygote is gone: {error}")
        else:
            self._loop.add_reader(self._zygote.channel.fileno(), self._read_report)
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _watch(self, descriptor: int, read: Callable[[int], None]) -> None:
        os.set_blocking(descriptor, False)
        self._open[descriptor] = read
        self._loop.add_reader(descriptor, read, descriptor)

    def _forget(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        del self._open[descriptor]
        os.close(descriptor)

    # -- what comes out ------------------------------------------------------------------------------------------

    def _read_output(self, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._forget(descriptor)
            self._finish()
            return
        kept = self._kept[descriptor]
        room = max(0, self._job.limits.output_bytes - self._written)
        kept += data[:room]
        self._written += len(data)
        if self._written > self._job.limits.output_bytes:
            self.kill(Ended.OUTPUT)

    def _read_answers(self, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._forget(descriptor)
            self._finish()
            return
        if self._why is not None:
            return  # what comes after the end was decided counts for nothing
        self._answer_buffer += data
        while len(self._answer_buffer) >= 4:
            (size,) = struct.unpack_from(">I", self._answer_buffer)
            if not 0 < size <= MAX_BYTES + 1:
                self._answer_buffer.clear()
                self.kill(Ended.OUTPUT)
                return
            if len(self._answer_buffer) < 4 + size:
                return
            answer = bytes(self._answer_buffer[4 : 4 + size])
            del self._answer_buffer[: 4 + size]
            if self._waiter is None or self._waiter.done():
                self.kill(Ended.ERROR)  # no call waits for it
                return
            self._waiter.set_result(answer)

    def _read_report(self) -> None:
        try:
            packet = self._zygote.channel.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"the zygote is gone: {error}")
            return
        self._loop.remove_reader(self._zygote.channel.fileno())
        if packet:
            self._report = json.loads(packet)
            self._finish()
        else:
            self._fail("the zygote is gone")

    # -- what goes in --------------------------------------------------------------------------------------------

    async def ask(self, request: bytes | None) -> bytes | None:
        """Send a request (None: only wait for what comes first) and return the answer; None at the end."""
        if self.finished.done() or self._calls is None:
            return None
        self._waiter = self._loop.create_future()
        if request is not None:
            self._to_write += struct.pack(">I", len(request)) + request
            self._write()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _write(self) -> None:
        assert self._calls is not None
        self._loop.remove_writer(self._calls)
        try:
            self._to_write = self._to_write[os.write(self._calls, self._to_write) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._to_write = b""  # its end is reported by the zygote
        if self._to_write:
            self._loop.add_writer(self._calls, self._write)

    # -- the end -------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """End an execution whose time is over; later, where it was kept from using it."""
        seconds, lasted = self._job.limits.wall_seconds, self._loop.time() - self._began
        if self.share.own_seconds() < FAIR_SHARE * seconds:
            if lasted < PATIENCE * seconds:
                self._clock = self._loop.call_later(seconds / 4, self._expire)
                return
            self._starved = lasted
        self.kill(Ended.TIMEOUT)

    def serves(self) -> None:
        """Leave time limits to the callers, whose calls also wait for others; the clock is for what they forget."""
        if not self.finished.done() and self._why is None:
            self._clock.cancel()
            self._clock = self._loop.call_later(PATIENCE * self._job.limits.wall_seconds, self._expire)

    def kill(self, why: Ended) -> None:
        """End the execution; `why` is what the report says, unless it ended before."""
        if self._report is not None or self.finished.done():
            return
        self._why = self._why or why
        self._clock.cancel()
        self._clock = self._loop.call_later(_KILL_SECONDS, self._fail, "the zygote does not answer")
        try:
            self._zygote.channel.send(b"kill")
        except OSError as error:
            self._fail(f"the zygote is gone: {error}")

    def _fail(self, message: str) -> None:
        self._broken = self._broken or message
        self._loop.remove_reader(self._zygote.channel.fileno())
        for descriptor in list(self._open):
            self._forget(descriptor)
        self._finish()

    def _finish(self) -> None:
        if self.finished.done() or self._open or (self._report is None and not self._broken):
            return
        self._clock.cancel()
        if self._calls is not None:
            self._loop.remove_writer(self._calls)
            os.close(self._calls)
            self._calls = None
        self.finished.set_result(self._assess())
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def spent(self) -> bool:
        """Whether the zygote can run nothing more."""
        return bool(self._broken) or not self._zygote.nested

    def _assess(self) -> BoxReport:
        report = self._report or {}
        status: int | None = report.get("status")
        ended, detail = self._ending(report, status)
        return BoxReport(
            ended=ended,
            exit_code=1 if ended is Ended.COMPILE_ERROR else status,
            stdout=bytes(self._kept[self._stdout]),
            stderr=bytes(self._kept[self._stderr][-_STDERR_KEPT:]).decode("utf-8", "replace"),
            cpu_seconds=report.get("cpu", 0.0),
            peak_memory_bytes=report.get("peak", 0),
            detail=detail,
        )

    def _ending(self, report: dict[str, Any], status: int | None) -> tuple[Ended, str]:  # noqa: PLR0911 - a table
        limits = self._job.limits
        if self._broken:
            return (self._why, "killed with its sandbox") if self._why else (Ended.BROKEN, self._broken)
        if report["setup"]:
            return Ended.BROKEN, f"the execution could not be set up: {report['setup']}"
        if status == NOT_STARTED and not report["started"]:
            return Ended.BROKEN, "the worker could not start"
        if report["why"] == "memory" or report["peak"] > limits.memory_bytes or self._memory_error(status):
            return Ended.MEMORY, f"needs more than {limits.memory_bytes} bytes of memory"
        if self._why is Ended.OUTPUT:
            return Ended.OUTPUT, f"wrote more than {limits.output_bytes} bytes"
        if self._starved:
            return Ended.BROKEN, too_busy(self._starved, report["cpu"])
        if self._why is Ended.TIMEOUT:
            return Ended.TIMEOUT, f"ran for more than {limits.wall_seconds} s"
        cpu_used_up = status == -_SIGXCPU or (status == -_SIGKILL and report["cpu"] >= limits.cpu_seconds)
        if report["why"] == "cpu" or cpu_used_up:
            return Ended.TIMEOUT, f"used more than {limits.cpu_seconds} s of CPU"
        if self._why is not None:
            return self._why, "sent an answer without a request"
        if status is None:
            return Ended.ERROR, "its processes were killed from inside"
        if status == COMPILE_ERROR and not report["started"]:
            return Ended.COMPILE_ERROR, "does not compile"
        return (Ended.EXITED, "") if status == 0 else (Ended.ERROR, f"exit status {status}")

    def _memory_error(self, status: int | None) -> bool:
        """Whether Python printed this as its end; believed, because no ending is better for a program than another."""
        last_line = self._kept[self._stderr].rstrip().rpartition(b"\n")[2]
        return status == 1 and self._job.kind == "run" and last_line.startswith(b"MemoryError")


def _in_memory(data: bytes) -> int:
    """Return a descriptor of a file in memory with `data`, from its beginning."""
    descriptor = os.memfd_create("job", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
