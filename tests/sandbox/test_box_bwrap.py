"""The bubblewrap backend: what ends an execution, what a program cannot do, what stays behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from roll_like.sandbox.box import CallFailed, Ended, Program
from roll_like.sandbox.bwrap import BwrapBox
from roll_like.sandbox.types import Limits

MIB = 1 << 20
LIMITS = Limits(wall_seconds=10, cpu_seconds=5, memory_bytes=256 * MIB)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[BwrapBox]:
    box = BwrapBox(workers=2)
    yield box
    await box.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def printed(box: BwrapBox, source: str, limits: Limits = LIMITS, stdin: str = "") -> str:
    """Run a program that has to end well and return what it printed."""
    report = await box.run(Program(source), stdin, limits)
    assert report.ended is Ended.EXITED, report
    return report.stdout.decode().strip()


# -- how executions end ----------------------------------------------------------------------------------------------


async def test_a_program_reads_its_input_and_prints(box):
    report = await box.run(Program("print(sum(map(int, input().split())))"), "3 4\n", LIMITS)
    assert (report.ended, report.exit_code, report.stdout, report.stderr) == (Ended.EXITED, 0, b"7\n", "")
    assert 0 < report.cpu_seconds < 1


@pytest.mark.parametrize(
    ("source", "ended", "code"),
    [
        ("raise SystemExit(0)", Ended.EXITED, 0),
        ("raise SystemExit(3)", Ended.ERROR, 3),
        ("raise SystemExit('no')", Ended.ERROR, 1),
        ("1 / 0", Ended.ERROR, 1),
        ("import os; os._exit(7)", Ended.ERROR, 7),
        ("import os; os.abort()", Ended.ERROR, -6),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Ended.ERROR, -9),
        ("def broken(:", Ended.COMPILE_ERROR, 1),
        ("print('\\0')\0", Ended.COMPILE_ERROR, 1),
        ("x = 'a' * 10**12", Ended.MEMORY, 1),
        ("def f(): f()\nf()", Ended.ERROR, 1),
    ],
)
async def test_how_a_program_ends(box, source: str, ended: Ended, code: int):
    report = await box.run(Program(source), "", LIMITS)
    assert (report.ended, report.exit_code) == (ended, code), report


async def test_a_traceback_shows_the_program_alone(box):
    report = await box.run(Program("def f():\n    return 1 / 0\n\nf()\n"), "", LIMITS)
    assert "ZeroDivisionError" in report.stderr
    assert "return 1 / 0" in report.stderr
    assert "worker.py" not in report.stderr


async def test_the_wall_clock_ends_a_sleeper(box):
    begun = time.monotonic()
    report = await box.run(Program("import time; print('x', flush=True); time.sleep(60)"), "", Limits(wall_seconds=0.5))
    assert (report.ended, report.stdout) == (Ended.TIMEOUT, b"x\n")
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
    ],
)
async def test_cpu_time_counts_over_all_processes(box, source: str):
    report = await box.run(Program(source), "", Limits(wall_seconds=20, cpu_seconds=1))
    assert report.ended is Ended.TIMEOUT
    assert "CPU" in report.detail
    assert 0.8 < report.cpu_seconds < 3


async def test_output_floods_are_cut_off(box):
    report = await box.run(Program("while True: print('x' * 1000)"), "", Limits(output_bytes=10_000))
    assert (report.ended, len(report.stdout)) == (Ended.OUTPUT, 10_000)
    report = await box.run(
        Program("import sys\nwhile True: sys.stderr.write('y' * 1000)"), "", Limits(output_bytes=10_000)
    )
    assert report.ended is Ended.OUTPUT
    assert len(report.stderr) <= 4096


async def test_memory_of_many_processes_counts_together(box):
    source = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(100 << 20)
        for at in range(0, len(held), 4096): held[at] = 1
        time.sleep(20)
        os._exit(0)
time.sleep(20)
"""
    report = await box.run(Program(source), "", LIMITS)
    assert report.ended is Ended.MEMORY
    assert report.peak_memory_bytes > 256 * MIB


async def test_files_in_memory_count_as_memory(box):
    source = "for i in range(3): open(f'/tmp/{i}', 'wb').write(bytes(9 << 20))\nimport time; time.sleep(9)"
    report = await box.run(Program(source), "", Limits(memory_bytes=20 * MIB, wall_seconds=9))
    assert report.ended is Ended.MEMORY


