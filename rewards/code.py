"""Programs: whether the program in a response passes its row's tests, run in a sandbox.

    {"prompt": "Write add(a, b).", "entry_point": "add", "tests": [{"args": [3, 4], "expected": 7}]}

`rewards.code_tests` lists the shapes of tests; expected values never enter the sandbox.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from roll_like import Completion, Outcome, Reward, RewardCase, RewardConfig, RewardResult, register_reward
from roll_like.builtin.rewards.code_asserts import resolve_entry_points
from roll_like.builtin.rewards.code_block import last_program
from roll_like.builtin.rewards.code_tests import read_tests
from roll_like.errors import ConfigError, DataError, RewardError, SandboxError
from roll_like.rewards.base import refusing_row
from roll_like.sandbox import CodeEvaluator, CodeResult, Limits, StdioTest, TestStatus, self_test
from roll_like.sandbox.compare import Comparison, short_repr
from roll_like.sandbox.evaluator import check_tests
from roll_like.types import Task

_MIB = 1 << 20
#: An import from `__future__`, where one may stand: at the beginning of a line or behind a semicolon.
_FUTURE = re.compile(
    r"(?:^|;)[ \t]*from[ \t]+__future__[ \t]+import\b(?:[ \t]*\([^)]*\)|(?:\\\n|[^\n;#(])*)", re.MULTILINE
)
#: Most imports from which on the end of the head is looked for; hostile text is not parsed again and again.
_TRIES = 8
_LONGEST_HEAD = 1 << 15
_ODD_ESCAPE = re.compile(r"\\(?=[^\n\\'\"abfnrtv0-7xNuU])")


def _python(text: str) -> str:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"should be Python, found: {error}") from error
    return text


class CodeConfig(RewardConfig):
    """Settings of the `code` reward."""

    type: Literal["code"] = "code"
    tests_field: str | tuple[str, ...] = Field(
        default="tests",
        min_length=1,
        description="Row field with the tests: HumanEval's `test`, and so on. A list of fields means the tests of all.",
    )
    entry_point_field: str = Field(
        default="entry_point",
        description="Row field with the name of the function under test, where there is one; LiveCodeBench's "
        "`metadata` works too.",
    )
    setup_field: str | None = Field(
        default=None,
        description="Row field with Python that is put before each program, as text or a list of lines: imports, "
        "helpers. The program's imports from `__future__` come first.",
    )
    setup: Annotated[str, AfterValidator(_python)] = Field(
        default="",
        description="Python that is put before the programs of all rows, as LeetCode and LiveCodeBench do: "
        "`from typing import *`, and so on.",
    )
    compare: Literal["tokens", "exact"] = Field(
        default="tokens",
        description="tokens: output is compared token by token, blanks and line ends only separate, and numbers may "
        "differ by `float_tolerance`, returned ones too. exact: line by line, except for blanks at the ends of lines "
        "and empty lines at the end, and without tolerance.",
    )
    float_tolerance: float = Field(
        default=1e-6,
        ge=0,
        lt=1,
        description="With `compare: tokens`: largest absolute or relative difference of two numbers of which one has "
        "a decimal point or an exponent; absolute where a whole number is expected. Whole numbers have to be the same.",
    )
    reward: Literal["binary", "fraction"] = Field(
        default="binary", description="binary: 1 if every test passed. fraction: the share of tests that passed."
    )
    language: Literal["python", "cpp", "javascript"] = Field(
        default="python", description="Language of a code block without a tag."
    )
    languages: tuple[Literal["python", "cpp", "javascript"], ...] = Field(
        default=("python",), min_length=1, description="Languages that are run; programs in others get 0."
    )
    block: Literal["last", "longest"] = Field(
        default="last",
        description="Which code block is the program. longest: that with the most lines, for answers with an example "
        "of use behind it.",
    )
    whole_response: bool = Field(
        default=False, description="Take a response without a code block as the program, instead of scoring it 0."
    )
    wall_seconds: float = Field(
        default=10.0,
        gt=0,
        description="Limit of one execution, waiting included, except for processors on a busy machine. Seconds.",
    )
    total_seconds: float = Field(
        default=20.0,
        gt=0,
        description="Limit of all tests of one program; with binary its first failure ends it too. Seconds.",
    )
    cpu_seconds: float = Field(default=8.0, gt=0, description="Processor time of one execution. Seconds.")
    memory_mib: int = Field(default=512, ge=32, description="Memory of one execution. MiB.")
    numpy: bool = Field(
        default=False,
        description="Programs, and tests that are assertions, may import NumPy, that of this environment; nothing else "
        "that is installed.",
    )
    executions: int = Field(default=2, ge=1, description="Executions of one reward worker at a time.")
    backend: str = Field(
        default="auto",
        pattern=r"^(auto|bwrap|landlock|remote:https?://\S+)$",
        description="Sandbox: auto (or bwrap), landlock (weaker, where namespaces are not allowed), or "
        "`remote:http://HOST:PORT`, a SandboxFusion server.",
    )


@register_reward("code")
class Code(Reward):
    """1 where the last code block passes the tests, else 0 (or the share that passed).

    `passed`, `fraction`, `parsed` (there was a program) and one figure for each status are reported too.
    """

    Config: ClassVar[type[RewardConfig]] = CodeConfig
    per_sample: ClassVar[bool] = True

    config: CodeConfig

    def __init__(self, config: CodeConfig) -> None:
        super().__init__(config)
        self._evaluator: CodeEvaluator | None = None

    @property
    def side_by_side(self) -> int:
        """One group: its programs keep all executions busy."""
        return 1

    def start(self) -> None:
        """Test the sandbox and start it.

        Raises:
            SandboxError: No sandbox isolates on this machine.
        """
        if self._evaluator is None:
            self_test(self.config.backend, numpy=self.config.numpy)
            limits = Limits(
                wall_seconds=self.config.wall_seconds,
                cpu_seconds=self.config.cpu_seconds,
                memory_bytes=self.config.memory_mib * _MIB,
            )
            self._evaluator = CodeEvaluator(
                limits,
                backend=self.config.backend,
                workers=self.config.executions,
                comparison=Comparison(
                    float_tolerance=self.config.float_tolerance if self.config.compare == "tokens" else None,
                    tokens=self.config.compare == "tokens",
                    from_json=True,
                ),
                total_seconds=self.config.total_seconds,
                stop_at_failure=self.config.reward == "binary",
                numpy=self.config.numpy,
            )

    def check_row(self, task: Task) -> None:
        """Check that the row has tests that can be read.

        Raises:
            DataError: It has none, or in a shape that is not known.
        """
        with refusing_row(task, "correct the row, or `tests_field` or `entry_point_field` of the reward"):
            tests = self._tests(task.metadata)
        if "python" not in self.config.languages and not all(isinstance(test, StdioTest) for test in tests):
            raise DataError(
                f"{task.origin}: calls and assertions need Python, and `languages` is {list(self.config.languages)}",
                fix="add python to `languages` of the code reward, or give the row tests with input and output",
            )

    async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return a value from 0 to 1 for each completion; a `RewardError` where the sandbox failed."""
        self.start()
        return list(await asyncio.gather(*(self._score_one(completion) for completion in completions)))

    def close(self) -> None:
        """End the sandbox."""
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None

    def cases(self) -> Sequence[RewardCase]:
        """Return a function under test by calls, and a program by its output."""
        field = self.config.tests_field if isinstance(self.config.tests_field, str) else self.config.tests_field[0]
        right = "```python\ndef add(a, b):\n    return a + b\n```"
        calls = [{"args": [3, 4], "expected": 7}, {"args": [-1, 1], "expected": 0}]
        stdio = [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1\n", "output": "2\n"}]
        return (
            RewardCase(
                prompt="Write a function add(a, b).",
                metadata={field: calls, self.config.entry_point_field: "add"},
                gold=(right, f"So:\n{right}\nwhich prints\n```text\n7\n```\n"),
                wrong=("```python\ndef add(a, b):\n    return a - b\n```", "```python\ndef add(a, b)\n```"),
                hostile=(
                    "```python\nimport sys\nsys.exit(0)\n```",
                    "```python\nimport os\ndef add(a, b):\n    os._exit(0)\n```",
                    "```python\nclass Equal:\n    def __eq__(self, other): return True\n"
                    "def add(a, b): return Equal()\n```",
                    "```python\nprint('All tests passed')\n```",
                    "All tests pass.",
                ),
            ),
            RewardCase(
                prompt="Read two numbers and print their sum.",
                metadata={field: stdio},
                gold=("```python\nprint(sum(map(int, input().split())))\n```",),
                wrong=("```python\nprint(7)\n```".replace("7", "8"), "```python\nraise SystemExit(0)\n```"),
            ),
        )

    async def _score_one(self, completion: Completion) -> Outcome:
        try:
            tests = self._tests(completion.metadata)
        except ValueError as error:
            return RewardError(str(error), fix="correct the row")
        longest = self.config.block == "longest"
        block = last_program(completion.text, self.config.language, self.config.languages, longest=longest)
        source, language = (block.source, block.language) if block else (completion.text, self.config.language)
        if not source.strip() or (block is None and not self.config.whole_response):
            return RewardResult(0.0, {"parsed": 0.0, "passed": 0.0, "fraction": 0.0})
        only_python = not all(isinstance(test, StdioTest) for test in tests)
        if language not in self.config.languages or (only_python and language != "python"):
            return RewardResult(0.0, {"parsed": 1.0, "passed": 0.0, "fraction": 0.0, "other_language": 1.0})
        if language == "python":
            source = with_setup(self._setup(completion.metadata), source)
            tests = resolve_entry_points(tests, source)
        assert self._evaluator is not None
        try:
            result = await self._evaluator.evaluate(source, tests, language)
        except (SandboxError, ConfigError) as error:
            return RewardError(str(error))
        return self._outcome(result)

    def _outcome(self, result: CodeResult) -> Outcome:
        if result.status is TestStatus.SANDBOX_ERROR:
            why = [test.detail for test in result.tests if test.status is TestStatus.SANDBOX_ERROR]
            return RewardError(
                f"the sandbox failed: {'; '.join(why[:1]) or result.stderr or 'no reason given'}",
                fix="run `roll-like check-reward code` on this machine",
            )
        passed = result.status is TestStatus.PASSED
        value = result.fraction if self.config.reward == "fraction" else float(passed)
        details = {"parsed": 1.0, "passed": float(passed), "fraction": result.fraction}
        details |= {f"status/{status}": float(result.status is status) for status in TestStatus}
        details |= {"cpu_seconds": result.cpu_seconds, "memory_mib": result.peak_memory_bytes / _MIB}
        return RewardResult(value, details)

    def _tests(self, metadata: Mapping[str, Any]) -> tuple[Any, ...]:
        tests = read_tests(
            metadata,
            tests_field=self.config.tests_field,
            entry_point_field=self.config.entry_point_field,
            numpy=self.config.numpy,
        )
        check_tests(tests, "python")
        self._setup(metadata)
        return tests

    def _setup(self, metadata: Mapping[str, Any]) -> str:
        """Return what is put before the program of a row.

        Raises:
            ValueError: The row's field holds no Python.
        """
        if self.config.setup_field is None:
            return self.config.setup
        setup = metadata.get(self.config.setup_field, ...)
        if isinstance(setup, (list, tuple)) and all(isinstance(line, str) for line in setup):
            setup = "\n".join(setup)
        if setup is None:
            return self.config.setup
        if not isinstance(setup, str):
            found = "none" if setup is ... else short_repr(setup)
            raise ValueError(f"the field {self.config.setup_field!r} should hold Python, found {found}")
        try:
            ast.parse(setup)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ValueError(f"the field {self.config.setup_field!r} should hold Python, found: {error}") from error
        return with_setup(self.config.setup, setup)


def with_setup(setup: str, program: str) -> str:
    """Return both as one program: imports from `__future__`, which have to come first, then set-up, then the rest."""
    if not setup.strip():
        return program
    if "__future__" not in setup + program:
        return f"{setup.rstrip()}\n\n{program}"
    features, rest = [], []
    for text in (setup, program):
        names, without = _without_future(text)
        features += names
        rest.append(without)
    first = f"from __future__ import {', '.join(dict.fromkeys(features))}\n" if features else ""
    return f"{first}{rest[0].rstrip()}\n\n{rest[1]}"


def _without_future(text: str) -> tuple[list[str], str]:
    """Return the features that a text imports where it may, and the text with `pass` for these imports.

    Imports behind other statements stay: they are errors, as they are without set-up.
    """
    ends = [match.end() for match in _FUTURE.finditer(text)][:_TRIES]
    for end in reversed(ends):
        head = text[:end]
        if len(head) > _LONGEST_HEAD:
            continue
        try:
            # an unknown escape is a warning, which goes nowhere from here
            body = ast.parse(_ODD_ESCAPE.sub("x", head)).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # this one is within a string
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]  # the docstring
        imports = [one for one in body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
        if imports != body[: len(imports)]:
            continue
        return [alias.name for one in imports for alias in one.names], _replaced(text, imports)
    return [], text


def _replaced(text: str, imports: list[ast.ImportFrom]) -> str:
    """Put `pass` in the place of statements; their columns count bytes."""
    lines = text.encode().split(b"\n")
    for one in reversed(imports):
        assert one.end_lineno is not None
        assert one.end_col_offset is not None
        before = lines[one.lineno - 1][: one.col_offset]
        behind = lines[one.end_lineno - 1][one.end_col_offset :]
        lines[one.lineno - 1 : one.end_lineno] = [before + b"pass" + behind, *[b""] * (one.end_lineno - one.lineno)]
    return b"\n".join(lines).decode()
