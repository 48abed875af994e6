r"""Evaluation of a program against tests.

    with CodeEvaluator(Limits(wall_seconds=5)) as evaluator:
        result = evaluator.evaluate_sync("print(int(input()) * 2)", [StdioTest("4", "8")])
    result.status                                   # TestStatus.PASSED

The program runs in a box that holds neither expected values nor the text of tests; what it gives is compared
here. Where no box can isolate, the first evaluation raises `SandboxUnavailable`: there is no other mode.
"""

from __future__ import annotations

import ast
import asyncio
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from roll_like.content.unicode import is_whole
from roll_like.errors import ConfigError, SandboxError
from roll_like.sandbox import asserts, codec
from roll_like.sandbox.backends import open_box
from roll_like.sandbox.box import Box, Program
from roll_like.sandbox.compare import Comparison
from roll_like.sandbox.grading import Grading, not_compiled
from roll_like.sandbox.types import AssertTest, CallTest, CodeResult, Limits, StdioTest, TestCase

T = TypeVar("T")

#: Longest program, in bytes of UTF-8.
MAX_PROGRAM_BYTES = 1 << 20
#: Longest standard input and expected output of a test, in characters.
MAX_INPUT = 1 << 26
#: Up to here a program is parsed before a box is used: parsing hostile text takes quadratic time at worst.
_PARSED_BYTES = 1 << 15
_ODD_ESCAPE = re.compile(r"\\[^\n\\'\"abfnrtv0-7xNuU]")


class CodeEvaluator:
    """Evaluates programs, `workers` at a time; usable from any thread and any event loop.

    Args:
        limits: What one execution, and each call within one, may use.
        backend: Name of a sandbox, "auto" for the best one here, or a box.
        workers: Programs that run at one time; the others wait.
        comparison: What counts as the same output or value.
        total_seconds: Wall clock of all tests of one program, from its start.
        stop_at_failure: Run no test after one that failed; the others count as failed like it. For callers that only
            ask whether all pass.
        numpy: Programs and assert tests may import NumPy, that of this environment.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        backend: str | Box = "auto",
        workers: int = 2,
        *,
        comparison: Comparison | None = None,
        total_seconds: float = 60.0,
        stop_at_failure: bool = False,
        numpy: bool = False,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"CodeEvaluator.workers should be at least 1, found {workers}")
        if not 0 < total_seconds < float("inf"):
            raise ConfigError(f"CodeEvaluator.total_seconds should be a number above 0, found {total_seconds!r}")
        self.limits = limits or Limits()
        self.workers = workers
        self.comparison = comparison or Comparison()
        self.total_seconds = total_seconds
        self.stop_at_failure = stop_at_failure
        self.numpy = numpy
        self._backend = backend
        self._box: Box | None = None if isinstance(backend, str) else backend
        self._slots = asyncio.Semaphore(workers)
        self._starting = asyncio.Lock()
        self._thread = _LoopThread()

    async def evaluate(self, program: str, tests: Sequence[TestCase], language: str = "python") -> CodeResult:
        """Run a program against tests.

        Args:
            program: Its source.
            tests: At least one; several `CallTest`s in a row share one execution of the program.
            language: "python", or another one that the backend runs (`StdioTest` only).

        Returns:
            The status, with one result for each test.

        Raises:
            ConfigError: There is no test, or a test cannot be evaluated.
            SandboxUnavailable: No backend isolates here.
        """
        check_tests(tests, language)
        return await asyncio.wrap_future(self._thread.submit(self._evaluate(program, tuple(tests), language)))

    def evaluate_sync(self, program: str, tests: Sequence[TestCase], language: str = "python") -> CodeResult:
        """Do what `evaluate` does and block until it is done; also where an event loop runs."""
        check_tests(tests, language)
        return self._thread.submit(self._evaluate(program, tuple(tests), language)).result()

    def close(self) -> None:
        """End every process; what is under way is cancelled."""
        self._thread.close(self._close_box())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _evaluate(self, program: str, tests: Sequence[TestCase], language: str) -> CodeResult:
        problem = unusable(program) or (syntax_error(program) if language == "python" else None)
        if problem is not None:
            return not_compiled(problem, len(tests))
        async with self._slots:
            box = await self._open_box()
            grading = Grading(
                box,
                Program(program, language),
                self.limits,
                self.comparison,
                self.total_seconds,
                self.stop_at_failure,
                self.numpy,
            )
            return await grading.run(tests)

    async def _open_box(self) -> Box:
        async with self._starting:
            if self._box is None:
                assert isinstance(self._backend, str)
                self._box = await open_box(self._backend, workers=self.workers, numpy=self.numpy)
        return self._box

    async def _close_box(self) -> None:
        if self._box is not None:
            await self._box.close()


class _LoopThread:
    """A daemon thread that runs coroutines, for callers with and without a loop; started by the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; the future may be waited for in any other thread.

        Raises:
            SandboxError: The thread was closed, or asks itself, which would never end.
        """
        with self._lock:
            if self._closed or threading.current_thread() is self._thread:
                coroutine.close()
                why = "is closed" if self._closed else "was called from its own thread"
                raise SandboxError(f"the evaluator {why}")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="code-evaluator", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, run `last`, and end the thread; a second call does nothing."""
        with self._lock:
            if self._closed or self._loop is None or self._thread is None:
                self._closed = True
                last.close()
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._finish(last), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await last


