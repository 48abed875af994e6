"""The code reward up to the sandbox: which program is taken, which tests a row holds, what a status becomes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from reward_support import completion, outcomes, row

from roll_like import RewardResult
from roll_like.builtin.rewards.code import Code, CodeConfig
from roll_like.builtin.rewards.code_asserts import resolve_entry_points
from roll_like.builtin.rewards.code_block import CodeBlock, code_blocks, last_program
from roll_like.builtin.rewards.code_tests import read_tests
from roll_like.errors import DataError, RewardError, SandboxError
from roll_like.registry import REWARDS
from roll_like.sandbox import AssertTest, CallTest, CodeResult, StdioTest, TestCase, TestResult, TestStatus

ADD = "def add(a, b):\n    return a + b\n"
STDIO = [{"input": "1\n", "output": "2\n"}]


class FakeEvaluator:
    """Gives what a test wants, and writes down what it was asked."""

    def __init__(self, status: TestStatus = TestStatus.PASSED, fraction: float = 1.0) -> None:
        self.asked: list[tuple[str, tuple[TestCase, ...], str]] = []
        self.status, self.fraction = status, fraction
        self.error: Exception | None = None
        self.closed = 0

    async def evaluate(self, program: str, tests: Sequence[TestCase], language: str = "python") -> CodeResult:
        if self.error is not None:
            raise self.error
        self.asked.append((program, tuple(tests), language))
        results = tuple(TestResult(self.status, "the reason") for _ in tests)
        return CodeResult(
            status=self.status,
            tests=results,
            fraction=self.fraction,
            cpu_seconds=0.5,
            peak_memory_bytes=3 << 20,
            stderr="",
        )

    def close(self) -> None:
        self.closed += 1


def make(evaluator: FakeEvaluator | None = None, **settings: Any) -> tuple[Code, FakeEvaluator]:
    fake = evaluator or FakeEvaluator()
    reward = Code(CodeConfig(**settings))
    reward._evaluator = fake  # type: ignore[assignment]
    return reward, fake


def one(reward: Code, text: str, **metadata: Any) -> RewardResult:
    (outcome,) = outcomes(reward, [completion(text, **metadata)])
    assert isinstance(outcome, RewardResult), outcome
    return outcome


def fenced(source: str, tag: str = "python") -> str:
    return f"```{tag}\n{source}```"


def test_is_registered_by_its_entry_point() -> None:
    assert REWARDS.get("code") is Code


# ---- which program ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nx = 1\n```", ("x = 1\n", "python")),
        ("```py\nx = 1\n```\nand better\n```python3\nx = 2\n```", ("x = 2\n", "python")),
        ("```\nx = 1\n```", ("x = 1\n", "python")),
        ("~~~python\nx = 1\n~~~", ("x = 1\n", "python")),
        ("   ```python\nx = 1\n   ```", ("x = 1\n", "python")),
        ("````python\ns = '''\n```\n'''\n````", ("s = '''\n```\n'''\n", "python")),
        ("```c++\nint x;\n```", ("int x;\n", "cpp")),
        ("```js\nlet x\n```", ("let x\n", "javascript")),
        ("```{python}\nx = 1\n```", ("x = 1\n", "python")),
        # what is printed and what a shell is told are no programs
        ("```python\nx = 1\n```\n```text\n1\n```\n```bash\npython x.py\n```", ("x = 1\n", "python")),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", ("x = 1\n", "python")),
        ("```\nx = 1\n```\n```text\n1\n```", ("x = 1\n", "python")),
        # nothing to take
        ("```python\nx = 1\n", None),
        ("x = 1", None),
        ("`x = 1`", None),
        ("``` x = 1 ```", None),
        ("```rust\nlet x;\n```", None),
        ("", None),
    ],
)
def test_the_last_program(text: str, expected: tuple[str, str] | None) -> None:
    assert last_program(text, "python") == (None if expected is None else CodeBlock(*expected))


def test_the_longest_program() -> None:
    text = "```python\ndef f():\n    return 1\n```\nUse it:\n```python\nprint(f())\n```\n"
    assert last_program(text, "python") == CodeBlock("print(f())\n", "python")
    assert last_program(text, "python", longest=True) == CodeBlock("def f():\n    return 1\n", "python")
    equal = "```python\na = 1\n```\n```python\nb = 1\n```\n"
    assert last_program(equal, "python", longest=True) == CodeBlock("b = 1\n", "python")
    assert last_program("none", "python", longest=True) is None


def test_the_language_of_a_block_without_a_tag_is_the_one_configured() -> None:
    assert last_program("```\nint x;\n```", "cpp") == CodeBlock("int x;\n", "cpp")
    assert code_blocks("```\na\n```") == [CodeBlock("a\n", None)]


# ---- which tests -----------------------------------------------------------------------------------


def read(tests: Any, **metadata: Any) -> tuple[TestCase, ...]:
    return read_tests({"tests": tests, **metadata}, tests_field="tests", entry_point_field="entry_point")


HUMAN_EVAL = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"


@pytest.mark.parametrize(
    ("tests", "metadata", "expected"),
    [
        ([{"input": "1\n", "output": "2\n"}], {}, (StdioTest("1\n", "2\n"),)),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], {"entry_point": None}, (StdioTest("1", "2"),)),
        ([{"input": "1", "output": "2", "args": None, "expected": None}], {}, (StdioTest("1", "2"),)),
        ([{"args": [], "expected": None}], {"entry_point": "f"}, (CallTest("f"),)),
        ({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}, {}, (StdioTest("1\n", "2\n"), StdioTest("2\n", "3\n"))),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, {}, (StdioTest("1\n2\n", "3\n"),)),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, {}, (CallTest("add", (1, 2), expected=3),)),
        (
            {"inputs": [[[1, 2]]], "outputs": [[3]], "fn_name": "f"},
            {},
            (CallTest("f", ([1, 2],), expected=[3], wrapped=True),),
        ),
        (
            [{"input": '[1, 2]\n"x"', "output": "true", "testtype": "functional"}],
            {"entry_point": "f"},
            (CallTest("f", ([1, 2], "x"), expected=True),),
        ),
        (
            [{"args": [1], "kwargs": {"b": 2}, "expected": 3}],
            {"entry_point": "add"},
            (CallTest("add", (1,), {"b": 2}, 3),),
        ),
        ([{"kwargs": {"b": 2}, "expected": None, "entry_point": "g"}], {}, (CallTest("g", (), {"b": 2}, None),)),
        (HUMAN_EVAL, {"entry_point": "add"}, (AssertTest(f"{HUMAN_EVAL}\n\ncheck(add)\n".replace("\n\n\n", "\n\n")),)),
        (
            ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
            {},
            (AssertTest("assert add(1, 2) == 3"), AssertTest("assert add(0, 0) == 0")),
        ),
        ("assert add(1, 2) == 3", {}, (AssertTest("assert add(1, 2) == 3"),)),
    ],
)
def test_the_shapes_of_tests(tests: Any, metadata: dict[str, Any], expected: tuple[TestCase, ...]) -> None:
    assert read(tests, **metadata) == expected
    if not isinstance(tests, str):
        assert read(json.dumps(tests), **metadata) == expected  # APPS keeps them as text


def test_a_check_that_is_called_already_is_not_called_twice() -> None:
    code = f"{HUMAN_EVAL}\ncheck(add)\n"
    assert read(code, entry_point="add") == (AssertTest(code),)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "should hold tests"),
        ("", "holds no tests"),
        ([], "holds no tests"),
        ({"inputs": [], "outputs": []}, "holds no tests"),
        ({"inputs": ["1"], "outputs": []}, "as many of each"),
        ({"inputs": [1], "outputs": ["1"], "fn_name": "f"}, "a list of arguments"),
        ([{"input": "1"}], r"tests\[0\] should hold input and output"),
        ([{"args": [1], "expected": 1}], "no field 'entry_point'"),
        ([{"expected": 1}], "no field 'entry_point'"),
        ([{"input": "x", "output": "1", "testtype": "functional", "entry_point": "f"}], "should be JSON"),
        ([5], r"tests\[0\] should be a mapping"),
        ("[1, 2", "looks like JSON"),
        ("def check(candidate):\n    assert candidate() == 1", "no field 'entry_point'"),
        ("assert add(1", "not valid Python"),
        ("print('fine')", "assert nothing"),
    ],
)
def test_tests_that_cannot_be_read(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tests)


def test_a_method_of_solution_answers_a_function_too() -> None:
    tests = (CallTest("add", (1, 2), expected=3), StdioTest("", ""))
    method = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    assert resolve_entry_points(tests, method)[0] == CallTest("Solution.add", (1, 2), expected=3)
    assert resolve_entry_points(tests, ADD + method) == tests
    for other in (ADD, "class Solution:\n    pass\n", "def add(:", "\0", "(" * 10_000):
        assert resolve_entry_points(tests, other) == tests


# ---- what a status becomes ------------------------------------------------------------------------


def test_a_program_that_passes_gets_1_and_its_figures() -> None:
    reward, fake = make()
    status = one(reward, f"Sure:\n{fenced(ADD)}", tests=[{"args": [1, 2], "expected": 3}], entry_point="add")
    assert status.value == 1.0
    assert (status.details["parsed"], status.details["passed"], status.details["status/passed"]) == (1, 1, 1)
    assert (status.details["status/timeout"], status.details["memory_mib"]) == (0.0, 3.0)
    assert fake.asked == [(ADD, (CallTest("add", (1, 2), expected=3),), "python")]


@pytest.mark.parametrize("status", sorted(set(TestStatus) - {TestStatus.PASSED, TestStatus.SANDBOX_ERROR}))
def test_every_other_status_gets_0_or_the_share_that_passed(status: TestStatus) -> None:
    binary, _ = make(FakeEvaluator(status, 0.75))
    found = one(binary, fenced(ADD), tests=STDIO)
    assert (found.value, found.details[f"status/{status}"]) == (0.0, 1.0)
    shared, _ = make(FakeEvaluator(status, 0.75), reward="fraction")
    assert one(shared, fenced(ADD), tests=STDIO).value == 0.75


def test_a_sandbox_that_fails_is_no_judgement() -> None:
    reward, fake = make(FakeEvaluator(TestStatus.SANDBOX_ERROR, 0.0))
    (outcome,) = outcomes(reward, [completion(fenced(ADD), tests=STDIO)])
    assert isinstance(outcome, RewardError)
    assert "the reason" in str(outcome)
    fake.error = SandboxError("bwrap is gone")
    (outcome,) = outcomes(reward, [completion(fenced(ADD), tests=STDIO)])
    assert isinstance(outcome, RewardError)
    assert "bwrap is gone" in str(outcome)


@pytest.mark.parametrize(
    "text", ["", "All tests pass.", ADD, "```python\n```", "```python\n  \n```", "```python\nx = 1"]
)
def test_a_response_without_a_program_gets_0_and_runs_nothing(text: str) -> None:
    reward, fake = make()
    status = one(reward, text, tests=STDIO)
    assert (status.value, status.details["parsed"]) == (0.0, 0.0)
    assert fake.asked == []


def test_the_whole_response_where_that_is_wanted() -> None:
    reward, fake = make(whole_response=True)
    assert one(reward, ADD, tests=STDIO).value == 1.0
    assert fake.asked[0][0] == ADD
    assert one(reward, " ", tests=STDIO).value == 0.0


def test_languages() -> None:
    reward, fake = make(languages=("python", "cpp"))
    assert one(reward, fenced("int main() {}\n", "cpp"), tests=STDIO).value == 1.0
    assert fake.asked[-1] == ("int main() {}\n", (StdioTest("1\n", "2\n"),), "cpp")
    # calls and assertions are for Python, JavaScript is not allowed here
    for source, tests in ((fenced("int f;\n", "cpp"), ["assert f()"]), (fenced("let f\n", "js"), STDIO)):
        status = one(reward, source, tests=tests)
        assert (status.value, status.details["other_language"]) == (0.0, 1.0)
    assert len(fake.asked) == 1


def test_a_translation_does_not_hide_the_program() -> None:
    reward, fake = make()
    assert one(reward, f"{fenced(ADD)}\nIn C++:\n{fenced('int f;', 'cpp')}", tests=STDIO).value == 1.0
    assert fake.asked[-1] == (ADD, (StdioTest("1\n", "2\n"),), "python")


def test_setup_comes_before_the_program() -> None:
    reward, fake = make(setup_field="imports")
    one(reward, fenced(ADD), tests=STDIO, imports="import math")
    assert fake.asked[0][0] == f"import math\n\n{ADD}"
    with pytest.raises(DataError, match=r"data\.jsonl:7: the field 'imports'"):
        reward.check_row(row(tests=STDIO))


def test_rows_are_checked() -> None:
    reward, _ = make()
    reward.check_row(row(tests=STDIO))
    with pytest.raises(DataError, match=r"data\.jsonl:7: the field 'tests'"):
        reward.check_row(row())
    with pytest.raises(DataError, match="need Python"):
        make(languages=("cpp",))[0].check_row(row(tests=["assert f()"]))
    (outcome,) = outcomes(reward, [completion(fenced(ADD))])
    assert isinstance(outcome, RewardError)


def test_closing_ends_the_sandbox_once() -> None:
    reward, fake = make()
    reward.close()
    reward.close()
    assert fake.closed == 1
