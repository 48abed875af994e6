"""The process that runs a program: inside the box, after every privilege is gone.

Nothing here is trusted from outside: once the program runs, it may change any of it. Only the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import linecache
import mmap
import os
import resource
import site
import struct
import sys
import threading
import traceback
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from roll_like.sandbox import kernel

#: Exit statuses by which a worker says what the kernel does not. They mean this only before the program runs.
COMPILE_ERROR, NOT_STARTED = 120, 122

#: Descriptors of a worker: the calls come in on one and the answers go out on the other.
CALLS, ANSWERS = 3, 4

FILE_NAME = "main.py"
#: Bytes of the main thread's stack.
STACK = 64 << 20
#: Bytes of addresses beyond the memory limit: the stack of a thread is reserved whole and hardly used.
RESERVED = 1 << 30


def take_streams(descriptors: list[int]) -> bytes:
    """Make the job's descriptors this process's only ones and return the source that the first of them holds."""
    lowest = max(*descriptors, ANSWERS) + 1
    parked = [os.dup2(descriptor, lowest + index) for index, descriptor in enumerate(descriptors)]
    with os.fdopen(parked[0], "rb", closefd=False) as file:
        file.seek(0)
        source = file.read()
    for target, descriptor in enumerate(parked[1:]):
        os.dup2(descriptor, target)
    os.closerange(len(parked) - 1, 1 << 16)
    return source


def could_not_start(error: BaseException) -> NoReturn:
    """Leave with the status that says so."""
    os.write(2, f"the worker could not start: {type(error).__name__}: {error}\n".encode())
    os._exit(NOT_STARTED)


def work(kind: str, source: bytes, started: mmap.mmap) -> NoReturn:
    """Run a Python program, or serve calls into it.

    Args:
        kind: "run" or "serve".
        started: Memory shared with the zygote; its first byte is set and the memory given up right before the
            program runs, so that from then on no exit status can be taken for the worker's own.
    """
    _open_streams()
    code = _compiled(source)
    site.setquit()  # `exit` and `quit`, which the interpreter's `-S` leaves out
    sys.set_int_max_str_digits(0)  # a judge's Python has no such limit, or an older one; CPU time bounds it
    started[0] = 1
    started.close()
    if kind == "serve":
        serve_program(code)
    run_program(code)


def apply_limits(limits: dict[str, float], *, address_space: int | None, others: int) -> None:
    """Set the resource limits of a worker.

    Args:
        limits: Fields of `Limits`.
        address_space: Bytes, or None for no limit.
        others: Processes of the same user that are not the program's.
    """
    seconds = int(limits["cpu_seconds"]) + 1  # the watcher counts all processes together, and is more exact
    kernel.limit(resource.RLIMIT_CPU, seconds, seconds + 1)
    if address_space is not None:
        kernel.limit(resource.RLIMIT_AS, address_space)
    kernel.limit(resource.RLIMIT_NPROC, int(limits["processes"]) + others)
    kernel.limit(resource.RLIMIT_FSIZE, int(limits["file_bytes"]))
    kernel.limit(resource.RLIMIT_NOFILE, 64)
    kernel.limit(resource.RLIMIT_CORE, 0)
    stack = min(STACK, int(limits["memory_bytes"]))
    kernel.limit(resource.RLIMIT_STACK, stack, resource.getrlimit(resource.RLIMIT_STACK)[1])  # programs raise it
    kernel.limit(resource.RLIMIT_MSGQUEUE, 0)


def run_program(code: CodeType) -> NoReturn:
    """Run a program as `python main.py` would, and leave with its exit status."""
    module = ModuleType("__main__")
    module.__dict__["__file__"] = FILE_NAME
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(code, module.__dict__)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is its exit status
        status = _status_of(error)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
    except BaseException as error:  # noqa: BLE001 - of the program's own making
        status = status or _status_of(error)
    _leave(status, list(module.__dict__.values()))


def serve_program(code: CodeType) -> NoReturn:
    """Execute a program once as a module, then answer calls into it until an empty one asks for the end."""
    from roll_like.sandbox import codec

    module = ModuleType("solution")
    module.__dict__["__file__"] = FILE_NAME
    sys.modules["solution"] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is reported
        _answer(*_failure(error))
        _leave(_status_of(error) or 1)
    _answer(b"R")
    while request := _request():
        try:
            call: Any = codec.decode(request)
            entry_point, args, kwargs = call
            value = _resolve(module, entry_point)(*args, **kwargs)
            encoded = codec.encode(value)
        except BaseException as error:  # noqa: BLE001 - whatever the program raises is reported
            _answer(*_failure(error))
        else:
            _answer(b"V", encoded)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    _answer(b"K")
    _leave(0)


def write_file(contents: bytes, path: str) -> None:
    """Make an executable file."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
        file.write(contents)


