"""Assert tests: run in a process outside, with stubs for what the program defines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import psutil
import pytest
from hygiene import ended
from local_box import LocalBox, LocalSession

from roll_like.errors import ConfigError
from roll_like.sandbox import AssertTest, CodeEvaluator, Limits, TestResult, TestStatus
from roll_like.sandbox.box import Box, Program

PROGRAM = """
import math
from collections import Counter
LIMIT = 7
ONE, (TWO, *_) = 1, (2, 3)
double = lambda x: 2 * x
class Broke(ValueError): pass
class Worse(Broke): pass
class Node:
    shared = 5
    def __init__(self, value, after=None): self.value, self.after = value, after
    def __len__(self): return 1 + (len(self.after) if self.after is not None else 0)
    def __iter__(self):
        yield self.value
        if self.after is not None: yield from self.after
    def __getitem__(self, at): return list(self)[at]
    def __setitem__(self, at, value): self.value = value
    def __str__(self): return "->".join(map(str, self))
    def __eq__(self, other): return True
    def __contains__(self, value): return True
    def __add__(self, other): return 0.0
    __sub__ = __radd__ = __rsub__ = __add__
    def __lt__(self, other): return True
    def __bool__(self): return False
    def __enter__(self): return self
    def __exit__(self, *exception): self.value = "closed"
    @staticmethod
    def build(*values): return Node(values[0], Node.build(*values[1:]) if len(values) > 1 else None)
def add(a, b=10): return a + b
def sort(items, reverse=False): items.sort(reverse=reverse)
def fill(table, names): table["x"] = 1; names.add("y")
def boom(kind): raise {"broke": Broke, "worse": Worse, "stop": StopIteration, "import": ImportError,
                       "key": KeyError, "exit": SystemExit}[kind](kind)