async def test_peak_memory_is_measured(box):
    report = await box.run(Program("x = bytearray(64 << 20)\nx[::4096] = bytes(len(x[::4096]))"), "", LIMITS)
    assert 60 * MIB < report.peak_memory_bytes < 90 * MIB


async def test_files_are_limited_in_size_and_in_sum(box):
    source = """
def write(name, size):
    try:
        with open(name, 'wb') as file: file.write(bytes(size))
        return 'written'
    except OSError as error:
        return error.strerror
print(write('/tmp/a', 5 << 20), write('/tmp/b', 3 << 20), write('/tmp/c', 3 << 20), sep='|')
"""
    limits = Limits(file_bytes=4 * MIB, tmp_bytes=8 * MIB)
    assert await printed(box, source, limits) == "File too large|written|No space left on device"


# -- what a program cannot do ----------------------------------------------------------------------------------------


async def test_no_privilege_is_left(box):
    source = """
import ctypes, os, struct
libc = ctypes.CDLL(None)
header, data = struct.pack('Ii', 0x20080522, 0), ctypes.create_string_buffer(24)
libc.capget(header, data)
print(os.getresuid(), os.getresgid(), data.raw == bytes(24), libc.prctl(39, 0, 0, 0, 0), dict(os.environ),
      [cap for cap in range(64) if libc.prctl(23, cap, 0, 0, 0) == 1])
try: os.setuid(0)
except OSError: print('not root')
"""
    assert await printed(box, source) == "(1000, 1000, 1000) (1000, 1000, 1000) True 1 {} []\nnot root"


@pytest.mark.parametrize(
    "statement",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import os; os.memfd_create('x')",
        "import mmap; mmap.mmap(-1, 4096)",
        "import os; os.mknod('/tmp/x', 0o600)",
        "import os; os.chroot('/tmp')",
        "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
        "call('unshare', 0x10000000)",
        "call('unshare', 0x20000)",
        "call('setns', 3, 0)",
        "call('mount', b'x', b'/tmp', b'tmpfs', 0, 0)",
        "call('umount2', b'/tmp', 2)",
        "call('ptrace', 16, os.getppid(), 0, 0)",
        "call('process_vm_readv', 1, 0, 0, 0, 0, 0)",
        "call('shmget', 0, 4096, 0o1600)",
        "call('semget', 0, 1, 0o1600)",
        "call('msgget', 0, 0o1600)",
        "call('syscall', 250, 0, 0, 0, 0, 0)",
        "call('syscall', 321, 0, 0, 0)",
        "call('syscall', 323, 0)",
        "call('syscall', 425, 1, 0)",
        "call('syscall', 438, 0, 0, 0)",
        "call('personality', 0x0040000)",
        "call('prlimit', 1, 7, 0, 0)",
    ],
)
async def test_a_dangerous_system_call_is_refused(box, statement: str):
    source = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno(), name)
try:
    {statement}
    print('done')
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    assert await printed(box, source) in {"EPERM", "ENOSYS"}


async def test_a_namespace_cannot_be_had_by_clone(box):
    source = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print([libc.syscall(56, flag | 17, 0, 0, 0, 0) for flag in (0x10000000, 0x20000000, 0x20000, 0x40000000)])
print(libc.syscall(435, 0, 0), ctypes.get_errno())
"""
    assert await printed(box, source) == "[-1, -1, -1, -1]\n-1 38"


@pytest.mark.parametrize("kind", ["process", "thread"])
async def test_the_number_of_processes_is_limited(box, kind: str):
    grow = {
        "process": "pid = os.fork()\n        if pid == 0: time.sleep(5); os._exit(0)",
        "thread": "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
    }[kind]
    source = f"""
import os, threading, time
count = 1
try:
    while count < 100:
        {grow}
        count += 1
except (OSError, RuntimeError):
    pass
print(count, flush=True)
os._exit(0)
"""
    assert await printed(box, source, Limits(processes=7)) == "7"


async def test_the_file_system_is_read_only_and_small(box):
    source = """
import os
print(*(sorted(os.listdir(folder)) for folder in ('/', '/dev', '/proc')), os.path.exists('/etc'))
found = []
for folder, folders, files in os.walk('/'):
    for name in [*folders, *files]:
        path = os.path.join(folder, name)
        if os.path.islink(path) or path.startswith('/proc/2/'): continue
        if os.access(path, os.W_OK): found.append(path)
    try:
        open(os.path.join(folder, 'probe'), 'w').close()
        found.append(folder)
    except OSError: pass
