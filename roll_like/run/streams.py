"""Standard output and error of a run, whose loss is no reason to lose the run.

The terminal is closed, `tee` or `head` behind a pipe ends, the disk of a log is full: every later `print` would raise.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Within the block, let what standard output and error do not take go to the null device.

    Streams of notebooks and of tests, which are not this process's own, stay as they are.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if _is_own(stream):
            try:
                stream.flush()
            except OSError:
                _lose(stream.fileno())
                stream.flush()
            lasting = io.TextIOWrapper(
                io.BufferedWriter(_LastingFile(stream.fileno(), "w", closefd=False)),
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, lasting)
    try:
        yield
    finally:
        for name, stream in before.items():
            if (lasting := getattr(sys, name)) is not stream and isinstance(lasting, io.TextIOWrapper):
                lasting.flush()
            setattr(sys, name, stream)


def open_standard_streams() -> None:
    """Open the null device for each of the three standard streams that this process was started without.

    Otherwise the next files that it opens get their numbers, and native code writes messages into them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _lose(number)
    # Python leaves None for a stream that was closed
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _lose(descriptor: int) -> None:
    """Let what is written to a file descriptor go to the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.set_inheritable(descriptor, True)  # it is not where it was the missing one itself
    if null != descriptor:
        os.close(null)


def _is_own(stream: Any) -> bool:
    """Return whether a stream writes to file descriptor 1 or 2 of this process."""
    if not isinstance(stream, io.TextIOWrapper):
        return False
    raw = getattr(stream.buffer, "raw", stream.buffer)  # without a buffer where PYTHONUNBUFFERED is set
    return type(raw) is io.FileIO and raw.fileno() in (1, 2)


class _LastingFile(io.FileIO):
    """A file descriptor that is the null device once it has failed."""

    def write(self, data: Any, /) -> int:
        try:
            # None: another program has made a terminal that it shares non-blocking, and it is full
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except OSError:
            _lose(self.fileno())
            return memoryview(data).nbytes
        return written
