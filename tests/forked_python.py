"""An interpreter that has imported a library already, for tests that start it often.

Importing verifiers takes six seconds of a core. `forked_python` starts the library's own interpreter with this file,
which imports it once, and yields the path of a program that can be called as an interpreter can: `PROGRAM -P FILE
ARGUMENT …`. The program hands its descriptors, variables and arguments over, and what is run is forked from there. It
ends as that ends, and what is run is stopped and ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

#: Bytes of a request, and descriptors that come with it.
MOST_BYTES, MOST_DESCRIPTORS = 1 << 20, 64
#: Descriptors of this number and above are no one's, but for those that a request comes with.
FREE = 200
#: How often it is looked whether the program is stopped, as what it runs is then. Seconds.
LOOK_SECONDS = 0.1
#: What is called as an interpreter: it needs little of Python, so that it starts at once.
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {most})
server.connect({address!r})
open_ones = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
handed = [number for number in open_ones if number != server.fileno()]
request = dict(arguments=sys.argv[1:], variables=dict(os.environ), folder=os.getcwd(), descriptors=handed)
socket.send_fds(server, [json.dumps(request).encode()], handed)
for number in handed[3:]:
    os.close(number)
status = int(server.recv(100) or b"1")
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def forked_python(python: Path, modules: Sequence[str], folder: Path) -> Iterator[Path]:
    """Yield the path of a program that runs what it is given where these modules have been imported.

    Args:
        python: The library's interpreter.
        modules: What it imports.
        folder: Where the program is written.
    """
    address, program = str(folder / "socket"), folder / "python"
    program.write_text(PROGRAM.format(python=sys.executable, most=MOST_BYTES, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        command = [str(python), __file__, str(listening.fileno()), *modules]
        server = subprocess.Popen(command, pass_fds=[listening.fileno()], stdin=subprocess.DEVNULL)
    try:
        yield program
    finally:
        server.terminate()
        server.wait()


def serve(listening: socket.socket) -> NoReturn:
    """Fork a process for each request."""
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            keep(connection)
        connection.close()


def keep(connection: socket.socket) -> NoReturn:
    """Run a request in a process of its own, tell its end, and end it where nobody waits for it any more."""
    os.setsid()
    message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
    worker = os.fork()
    if worker == 0:
        connection.close()
        run(json.loads(message), descriptors)
    for number in descriptors:
        os.close(number)
    (asking, _, _) = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    ended, ready, stopped, server = os.pidfd_open(worker), list[Any](), False, os.getppid()
    while not ready and os.getppid() == server:
        ready, _, _ = select.select([connection, ended], [], [], LOOK_SECONDS)
        if stopped != (_state(asking) == "T"):
            stopped = not stopped
            os.kill(worker, signal.SIGSTOP if stopped else signal.SIGCONT)
    if ended not in ready:
        os.kill(worker, signal.SIGKILL)
    if not ready:  # the tests are over, and left it stopped
        os.kill(asking, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _state(process: int) -> str:
    """Return how a process is, as `ps` shows it."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def run(request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Do what an interpreter does with its arguments."""
    import fcntl

    os.setsid()
    free = max([FREE, *(wanted + 1 for wanted in request["descriptors"])])
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, free) for number in descriptors]
    os.closerange(0, free)
    for number, wanted in zip(moved, request["descriptors"], strict=True):
        os.dup2(number, wanted)
    os.closerange(free, max(moved, default=free) + 1)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    random.seed()
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [each for each in request["arguments"] if each != "-P"]
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.path.pop(0)  # the tests' folder
    for name in sys.argv[2:]:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
