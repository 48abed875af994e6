"""A box without walls, for honest programs only: it runs them in this process."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from unittest.mock import patch

from roll_like.sandbox import codec
from roll_like.sandbox.box import BoxReport, CallFailed, Ended, Program
from roll_like.sandbox.types import Limits


def report(ended: Ended = Ended.EXITED, stdout: bytes = b"", **changes: object) -> BoxReport:
    code = 0 if ended is Ended.EXITED else 1
    fields: dict[str, object] = {"exit_code": code, "stderr": "", "cpu_seconds": 0.25, "peak_memory_bytes": 1000}
    return BoxReport(ended=ended, stdout=stdout, detail=str(ended), **(fields | changes))  # type: ignore[arg-type]


class LocalSession:
    def __init__(self, scope: dict[str, object], end: BoxReport) -> None:
        self.scope, self.end, self.calls, self.closed = scope, end, 0, False

    async def call(self, entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        self.calls += 1
        try:
            name, _, method = entry_point.partition(".")
            function = self.scope[name]
            function = getattr(function(), method) if method else function
            args, kwargs = codec.decode(codec.encode([list(args), dict(kwargs)]))
            return codec.decode(codec.encode(function(*args, **kwargs)))
        except Exception as error:  # noqa: BLE001 - a program may raise anything
            raise CallFailed(Ended.ERROR, repr(error)) from None

    async def close(self) -> BoxReport:
        self.closed = True
        return self.end


class LocalBox:
    """Runs honest programs; `ends` are the reports that sessions give at their ends, in order."""

    name = "local"

    def __init__(self, ends: Sequence[BoxReport] = ()) -> None:
        self.ends, self.sessions, self.seen, self.closed = list(ends), [], [], False

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        self.seen.append((program, stdin, limits))
        out = io.StringIO()
        with redirect_stdout(out), patch("sys.stdin", io.StringIO(stdin)):
            exec(compile(program.source, "main.py", "exec"), {"__name__": "__main__"})
        return report(stdout=out.getvalue().encode())

    async def open(self, program: Program, limits: Limits) -> LocalSession:
        self.seen.append((program, None, limits))
        scope: dict[str, object] = {"__name__": "solution"}
        try:
            exec(compile(program.source, "main.py", "exec"), scope)
        except Exception as error:  # noqa: BLE001 - a program may raise anything
            raise CallFailed(Ended.ERROR, repr(error)) from None
        self.sessions.append(LocalSession(scope, self.ends.pop(0) if self.ends else report()))
        return self.sessions[-1]

    async def close(self) -> None:
        self.closed = True