def count(n): yield from range(n)
def adder(n): return lambda m: n + m
def reverse(node, before=None): return reverse(node.after, Node(node.value, before)) if node is not None else before
def nodes(n): return [Node(at) for at in range(n)]
def total(items): return sum(items)
def nothing(*a, **k): return None
"""


def run_code(code: str, program: str = PROGRAM, box: Box | None = None, **changes: object) -> TestResult:
    with CodeEvaluator(backend=box or LocalBox()) as evaluator:
        return evaluator.evaluate_sync(program, [AssertTest(code, **changes)]).tests[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "code",
    [
        "assert add(1, 2) == 3 and add(1) == 11 and add(b=2, a=1) == 3",
        "assert double(4) == 8 and LIMIT == 7",
        "assert LIMIT == 7",
        "assert ONE == 1 and TWO == 2",
        "assert Node.shared == 5",
        "assert math.sqrt(4) == 2 and math.floor(add(1, 1.5)) == 2",
        "items = [3, 1, 2]\nassert sort(items) is None and items == [1, 2, 3]",
        "items = [1, 2]\nsort(items, reverse=True)\nassert items[0] == 2",
        "table, names = {}, set()\nfill(table, names)\nassert table == {'x': 1} and names == {'y'}",
        "try: boom('broke')\nexcept Broke as error: assert str(error) == 'broke'\nelse: raise AssertionError",
        "try: boom('worse')\nexcept ValueError as e: assert type(e).__name__ == 'Worse'\nelse: assert False",
        "try: boom('key')\nexcept LookupError: pass\nelse: raise AssertionError",
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6 and next(count(1)) == 0",
        "assert adder(3)(4) == 7",
        "node = Node(1, Node(2))\nassert node.value == 1 and node.after.value == 2",
        "node = Node(1, Node(2))\nassert len(node) == 2 and str(node) == '1->2'",
        "node = Node(1)\nnode.value = 9\nassert node.value == 9",
        "node = Node(1)\nnode[0] = 8\nassert node[0] == 8 and list(node) == [8]",
        "assert Node.shared == 5 and str(Node.build(1, 2, 3)) == '1->2->3'",
        "node, seen = reverse(Node.build(1, 2)), []\nwhile node:\n    seen.append(node.value)\n    node = node.after\n"
        "assert seen == [2, 1]",
        "assert [node.value for node in nodes(3)] == [0, 1, 2]",
        "with Node(1) as node: pass\nassert node.value == 'closed'",
        "assert isinstance(Node(1), Node) and not isinstance(3, Node) and not isinstance(Node(1), int)",
        "assert total(range(4)) == 6 and total(iter([1, 2])) == 3 and total(x for x in (1, 2)) == 3",
        "assert Node(1, after=Node(2))[1] == 2 and Node(Node(1)).value.value == 1",
        "assert Node([Node(4)]).value[0].value == 4 and Node({1: Node(4)}).value[1].value == 4",
        "def check(candidate):\n    assert candidate(1, 1) == 2\ncheck(add)",
        "import random, itertools\nfor a, b in itertools.product(range(3), repeat=2): assert add(a, b) == a + b",
        "print('x' * 10000)\nassert add(1, 1) == 2",
        "assert nothing(1) is None and nothing(1) == None",
    ],
)
def test_what_a_test_may_do(code: str) -> None:
    assert run_code(code) == TestResult(TestStatus.PASSED)


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("x = 1\nassert add(1, 2) == 4, 'sum'", "wrong_answer", "AssertionError: line 2 of the test: sum"),
        ("assert add(1, 'a') == 4", "runtime_error", "TypeError"),
        ("assert unknown(1)", "runtime_error", "NameError"),
        ("boom('stop')", "runtime_error", "RuntimeError"),
        ("boom('import')", "runtime_error", "Exception"),
        ("assert all(map(boom, ['stop']))", "runtime_error", ""),  # must not end the `map` as if it were empty
        ("for x in map(boom, ['stop']): pass", "runtime_error", ""),
        ("import sys\nadd(1, 2)\nsys.exit(0)", "runtime_error", "SystemExit"),
        ("import os\nadd(1, 2)\nraise KeyboardInterrupt", "runtime_error", "KeyboardInterrupt"),
        ("add(1, 2)\nassert [1] * 10**12", "runtime_error", "MemoryError"),
        ("import itertools\ntotal(itertools.count())", "runtime_error", "iterator of more than"),
    ],
)
def test_how_a_test_fails(code: str, status: str, detail: str) -> None:
    result = run_code(code)
    assert result.status.value == status
    assert detail in result.detail


@pytest.mark.parametrize(
    "code",
    [
        "assert Node(1) == 5",
        "assert Node.build(1) == 5",
        "assert [Node.build(1)] == [5]",
        "assert not Node.build(1) != 5",
        "assert 5 in Node.build(1)",
        "assert 5 in Node(1)",
        "assert Node(1) < 5",
        "assert 5 > Node.build(1)",
        "assert Node(1) - 3.0 == 0.0",
        "assert 3.0 - Node(1) == 0.0",
        "assert math.fabs(Node(1) - 3.0) < 1e-6",
        "assert Node(1) == Node(1)",
        "assert {Node(1)} == {5}",
        "assert max(Node(1), 5) == 5",
        "assert not Node(1)",
    ],
)
def test_a_program_does_not_judge_itself(code: str) -> None:
    box, received = listening()
    result = run_code(code, box=box)
    assert result.status in {TestStatus.WRONG_ANSWER, TestStatus.RUNTIME_ERROR}
    assert "5" not in repr(received)
    assert "3.0" not in repr(received)


def test_comparing_objects_is_explained() -> None:
    assert "compared by identity" in run_code("assert Node(1) == Node(1)").detail


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("def len(x): return 3", "len([1]) == 1"),
        ("def abs(x): return 0", "abs(-4) == 4"),
        ("class isinstance:\n    def __new__(cls, *a): return True", "not isinstance(3, str)"),
        ("class math:\n    floor = staticmethod(lambda x: 3)", "math.floor(8) == 8"),
        ("from operator import truth as all", "not all([0, 0])"),
    ],
)
def test_builtins_and_modules_keep_their_meaning(program: str, code: str) -> None:
    source = f"def add(a, b): return a + b\n{program}\n"
    assert run_code(f"assert add(1, 2) == 3 and {code}", source) == TestResult(TestStatus.PASSED)


def test_a_test_may_name_a_builtin_that_is_the_programs_own() -> None:
    program = "def sum(a, b):\n    return a * b\n"
    assert run_code("assert sum(3, 4) == 12", program).status is TestStatus.RUNTIME_ERROR
    assert run_code("assert sum(3, 4) == 12", program, names=("sum",)).status is TestStatus.PASSED


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("assert True", "without using the program"),
        ("def check(candidate):\n    assert candidate(1) == 1", "without using the program"),
        ("assert add(1, 2) ==", "no Python"),
        ("import numpy\nassert add(1, 2) == 3", "that it cannot import: No module named .numpy."),
        ("assert total(map(lambda x: x, [1])) == 1\nadd(lambda: 1, 2)", "function of its own"),
        ("class Mine: pass\nadd(Mine(), 2)", "a Mine cannot enter"),
        ("assert Counter", "without using the program"),
    ],
)
def test_tests_that_cannot_be_run_are_the_callers_error(code: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_code(code)


def test_names_are_found_wherever_the_module_defines_them() -> None:
    program = "try:\n    import nowhere\nexcept ImportError:\n    def f(x): return 1\nelse:\n    def f(x): return 2\n"
    program += "if True:\n    def g(x): return 3\n"
    assert run_code("assert f(0) == 1 and g(0) == 3", program).status is TestStatus.PASSED


def test_dunder_names_of_a_program_are_not_taken_over() -> None:
    program = "def add(a, b): return a + b\nif False:\n    class __builtins__: pass\n"
    assert run_code("assert add(1, 2) == 3 and len('ab') == 2", program).status is TestStatus.PASSED


def test_a_slow_test_is_a_timeout_and_leaves_no_process() -> None:
    with CodeEvaluator(Limits(wall_seconds=0.5), LocalBox()) as evaluator:
        code = "assert add(1, 2) == 3\nwhile True: pass  # a mark: slow-test-of-this-suite"
        assert evaluator.evaluate_sync(PROGRAM, [AssertTest(code)]).status is TestStatus.TIMEOUT
        assert ended(*own_processes("assert_process.py"))


def own_processes(program: str) -> Iterator[int]:
    """Yield what runs a program below this process: other test workers have theirs."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(program in word for word in child.cmdline()):
                yield child.pid


