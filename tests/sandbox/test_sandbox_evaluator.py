"""Test statuses of the evaluator, with boxes that run honest programs here or end as a test wants them to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from local_box import LocalBox, LocalSession, report

from roll_like.errors import ConfigError, SandboxError
from roll_like.sandbox import (
    AssertTest,
    CallTest,
    CodeEvaluator,
    CodeResult,
    Comparison,
    Limits,
    StdioTest,
    TestStatus,
)
from roll_like.sandbox.box import Box, BoxReport, CallFailed, Ended, Program, SandboxUnavailable
from roll_like.sandbox.evaluator import MAX_PROGRAM_BYTES, syntax_error
from roll_like.sandbox.types import TestCase

DOUBLE = "def double(x):\n    return x * 2\n"
PRINT_DOUBLE = "print(int(input()) * 2)"


def evaluate(box: Box, program: str, tests: Sequence[TestCase], **options: object) -> CodeResult:
    with CodeEvaluator(backend=box, **options) as evaluator:  # type: ignore[arg-type]
        return evaluator.evaluate_sync(program, tests)


class EndingBox(LocalBox):
    """Ends every whole program, and every call, in one way."""

    def __init__(self, end: BoxReport, call: CallFailed | None = None, opening: CallFailed | None = None) -> None:
        super().__init__()
        self.end, self.failure, self.opening = end, call, opening

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        self.seen.append((program, stdin, limits))
        return self.end

    async def open(self, program: Program, limits: Limits) -> LocalSession:
        if self.opening is not None:
            raise self.opening
        session = await super().open(program, limits)
        session.end = self.end
        if self.failure is not None:
            session.call = self._fail  # type: ignore[method-assign]
        return session

    async def _fail(self, entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        assert self.failure is not None
        raise self.failure


def test_a_right_program_passes_every_kind_of_test() -> None:
    program = DOUBLE + "if __name__ == '__main__':\n    " + PRINT_DOUBLE
    tests = [StdioTest("4", "8\n"), CallTest("double", (4,), expected=8), AssertTest("assert double(4) == 8")]
    result = evaluate(LocalBox(), program, tests)
    assert result.status is TestStatus.PASSED
    assert [test.status for test in result.tests] == [TestStatus.PASSED] * 3
    assert (result.fraction, result.cpu_seconds, result.peak_memory_bytes) == (1.0, 0.75, 1000)


def test_every_stdio_test_is_an_execution_of_its_own() -> None:
    box = LocalBox()
    result = evaluate(box, PRINT_DOUBLE, [StdioTest("4", "8"), StdioTest("5", "11"), StdioTest("6", "12")])
    assert [test.status for test in result.tests] == [TestStatus.PASSED, TestStatus.WRONG_ANSWER, TestStatus.PASSED]
    assert result.status is TestStatus.WRONG_ANSWER
    assert result.fraction == pytest.approx(2 / 3)
    assert result.tests[1].detail == "line 1: expected '11', got '10'"
    assert [stdin for _, stdin, _ in box.seen] == ["4", "5", "6"]


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (Ended.ERROR, TestStatus.RUNTIME_ERROR),
        (Ended.TIMEOUT, TestStatus.TIMEOUT),
        (Ended.MEMORY, TestStatus.MEMORY_LIMIT),
        (Ended.OUTPUT, TestStatus.OUTPUT_LIMIT),
        (Ended.COMPILE_ERROR, TestStatus.COMPILE_ERROR),
        (Ended.BROKEN, TestStatus.SANDBOX_ERROR),
    ],
)
def test_right_output_without_a_clean_end_is_no_pass(ended: Ended, status: TestStatus) -> None:
    box = EndingBox(report(ended, b"8\n", stderr="what it said"))
    result = evaluate(box, PRINT_DOUBLE, [StdioTest("4", "8")])
    assert (result.status, result.fraction, result.stderr) == (status, 0.0, "what it said")
    # right values, then a session that ends in that way
    for test in (CallTest("double", (4,), expected=8), AssertTest("assert double(4) == 8")):
        assert evaluate(box, DOUBLE, [test]).status is status
    # a call, and the start of a session, that end in that way
    for other in (EndingBox(report(), CallFailed(ended, "x")), EndingBox(report(), opening=CallFailed(ended, "x"))):
        for test in (CallTest("double", (4,), expected=8), AssertTest("assert double(4) == 8")):
            assert evaluate(other, DOUBLE, [test]).status is status


def test_a_clean_end_before_the_value_came_is_a_runtime_error() -> None:
    box = EndingBox(report(), CallFailed(Ended.EXITED, "left with status 0"))
    for test in (CallTest("double", (4,), expected=8), AssertTest("assert double(4) == 8")):
        assert evaluate(box, DOUBLE, [test]).status is TestStatus.RUNTIME_ERROR


def test_an_exit_status_is_a_runtime_error_whatever_was_printed() -> None:
    box = EndingBox(report(Ended.EXITED, b"8\n", exit_code=3))
    assert evaluate(box, PRINT_DOUBLE, [StdioTest("4", "8")]).status is TestStatus.RUNTIME_ERROR


def test_calls_share_a_session_until_one_fails() -> None:
    box = LocalBox()
    right, wrong = CallTest("double", (1,), expected=2), CallTest("double", (1,), expected=3)
    result = evaluate(box, DOUBLE, [right, right, wrong, right, CallTest("double", ("a",), {"y": 1}), right, right])
    names = [test.status.value for test in result.tests]
    assert names == ["passed", "passed", "wrong_answer", "passed", "runtime_error", "passed", "passed"]
    assert [session.calls for session in box.sessions] == [3, 2, 2]
    assert all(session.closed for session in box.sessions)


def test_a_session_that_ends_badly_vouches_for_none_of_its_calls() -> None:
    right = CallTest("double", (1,), expected=2)
    box = LocalBox(ends=[report(Ended.ERROR)])
    result = evaluate(box, DOUBLE, [right, right, StdioTest("", "")])
    assert [test.status.value for test in result.tests] == ["runtime_error", "runtime_error", "passed"]


def test_methods_keyword_arguments_and_missing_names() -> None:
    program = "class Solution:\n    def join(self, *parts, by):\n        return by.join(parts)\n"
    call = CallTest("Solution.join", ("a", "b"), {"by": "-"}, expected="a-b")
    result = evaluate(LocalBox(), program, [call, CallTest("missing", (), expected=None)])
    assert [test.status.value for test in result.tests] == ["passed", "runtime_error"]


def test_a_truth_value_is_no_number_and_tolerance_is_a_choice() -> None:
    program = "def same(x):\n    return x\n"
    assert evaluate(LocalBox(), program, [CallTest("same", (True,), expected=1)]).status is TestStatus.WRONG_ANSWER
    near = [CallTest("same", (0.1 + 0.2,), expected=0.3)]
    assert evaluate(LocalBox(), program, near).status is TestStatus.WRONG_ANSWER
    relaxed = evaluate(LocalBox(), program, near, comparison=Comparison(float_tolerance=1e-6))
    assert relaxed.status is TestStatus.PASSED


def test_expected_values_and_test_text_are_not_given_to_the_box() -> None:
    box = LocalBox()
    tests = [
        StdioTest("1", "SECRET"),
        CallTest("double", (1,), expected="SECRET"),
        AssertTest("answer = 'SECRET'\nassert double(2) == answer"),
    ]
    received: list[object] = []

    class Listening(LocalSession):
        async def call(self, entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
            received.append((entry_point, args, kwargs))
            return await super().call(entry_point, args, kwargs)

    async def opened(program: Program, limits: Limits) -> LocalSession:
        session = await LocalBox.open(box, program, limits)
        return Listening(session.scope, session.end)

    box.open = opened  # type: ignore[method-assign]
    result = evaluate(box, DOUBLE + "print(1)", tests)
    assert [test.status for test in result.tests] == [TestStatus.WRONG_ANSWER] * 3
    assert len(received) == 2
    assert "SECRET" not in repr(received) + repr(box.seen)


@pytest.mark.parametrize(
    "program",
    ["def (", "x = = 1", "  x", "if 1:\n", "", " \n", "x\0", "\ud800", "print 'a'", "(" * 300],
    ids=repr,
)
def test_what_is_no_program_is_a_compile_error_without_a_box(program: str) -> None:
    box = LocalBox()
    result = evaluate(box, program, [StdioTest("", ""), CallTest("f")])
    assert result.status is TestStatus.COMPILE_ERROR
    assert [test.status for test in result.tests] == [TestStatus.COMPILE_ERROR] * 2
    assert result.tests[0].detail
    assert box.seen == []


def test_a_compile_error_found_by_the_box_ends_the_evaluation() -> None:
    box = EndingBox(report(Ended.COMPILE_ERROR))
    result = evaluate(box, "return 1", [StdioTest("", "")] * 5)
    assert [test.status for test in result.tests] == [TestStatus.COMPILE_ERROR] * 5
    assert len(box.seen) == 1


def test_too_long_a_program_is_refused() -> None:
    assert evaluate(LocalBox(), "#" * (MAX_PROGRAM_BYTES + 1), [StdioTest("", "")]).status is TestStatus.COMPILE_ERROR


@pytest.mark.parametrize(
    "program", ["-" * 100_000 + "1", "import " + "a." * 100_000 + "b", "x = '\\d'", "+".join(["1"] * 15_000)]
)
def test_parsing_here_is_left_out_where_it_is_costly(program: str) -> None:
    begin = time.process_time()
    assert syntax_error(program) is None
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "the list of tests is empty"),
        ([CallTest("double", (object(),))], "cannot be carried"),
        ([CallTest("double", (), expected=object())], "cannot be carried"),
        ([CallTest("a b")], "entry_point"),
        ([CallTest("")], "entry_point"),
        ([CallTest("double", "abc")], "args should be"),
        ([CallTest("double", (), {1: 2})], "kwargs should be"),  # type: ignore[dict-item]
        ([StdioTest(1, "")], "should be text"),  # type: ignore[arg-type]
        ([StdioTest("\ud800", "")], "lone surrogates"),
        ([AssertTest(" ")], "the code is empty"),
        (["assert 1"], "expected a StdioTest"),
    ],
)
def test_tests_that_cannot_be_run_are_refused_before_anything_runs(tests: list[TestCase], message: str) -> None:
    box = LocalBox()
    with CodeEvaluator(backend=box) as evaluator:
        with pytest.raises(ConfigError, match=message):
            evaluator.evaluate_sync(DOUBLE, tests)
        with pytest.raises(ConfigError, match=message):
            asyncio.run(evaluator.evaluate(DOUBLE, tests))
    assert box.seen == []


def test_other_languages_take_stdio_tests_only() -> None:
    with CodeEvaluator(backend=EndingBox(report(Ended.EXITED, b"8"))) as evaluator:
        assert evaluator.evaluate_sync("int main(", [StdioTest("", "8")], "cpp").status is TestStatus.PASSED
        with pytest.raises(ConfigError, match="cpp has StdioTest only"):
            evaluator.evaluate_sync("int main(", [CallTest("main")], "cpp")


def test_a_broken_box_is_a_sandbox_error_and_a_missing_one_is_raised() -> None:
    class Broken(LocalBox):
        error: SandboxError = SandboxError("the zygote died")

        async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
            raise self.error

    result = evaluate(Broken(), PRINT_DOUBLE, [StdioTest("4", "9")])
    assert result.status is TestStatus.SANDBOX_ERROR
    assert result.tests[0].detail == "the zygote died"
    missing = Broken()
    missing.error = SandboxUnavailable("no bwrap")
    with pytest.raises(SandboxUnavailable, match="no bwrap"):
        evaluate(missing, PRINT_DOUBLE, [StdioTest("4", "8")])


def test_sandbox_error_outweighs_every_other_status() -> None:
    class Half(LocalBox):
        async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
            return report(Ended.BROKEN if stdin == "2" else Ended.TIMEOUT)

    result = evaluate(Half(), PRINT_DOUBLE, [StdioTest("1", "2"), StdioTest("2", "4")])
    assert result.status is TestStatus.SANDBOX_ERROR


class SlowBox(LocalBox):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.running, self.most = seconds, 0, 0

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        self.running += 1
        self.most = max(self.most, self.running)
        self.seen.append((program, stdin, limits))
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return report(stdout=b"8")


def test_no_more_than_workers_run_at_once() -> None:
    box = SlowBox(0.2)
    tests = [StdioTest("4", "8")]

    async def many(evaluator: CodeEvaluator) -> list[CodeResult]:
        return await asyncio.gather(*(evaluator.evaluate(PRINT_DOUBLE, tests) for _ in range(7)))

    with CodeEvaluator(backend=box, workers=3) as evaluator:
        results = asyncio.run(many(evaluator))
    assert {result.status for result in results} == {TestStatus.PASSED}
    assert box.most == 3


def test_the_total_time_bounds_all_tests_together() -> None:
    box = SlowBox(0.2)
    begin = time.monotonic()
    result = evaluate(box, PRINT_DOUBLE, [StdioTest("4", "8")] * 20, total_seconds=1.0)
    assert time.monotonic() - begin < 30
    assert result.status is TestStatus.TIMEOUT
    assert 0 < result.fraction < 0.5
    assert "not run" in result.tests[-1].detail
    assert all(limits.wall_seconds <= 1.0 for _, _, limits in box.seen)


def test_a_call_has_the_wall_limit_and_the_next_one_a_fresh_session() -> None:
    class Sleepy(LocalBox):
        async def open(self, program: Program, limits: Limits) -> LocalSession:
            session = await super().open(program, limits)
            call = session.call

            async def slow(entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
                await asyncio.sleep(30 if args[0] == 0 else 0)
                return await call(entry_point, args, kwargs)

            session.call = slow  # type: ignore[method-assign]
            return session

    box = Sleepy()
    tests = [CallTest("double", (at,), expected=2 * at) for at in (1, 0, 2)]
    result = evaluate(box, DOUBLE, tests, limits=Limits(wall_seconds=0.5))
    assert [test.status.value for test in result.tests] == ["passed", "timeout", "passed"]
    assert len(box.sessions) == 2


def test_it_works_inside_a_running_loop_and_from_many_threads() -> None:
    tests = [CallTest("double", (4,), expected=8)]

    async def inside(evaluator: CodeEvaluator) -> TestStatus:
        return evaluator.evaluate_sync(DOUBLE, tests).status

    with CodeEvaluator(backend=LocalBox()) as evaluator:
        assert asyncio.run(inside(evaluator)) is TestStatus.PASSED
        assert asyncio.run(inside(evaluator)) is TestStatus.PASSED
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _: evaluator.evaluate_sync(DOUBLE, tests), range(40)))
    assert {result.status for result in results} == {TestStatus.PASSED}


def test_closing_cancels_ends_the_thread_and_refuses_more() -> None:
    box = SlowBox(60)
    evaluator = CodeEvaluator(backend=box)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(evaluator.evaluate_sync, PRINT_DOUBLE, [StdioTest("4", "8")])
        while not box.seen:
            time.sleep(0.01)
        evaluator.close()
        with pytest.raises(BaseException):  # noqa: B017, PT011 - CancelledError of concurrent.futures
            waiting.result(60)
    assert box.closed
    assert "code-evaluator" not in {thread.name for thread in threading.enumerate()}
    evaluator.close()
    with pytest.raises(SandboxError, match="closed"):
        evaluator.evaluate_sync(PRINT_DOUBLE, [StdioTest("4", "8")])


def test_a_cancelled_evaluation_gives_its_place_back() -> None:
    box = SlowBox(60)

    async def main(evaluator: CodeEvaluator) -> CodeResult:
        task = asyncio.ensure_future(evaluator.evaluate(PRINT_DOUBLE, [StdioTest("4", "8")]))
        while not box.seen:
            await asyncio.sleep(0.01)
        box.seconds = 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await evaluator.evaluate(PRINT_DOUBLE, [StdioTest("4", "8")])

    with CodeEvaluator(backend=box, workers=1) as evaluator:
        assert asyncio.run(main(evaluator)).status is TestStatus.PASSED


@pytest.mark.parametrize("options", [{"workers": 0}, {"total_seconds": 0}, {"total_seconds": float("inf")}])
def test_senseless_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CodeEvaluator(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "limits", [{"wall_seconds": 0}, {"memory_bytes": -1}, {"processes": True}, {"cpu_seconds": float("inf")}]
)
def test_senseless_limits_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"Limits.{next(iter(limits))}"):
        Limits(**limits)  # type: ignore[arg-type]


def test_what_a_busy_machine_takes_is_not_taken_from_the_other_tests() -> None:
    class Late(LocalBox):
        async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
            await asyncio.sleep(0.5)  # ten times what one test may take: it was kept waiting
            return await super().run(program, stdin, limits)

    tests = [StdioTest(str(number), str(2 * number)) for number in range(3)]
    result = evaluate(Late(), PRINT_DOUBLE, tests, limits=Limits(wall_seconds=0.05), total_seconds=0.4)
    assert [test.status for test in result.tests] == [TestStatus.PASSED] * 3
