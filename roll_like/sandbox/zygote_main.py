"""The first process inside a box: it has Python started, and forks a worker for each execution.

Runs under bubblewrap, started by `roll_like.sandbox.zygote`. Only the standard
library, and nothing that a program could have written is ever read here. For each execution:

    zygote ─fork─▶ init ─fork─▶ worker
    reports        first process of a process   the program; no capability, no
    and kills      namespace of its own          descriptor but its streams

The worker's end is seen by init, which tells the zygote and leaves; with it the kernel ends every process of
that namespace. Where the kernel grants no nested namespaces the zygote serves one execution only and is the
first process of the namespace itself.

Control socket, one packet each: `config`, the seccomp filter, then for every execution a JSON object with the
descriptors beside it, answered by a JSON object; the packet `kill` ends the execution early.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from roll_like.sandbox import codec, kernel, worker
from roll_like.sandbox.numpy_only import load_numpy

#: What the zygote has imported before it forks, for every worker.
IMPORTS = tuple(
    """
    abc bisect collections copy cmath contextlib dataclasses datetime decimal enum fractions functools hashlib heapq
    io itertools json math operator random re statistics string struct sys textwrap time traceback types typing
    """.split()  # noqa: SIM905
)

POLL_SECONDS = 0.02
PACKET = 1 << 16
_PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


def main(control: int, folder: str) -> NoReturn:
    """Serve executions until the other end of the control socket closes.

    Args:
        control: Descriptor of the control socket.
        folder: Where the box's own files lie; the program does not get it on its path.
    """
    sys.path.remove(folder)
    os.closerange(control + 1, 1 << 16)
    channel = socket.socket(fileno=control)
    config = json.loads(channel.recv(PACKET))
    zygote = ZygoteServer(channel, config, channel.recv(PACKET))
    for name in IMPORTS:
        importlib.import_module(name)
    if config["numpy"] is not None:
        load_numpy(config["numpy"])
    os.environ.clear()
    gc.collect()
    gc.freeze()
    channel.send(json.dumps({"nested": zygote.nested}).encode())
    zygote.serve()


class ZygoteServer:
    """Forks workers and watches them.

    Args:
        config: `uid` to become (None: stay), `nest` whether to try namespaces for each execution.
    """

    def __init__(self, channel: socket.socket, config: dict[str, Any], seccomp: bytes) -> None:
        self._channel = channel
        self._filter = seccomp
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        kernel.forget_bounding_set()
        if config["uid"] is not None:
            kernel.become(config["uid"])
        kernel.set_capabilities(1 << kernel.CAP_SYS_ADMIN)
        kernel.hide_from_siblings()
        self.nested = bool(config["nest"]) and self._can_nest()

    def _can_nest(self) -> bool:
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
            kernel.set_namespace(self._own, kernel.CLONE_NEWPID)
        except OSError:
            return False
        return True

    def serve(self) -> NoReturn:
        """Run one execution after the other."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._channel, PACKET, 8)
            if not message:
                os._exit(0)
            if message == b"kill":  # came too late: that execution has ended
                continue
            report = self._execute(json.loads(message), descriptors)
            self._channel.send(json.dumps(report).encode())

    def _execute(self, job: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started = mmap.mmap(-1, 1)
        baseline = memory_of(os.getpid())[1] if job["kind"] != "exec" else 0
        space = statm(os.getpid())[0] if job["kind"] != "exec" else 0
        if self.nested:
            kernel.unshare(kernel.CLONE_NEWPID)
        init = os.fork()
        if init == 0:
            ours.detach()
            os.close(self._channel.detach())
            os.close(self._own)
            _init(job, descriptors, theirs, self._filter, self.nested, space, started)
        if self.nested:
            kernel.set_namespace(self._own, kernel.CLONE_NEWPID)
        theirs.close()
        for descriptor in descriptors:
            os.close(descriptor)
        with ours, started:
            report = self._watch(init, job["limits"], ours, baseline)
            return {**report, "started": bool(started[0])}

    def _watch(self, init: int, limits: dict[str, float], messages: socket.socket, baseline: int) -> dict[str, Any]:
        report: dict[str, Any] = {"status": None, "setup": None, "why": ""}
        files: int | None = None
        cpu, peak, pause, started_with = 0.0, 0, POLL_SECONDS / 4, 0
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(messages, select.POLLIN)
        ended = False
        while not ended:
            ready = {descriptor for descriptor, _ in poller.poll(pause * 1000)}
            pause = POLL_SECONDS
            if messages.fileno() in ready:
                packet, received, _, _ = socket.recv_fds(messages, 4096, 1)
                if received:
                    files = received[0]
                    (started_with,) = struct.unpack("q", packet)
                elif packet[:1] == b"S":
                    (report["status"],) = struct.unpack("i", packet[1:])
                elif packet:
                    report["setup"] = packet.decode()
                ended = not packet or report["status"] is not None
            if self._channel.fileno() in ready:
                if self._channel.recv(PACKET) != b"kill":
                    self._kill(init)
                    os._exit(0)
                report["why"] = report["why"] or "killed"
                self._kill(init)
            if not ended and not ready:
                cpu, memory = self._usage(init, baseline, files)
                peak = max(peak, memory)
                if cpu > limits["cpu_seconds"] or memory > limits["memory_bytes"]:
                    report["why"] = report["why"] or ("cpu" if cpu > limits["cpu_seconds"] else "memory")
                    self._kill(init)
        if files is not None:
            peak = max(peak, _used(files))
            os.close(files)
        usage = self._reap(init)
        # what was killed is not in the usage: the kernel reaps it without adding it up
        report["cpu"] = max(cpu, usage.ru_utime + usage.ru_stime)
        report["peak"] = max(peak, usage.ru_maxrss * 1024 - (started_with if baseline else 0), 0)
        return report

    def _kill(self, init: int) -> None:
        if self.nested:
            os.kill(init, signal.SIGKILL)  # takes its whole namespace with it
        else:
            _kill_all_others()

    def _reap(self, init: int) -> Any:
        _, _, usage = os.wait4(init, 0)
        if not self.nested:
            _kill_all_others()
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)
            except ChildProcessError:
                return usage

    def _usage(self, init: int, baseline: int, files: int | None) -> tuple[float, int]:
        """Return CPU seconds and bytes of everything that belongs to the execution."""
        ticks, memory = 0, 0 if files is None else _used(files)
        for name in os.listdir("/proc"):
            if name.isdigit() and (pid := int(name)) != os.getpid():
                used, anonymous = memory_of(pid)
                ticks += used
                memory += 0 if pid == init else max(0, anonymous - baseline)
        return ticks / TICKS, memory


