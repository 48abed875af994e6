"""The bubblewrap backend: Python programs in workers that a zygote inside a sandbox forks.

Each zygote is one sandbox: user, process, mount, network, IPC, host-name and (where there is one) cgroup
namespace, a root with the interpreter and nothing else. Each execution inside has process and mount namespaces
of its own. `workers` zygotes run at a time, one execution each; after `recycle` executions a zygote is replaced,
so that what forks share (hash seed, addresses) is not shared for long.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from roll_like.sandbox import codec
from roll_like.sandbox.box import BoxReport, CallFailed, Ended, Program, SandboxUnavailable
from roll_like.sandbox.numpy_only import numpy_folder
from roll_like.sandbox.rootfs import (
    BOX,
    NUMPY,
    PYTHON,
    box_mounts,
    compiler_mounts,
    interpreter_mounts,
    interpreter_path,
)
from roll_like.sandbox.seccomp import filter_program
from roll_like.sandbox.types import Limits
from roll_like.sandbox.zygote import Execution, Job, Zygote

T = TypeVar("T")

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"
HELP = (
    f"install bubblewrap: {INSTALL}; in a container, allow user namespaces (Docker: --security-opt seccomp=unconfined"
    " --security-opt systempaths=unconfined), or choose the weaker backend `landlock` by name;"
    " `python -m roll_like.sandbox` shows every probe"
)

#: User and group id of programs, as they see it.
_UID = 1000
_CONTROL = "@control@"
_NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETPCAP")


class PythonBox:
    """A `Box` for Python, whose programs run in the zygotes of a pool."""

    name: str

    def __init__(self, pool: ZygotePool) -> None:
        self._pool = pool

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        """Run a whole program on standard input."""
        return await self._pool.run(self._job("run", program, limits), stdin.encode("utf-8", "surrogatepass"))

    async def open(self, program: Program, limits: Limits) -> PythonSession:
        """Execute a program once in a fresh worker that then answers calls."""
        return await PythonSession.start(self._pool, self._job("serve", program, limits))

    async def close(self) -> None:
        """End every process of this box."""
        await self._pool.close()

    def _job(self, kind: str, program: Program, limits: Limits) -> Job:
        if program.language != "python":
            raise SandboxUnavailable(f"the box {self.name!r} runs python, not {program.language!r}")
        return Job(kind=kind, source=program.source.encode("utf-8", "surrogatepass"), limits=limits)


class BwrapBox(PythonBox):
    """Python in zygotes under bubblewrap.

    Args:
        workers: Executions at a time; others wait.
        nest: False makes every execution take a zygote of its own, as where nested namespaces are refused.
        numpy: Whether programs may import NumPy.
    """

    name = "bwrap"

    def __init__(self, *, workers: int = 2, recycle: int = 64, nest: bool = True, numpy: bool = False) -> None:
        super().__init__(ZygotePool(partial(start_zygote, nest=nest, numpy=numpy), workers=workers, recycle=recycle))


class PythonSession:
    """A worker that answers calls; see `BoxSession`."""

    def __init__(self, pool: ZygotePool, zygote: Zygote, execution: Execution) -> None:
        self._pool = pool
        self._zygote: Zygote | None = zygote
        self._execution = execution
        self._report: BoxReport | None = None

    @classmethod
    async def start(cls, pool: ZygotePool, job: Job) -> PythonSession:
        """Execute the program and return the session.

        Raises:
            CallFailed: It raised, or ran out of a limit.
        """
        zygote = await pool.take()
        session = cls(pool, zygote, Execution(zygote, job))
        try:
            session._value(await session._execution.ask(None), b"R")
            session._execution.serves()
        except BaseException:
            await session._end(Ended.ERROR)
            raise
        return session

    async def call(self, entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Call a function of the program and return its decoded value."""
        if self._report is not None:
            raise CallFailed(self._report.ended, "the session is closed")
        request = codec.encode((entry_point, tuple(args), dict(kwargs)))
        try:
            return self._value(await self._execution.ask(request), b"V")
        except asyncio.CancelledError:
            await self._end(Ended.TIMEOUT)
            raise

    def own_seconds(self) -> float:
        """Return the seconds since its start in which nothing but itself kept it from its end."""
        return self._execution.share.own_seconds()

    async def close(self) -> BoxReport:
        """End the worker; `EXITED` only where it acknowledged the end itself and left with status 0."""
        if self._report is not None:
            return self._report
        try:
            acknowledged = await self._execution.ask(b"") == b"K"
        except asyncio.CancelledError:
            await self._end(Ended.TIMEOUT)
            raise
        report = await self._end(None)
        if report.ended is Ended.EXITED and not acknowledged:
            report = replace(report, ended=Ended.ERROR, detail="left without acknowledging the end")
        self._report = report
        return report

    def _value(self, answer: bytes | None, expected: bytes) -> object:
        if answer is None:
            report = self._execution.finished.result()
            kind = Ended.ERROR if report.ended is Ended.EXITED else report.ended
            raise CallFailed(kind, report.detail or "the program left before it answered")
        kind_byte, payload = answer[:1], answer[1:]
        if kind_byte in {b"E", b"M"}:
            kind = Ended.MEMORY if kind_byte == b"M" else Ended.ERROR
            raise CallFailed(kind, payload[:4000].decode("utf-8", "replace"))
        if kind_byte != expected:
            raise CallFailed(Ended.ERROR, "the program wrote an answer that is none")
        try:
            return codec.decode(payload) if expected == b"V" else None
        except codec.CodecError as error:
            raise CallFailed(Ended.ERROR, f"the value that came back is refused: {error}") from None

    async def _end(self, why: Ended | None) -> BoxReport:
        """Wait for the end (or bring it, with a reason) and give the zygote back."""
        if why is not None:
            self._execution.kill(why)
        zygote, self._zygote = self._zygote, None
        try:
            self._report = await asyncio.shield(self._execution.finished)
        finally:
            if zygote is not None:
                await self._pool.give(zygote, spent=self._execution.spent or not self._execution.finished.done())
        return self._report


