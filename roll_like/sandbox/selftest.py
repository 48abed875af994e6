"""Does a box isolate on this machine? Programs that try what must not work, and a look at what came of it.

A box is used only after all of these passed in the same process (`backends.open_box`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from roll_like.sandbox.box import Box, BoxReport, Ended, Program
from roll_like.sandbox.types import Limits

_MIB = 1 << 20
_LIMITS = Limits(wall_seconds=10.0, cpu_seconds=5.0, memory_bytes=128 * _MIB, output_bytes=64 * 1024, processes=6)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One property, whether it holds, and what was seen."""

    name: str
    passed: bool
    seen: str


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What the self-test found.

    Attributes:
        backend: Name of the box.
        probes: In the order of the table; empty where the box could not be had.
        reason: Why the box could not be had; empty otherwise.
    """

    backend: str
    probes: tuple[ProbeResult, ...]
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the box may be used."""
        return bool(self.probes) and all(probe.passed for probe in self.probes)

    def failures(self) -> str:
        """Return one line for each probe that failed."""
        failed = [f"  {probe.name}: {probe.seen}" for probe in self.probes if not probe.passed]
        return "\n".join(failed) or self.reason

    def table(self) -> str:
        """Return all probes as text for a terminal."""
        if not self.probes:
            return f"backend {self.backend}: not available\n{self.reason}"
        width = max(len(probe.name) for probe in self.probes)
        lines = [f"  {'ok  ' if probe.passed else 'FAIL'}  {probe.name:{width}}  {probe.seen}" for probe in self.probes]
        status = "isolates" if self.passed else "DOES NOT ISOLATE and will not be used"
        return "\n".join([f"backend {self.backend}", *lines, f"{self.backend} {status} on this machine"])


async def run_probes(box: Box) -> SelfTestReport:
    """Run every probe in a box.

    Raises:
        SandboxUnavailable: The box cannot start at all.
    """
    everywhere = [_clock, _flood]
    probes = [_elsewhere, *everywhere] if box.name == "remote" else [*_HERE, *everywhere]
    found = [await run(box) for run in probes]
    return SelfTestReport(box.name, tuple(each for several in found for each in several))


_INSPECT = """
import ctypes, errno, json, os, socket, struct, sys
canary, port = sys.stdin.readline().strip(), int(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
found = {}
def attempt(name, action):
    try:
        action()
        found[name] = "possible"
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno, str(error))
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno(), name)
attempt("read", lambda: open(canary).read())
attempt("write", lambda: open(canary, "w").write("overwritten"))
attempt("beside", lambda: open(canary + ".new", "w").write("made"))
name = os.path.basename(canary)
found["listed"] = [root for root, _, files in os.walk("/") if name in files]
attempt("connect", lambda: socket.create_connection(("127.0.0.1", port), timeout=2))
attempt("datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port)))
attempt("unix socket", lambda: socket.socket(socket.AF_UNIX))
# harmless where they are not refused: the arguments mean nothing
attempt("unshare", lambda: call("unshare", 1))
attempt("mount", lambda: call("mount", b"x", b"/nowhere/at/all", b"tmpfs", 0, 0))
attempt("ptrace", lambda: call("ptrace", 0x7777, 0, 0, 0))
attempt("memfd", lambda: call("memfd_create", b"x", 0))
attempt("shared memory", lambda: call("shmget", 0x7777, 4096, 0))
header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
libc.capget(header, data)
found["capabilities"] = data.raw.hex() if any(data.raw) else ""
found["no_new_privs"] = libc.prctl(39, 0, 0, 0, 0)
found["ids"] = [*os.getresuid(), *os.getresgid()]
found["environment"] = sorted(os.environ)
held = []
for descriptor in range(4096):
    try: os.fstat(descriptor); held.append(descriptor)
    except OSError: pass
found["descriptors"] = held
try: found["processes"] = [int(name) for name in os.listdir("/proc") if name.isdigit()]
except OSError: found["processes"] = []
print(json.dumps(found))
"""


async def _look_around(box: Box) -> list[ProbeResult]:
    with tempfile.TemporaryDirectory(prefix="sandbox-canary-") as folder, socket.socket() as listener:
        Path(folder).chmod(0o755)  # what would keep a program out must be the box, not the file's mode
        canary = Path(folder) / f"canary-{secrets.token_hex(6)}"
        canary.write_text("canary")
        canary.chmod(0o666)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0)
        report = await box.run(Program(_INSPECT), f"{canary}\n{listener.getsockname()[1]}\n", _LIMITS)
        found: dict[str, Any] = json.loads(report.stdout) if report.ended is Ended.EXITED else {}
        if not found:
            return [ProbeResult("a program runs", False, f"{report.ended}: {report.detail} {report.stderr[-300:]}")]
        try:
            listener.accept()[0].close()
            reached = True
        except BlockingIOError:
            reached = False
        unharmed = canary.read_text() == "canary" and len(list(Path(folder).iterdir())) == 1
    calls = ("unshare", "mount", "ptrace", "memfd", "shared memory")
    refused = all(found[name] in {"EPERM", "ENOSYS"} for name in calls)

    def stopped(*names: str) -> tuple[bool, str]:
        return all(found[name] != "possible" for name in names), ", ".join(f"{name} {found[name]}" for name in names)

    files, files_seen = stopped("read", "write", "beside")
    network, network_seen = stopped("connect", "datagram", "unix socket")
    return [
        ProbeResult("a program runs", True, f"{report.cpu_seconds:.3f} s of CPU"),
        ProbeResult("files outside are out of reach", files and unharmed and not found["listed"], files_seen),
        ProbeResult("no network", network and not reached, network_seen),
        ProbeResult("dangerous system calls refused", refused, stopped(*calls)[1]),
        ProbeResult("not root", 0 not in found["ids"], f"user {found['ids'][0]}"),
        ProbeResult(
            "no capability, none to be had",
            not found["capabilities"] and found["no_new_privs"] == 1,
            f"capabilities {found['capabilities'] or 'none'}, no_new_privs {found['no_new_privs']}",
        ),
        ProbeResult("environment empty", not found["environment"], ", ".join(found["environment"]) or "no variable"),
        ProbeResult("no inherited descriptor", found["descriptors"] == [0, 1, 2], f"open: {found['descriptors']}"),
        ProbeResult(
            "no other process in sight", not _others(found["processes"]), f"{len(found['processes'])} in /proc"
        ),
    ]


