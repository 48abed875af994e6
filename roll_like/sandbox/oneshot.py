"""Languages beside Python: each execution starts a program of its own in namespaces of its own.

The sandbox is the same as for Python, with the system's programs (`/usr`, read-only) beside the interpreter.
A C++ program is compiled inside as well; the executable that comes out is bytes to us, kept for the program's
next tests.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from dataclasses import replace
from functools import partial

from roll_like.sandbox.box import BoxReport, Ended, Program, SandboxUnavailable
from roll_like.sandbox.bwrap import BwrapBox, ZygotePool, start_zygote
from roll_like.sandbox.types import Limits
from roll_like.sandbox.zygote import Job

_MIB = 1 << 20
_COMPILE = Limits(
    wall_seconds=60.0,
    cpu_seconds=30.0,
    memory_bytes=1024 * _MIB,
    output_bytes=32 * _MIB,
    file_bytes=64 * _MIB,
    tmp_bytes=128 * _MIB,
)
#: Executables kept for the next tests of the same program.
_KEPT = 16
#: Threads of node's own: its event loop, its thread pool, V8's workers.
_NODE_THREADS = 16
_COMPILER = "g++ -std=c++17 -O2 -pipe -o /tmp/a.out /tmp/main.cpp && exec cat /tmp/a.out"


#: The program that a language needs on this machine, and how to get it.
LANGUAGES = {"cpp": ("g++", "apt-get install g++"), "javascript": ("node", "apt-get install nodejs")}


class EveryLanguageBox(BwrapBox):
    """A `Box` for Python, C++ (g++) and JavaScript (node); calls into a program are for Python only.

    Args:
        workers: Executions of Python at a time; executions of the other languages at a time.
        numpy: Whether programs may import NumPy.
    """

    def __init__(self, *, workers: int = 2, numpy: bool = False) -> None:
        super().__init__(workers=workers, numpy=numpy)
        self._others = ZygotePool(partial(start_zygote, compilers=True), workers=workers, recycle=64)
        self._compiled: OrderedDict[str, bytes] = OrderedDict()

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        """Run a whole program on standard input.

        Raises:
            SandboxUnavailable: The language is not known, or its compiler or interpreter is not installed.
        """
        if program.language == "python":
            return await super().run(program, stdin, limits)
        check_language(program.language)
        given = stdin.encode("utf-8", "surrogatepass")
        if program.language == "javascript":
            return await self._others.run(_javascript(program, limits), given)
        executable = await self._compile(program.source)
        if isinstance(executable, BoxReport):
            return executable
        job = Job(
            kind="exec",
            source=executable,
            limits=limits,
            path="/tmp/a.out",
            arguments=("/tmp/a.out",),
            address_space=limits.memory_bytes * 4,  # what is touched counts, not what is reserved
        )
        return await self._others.run(job, given)

    async def close(self) -> None:
        """End every process of this box."""
        await super().close()
        await self._others.close()

    async def _compile(self, source: str) -> bytes | BoxReport:
        """Return the executable, or the report of a program that does not compile."""
        if source in self._compiled:
            self._compiled.move_to_end(source)
            return self._compiled[source]
        job = Job(
            kind="exec",
            source=source.encode("utf-8", "surrogatepass"),
            limits=_COMPILE,
            path="/tmp/main.cpp",
            arguments=("/bin/sh", "-c", _COMPILER),
        )
        report = await self._others.run(job, b"")
        if report.ended is Ended.BROKEN:
            return report
        if report.ended is not Ended.EXITED:
            why = "does not compile" if report.ended is Ended.ERROR else f"the compiler {report.detail}"
            return replace(report, ended=Ended.COMPILE_ERROR, stdout=b"", detail=why)
        self._compiled[source] = report.stdout
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return report.stdout


def check_language(name: str) -> None:
    """Refuse a language that cannot be run here.

    Raises:
        SandboxUnavailable: It is not known, or its program is not installed.
    """
    if name not in LANGUAGES:
        raise SandboxUnavailable(f"no sandbox runs {name!r}; there are python, {', '.join(LANGUAGES)}")
    program, install = LANGUAGES[name]
    if shutil.which(program) is None:
        raise SandboxUnavailable(f"{program} is not installed, which {name} needs", fix=install)


def _javascript(program: Program, limits: Limits) -> Job:
    heap = max(16, limits.memory_bytes // _MIB)
    return Job(
        kind="exec",
        source=program.source.encode("utf-8", "surrogatepass"),
        limits=limits,
        path="/tmp/main.js",
        arguments=("/node/bin/node", f"--max-old-space-size={heap}", "/tmp/main.js"),
        extra_processes=_NODE_THREADS,  # V8 reserves far more addresses than it uses: no limit on those
    )
