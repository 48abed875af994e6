"""Python as a tool: the policy's program runs in the sandbox, and what it prints comes back."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from roll_like.errors import SandboxError
from roll_like.sandbox.backends import open_box
from roll_like.sandbox.box import Box, BoxReport, Ended, Program
from roll_like.sandbox.types import Limits
from roll_like.tools.base import Tool, ToolError

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
    linecache.cache["<program>"] = len(code), None, code.splitlines(True), "<program>"
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


class PythonRunner:
    """Holds a sandbox; `tool` is `python(code)`. Every call is a program of its own: nothing is remembered.

        async with PythonRunner() as runner:
            await runner.tool.call(code="print(6 * 7)")              # "42"

    Args:
        limits: What one program may use.
        backend: Name of a sandbox; "auto" takes the strongest that works here.
        workers: Programs at a time.
    """

    def __init__(self, limits: Limits | None = None, *, backend: str = "auto", workers: int = 2) -> None:
        self._limits = limits or Limits()
        self._backend = backend
        self._workers = workers
        self._box: Box | None = None

    @property
    def tool(self) -> Tool:
        """The tool `python(code)`."""
        parameters = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "A whole program; print what you want to see."}},
            "required": ["code"],
            "additionalProperties": False,
        }
        return Tool("python", "Run a Python program and return what it prints.", parameters, self.run)

    async def __aenter__(self) -> Self:
        """Start the sandbox.

        Raises:
            SandboxUnavailable: None isolates on this machine.
        """
        self._box = await open_box(self._backend, workers=self._workers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()

    async def run(self, code: str) -> str:
        """Return what a program prints; of a last line that is an expression, its value too.

        Raises:
            ToolError: The program failed or reached a limit; the message says how.
            SandboxError: The sandbox failed.
        """
        if self._box is None:
            raise SandboxError("the sandbox of the python tool has not been started", fix="use `async with`")
        report = await self._box.run(Program(_RUN.format(code=code)), "", self._limits)
        printed = report.stdout.decode(errors="replace").strip()
        if report.ended is Ended.BROKEN:
            raise SandboxError(f"the sandbox of the python tool failed: {report.detail}")
        if report.ended is not Ended.EXITED:
            raise ToolError("\n".join(filter(None, [_why(report), printed and f"printed before: {printed}"])))
        return printed or "(nothing was printed)"


def _why(report: BoxReport) -> str:
    if report.ended in _WHY:
        return _WHY[report.ended]
    return "\n".join(report.stderr.strip().splitlines()[-_LAST_LINES:]) or report.detail
