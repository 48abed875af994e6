r"""What goes into the evaluation of a program, and what comes out.

    tests = [StdioTest("3 4\n", "7\n"), CallTest("add", (3, 4), expected=7), AssertTest("assert add(3, 4) == 7")]
    result = CodeEvaluator(Limits()).evaluate_sync(program, tests)
    result.status, result.fraction        # TestStatus.PASSED, 1.0

Nothing here runs anything, and nothing but the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

from roll_like.errors import ConfigError

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one execution may use; every one of them is enforced by the sandbox.

    Attributes:
        wall_seconds: Time from start to end, waiting included.
        cpu_seconds: Processor time of each process inside.
        memory_bytes: Memory of the whole execution: all its processes and its files in memory.
        output_bytes: Bytes written to standard output and standard error together.
        processes: Threads and processes at one time, the program's own included.
        file_bytes: Size of one file.
        tmp_bytes: Size of the writable folder.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 8.0
    memory_bytes: int = 512 * _MIB
    output_bytes: int = _MIB
    processes: int = 16
    file_bytes: int = 16 * _MIB
    tmp_bytes: int = 32 * _MIB

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"Limits.{limit.name} should be a number above 0, found {value!r}")


@dataclass(frozen=True, slots=True)
class StdioTest:
    """The program is run once with `input` on standard input and has to print `output`."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """`entry_point(*args, **kwargs)` has to return `expected`.

    Attributes:
        entry_point: A function's name, or `"Solution.two_sum"`: a method of a class made without arguments.
        args: Positional arguments, of plain types (see `roll_like.sandbox.codec`).
        kwargs: Keyword arguments, likewise.
        expected: What has to come back; it never enters the sandbox.
        wrapped: `expected` is a list of one element, and that alone is right too.
    """

    entry_point: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None
    wrapped: bool = False


@dataclass(frozen=True, slots=True)
class AssertTest:
    """Python statements that raise when the program is wrong; the program's names are in scope.

    They run outside the sandbox: every call of a name of the program is a call into it.

    Attributes:
        code: The statements.
        names: Names of builtins and standard modules that mean the program's own here. Without it they keep
            their meaning, so that a program that defines `len` does not change how a test counts.
    """

    code: str
    names: tuple[str, ...] = ()


TestCase: TypeAlias = StdioTest | CallTest | AssertTest


class TestStatus(StrEnum):
    """What came of a test or of a whole evaluation, from the best to the gravest.

    Only `passed` is success. `sandbox_error` says nothing about the program: the sandbox failed, and
    the evaluation is to be repeated or left out, never counted as wrong.
    """

    __test__ = False  # pytest should not take the class for tests

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    OUTPUT_LIMIT = "output_limit"
    MEMORY_LIMIT = "memory_limit"
    TIMEOUT = "timeout"
    COMPILE_ERROR = "compile_error"
    SANDBOX_ERROR = "sandbox_error"


@dataclass(frozen=True, slots=True)
class TestResult:
    """What came of one test, and why in a few words."""

    __test__ = False  # pytest should not take the class for tests

    status: TestStatus
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeResult:
    """What came of all tests of one program.

    Attributes:
        status: `passed` when every test passed; else the gravest status of a test.
        tests: One result for each test, in order.
        fraction: Share of the tests that passed, between 0 and 1.
        cpu_seconds: Processor time of all executions.
        peak_memory_bytes: Memory of the largest execution.
        stderr: Standard error of the first execution that did not pass, cut to a few KiB.
    """

    status: TestStatus
    tests: tuple[TestResult, ...]
    fraction: float
    cpu_seconds: float
    peak_memory_bytes: int
    stderr: str
