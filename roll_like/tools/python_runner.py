"""Python as a tool: the policy's program runs in the sandbox, and what it prints comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from roll_like.errors import SandboxError
from roll_like.sandbox.backends import open_box
from roll_like.sandbox.box import BoxReport, Ended, Program
from roll_like.sandbox.types import Limits
from roll_like.tools.base import Tool, ToolError, text_tool
from roll_like.tools.config import PythonConfig

_WHY = {
    Ended.TIMEOUT: "the time limit was reached",
    Ended.MEMORY: "the memory limit was reached",
    Ended.OUTPUT: "it printed too much",
}
_LAST_LINES = 5  # of a traceback
#: Has the last line's value printed where it is an expression, as an interactive session does. All of it happens in
#: the sandbox: parsing hostile text is no job for the process outside.
_RUN = """
def _run(code):
    import ast, linecache, sys, traceback
    linecache.cache["<program>"] = len(code), None, [line + "\\n" for line in code.split("\\n")], "<program>"
    try:
        tree = ast.parse(code, "<program>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<program>", "exec"), globals())
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<program>", "eval"), globals())
            if value is not None:
                print(value)
    except Exception as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != "<program>":
            frame = frame.tb_next
        traceback.print_exception(type(error), error, frame)
        sys.exit(1)

_run({code!a})
"""


@asynccontextmanager
async def python_tool(config: PythonConfig) -> AsyncIterator[Tool]:
    """Start a sandbox and yield `python(code)`. Every call is a program of its own: nothing is remembered.

        async with python_tool(PythonConfig()) as tool:
            await tool.call(code="print(6 * 7)")              # "42"

    The tool returns what a program prints; of a last line that is an expression, its value too. It raises a
    `ToolError` for a program that failed or reached a limit, and a `SandboxError` where the sandbox failed.

    Raises:
        SandboxUnavailable: No sandbox isolates on this machine.
    """
    limits = Limits(
        wall_seconds=config.wall_seconds, cpu_seconds=config.cpu_seconds, memory_bytes=config.memory_mib << 20
    )
    box = await open_box(config.backend, workers=config.workers)

    async def call(code: str) -> str:
        report = await box.run(Program(_RUN.format(code=code)), "", limits)
        printed = report.stdout.decode(errors="replace").strip()
        if report.ended is Ended.BROKEN:
            raise SandboxError(f"the sandbox of the python tool failed: {report.detail}")
        if report.ended is not Ended.EXITED:
            raise ToolError("\n".join(filter(None, [_why(report), printed and f"printed before: {printed}"])))
        return printed or "(nothing was printed)"

    description = "Run a Python program and return what it prints."
    try:
        yield text_tool("python", description, "code", "A whole program; print what you want to see.", call)
    finally:
        await box.close()


def _why(report: BoxReport) -> str:
    if report.ended in _WHY:
        return _WHY[report.ended]
    return "\n".join(report.stderr.strip().splitlines()[-_LAST_LINES:]) or report.detail
