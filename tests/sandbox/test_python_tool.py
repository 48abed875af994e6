"""The python tool runs what a model writes for it as an interpreter would."""

from __future__ import annotations

import asyncio

from roll_like.tools import ToolError
from roll_like.tools.config import PythonConfig
from roll_like.tools.python_runner import python_tool

CALLS = [
    ("print(4)\nexit()", "4"),
    ("if True:\n    print(4)\n    quit(0)\nprint(5)", "4"),
    ("10**5000 // 10**4999", "10"),
    ("print(len(str(10**5000)))", "5001"),
    ("s = 'a\u2028b\x85c\x1cd'\nlen(s)", "7"),
    ("# -*- coding: latin-1 -*-\nprint('é')", "é"),
    ("from __future__ import annotations\ndef f(x: Unknown): return x\nf(4)", "4"),
    ("import sys, io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(4)", "4"),
    ("import threading\nthreading.Timer(0.05, print, [4]).start()\nexit()", "4"),
]
FAILURES = [
    "print(4)\nexit(1)",
    "print('\ud800')",
    "x = '\ud800'",
    "x = '\0'",
    "s = 'a\u2028b'\n1 / 0",
    "from __future__ import no",
]


def test_programs() -> None:
    async def run() -> list[object]:
        async with python_tool(PythonConfig()) as tool:
            given = [code for code, _ in CALLS] + FAILURES
            return await asyncio.gather(*(tool.call(code=code) for code in given), return_exceptions=True)

    found = asyncio.run(run())
    assert found[: len(CALLS)] == [printed for _, printed in CALLS]
    assert [type(one) for one in found[len(CALLS) :]] == [ToolError] * len(FAILURES)
