"""Processes for work that may hang: one that passes its time-out is killed and replaced.

Threads cannot be killed, and a signal-based time-out works in the main thread only. Each child is a
fresh interpreter that runs one script (no fork of a process with threads, no re-import of the
parent's `__main__`), and talks over a pipe.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_START_SECONDS = 60.0


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    connection: Connection
    starting: bool = True
    request: int | None = None
    deadline: float = field(default=0.0)


class ChildPool:
    """Runs requests in child processes, each with a hard time-out.

    Args:
        script: Python file that serves a pipe: its arguments are the pipe's file descriptor and `arguments`.
            It sends None once it is ready, or an error and ends, and then an answer for each request.
        size: Children at a time; they start when first needed.
        timeout_seconds: Limit of one request, once its child is ready.
        setup: What each child receives before any request; None for nothing.
    """

    def __init__(
        self, script: Path, *, size: int, timeout_seconds: float, arguments: Sequence[str] = (), setup: Any = None
    ) -> None:
        self._script = script
        self._size = size
        self._timeout = timeout_seconds
        self._arguments = tuple(arguments)
        self._setup = setup
        self._children: list[_Child] = []
        self._lock = threading.Lock()
        # also when the owner forgets to close it, and at interpreter exit
        self._finalizer = weakref.finalize(self, _end_all, self._children)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the children that exist now."""
        return [child.process.pid for child in self._children]

    def run(self, requests: Sequence[Any]) -> list[Any]:
        """Return each request's answer, in order; a `TimeoutError` or `ChildProcessError` where there is none.

        One call at a time: another thread's call waits for this one.
        """
        with self._lock:
            return self._run(requests)

    def _run(self, requests: Sequence[Any]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        try:
            while waiting or any(child.request is not None for child in self._children):
                self._hand_out(waiting, requests, answers)
                self._collect(answers)
        except BaseException:
            _end_all(self._children)  # an interrupted child would answer the next call with this call's answers
            raise
        return answers

    def close(self) -> None:
        """End all children, after the call that runs. The pool can be used again: new ones start."""
        with self._lock:
            _end_all(self._children)

    def _hand_out(self, waiting: deque[int], requests: Sequence[Any], answers: list[Any]) -> None:
        idle = [child for child in self._children if child.request is None]
        while waiting and (idle or len(self._children) < self._size):
            child = idle.pop() if idle else self._start()
            index = waiting.popleft()
            child.request = index
            child.deadline = time.monotonic() + (_START_SECONDS if child.starting else self._timeout)
            try:
                child.connection.send(requests[index])
            except OSError:
                self._lose(child, answers, ChildProcessError("the process ended before it took the request"))

    def _collect(self, answers: list[Any]) -> None:
        busy = [child for child in self._children if child.request is not None]
        if not busy:
            return
        patience = max(min(child.deadline for child in busy) - time.monotonic(), 0.0)
        ready = set(wait([child.connection for child in busy], timeout=patience))
        for child in busy:
            if child.connection in ready:
                self._take(child, answers)
            elif time.monotonic() >= child.deadline:
                limit = _START_SECONDS if child.starting else self._timeout
                what = "not started" if child.starting else "no answer"
                self._lose(child, answers, TimeoutError(f"{what} within {limit:g} s"))

    def _take(self, child: _Child, answers: list[Any]) -> None:
        assert child.request is not None
        try:
            answer = child.connection.recv()
        except (EOFError, OSError):
            status = child.process.wait()
            self._lose(child, answers, ChildProcessError(f"the process ended with status {status}"))
            return
        if child.starting and isinstance(answer, Exception):
            self._lose(child, answers, answer)
        elif child.starting:
            child.starting, child.deadline = False, time.monotonic() + self._timeout
        else:
            answers[child.request], child.request = answer, None

    def _lose(self, child: _Child, answers: list[Any], error: Exception) -> None:
        assert child.request is not None
        answers[child.request] = error
        self._children.remove(child)
        _end(child)

    def _start(self) -> _Child:
        ours, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            # -P: the script's folder must not come before the standard library
            command = [sys.executable, "-P", str(self._script), str(descriptor), *self._arguments]
            process = subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL)
        if self._setup is not None:
            with contextlib.suppress(OSError):  # it ended: its request says so
                ours.send(self._setup)
        child = _Child(process, ours)
        self._children.append(child)
        return child


def _end_all(children: list[_Child]) -> None:
    while children:
        _end(children.pop())


def _end(child: _Child) -> None:
    with contextlib.suppress(OSError):
        child.connection.close()
    child.process.kill()
    child.process.wait()
