"""The Landlock backend: weaker, for one thread that writes nothing; used only where it is named."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from roll_like.sandbox import backends, kernel
from roll_like.sandbox.box import CallFailed, Ended, Program, SandboxUnavailable
from roll_like.sandbox.landlock import LandlockBox, start_confined
from roll_like.sandbox.selftest import run_probes
from roll_like.sandbox.types import Limits

MIB = 1 << 20
LIMITS = Limits(wall_seconds=10, cpu_seconds=5, memory_bytes=128 * MIB)
OLDEST = 3
HAS_LANDLOCK = kernel.landlock_version() >= OLDEST

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[LandlockBox]:
    box = LandlockBox(workers=2)
    yield box
    await box.close()


async def run(box: LandlockBox, source: str, stdin: str = "", limits: Limits = LIMITS):
    """Return the report, or None where this kernel has no Landlock and the refusal says so."""
    if HAS_LANDLOCK:
        return await box.run(Program(source), stdin, limits)
    with pytest.raises(SandboxUnavailable, match="Landlock version"):
        await box.run(Program(source), stdin, limits)
    return None


async def test_it_passes_the_self_test():
    box = LandlockBox(workers=1)
    try:
        if HAS_LANDLOCK:
            report = await run_probes(box)
            assert report.passed, report.table()
        else:
            with pytest.raises(SandboxUnavailable, match="Landlock version"):
                start_confined()
    finally:
        await box.close()


@pytest.mark.parametrize(
    ("source", "ended", "code"),
    [
        ("print(input())", Ended.EXITED, 0),
        ("raise SystemExit(3)", Ended.ERROR, 3),
        ("def (", Ended.COMPILE_ERROR, 1),
        ("while True: pass", Ended.TIMEOUT, None),
        ("import time; time.sleep(60)", Ended.TIMEOUT, None),
        ("while True: print('x' * 4096)", Ended.OUTPUT, None),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", Ended.MEMORY, None),
        ("import sqlite3, xml.dom.minidom, zoneinfo, lzma, ctypes", Ended.EXITED, 0),
    ],
)
async def test_how_a_program_ends(box, source: str, ended: Ended, code: int | None):
    if report := await run(box, source, "x\n", Limits(wall_seconds=3, cpu_seconds=1, memory_bytes=128 * MIB)):
        assert report.ended is ended, report
        assert code is None or report.exit_code == code


@pytest.mark.parametrize(
    "statement",
    [
        "open('/etc/passwd')",
        "open('/tmp/x', 'w')",
        "open('/dev/shm/x', 'w')",
        "os.listdir('/proc')",
        "os.listdir('/root')",
        "os.listdir('/home')",
        "open(os.path.join(os.path.dirname(os.__file__), 'site-packages', 'README.txt'))",
        "os.chmod('/tmp', 0)",
        "os.truncate('/etc/passwd', 0)",
        "os.utime('/tmp')",
        "os.mkdir('/tmp/made')",
        "os.symlink('/etc', '/tmp/link')",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "os.fork()",
        "os.execv('/bin/sh', ['sh'])",
        "os.chdir('/')",
        "threading.Thread(target=print).start()",
        "socket.socketpair()",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
        "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "signal.pthread_kill(threading.get_ident(), 0)",
    ],
)
async def test_what_a_program_may_not_do(box, statement: str):
    source = f"""
import fcntl, os, signal, socket, threading
try:
    {statement}
    print('done')
except (OSError, RuntimeError) as error:
    print('refused')
"""
    if report := await run(box, source):
        assert report.stdout == b"refused\n", report


async def test_calls_work(box):
    program = Program("def add(a, b=1): return a + b\ndef leaves():\n    import os\n    os._exit(0)")
    if not HAS_LANDLOCK:
        with pytest.raises(SandboxUnavailable, match="Landlock version"):
            await box.open(program, LIMITS)
        return
    session = await box.open(program, LIMITS)
    assert await session.call("add", (1,), {"b": 4}) == 5
    assert (await session.close()).ended is Ended.EXITED
    session = await box.open(program, LIMITS)
    with pytest.raises(CallFailed):
        await session.call("leaves", (), {})
    assert (await session.close()).ended is Ended.ERROR


async def test_an_old_kernel_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("roll_like.sandbox.landlock._WITHOUT_PACKAGE", OLD_KERNEL)
    with pytest.raises(SandboxUnavailable, match=r"Landlock version 2 was found, at least 3 \(Linux 6.2\) is needed"):
        start_confined()


async def test_it_is_never_chosen_by_itself():
    assert isinstance(backends.make_box("landlock"), LandlockBox)
    assert not isinstance(backends.make_box("auto"), LandlockBox)


OLD_KERNEL = """
import types
for name, path in (("roll_like", "{here}/.."), ("roll_like.sandbox", "{here}")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from roll_like.sandbox import kernel
kernel.landlock_version = lambda: 2
from roll_like.sandbox.landlock_main import main
"""
