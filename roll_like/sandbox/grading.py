"""The tests of one program, one after the other, against one box.

Every path to `passed` goes through a value that was compared outside, and through a clean end that the box
saw. Whatever else happens has a status of its own; what says nothing about the program is `sandbox_error`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll_like.errors import SandboxError
from roll_like.sandbox import asserts
from roll_like.sandbox.box import Box, BoxReport, BoxSession, CallFailed, Ended, Program, SandboxUnavailable
from roll_like.sandbox.compare import Comparison, short_repr
from roll_like.sandbox.fair import PATIENCE, Measured, within
from roll_like.sandbox.types import (
    AssertTest,
    CallTest,
    CodeResult,
    Limits,
    StdioTest,
    TestCase,
    TestResult,
    TestStatus,
)

#: Most seconds that a box may be late with its own time-out: on a busy machine it also has to start.
_GRACE_SECONDS = 40.0
_SHORTEST_SECONDS = 0.05
#: Room for output, as a multiple of what is expected: blanks, and more digits than asked.
_SPARE_OUTPUT = 4

_OF_END = {
    Ended.ERROR: TestStatus.RUNTIME_ERROR,
    Ended.TIMEOUT: TestStatus.TIMEOUT,
    Ended.MEMORY: TestStatus.MEMORY_LIMIT,
    Ended.OUTPUT: TestStatus.OUTPUT_LIMIT,
    Ended.COMPILE_ERROR: TestStatus.COMPILE_ERROR,
    Ended.BROKEN: TestStatus.SANDBOX_ERROR,
}


@dataclass
class Grading:
    """One evaluation.

    Args:
        box: Where the program runs.
        limits: Of each execution, and of each call within one.
        total_seconds: Wall clock of all tests together; tests that it leaves no time for are time-outs. What a test
            takes beyond its own limit, on a busy machine, does not count.
        stop_at_failure: Give the tests after one that failed its status, instead of running them.
        numpy: Whether assert tests may import NumPy.
    """

    box: Box
    program: Program
    limits: Limits
    comparison: Comparison
    total_seconds: float
    stop_at_failure: bool = False
    numpy: bool = False

    def __post_init__(self) -> None:
        self._cpu_seconds, self._peak, self._stderr = 0.0, 0, ""
        self._deadline = time.monotonic() + self.total_seconds

    async def run(self, tests: Sequence[TestCase]) -> CodeResult:
        """Run every test.

        Raises:
            ConfigError: A test cannot be evaluated, whatever the program.
            SandboxUnavailable: There is no sandbox.
        """
        results: list[TestResult] = []
        while len(results) < len(tests):
            rest = tests[len(results) :]
            if results and results[-1].status is TestStatus.COMPILE_ERROR:
                results += results[-1:] * len(rest)
            elif self.stop_at_failure and results and results[-1].status is not TestStatus.PASSED:
                results += [TestResult(results[-1].status, "not run: a test before it failed")] * len(rest)
            elif self._remaining() < _SHORTEST_SECONDS:
                missed = f"not run: {self.total_seconds:g} s for all tests were used up"
                results += [TestResult(TestStatus.TIMEOUT, missed)] * len(rest)
            else:
                began = time.monotonic()
                found = await self._next(rest)
                own = self.limits.wall_seconds * len(found)
                self._deadline += max(0.0, time.monotonic() - began - own)  # the rest was the machine's
                results += found
        return summary(results, self._cpu_seconds, self._peak, self._stderr)

    async def _next(self, tests: Sequence[TestCase]) -> list[TestResult]:
        """Return the results of the first test, or of as many calls as one session served."""
        test = tests[0]
        try:
            if isinstance(test, StdioTest):
                return [await self._stdio(test)]
            if isinstance(test, AssertTest):
                return [await self._assert(test)]
            calls: list[CallTest] = []
            for candidate in tests:
                if not isinstance(candidate, CallTest):
                    break
                calls.append(candidate)
            return await self._calls(calls)
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            return [TestResult(TestStatus.SANDBOX_ERROR, str(error))]

    async def _stdio(self, test: StdioTest) -> TestResult:
        limits = self._limits(1)
        output_bytes = max(limits.output_bytes, _SPARE_OUTPUT * len(test.output.encode()))
        limits = replace(limits, output_bytes=output_bytes)  # what is expected can be printed, whatever the limit
        try:
            async with asyncio.timeout(limits.wall_seconds * PATIENCE + _GRACE_SECONDS):
                report = await self.box.run(self.program, test.input, limits)
        except TimeoutError:
            raise SandboxError(f"the box did not end an execution after {limits.wall_seconds:g} s") from None
        self._count(report)
        result = of_report(report)
        if result.status is TestStatus.PASSED:
            difference = self.comparison.outputs(report.stdout.decode("utf-8", "replace"), test.output)
            result = result if difference is None else TestResult(TestStatus.WRONG_ANSWER, difference)
        return self._noted(result, report)

    async def _calls(self, tests: Sequence[CallTest]) -> list[TestResult]:
        """Serve calls in one session until one fails; the next ones get a session that it did not touch."""
        results: list[TestResult] = []
        try:
            session = await self._open(self.program, self._limits(len(tests)))
        except CallFailed as failure:
            return [_of_failure(failure)]
        try:
            for test in tests:
                if results and self._remaining() < _SHORTEST_SECONDS:
                    break
                results.append(await self._call(session, test))
                if results[-1].status is not TestStatus.PASSED:
                    break
        finally:
            report = await self._end(session)
        if results[-1].status is TestStatus.PASSED and report.ended is not Ended.EXITED:
            # every value was right, but a session that does not end as it should vouches for nothing
            return [self._noted(of_report(report), report)] * len(results)
        self._noted(results[-1], report)
        return results

    async def _call(self, session: BoxSession, test: CallTest) -> TestResult:
        seconds = min(self.limits.wall_seconds, self._remaining())
        try:
            call = session.call(test.entry_point, test.args, test.kwargs)
            value = await within(call, seconds, session.own_seconds if isinstance(session, Measured) else None)
        except TimeoutError:
            return TestResult(TestStatus.TIMEOUT, f"{test.entry_point} took more than {seconds:.3g} s")
        except CallFailed as failure:
            return _of_failure(failure)
        difference = self.comparison.values(value, test.expected)
        if difference is None or (test.wrapped and self.comparison.values(value, test.expected[0]) is None):
            return TestResult(TestStatus.PASSED)
        return TestResult(TestStatus.WRONG_ANSWER, f"{test.entry_point}{short_repr(tuple(test.args))}: {difference}")

    async def _assert(self, test: AssertTest) -> TestResult:
        limits = self._limits(1)
        try:
            session = await self._open(asserts.with_remote_objects(self.program), limits)
        except CallFailed as failure:
            return _of_failure(failure)
        try:
            result = await asserts.run_assert_test(session, self.program, test, limits.wall_seconds, numpy=self.numpy)
        except CallFailed as failure:
            result = _of_failure(failure)
        finally:
            report = await self._end(session)
        return self._noted(of_report(report) if result.status is TestStatus.PASSED else result, report)

    async def _open(self, program: Program, limits: Limits) -> BoxSession:
        try:
            async with asyncio.timeout(limits.wall_seconds * PATIENCE + _GRACE_SECONDS):
                return await self.box.open(program, limits)
        except TimeoutError:
            raise SandboxError(f"the box did not start a program within {limits.wall_seconds:g} s") from None

    async def _end(self, session: BoxSession) -> BoxReport:
        try:
            async with asyncio.timeout(self.limits.wall_seconds * PATIENCE + _GRACE_SECONDS):
                report = await session.close()
        except TimeoutError:
            raise SandboxError(f"the box did not end a session after {self.limits.wall_seconds:g} s") from None
        self._count(report)
        return report

    def _limits(self, calls: int) -> Limits:
        """Return the limits of an execution that serves so many calls, each of which may take the whole time."""
        wall = min(self.limits.wall_seconds * calls, self._remaining())
        return replace(self.limits, wall_seconds=wall, cpu_seconds=self.limits.cpu_seconds * calls)

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _count(self, report: BoxReport) -> None:
        self._cpu_seconds += report.cpu_seconds
        self._peak = max(self._peak, report.peak_memory_bytes)

    def _noted(self, result: TestResult, report: BoxReport) -> TestResult:
        if result.status is not TestStatus.PASSED and not self._stderr:
            self._stderr = report.stderr
        return result


def of_report(report: BoxReport) -> TestResult:
    """Return what the end of an execution says; `passed` only means that nothing speaks against it."""
    if report.ended is Ended.EXITED:
        if report.exit_code in {0, None}:
            return TestResult(TestStatus.PASSED)
        return TestResult(TestStatus.RUNTIME_ERROR, f"exit status {report.exit_code}")
    return TestResult(_OF_END[report.ended], report.detail)


def not_compiled(problem: str, tests: int) -> CodeResult:
    """Return the result of a program that is not run, because it cannot be compiled."""
    return summary([TestResult(TestStatus.COMPILE_ERROR, problem)] * tests, 0.0, 0, problem)


def summary(results: Sequence[TestResult], cpu_seconds: float, peak_memory_bytes: int, stderr: str) -> CodeResult:
    """Return the result of an evaluation: its gravest status, and the share of tests passed."""
    statuses = {result.status for result in results}
    return CodeResult(
        status=next(status for status in reversed(TestStatus) if status in statuses),
        tests=tuple(results),
        fraction=sum(result.status is TestStatus.PASSED for result in results) / len(results),
        cpu_seconds=cpu_seconds,
        peak_memory_bytes=peak_memory_bytes,
        stderr=stderr,
    )


def _of_failure(failure: CallFailed) -> TestResult:
    # a session that ended before its value came has failed, however cleanly it left
    return TestResult(_OF_END.get(failure.kind, TestStatus.RUNTIME_ERROR), failure.message)