def check_tests(tests: Sequence[TestCase], language: str) -> None:
    """Refuse tests that could not be evaluated, before anything runs.

    Raises:
        ConfigError: The list is empty, or a test holds what cannot be carried or compared.
    """
    if not tests:
        raise ConfigError(
            "the list of tests is empty: a program without tests is neither right nor wrong",
            fix="give at least one StdioTest, CallTest or AssertTest, or leave the sample out",
        )
    for number, test in enumerate(tests):
        problem = _problem(test, language)
        if problem is not None:
            raise ConfigError(f"tests[{number}]: {problem}")


def _problem(test: TestCase, language: str) -> str | None:
    if isinstance(test, StdioTest):
        parts: tuple[object, ...] = (test.input, test.output)
        if not all(isinstance(part, str) for part in parts):
            return f"input and output should be text, found {test!r:.200}"
        return _text_problem(test.input, MAX_INPUT) or _text_problem(test.output, MAX_INPUT)
    if not isinstance(test, (CallTest, AssertTest)):
        return f"expected a StdioTest, CallTest or AssertTest, found {type(test).__name__}"
    if language != "python":
        return f"{type(test).__name__} works with python; {language} has StdioTest only"
    if isinstance(test, AssertTest):
        return _text_problem(test.code, asserts.MAX_TEST) if test.code.strip() else "the code is empty"
    return _call_problem(test)


def _call_problem(test: CallTest) -> str | None:
    if not all(part.isidentifier() for part in test.entry_point.split(".")):
        return f"entry_point should be a name or Class.method, found {test.entry_point!r}"
    if isinstance(test.args, (str, bytes)) or not isinstance(test.args, Sequence):
        return f"args should be a list or tuple, found {test.args!r:.200}"
    if not isinstance(test.kwargs, Mapping) or not all(isinstance(name, str) for name in test.kwargs):
        return f"kwargs should be a mapping of names, found {test.kwargs!r:.200}"
    if test.wrapped and not (isinstance(test.expected, list) and len(test.expected) == 1):
        return f"wrapped should go with an expected list of one element, found {test.expected!r:.200}"
    try:
        codec.encode([list(test.args), dict(test.kwargs)])
        codec.encode(test.expected)
    except codec.CodecError as error:
        return f"an argument or the expected value cannot be carried: {error}"
    return None


def _text_problem(text: str, longest: int) -> str | None:
    if len(text) > longest:
        return f"a text of {len(text)} characters is longer than {longest}"
    return None if is_whole(text) else "a text has lone surrogates, which no file or pipe can hold"


def unusable(program: str) -> str | None:
    """Say why a program is no source text at all, or return `None`."""
    if not program.strip():
        return "the program is empty"
    if "\0" in program:
        return "the program contains null characters"
    if not is_whole(program):
        return "the program has lone surrogates, which are no text"
    if len(program.encode()) > MAX_PROGRAM_BYTES:
        return f"the program is longer than {MAX_PROGRAM_BYTES} bytes"
    return None


def syntax_error(program: str) -> str | None:
    """Return the syntax error of a Python program where parsing it here is cheap and safe, else `None`.

    A box compiles every program anyway; this only spares it the ordinary mistakes. Long programs are left to
    it, and those with odd escapes, for which Python would print a warning about each.
    """
    if len(program) > _PARSED_BYTES or _ODD_ESCAPE.search(program):
        return None
    try:
        ast.parse(program)
    except SyntaxError as error:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    except (RecursionError, MemoryError, ValueError):
        return None
    return None