def test_the_test_has_no_environment_and_no_site_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_TRAINER", "1")
    code = (
        "import os, sys\nassert add(1, 2) == 3\nassert 'A_SECRET_OF_THE_TRAINER' not in os.environ, list(os.environ)\n"
    )
    code += "assert not [p for p in sys.path if 'site-packages' in p], sys.path\n"
    code += "assert sorted(os.listdir('/proc/self/fd'))[:3] == ['0', '1', '2']"
    assert run_code(code) == TestResult(TestStatus.PASSED)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        5,
        (),
        ("value",),
        ("value", ("v", 3)),
        ("value", ("v",), []),
        ("value", ("?", 3), []),
        ("value", ("h", "x", "y"), []),
        ("value", ("l", 5), []),
        ("value", ("v", 3), 5),
        ("value", ("v", 3), [[0, ("v", 3), 5]]),
        ("value", ("v", 3), [["b", ("v", 3)]]),
        ("raised",),
        ("raised", 5, "x"),
        ("raised", [["x"]], None),
        ("raised", ["SystemExit"], "x"),
        ("raised", ["BaseExceptionGroup", "ExceptionGroup"], "x"),
        ("passed",),
        ("stop",),
        "passed",
        {"passed": True},
    ],
    ids=repr,
)
def test_malformed_answers_are_the_programs_error(answer: object) -> None:
    class Forging(LocalSession):
        async def call(self, entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
            return answer

    class Box(LocalBox):
        async def open(self, program: Program, limits: Limits) -> LocalSession:
            session = await super().open(program, limits)
            return Forging(session.scope, session.end)

    result = run_code("assert add(1, 2) == 4", box=Box())
    assert result.status is TestStatus.RUNTIME_ERROR, result


def listening() -> tuple[LocalBox, list[object]]:
    """A box, and the list of everything that is sent to its sessions."""
    received: list[object] = []

    class Listening(LocalSession):
        async def call(self, entry_point: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
            received.append(args)
            return await super().call(entry_point, args, kwargs)

    class Box(LocalBox):
        async def open(self, program: Program, limits: Limits) -> LocalSession:
            session = await super().open(program, limits)
            return Listening(session.scope, session.end)

    return Box(), received
