"""The process that starts and watches one worker confined by Landlock and seccomp. Only the standard library.

It speaks as `zygote_main` does, for one execution. Nothing is namespaced: the worker is one thread that can
start nothing, signal no process, open no socket and write no file, so that ending it ends everything.
"""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from roll_like.sandbox import kernel, worker
from roll_like.sandbox.numpy_only import LATER, load_numpy
from roll_like.sandbox.zygote_main import IMPORTS, PACKET, POLL_SECONDS, TICKS, memory_of, statm

#: The oldest version of Landlock that governs truncation.
_OLDEST = 3
#: The current folder by a path that leads through no other one.
_HERE = "/proc/self/cwd"


def main(control: int, folder: str) -> NoReturn:
    """Serve one execution.

    Args:
        control: Descriptor of the control socket.
        folder: Where this package lies; the program does not get it on its path.
    """
    sys.path.remove(folder)
    os.closerange(control + 1, 1 << 16)
    channel = socket.socket(fileno=control)
    config = json.loads(channel.recv(PACKET))
    seccomp = channel.recv(PACKET)
    version = kernel.landlock_version()
    if version < _OLDEST:
        sys.exit(f"Landlock version {version} was found, at least {_OLDEST} (Linux 6.2) is needed")
    for name in IMPORTS:
        importlib.import_module(name)
    if config["numpy"] is not None:
        load_numpy(config["numpy"], LATER)  # whose files a program cannot open
    rules = kernel.file_rules(config["readable"], [config["library"]], version)
    # root's folders may be closed to others; from inside, what is open in them still is
    os.chdir(config["library"])
    sys.path[:] = [_HERE, f"{_HERE}/lib-dynload"]
    for module in list(sys.modules.values()):
        if hasattr(module, "__path__"):
            module.__path__ = [path.replace(config["library"], _HERE, 1) for path in module.__path__]
    if config["uid"] is not None:
        kernel.become(config["uid"])
    kernel.set_capabilities(0)
    os.environ.clear()
    gc.collect()
    gc.freeze()
    channel.send(json.dumps({"nested": False}).encode())
    message, descriptors, _, _ = socket.recv_fds(channel, PACKET, 8)
    if message and message != b"kill":
        report = _execute(channel, json.loads(message), descriptors, (rules, seccomp))
        channel.send(json.dumps(report).encode())
        channel.recv(PACKET)
    os._exit(0)


def _execute(
    channel: socket.socket, job: dict[str, Any], descriptors: list[int], confinement: tuple[int, bytes]
) -> dict[str, Any]:
    limits = job["limits"]
    space, (_, baseline) = statm(os.getpid())[0], memory_of(os.getpid())
    resident = statm(os.getpid())[1]
    started = mmap.mmap(-1, 1)
    pid = os.fork()
    if pid == 0:
        os.close(channel.detach())
        _worker(job, descriptors, confinement, space, started)
    for descriptor in descriptors:
        os.close(descriptor)
    report: dict[str, Any] = {"status": None, "setup": None, "why": "", "peak": 0, "cpu": 0.0}
    end = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(end, select.POLLIN)
    while end not in (ready := [descriptor for descriptor, _ in poller.poll(POLL_SECONDS * 1000)]):
        if ready:
            gone = channel.recv(PACKET) != b"kill"
            report["why"] = report["why"] or "killed"
            os.kill(pid, signal.SIGKILL)
            if gone:
                os._exit(0)
            continue
        ticks, used = memory_of(pid)
        report["cpu"], report["peak"] = ticks / TICKS, max(report["peak"], used - baseline)
        for why, over in (
            ("cpu", report["cpu"] > limits["cpu_seconds"]),
            ("memory", report["peak"] > limits["memory_bytes"]),
        ):
            if over and not report["why"]:
                report["why"] = why
                os.kill(pid, signal.SIGKILL)
    os.close(end)
    _, status, usage = os.wait4(pid, 0)
    report["status"], report["started"] = os.waitstatus_to_exitcode(status), bool(started[0])
    report["cpu"] = max(report["cpu"], usage.ru_utime + usage.ru_stime)
    report["peak"] = max(report["peak"], usage.ru_maxrss * 1024 - resident, 0)
    return report


def _worker(
    job: dict[str, Any], descriptors: list[int], confinement: tuple[int, bytes], space: int, started: mmap.mmap
) -> NoReturn:
    rules, seccomp = confinement
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        limits = {**job["limits"], "file_bytes": 0}
        kernel.forbid_new_privileges()
        kernel.enforce_file_rules(rules)
        source = worker.take_streams(descriptors)
        memory = int(limits["memory_bytes"]) + space + worker.RESERVED
        worker.apply_limits(limits, address_space=memory, others=1 << 20)
        kernel.load_filter(seccomp)
    except BaseException as error:  # noqa: BLE001 - the report tells it apart by its status
        worker.could_not_start(error)
    worker.work(job["kind"], source, started)