print(sorted(set(found)))
library = os.path.dirname(os.__file__)
print([hidden for hidden in ('site-packages', 'test') if os.listdir(os.path.join(library, hidden))])
"""
    root, writable, hidden = (await printed(box, source)).split("\n")
    assert root == (
        "['box', 'dev', 'lib64', 'proc', 'python', 'tmp', 'usr'] "
        "['null', 'random', 'shm', 'stderr', 'stdin', 'stdout', 'urandom'] ['2', 'self', 'thread-self'] False"
    )
    assert writable == "['/dev/null', '/dev/random', '/dev/urandom', '/tmp']"
    assert hidden == "[]"


async def test_descriptors_of_this_process_do_not_get_in(box):
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    os.set_inheritable(writing, True)
    fresh = BwrapBox(workers=1)
    try:
        source = """
import os
held = []
for descriptor in range(1024):
    try: os.fstat(descriptor); held.append(descriptor)
    except OSError: pass
print(held)
"""
        assert await printed(fresh, source) == "[0, 1, 2]"
        zygote = next(iter(fresh._pool._idle)).process.pid
        family = [psutil.Process(zygote), *psutil.Process(zygote).children(recursive=True)]
        held = {os.readlink(path) for member in family for path in descriptors_of(member.pid)}
        assert held
        assert os.readlink(f"/proc/self/fd/{reading}") not in held
    finally:
        await fresh.close()
        os.close(reading)
        os.close(writing)


async def test_signals_to_everybody_do_not_reach_the_zygote(box):
    fresh = BwrapBox(workers=1)
    try:
        for source in ("os.kill(0, 9)", "os.kill(-1, 9)", "os.killpg(0, 9)", "os.kill(1, 9); os.kill(os.getppid(), 9)"):
            await fresh.run(Program(f"import os; {source}"), "", LIMITS)
        assert next(iter(fresh._pool._idle)).executions == 4  # the same zygote served them all
    finally:
        await fresh.close()


async def test_a_child_does_not_outlive_its_parent(box):
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(0.01)
    os._exit(0)
print('gone')
"""
    begun = time.monotonic()
    assert await printed(box, source) == "gone"
    assert time.monotonic() - begun < 30
    assert not [found for zygote in box._pool._idle for found in workers_of(zygote.process.pid)]


async def test_nothing_persists_between_executions(box):
    source = """
import os, sys, math
print(os.listdir('/tmp'), hasattr(math, 'left'))
open('/tmp/left', 'w').close(); math.left = 1; os.symlink('/etc', '/tmp/link')
"""
    fresh = BwrapBox(workers=1)
    try:
        assert [await printed(fresh, source) for _ in range(3)] == ["[] False"] * 3
    finally:
        await fresh.close()


