"""NumPy in the sandbox and in assert tests: it alone, where it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_protocols import ROWS
from reward_support import outcomes

from roll_like import RewardResult
from roll_like.builtin.rewards.code import Code
from roll_like.config.benchmarks import BenchmarkUse
from roll_like.errors import ConfigError
from roll_like.rewards.base import given_completion
from roll_like.sandbox import AssertTest, CallTest, CodeEvaluator, CodeResult, Limits, StdioTest, TestStatus, kernel
from roll_like.sandbox import self_test as probed

BACKENDS = [
    "auto",
    pytest.param("landlock", marks=pytest.mark.skipif(kernel.landlock_version() < 3, reason="needs Linux 6.2")),
]
CHECK = "import numpy as np\nassert np.allclose(f([1.0, 2.0]), [2.0, 4.0]) and f([1.0]) == [2.0]"
DOUBLE = "import numpy as np\ndef f(x): return np.array(x) * 2"


def evaluate(program: str, test: Any, backend: str = "auto", *, numpy: bool = True) -> CodeResult:
    limits = Limits(wall_seconds=20, cpu_seconds=20)
    with CodeEvaluator(limits, backend=backend, workers=1, numpy=numpy, total_seconds=30) as evaluator:
        return evaluator.evaluate_sync(program, [test])


@pytest.mark.parametrize("backend", BACKENDS)
def test_programs_and_tests_may_import_it(backend: str) -> None:
    for program, test in (
        (DOUBLE, AssertTest(CHECK)),
        ("def f(x): return [2 * each for each in x]", AssertTest(CHECK)),
        (DOUBLE, CallTest("f", ([1, 2],), expected=[2, 4])),
        (
            "import numpy as np\nnp.random.seed(0)\nm = np.linalg.inv(np.random.rand(90, 90))\nprint(m.shape[0])",
            StdioTest("", "90"),
        ),
    ):
        result = evaluate(program, test, backend)
        assert result.status is TestStatus.PASSED, result
    wrong = evaluate(DOUBLE.replace("2", "3"), AssertTest(CHECK), backend)
    assert wrong.status is TestStatus.WRONG_ANSWER


def test_the_sandbox_isolates_with_it() -> None:
    assert probed("auto", numpy=True).passed
    assert probed("auto", numpy=True) is not probed("auto")


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("import os\nprint(sorted(os.listdir('/python/packages')))", "['numpy', 'numpy.libs']"),
        ("import sys\nprint([one for one in sys.path if 'packages' in one])", "[]"),
        ("try: import pydantic\nexcept ImportError: print('none')", "none"),
        (
            "import numpy\ntry: open(numpy.__file__, 'a')\nexcept OSError as error: print(type(error).__name__)",
            "PermissionError",
        ),
        ("import os\nprint(dict(os.environ))", "{}"),
        ("import os\nprint(len(os.listdir('/proc/self/task')))", "1"),
    ],
)
def test_nothing_comes_with_it(program: str, printed: str) -> None:
    result = evaluate(program, StdioTest("", printed))
    assert result.status is TestStatus.PASSED, result


def test_a_test_may_import_nothing_else() -> None:
    with pytest.raises(ConfigError, match="needs a module that it cannot import: No module named 'pydantic'"):
        evaluate("def f(): return 1", AssertTest("import numpy, pydantic\nassert f() == 1"))


def test_without_it_neither_may() -> None:
    result = evaluate(DOUBLE, CallTest("f", ([1],), expected=[2]), numpy=False)
    assert "No module named 'numpy'" in result.tests[0].detail
    with pytest.raises(ConfigError, match="No module named 'numpy'"):
        evaluate("def f(x): return x", AssertTest(CHECK), numpy=False)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("def f(): return np.float64(1.5), [np.int64(2)], {'a': np.bool_(True)}", TestStatus.PASSED),
        ("def f(): return (np.array(1.5), np.array([2]), dict(a=True))", TestStatus.PASSED),
        ("def f(): return (1.5, [2], {'a': False})", TestStatus.WRONG_ANSWER),
        (
            "class Fake(float):\n    __eq__ = lambda *_: True\n    tolist = lambda self: 1\n"
            "Fake.__module__ = 'numpy'\ndef f(): return Fake(1), [2], {'a': True}",
            TestStatus.WRONG_ANSWER,
        ),
    ],
)
def test_what_a_program_returns_is_compared_as_plain_values(program: str, status: TestStatus) -> None:
    result = evaluate(f"import numpy as np\n{program}", AssertTest("assert f() == (1.5, [2], {'a': True})"))
    assert result.status is status, result


@pytest.mark.parametrize(
    "interface",
    [
        "{'version': 3, 'shape': (1,), 'typestr': '<f8', 'data': (4096, False)}",
        "{'version': 3, 'shape': (1,), 'typestr': '|O', 'data': b'A' * 8}",
        "{'version': 3, 'shape': (1,), 'typestr': '|O', 'data': bytes(8)}",
        "{'version': 3, 'shape': (16384,), 'typestr': '<f8', 'data': b'x' * 24, 'offset': -65536}",
        "{'version': 3, 'shape': (0,), 'typestr': '<f8', 'data': b''}",
    ],
)
@pytest.mark.parametrize("test", ["np.allclose(f(), 1.5)", "np.asarray(f()).size >= 0 and np.shape([f()]) == (0,)"])
def test_numpy_outside_reads_no_memory_that_an_object_of_the_program_states(interface: str, test: str) -> None:
    """Before, the trusted process died, or read where it was told to."""
    program = f"class X:\n    __array_interface__ = {interface}\n    __array_struct__ = 1\ndef f(): return X()"
    result = evaluate(program, AssertTest(f"import numpy as np\nassert {test}"))
    assert result.status in (TestStatus.WRONG_ANSWER, TestStatus.RUNTIME_ERROR), result


def test_an_object_of_the_program_is_a_sequence_where_it_has_items() -> None:
    program = "class X:\n    def __len__(self): return 2\n    def __getitem__(self, at): return [1.0, 2.0][at]\n"
    test = AssertTest("import numpy as np\nassert np.allclose(np.array(f()), [1.0, 2.0])")
    assert evaluate(f"{program}def f(): return X()", test).status is TestStatus.PASSED


@pytest.mark.parametrize(
    ("program", "test", "passes"),
    [
        ("def f(): return []", "np.allclose(f(), 1.5)", False),
        ("def f(): return []", "np.allclose(f(), [])", True),
        ("def f(): return 1.5", "np.allclose(f(), 1.5)", True),
        ("def f(): return [1.5, 1.5]", "np.allclose(f(), 1.5)", True),
        ("def f(): return np.longdouble(1), np.clongdouble(2)", "f() == (1.0, 2 + 0j)", True),
        ("def f(x):\n    x[0] = np.array([1, 2])\n    return 1", "f(x) == 1 and x == [[1, 2], 0]", True),
        ("def f(x): return type(x) is int and x == 3", "f(np.int64(3))", True),
        ("def f(x): return type(x) is float and x == 0.5", "f(np.float32(0.5))", True),
    ],
)
def test_values_of_numpy(program: str, test: str, passes: bool) -> None:
    result = evaluate(f"import numpy as np\n{program}", AssertTest(f"import numpy as np\nx = [0, 0]\nassert {test}"))
    assert result.status is (TestStatus.PASSED if passes else TestStatus.WRONG_ANSWER), result


def test_a_test_of_megabytes() -> None:
    inputs = [[at, float(at), "x" * 40] for at in range(40_000)]
    code = f"import numpy as np\ninputs = {inputs}\nassert np.sum([f(*one) for one in inputs[::1000]]) == 0"
    assert len(code) > 2 << 20
    assert evaluate("def f(a, b, c): return a - b", AssertTest(code)).status is TestStatus.PASSED


FENCED = "Sure.\n```python\n{}```\nIt works."


@pytest.mark.parametrize(
    ("name", "answer", "values"),
    [
        ("humaneval_plus", "    return sum(x) / len(x)\n", [1.0]),
        ("humaneval_plus", "    import numpy as np\n    return np.mean(x)\n", [1.0]),
        ("humaneval_plus", "    return 1.5\n", [0.0]),
        ("humaneval_plus", "    return []\n", [0.0]),
        ("humaneval_plus_instruct", FENCED.format("def mean(x):\n    return sum(x) / len(x)\n"), [1.0]),
        ("humaneval_plus_instruct", FENCED.format("def average(x):\n    return sum(x) / len(x)\n"), [0.0]),
        (
            "humaneval_plus_instruct",
            FENCED.format("def mean(x):\n    return sum(x) / len(x)\n") + "\n```python\nprint(mean([1]))\n```",
            [1.0],
        ),
        ("humaneval_plus_instruct", "def mean(x):\n    return sum(x) / len(x)\n", [1.0]),
        ("mbpp_plus", "def add(a, b):\n    return a + b\n", [1.0, 1.0]),
        # right by MBPP's own tests alone
        ("mbpp_plus", "def add(a, b):\n    return round(a) + b\n", [0.0, 1.0]),
        ("mbpp_plus_instruct", FENCED.format("def add(a, b):\n    return a + b\n"), [1.0, 1.0]),
        ("mbpp_plus_instruct", "It cannot be done.", [0.0, 0.0]),
    ],
)
def test_evalplus_grades_by_its_own_tests(name: str, answer: str, values: list[float], tmp_path: Path) -> None:
    [row] = ROWS[name]["test"]
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    found = []
    for config in BenchmarkUse(name=name, path=str(tmp_path)).rewards():
        reward = Code(config)  # type: ignore[arg-type]
        [outcome] = outcomes(reward, [given_completion(answer, messages=[], answer=None, metadata=row)])
        reward.close()
        assert isinstance(outcome, RewardResult), outcome
        found.append(outcome.value)
    assert found == values