def memory_of(pid: int) -> tuple[int, int]:
    """Return a process's clock ticks, those of its dead children included, and the bytes that are its own."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return sum(int(field) for field in fields[11:15]), statm(pid)[1] - statm(pid)[2]
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0


def statm(pid: int) -> list[int]:
    """Return a process's virtual, resident, and resident but shared or file-backed bytes."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return [int(field) * _PAGE for field in file.read().split()[:3]]


def _used(folder: int) -> int:
    state = os.fstatvfs(folder)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def _kill_all_others() -> None:
    """End every process of a namespace of which this is the first."""
    if os.getpid() != 1:
        raise RuntimeError("only the first process of a namespace may end all others")
    with contextlib.suppress(ProcessLookupError):  # no other process is left
        os.kill(-1, signal.SIGKILL)


def _init(
    job: dict[str, Any],
    descriptors: list[int],
    messages: socket.socket,
    seccomp: bytes,
    nested: bool,
    space: int,
    started: mmap.mmap,
) -> NoReturn:
    """Be the first process of an execution's namespace: set it up, start the worker, say how it ended."""
    limits = job["limits"]
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if nested:
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.keep_mounts_private()
            size = int(limits["tmp_bytes"])
            kernel.mount_tmpfs("/tmp", size, executable=job["kind"] == "exec")
            kernel.mount_processes("/proc")  # over the zygote's, whose own is out of sight from here on
        os.chdir("/tmp")
        folder = os.open("/tmp", os.O_RDONLY)
        socket.send_fds(messages, [struct.pack("q", resident)], [folder])
        os.close(folder)
        kernel.set_capabilities(0)
        kernel.forbid_new_privileges()
        child = os.fork()
        if child == 0:
            try:
                _worker(job, descriptors, seccomp, space, started)
            finally:
                os._exit(1)  # whatever a program has made of the worker's code, it does not go on as init
        for descriptor in (0, 1, 2, *descriptors):
            os.close(descriptor)
        while True:
            pid, status, _ = os.wait4(-1, 0)
            if pid == child:
                break
        messages.send(b"S" + struct.pack("i", os.waitstatus_to_exitcode(status)))
    except BaseException as error:  # noqa: BLE001 - reported; nothing above would see it
        messages.send(f"{type(error).__name__}: {error}".encode()[:4000])
    os._exit(0)


def _worker(job: dict[str, Any], descriptors: list[int], seccomp: bytes, space: int, started: mmap.mmap) -> NoReturn:
    """Become what the job asks for, with nothing left but the job's own streams."""
    external = job["kind"] == "exec"
    try:
        os.setsid()
        source = worker.take_streams(descriptors)
        if external:
            worker.write_file(source, job["path"])
        memory = int(job["limits"]["memory_bytes"])
        worker.apply_limits(
            job["limits"],
            address_space=job["address_space"] if external else memory + space + worker.RESERVED,
            others=2 + job["extra_processes"],
        )
        kernel.load_filter(seccomp)
    except BaseException as error:  # noqa: BLE001 - the report tells it apart by its status
        worker.could_not_start(error)
    if external:
        worker.execute(job["arguments"], started)
    worker.work(job["kind"], source, started)


assert codec is not None  # loaded here once, for every worker