async def test_links_made_inside_are_not_followed_outside(box, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("outside")
    before = set(os.listdir("/tmp"))
    source = f"""
import os
os.symlink({str(secret)!r}, '/tmp/link')
try: print(open('/tmp/link').read())
except FileNotFoundError: print('nothing there')
os.link('/tmp/link', '/tmp/hard'); os.symlink('/', '/tmp/root')
print(sorted(os.listdir('/tmp/root')) == sorted(os.listdir('/')))
"""
    assert await printed(box, source) == "nothing there\nTrue"
    assert not {"link", "hard", "root"} & (set(os.listdir("/tmp")) - before)
    assert secret.read_text() == "outside"


async def test_zygotes_are_recycled_and_with_them_hash_seed_and_layout(box):
    fresh = BwrapBox(workers=1, recycle=3)
    try:
        source = "print(hash('x'), id(None), id(object()))"
        seen = [await printed(fresh, source) for _ in range(7)]
        seeds = [line.split()[0] for line in seen]
        assert seeds[0] == seeds[1] == seeds[2] != seeds[3]
        assert len(set(seeds)) == 3
        assert len({line.split()[1] for line in seen}) == 3
    finally:
        await fresh.close()


async def test_random_numbers_differ_between_executions_of_a_zygote(box):
    assert len({await printed(box, "import random; print(random.random())") for _ in range(4)}) == 4


async def test_standard_input_can_be_opened_by_name(box):
    assert await printed(box, "print(open('/dev/stdin').read(), end='')", stdin="a\nb\n") == "a\nb"


async def test_event_loops_and_subprocesses_work_within_the_limits(box):
    source = """
import asyncio, subprocess, sys, concurrent.futures
async def main(): await asyncio.sleep(0.01); return 5
print(asyncio.run(main()))
print(subprocess.run([sys.executable, '-I', '-S', '-c', 'print(6)'], capture_output=True, text=True).stdout.strip())
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(sum(pool.map(int, '34')))
"""
    assert await printed(box, source) == "5\n6\n7"


# -- calls -----------------------------------------------------------------------------------------------------------

SOLUTION = """
import os, sys, time
count = 0
def add(a, b=1):
    return a + b
def counted():
    global count
    count += 1
    return count
class Solution:
    def twice(self, values): return [2 * value for value in values]
def fails(): raise ValueError('on purpose')
def leaves(): os._exit(0)
def hangs(): time.sleep(60)
def mine():
    class Mine(int): pass
    return Mine(3)
def grows(): return bytearray(1 << 40)
def many(): os.write(4, b'\\0\\0\\0\\2V1' * 3)
def prints(): print('shown')
"""


async def test_calls_reach_functions_and_methods_of_one_execution(box):
    session = await box.open(Program(SOLUTION), LIMITS)
    assert await session.call("add", (2,), {"b": 5}) == 7
    assert [await session.call("counted", (), {}) for _ in range(3)] == [1, 2, 3]
    assert await session.call("Solution.twice", ([1, 2],), {}) == [2, 4]
    await session.call("prints", (), {})
    report = await session.close()
    assert (report.ended, report.exit_code, report.stdout) == (Ended.EXITED, 0, b"shown\n")
    assert await session.close() is report
    with pytest.raises(CallFailed, match="closed"):
        await session.call("add", (1,), {})


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("fails", Ended.ERROR, "ValueError: on purpose"),
        ("absent", Ended.ERROR, "'absent' is not defined"),
        ("mine", Ended.ERROR, "Mine"),
        ("grows", Ended.MEMORY, "MemoryError"),
    ],
)
async def test_a_failed_call_leaves_the_worker_alive(box, name: str, kind: Ended, message: str):
    session = await box.open(Program(SOLUTION), LIMITS)
    with pytest.raises(CallFailed, match=message) as caught:
        await session.call(name, (), {})
    assert caught.value.kind is kind
    assert await session.call("add", (1,), {}) == 2
    assert (await session.close()).ended is Ended.EXITED


@pytest.mark.parametrize(("name", "kind"), [("leaves", Ended.ERROR), ("hangs", Ended.TIMEOUT)])
async def test_a_call_that_ends_the_worker(box, name: str, kind: Ended):
    session = await box.open(Program(SOLUTION), Limits(wall_seconds=1))
    with pytest.raises(CallFailed) as caught:
        await session.call(name, (), {})
    assert caught.value.kind is kind
    assert (await session.close()).ended is kind


async def test_answers_that_nobody_asked_for_end_the_session(box):
    session = await box.open(Program(SOLUTION), LIMITS)
    failures = 0
    for _ in range(10):
        try:
            await session.call("many", (), {})
        except CallFailed:
            failures += 1
    assert failures >= 9
    assert (await session.close()).ended is Ended.ERROR


async def test_a_program_that_fails_at_once_cannot_be_called(box):
    for source, kind in (("1/0", Ended.ERROR), ("x = (", Ended.COMPILE_ERROR), ("raise SystemExit(0)", Ended.ERROR)):
        with pytest.raises(CallFailed) as caught:
            await box.open(Program(source), LIMITS)
        assert caught.value.kind is kind, source


async def test_leaving_without_the_last_word_is_no_clean_end(box):
    later = "threading.Thread(target=lambda: (time.sleep(.1), os._exit(0))).start()"
    source = f"import os, threading, time\ndef f():\n    {later}"
    session = await box.open(Program(source), LIMITS)
    assert await session.call("f", (), {}) is None
    await asyncio.sleep(1.5)
    report = await session.close()
    assert (report.ended, report.exit_code) == (Ended.ERROR, 0)


# -- the box itself --------------------------------------------------------------------------------------------------