def execute(arguments: list[str], started: mmap.mmap) -> NoReturn:
    """Become another program."""
    started[0] = 1  # the memory is given up with everything else
    os.execve(arguments[0], arguments, {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp"})


def _open_streams() -> None:
    """Replace the streams made at the zygote's start: they believe that they can seek, as its own could."""
    for number, name, mode, errors in (
        (0, "stdin", "r", "surrogateescape"),
        (1, "stdout", "w", "surrogateescape"),
        (2, "stderr", "w", "backslashreplace"),
    ):
        raw = open(number, f"{mode}b", closefd=False)  # noqa: SIM115 - for as long as the program runs
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _compiled(source: bytes) -> CodeType:
    text = source.decode("utf-8", "replace")
    lines = io.StringIO(text, newline=None).readlines()
    linecache.cache[FILE_NAME] = (len(source), None, lines, FILE_NAME)
    try:  # as text: what an encoding declaration in it says has been decided
        return compile(text, FILE_NAME, "exec", dont_inherit=True)
    except BaseException as error:  # noqa: BLE001 - SyntaxError, ValueError, RecursionError, MemoryError, …
        traceback.print_exception(type(error), error, None)
        _leave(COMPILE_ERROR)


def _resolve(module: ModuleType, entry_point: str) -> Any:
    """Return the function that a dotted name means; classes on the way are instantiated without arguments."""
    first, *rest = entry_point.split(".")
    if first not in module.__dict__:
        raise NameError(f"name '{first}' is not defined by the program")
    value = module.__dict__[first]
    for name in rest:
        value = getattr(value() if isinstance(value, type) else value, name)
    return value


def _status_of(error: BaseException) -> int:
    """Print an uncaught exception, as the interpreter would, and return the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return 0 if error.code is None else int(error.code) & 0xFF
        with contextlib.suppress(BaseException):
            print(error.code, file=sys.stderr)
        return 1
    with contextlib.suppress(BaseException):
        traceback.print_exception(type(error), error, _own_frames(error.__traceback__))
    return 1


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    return trace.tb_next if trace is not None else None


def _failure(error: BaseException) -> tuple[bytes, bytes]:
    text = io.StringIO()
    try:
        text.write("".join(traceback.format_exception_only(type(error), error))[:2000].strip())
        traceback.print_exception(type(error), error, _own_frames(error.__traceback__))
    except BaseException:  # noqa: BLE001 - an exception's own text may raise too
        text.write(object.__repr__(error))
    return (b"M" if isinstance(error, MemoryError) else b"E"), text.getvalue().encode("utf-8", "replace")


def _request() -> bytes:
    (size,) = struct.unpack(">I", _read(4))
    return _read(size)


def _read(count: int) -> bytes:
    parts = []
    while count:
        part = os.read(CALLS, min(count, 1 << 16))
        if not part:
            os._exit(NOT_STARTED)  # the other end is gone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _answer(kind: bytes, payload: bytes = b"") -> None:
    view = memoryview(struct.pack(">I", len(payload) + 1) + kind + payload)
    while view:
        view = view[os.write(ANSWERS, view) :]


def _leave(status: int, variables: list[object] | None = None) -> NoReturn:
    """Do what the interpreter does at its end, without taking modules apart.

    Args:
        status: Exit status.
        variables: Values among which files may be open that the interpreter would close, which writes what they hold.
    """
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001 - a stream of the program's own making
            status = status or 1
    for value in variables or ():
        with contextlib.suppress(BaseException):  # the interpreter does not mind either
            if isinstance(value, io.IOBase):
                value.flush()
    os._exit(status)
