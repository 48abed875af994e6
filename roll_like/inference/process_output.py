"""Keeps what child processes print: the cause of a failed start, if the child fails with it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator

_KEPT_LINES = 400
#: `SomeError: text`, at the start of a line or behind a logger's prefix.
_ERROR_LINE = re.compile(r"(?:^|\]\s+)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (.*)$")
#: Errors that only report that another one happened.
_SECOND_HAND = ("See root cause above", "cancelled", "Engine core initialization failed")


class ProcessOutput:
    """Takes the error stream of processes that are started under `capture`, and keeps its end.

    A pipe stands in for file descriptor 2 while children start; they keep it for their lifetime. A thread
    reads it until the last of them ends, so a chatty child never blocks.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Give this object's pipe to whatever starts inside; this process's own output is kept too."""
        sys.stderr.flush()
        reading, writing = os.pipe()
        original = os.dup(2)
        os.dup2(writing, 2)
        os.close(writing)
        self._thread = threading.Thread(target=self._read, args=(reading,), name="engine-output", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as stream:
            self._lines.extend(line.rstrip() for line in stream)

    def join(self, timeout: float) -> None:
        """Wait until every process that writes here has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines."""
        return "\n".join(list(self._lines)[-lines:])

    def cause(self) -> str | None:
        """Return the last error that was printed, without those that only pass another one on."""
        for line in reversed(self._lines):
            match = _ERROR_LINE.search(line)
            if match is not None and match[2].strip() and not any(word in match[2] for word in _SECOND_HAND):
                return f"{match[1].rsplit('.', 1)[-1]}: {match[2].strip()}"
        return None