async def test_where_nested_namespaces_are_refused_each_execution_has_a_sandbox_of_its_own():
    alone = BwrapBox(workers=1, nest=False)
    try:
        source = (
            "import os\nprint(os.listdir('/tmp')); open('/tmp/left', 'w').close()\nif os.fork() == 0:\n  while 1: pass"
        )
        assert [await printed(alone, source) for _ in range(2)] == ["[]", "[]"]
        for kill in ("os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.kill(1, 9)\n1/0"):
            assert (await alone.run(Program(f"import os; {kill}"), "", LIMITS)).ended is Ended.ERROR
        blocked = "import os; print([os.access(f'/proc/{p}/fd', os.R_OK) for p in (1, os.getppid())])"
        assert await printed(alone, blocked) == "[False, False]"
        assert not alone._pool._idle
    finally:
        await alone.close()


async def test_a_cancelled_run_ends_its_program_and_frees_its_place():
    fresh = BwrapBox(workers=1)
    try:
        await fresh.run(Program("pass"), "", LIMITS)
        task = asyncio.create_task(fresh.run(Program("import time; time.sleep(60)"), "", Limits(wall_seconds=60)))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await printed(fresh, "print(1)") == "1"
    finally:
        await fresh.close()


async def test_a_killed_zygote_is_a_broken_sandbox_and_is_replaced():
    fresh = BwrapBox(workers=1)
    try:
        task = asyncio.create_task(fresh.run(Program("import time; time.sleep(60)"), "", LIMITS))
        while not fresh._pool._busy:
            await asyncio.sleep(0.01)
        monitor = next(iter(fresh._pool._busy)).process.pid
        (zygote,) = psutil.Process(monitor).children()
        zygote.kill()
        assert (await task).ended is Ended.BROKEN
        assert await printed(fresh, "print(1)") == "1"
    finally:
        await fresh.close()


async def test_closing_leaves_no_process():
    fresh = BwrapBox(workers=2)
    await asyncio.gather(*(fresh.run(Program("print(1)"), "", LIMITS) for _ in range(4)))
    pids = [member for zygote in fresh._pool._idle for member in family_of(zygote.process.pid)]
    assert len(pids) >= 4
    await fresh.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_a_zygote_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("roll_like.sandbox.zygote._KILL_SECONDS", 0.3)
    monkeypatch.setattr("roll_like.sandbox.zygote._STOP_SECONDS", 0.3)
    fresh = BwrapBox(workers=1)
    await fresh.run(Program("pass"), "", LIMITS)
    monitor = next(iter(fresh._pool._idle)).process.pid
    (zygote,) = psutil.Process(monitor).children()
    zygote.suspend()
    report = await fresh.run(Program("pass"), "", Limits(wall_seconds=0.2))
    assert report.ended is Ended.TIMEOUT
    assert not zygote.is_running()
    await fresh.close()


@pytest.mark.integration
async def test_many_executions_leave_nothing_behind():
    fresh = BwrapBox(workers=2, recycle=1000)
    mine = psutil.Process()
    try:
        await asyncio.gather(*(fresh.run(Program("x = [0] * 10**5"), "", LIMITS) for _ in range(20)))
        zygotes = [pid for zygote in fresh._pool._idle for pid in family_of(zygote.process.pid)]

        def state() -> tuple[int, int, str, list[int]]:
            mounts = Path("/proc/self/mounts").read_text()
            inner = Path(f"/proc/{zygotes[-1]}/mounts").read_text()
            held = [len(descriptors_of(pid)) for pid in zygotes]
            return mine.num_fds(), len(mine.children(recursive=True)), mounts + inner, held

        before, files = state(), set(os.listdir("/tmp"))
        memory = [psutil.Process(pid).memory_info().rss for pid in zygotes]
        for _ in range(10):
            await asyncio.gather(*(fresh.run(Program("x = [0] * 10**5"), "", LIMITS) for _ in range(20)))
        assert state() == before
        # other test workers have canaries of their own there
        new = {name for name in set(os.listdir("/tmp")) - files if not name.startswith("sandbox-canary-")}
        assert not {name for name in new if name.startswith(("bwrap", "sandbox", "main"))}
        grown = [psutil.Process(pid).memory_info().rss - was for pid, was in zip(zygotes, memory, strict=True)]
        assert max(grown) < MIB
    finally:
        await fresh.close()


def descriptors_of(pid: int) -> list[Path]:
    """What a process has open, where this one may see it: only root sees it of a zygote, which hides itself."""
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        assert os.geteuid() != 0
        return []


def family_of(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def workers_of(pid: int) -> list[int]:
    """Everything below the zygote itself, which is the last of the chain that starts it."""
    chain = psutil.Process(pid).children(recursive=True)
    return [process.pid for process in chain if process.ppid() != pid]