class ZygotePool:
    """Zygotes that are idle or at work. Belongs to the event loop in which it is first used.

    Args:
        start: Starts one; blocks, and is called in a thread.
        workers: Most zygotes at a time.
    """

    def __init__(self, start: Callable[[], Zygote], *, workers: int, recycle: int) -> None:
        self._start = start
        self._free = asyncio.Semaphore(workers)
        self._idle: list[Zygote] = []
        self._busy: set[Zygote] = set()
        self._recycle = recycle
        # bubblewrap ends with the thread that started it, so that thread has to live as long as the pool
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox")
        self._closed = False

    async def run(self, job: Job, stdin: bytes) -> BoxReport:
        """Run a job to its end."""
        zygote = await self.take()
        execution = Execution(zygote, job, stdin)
        try:
            return await asyncio.shield(execution.finished)
        finally:
            execution.kill(Ended.TIMEOUT)  # only where this was cancelled; otherwise it has ended
            if not execution.finished.done():
                await execution.finished
            await self.give(zygote, spent=execution.spent)

    async def take(self) -> Zygote:
        """Wait for a free place and return an idle zygote.

        Raises:
            SandboxUnavailable: None can be started.
        """
        await self._free.acquire()
        try:
            if self._closed:
                raise SandboxUnavailable("the sandbox is closed")
            zygote = self._idle.pop() if self._idle else await self._in_thread(self._start)
        except BaseException:
            self._free.release()
            raise
        self._busy.add(zygote)
        return zygote

    async def give(self, zygote: Zygote, *, spent: bool) -> None:
        """Take a zygote back, and end it where it is spent or old."""
        self._busy.discard(zygote)
        try:
            if spent or self._closed or zygote.executions >= self._recycle:
                await self._in_thread(zygote.stop)
            else:
                self._idle.append(zygote)
        finally:
            self._free.release()

    async def close(self) -> None:
        """End every zygote."""
        self._closed = True
        for zygote in [*self._idle, *self._busy]:
            await self._in_thread(zygote.stop)
        self._idle.clear()
        self._starter.shutdown(wait=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._starter, work)


def start_zygote(*, nest: bool = True, compilers: bool = False, numpy: bool = False) -> Zygote:
    """Start a zygote in a sandbox; blocks.

    Args:
        nest: Whether it tries namespaces of their own for each execution.
        compilers: Whether the sandbox holds the system's programs (for languages other than Python).
        numpy: Whether programs may import NumPy.

    Raises:
        SandboxUnavailable: bubblewrap is missing or refuses.
    """
    command, uid = box_command(compilers=compilers, numpy=numpy)
    config = {"uid": uid, "nest": nest, "numpy": NUMPY if numpy else None}
    try:
        return Zygote.start(command, seccomp=filter_program(), control=_CONTROL, config=config)
    except SandboxUnavailable as error:
        raise SandboxUnavailable(error.message, fix=HELP) from error


def box_command(*, compilers: bool = False, numpy: bool = False) -> tuple[list[str], int | None]:
    """Return the command that starts a zygote, and the id it is to become (None: it has it already).

    Raises:
        SandboxUnavailable: bubblewrap is not installed.
    """
    program = shutil.which("bwrap", path=os.environ.get("PATH", "") + ":/usr/bin:/bin")
    if program is None:
        raise SandboxUnavailable("bubblewrap (bwrap) is not installed", fix=INSTALL)
    root = os.geteuid() == 0
    capabilities = (*_CAPABILITIES, "CAP_SETUID", "CAP_SETGID") if root else _CAPABILITIES
    command = [program, *_NAMESPACES, "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    command += [word for capability in capabilities for word in ("--cap-add", capability)]
    command += compiler_mounts() if compilers else ()
    command += interpreter_mounts(beside_system=compilers, numpy=numpy_folder() if numpy else None)
    command += box_mounts(Limits().tmp_bytes)
    start = f"import sys; sys.path.insert(0, {BOX!r}); from roll_like.sandbox.zygote_main import main"
    command += ["--", PYTHON, "-I", "-S", "-X", "utf8", "-c", f"{start}; main({_CONTROL}, {BOX!r})"]
    if not root:
        return [*command[:1], "--unshare-user", "--uid", str(_UID), "--gid", str(_UID), *command[1:]], None
    launcher = str(Path(__file__).with_name("launcher.py"))
    return [interpreter_path(), "-I", "-S", launcher, str(_UID), str(unused_id()), *command], _UID


def unused_id() -> int:
    """Return a user id outside that no account is likely to have: near the end of what is mapped here."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        first, _, count = (int(field) for field in file.read().splitlines()[-1].split())
    return min(first + count - 17, 2_000_000_000)