async def _elsewhere(box: Box) -> list[ProbeResult]:
    """What can be seen of a server from here: programs run on it and not on this machine."""
    with tempfile.TemporaryDirectory(prefix="sandbox-canary-") as folder:
        Path(folder).chmod(0o755)
        canary = Path(folder) / "canary"
        canary.write_text("canary")
        source = f"import os; print(os.path.exists({str(canary)!r}))"
        report = await box.run(Program(source), "", _LIMITS)
    ran = report.ended is Ended.EXITED
    text = report.stdout.decode().strip()
    return [
        ProbeResult("a program runs", ran, text or _words(report)),
        ProbeResult("programs run on another machine", ran and text == "False", f"sees this one's files: {text}"),
    ]


def _others(processes: list[int]) -> list[int]:
    """Return what cannot be in a fresh process namespace."""
    return [pid for pid in processes if pid > 64]


_ALLOCATE = """
import os, time
held = []
def fill(size):
    part = bytearray(size)
    for at in range(0, size, 4096): part[at] = 1
    held.append(part)
try:
    for _ in range(4):
        if os.fork() == 0: fill(60 << 20); time.sleep(20); os._exit(0)
except OSError:
    for _ in range(60): fill(4 << 20)
time.sleep(20)
"""

_COUNT = """
import os, threading, time
count = 1
try:
    while count < 200:
        if os.fork() == 0: time.sleep(5); os._exit(0)
        count += 1
except OSError: pass
try:
    while count < 200:
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        count += 1
except (OSError, RuntimeError): pass
print(count, flush=True)
os._exit(0)
"""

_OUTLIVE = """
import ctypes, os, sys, time
name = sys.stdin.readline().strip().encode()
reading, writing = os.pipe()
try:
    child = os.fork()
except OSError:
    print("no child can be had")
    raise SystemExit
if child == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
        for descriptor in (0, 1, 2): os.close(descriptor)
        os.write(writing, b"x")
        while True: time.sleep(1)
    os._exit(0)
os.read(reading, 1)
print("left a grandchild")
"""


async def _memory(box: Box) -> list[ProbeResult]:
    report = await box.run(Program(_ALLOCATE), "", _LIMITS)
    held = report.ended is Ended.MEMORY and report.peak_memory_bytes < 2 * _LIMITS.memory_bytes
    return [ProbeResult("memory limit holds", held, f"{report.ended} at {report.peak_memory_bytes >> 20} of 128 MiB")]


async def _processes(box: Box) -> list[ProbeResult]:
    report = await box.run(Program(_COUNT), "", _LIMITS)
    text = report.stdout.decode().strip()
    held = report.ended is Ended.EXITED and text.isdigit() and 1 <= int(text) <= _LIMITS.processes
    return [ProbeResult("process limit holds", held, f"{text or _words(report)} of {_LIMITS.processes}")]


async def _whole_tree(box: Box) -> list[ProbeResult]:
    name = "sb" + secrets.token_hex(6)
    report = await box.run(Program(_OUTLIVE), name + "\n", _LIMITS)
    left = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == name]
    text = report.stdout.decode().strip()
    held = report.ended is Ended.EXITED and bool(text) and not left
    return [
        ProbeResult("no process outlives its program", held, f"{text or _words(report)}, {len(left)} alive afterwards")
    ]


async def _clock(box: Box) -> list[ProbeResult]:
    begun = asyncio.get_running_loop().time()
    report = await box.run(Program("import time; time.sleep(30)"), "", Limits(wall_seconds=0.3))
    took = asyncio.get_running_loop().time() - begun
    return [
        ProbeResult(
            "time limit holds", report.ended is Ended.TIMEOUT and took < 10, f"{report.ended} after {took:.1f} s"
        )
    ]


async def _flood(box: Box) -> list[ProbeResult]:
    report = await box.run(Program("while True: print('x' * 4096)"), "", _LIMITS)
    held = report.ended is Ended.OUTPUT and len(report.stdout) <= _LIMITS.output_bytes
    return [ProbeResult("output limit holds", held, f"{report.ended} at {len(report.stdout) >> 10} of 64 KiB")]


async def _persistence(box: Box) -> list[ProbeResult]:
    source = """
import os, math
found = [name for name in ("/tmp/left", "/dev/shm/left", "left") if os.path.exists(name)]
for name in ("/tmp/left", "/dev/shm/left", "left"):
    try: open(name, "x").close()
    except OSError: pass
print(found, hasattr(math, "left"))
math.left = 1
"""
    reports = [await box.run(Program(source), "", _LIMITS) for _ in range(4)]
    seen = {report.stdout.decode().strip() or _words(report) for report in reports}
    return [ProbeResult("nothing stays for the next program", seen == {"[] False"}, "; ".join(sorted(seen)))]


def _words(report: BoxReport) -> str:
    return f"{report.ended} {report.detail}".strip()


_HERE = [_look_around, _memory, _processes, _whole_tree, _persistence]
