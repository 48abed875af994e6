"""Programs as models write them, on rows as data sets have them: right ones get 1, wrong and hostile ones 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from reward_support import completion, outcomes

from roll_like import RewardResult
from roll_like.builtin.rewards.code import Code, CodeConfig


class Case(NamedTuple):
    name: str
    row: dict[str, Any]
    right: Sequence[str] = ()
    wrong: Sequence[str] = ()


def prints(output: str, given: str = "") -> dict[str, Any]:
    return {"tests": [{"input": given, "output": output}]}


def call(name: str, args: list[Any], expected: Any) -> dict[str, Any]:
    return {"tests": [{"args": args, "expected": expected}], "entry_point": name}


def returns(value: Any) -> dict[str, Any]:
    return call("f", [], value)


def gives(*expressions: str) -> list[str]:
    return [f"def f(): return {expression}" for expression in expressions]


FOUR = prints("4\n")
NINES = "9" * 5000
LEETCODE = "def check(candidate):\n    assert candidate(nums=[2, 7], target=9) == [0, 1]\n"
DEEP = "import sys\nsys.setrecursionlimit(10**6)\nf = lambda n: 0 if n == 0 else 1 + f(n - 1)\n"
TWO_SUM = "class Solution:\n    def twoSum(self, nums, target):\n        return [0, 1]\n"

ENDS = [
    Case("exit", FOUR, ["print(4)\nexit()", "print(4)\nquit()", "print(4)\nexit(0)", "print(4)\nraise SystemExit"]),
    Case("exit in a function", FOUR, ["def f():\n    print(4)\n    exit()\nf()\nprint(5)"]),
    Case("exit with threads", FOUR, ["import threading as t, time\nt.Timer(.05, print, [4]).start()\nexit()"]),
    Case("exit of a thread", FOUR, ["import threading\nthreading.Thread(target=exit).start()\nprint(4)"]),
    Case(
        "status other than 0",
        FOUR,
        wrong=[
            "print(4)\nexit(1)",
            "print(4)\nexit('done')",
            "print(4)\nexit(256 + 3)",
            "print(4)\nraise SystemExit(2)",
            "import os\nprint(4, flush=True)\nos._exit(3)",
            "print(4)\n1 / 0",
            "print(4, flush=True)\nimport os\nos.abort()",
            "import atexit, os\nprint(4, flush=True)\natexit.register(os._exit, 1)",
        ],
    ),
    Case(
        "output at the end",
        FOUR,
        [
            "import atexit\natexit.register(print, 4)",
            "import os\nprint(4, flush=True)\nos._exit(0)",
            "out = open(1, 'w')\nout.write('4')",
            "import sys, io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(4)",
            "import sys\nsys.stdout.buffer.write(b'4\\n')",
            "import sys\nprint(4)\nsys.stdout.close()",
            "import sys\nprint(4, flush=True)\nsys.stdout = None",
        ],
        ["import os\nprint(4)\nos._exit(0)"],
    ),
    Case(
        "exit in calls",
        call("f", [1], 1),
        ["def f(x): return x\nif __name__ == '__main__': exit()"],
        [
            "def f(x): exit()",
            "def f(x): raise SystemExit(0)",
            "def f(x): return x\nexit()",
            "import os\ndef f(x): os._exit(0)",
            "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): exit(0)",
            "import os, threading as t, time\nt.Timer(0, os._exit, [0]).start()\ndef f(x): time.sleep(5); return x",
            "import os\nos.close(4)\ndef f(x): return x",
            "import sys\nsys.modules['__main__'].f = 1\ndef f(x): quit(x)",
        ],
    ),
    Case(
        "exit in assertions",
        {"tests": ["assert f(1) == 1"]},
        ["def f(x): return x"],
        ["def f(x): exit(0)", "exit(0)", "def f(x): return x\nexit()", "import os\ndef f(x): os._exit(0)"],
    ),
]

OUTPUTS = [
    Case("1/3", prints("0.333333\n"), ["print(1/3)", "print('3.333333e-1')", "print('.3333333')"], ["print(0.33334)"]),
    Case("3.0", prints("3.000000\n"), ["print(3)", "print(3.0)", "print(2.9999999999999996)"], ["print('3.0.0')"]),
    Case("a whole number", prints("100000"), ["print(1e5)", "print('1e5')", "print(100000.0)"], ["print(100000.4)"]),
    Case(
        "large whole numbers",
        prints("1000000007"),
        ["print(10**9 + 7)"],
        [
            "print(1000000006)",
            "print(1000000006.5)",
            "print('1.000000007e+10')",
            "print('+1000000007')",
            "print('01000000007')",
        ],
    ),
    Case("more digits than a float has", prints("12345678901234567"), wrong=["print(12345678901234567.0)"]),
    Case(
        "zero", prints("0"), ["print('-0')", "print(-0.0)", "print(1e-9)"], ["print(1e-3)", "print('')", "print('o')"]
    ),
    Case("digits that are text", prints("0101"), ["print('0101')"], ["print('101')", "print('00101')", "print(101.0)"]),
    Case(
        "no number",
        prints("0.5 1.5"),
        ["print('0.5\\t1.5  ')"],
        [
            "print('nan 1.5')",
            "print('inf 1.5')",
            "print('0.5 nan')",
            "print('0.5 1e999999')",
            "print('0.5 1_5')",
            "print('0.5')",
            "print('0.5 1.5 1.5')",
            "print('0.5 1.5 0')",
            "print('0.51.5')",
            "print('٠.٥ 1.5')",
        ],
    ),
    Case(
        "huge",
        prints("1e999"),
        ["print('10e998')"],
        ["print('1e998')", "print('inf')", "print('1')", "print('1e999999')"],
    ),
    Case("nan", prints("nan"), ["print(float('nan'))"], ["print(0)", "print('inf')", "print('0.0')"]),
    Case("upper and lower case", prints("YES"), ["print('YES')"], ["print('Yes')", "print('yes')", "print('YES.')"]),
    Case(
        "blanks",
        prints("1 2\r\n3\r\n"),
        ["print(' 1 2 \\n\\n3')", "print('1 2\\r\\n3\\r')", "print(1, 2, 3)"],
        ["print('12 3')"],
    ),
    Case("blanks of Unicode are text", prints("a b"), wrong=["print('a\\u00a0b')", "print('a\\u2028b')"]),
    Case("byte order mark", prints("\ufeff4"), ["print(4)", "print('\\ufeff4')"]),
    Case("nothing", prints("\n"), ["pass", "print()", "print(' ')"], ["print(0)"]),
    Case("a printed list", prints("[0.3, 1]"), ["print([0.1 + 0.2, 1])"], ["print([0.31, 1])", "print((0.3, 1))"]),
    Case("a long number", prints("1" + "0" * 5000), ["print(10**5000)"], ["print(10**5000 + 1)", "print(10**4999)"]),
    Case("a long number is read", prints(NINES + "9", NINES + "\n"), ["print(int(input()) * 10 + 9)"]),
    Case(
        "output as long as asked",
        prints(" ".join(map(str, range(250_000)))),
        ["print(*range(250_000))", "for i in range(250_000): print(i)"],
        ["print(*range(249_999))", "while True: print(*range(250_000))"],
    ),
    Case(
        "lone surrogates and bytes that are no text",
        prints("4"),
        wrong=[
            "import sys\nsys.stdout.buffer.write(b'\\xff4')",
            "print('\\ud800')",
            "print('4\\0')",
            "print(4)\0",
            "print('\ud800')",
        ],
    ),
]

VALUES = [
    Case(
        "floats",
        returns(0.3),
        gives("0.1 + 0.2", "0.3", "__import__('decimal').Decimal('0.3')", "__import__('fractions').Fraction(3, 10)"),
        gives("0.3001", "'0.3'", "[0.3]", "None", "float('nan')"),
    ),
    Case(
        "nested floats",
        returns([[0.3, 1], {"a": 1.5}]),
        gives("((0.1 + 0.2, 1), {'a': 1.5000001})"),
        gives("[[0.3, 1], {'b': 1.5}]"),
    ),
    Case("whole numbers", returns(10**17 + 1), gives("10**17 + 1"), gives("10**17", "1e17", "float(10**17 + 1)")),
    Case(
        "a float for a whole number",
        returns(4),
        gives("4.0", "4", "2.0000000000000004 * 2"),
        gives("4.5", "True", "'4'"),
    ),
    Case("True", returns(True), gives("True", "1 < 2"), gives("1", "'True'", "1.0")),
    Case("None", returns(None), gives("None"), gives("0", "[]", "''", "'None'", "False", "1 / 0")),
    Case("negative zero", returns(0.0), gives("-0.0", "0"), gives("None", "False", "0j")),
    Case(
        "keys as JSON has them",
        returns({"1": "a", "2": [1]}),
        gives("{1: 'a', 2: (1,)}", "{'1': 'a', '2': [1]}"),
        gives("{1: 'a'}", "{1: 'a', 2: [1], '3': 0}", "{1: 'a', '1': 'a', 2: [1]}", "{1.5: 'a', 2: [1]}"),
    ),
    Case(
        "keys of truth values",
        returns({"true": 1, "null": 2}),
        gives("{True: 1, None: 2}"),
        gives("{'True': 1, 'None': 2}"),
    ),
    Case(
        "a set is no list",
        returns([1, 2]),
        gives("[1, 2]", "(1, 2)"),
        gives("{1, 2}", "[2, 1]", "iter([1, 2])", "'[1, 2]'"),
    ),
    Case(
        "a long integer",
        {**returns(0), "tests": f'[{{"args": [], "expected": {NINES}}}]'},
        gives("10**5000 - 1"),
        gives("10**5000"),
    ),
    Case(
        "objects that equal everything",
        returns(4),
        wrong=[
            "class E(int):\n    __eq__ = lambda *a: True\ndef f(): return E(4)",
            "class E:\n    __module__ = 'numpy'\n    def tolist(self): return self\ndef f(): return E()",
            "class E(dict):\n    __eq__ = lambda *a: True\ndef f(): return E()",
        ],
    ),
]

ROWS = [
    Case(
        "APPS, wrapped",
        {"tests": {"fn_name": "rev", "inputs": [["ab"], ["xyz"]], "outputs": [["ba"], ["zyx"]]}},
        ["def rev(s): return s[::-1]", "def rev(s): return [s[::-1]]"],
        ["def rev(s): return s", "def rev(s): return [[s[::-1]]]", "def rev(s): return ''", "def rev(s): return []"],
    ),
    Case(
        "APPS, lists that are no wrapping",
        {"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]}},
        ["def f(n): return list(range(1, n + 1))"],
        ["def f(n): return 1 if n == 1 else [1, 2]"],
    ),
    Case(
        "APPS as text, keys of arguments",
        {"input_output": json.dumps({"fn_name": "g", "inputs": [[{"1": 5, "-2": 7}]], "outputs": [{"1": 6, "-2": 8}]})},
        ["def g(d): return {k + 1 - 1: v + 1 for k, v in d.items()}"],
    ),
    Case(
        "TACO, JSON texts",
        {"tests": {"fn_name": "g", "inputs": ['[1, 2]\n"x\u2028"', '[]\n""'], "outputs": ["[1, 2, 2]", "[0]"]}},
        ["def g(a, s): return a + [len(s)]", "class Solution:\n    def g(self, a: list, s: str): return a + [len(s)]"],
        ["def g(a, s): return a", "def g(*a): return 0"],
    ),
    Case(
        "LiveCodeBench with metadata",
        {
            "tests": json.dumps([{"input": "[3,1]\n2", "output": "5.0", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "add"}),
        },
        ["class Solution:\n    def add(self, a, b):\n        return sum(a) + b - 1.0000000001"],
        ["class Solution:\n    def add(self, a, b):\n        return a"],
    ),
    Case(
        "CodeContests",
        {"tests": {"input": ["1\n", "2\n"], "output": ["2\n", "3\n"]}},
        ["print(int(input()) + 1)"],
        ["print(2)", "print(input())"],
    ),
    Case(
        "PrimeIntellect",
        {
            "tests": {
                "language": "python",
                "test_cases": [{"type": "function_call", "fn_name": "g", "input": [[1, 2]], "output": [3]}],
            }
        },
        ["def g(a): return sum(a)"],
        ["def g(a): return a"],
    ),
    Case(
        "LeetCodeDataset",
        {"tests": LEETCODE, "entry_point": "Solution().twoSum"},
        [TWO_SUM],
        [TWO_SUM.replace("[0, 1]", "None"), "class Solution:\n    pass"],
    ),
    Case(
        "HumanEval, answered by a method",
        {"tests": LEETCODE, "entry_point": "twoSum"},
        [TWO_SUM, TWO_SUM.replace("Solution", "Answer")],
    ),
    Case(
        "MBPP, answered by a method",
        {"tests": ["assert twoSum([2, 7], 9) == [0, 1]"]},
        [TWO_SUM],
        [TWO_SUM.replace("1]", "2]")],
    ),
    Case(
        "MBPP with set-up",
        {
            "tests": ["assert area(Box(2, 3)) == 6"],
            "setup": "class Box:\n    def __init__(self, w, h): self.w, self.h = w, h",
        },
        ["def area(box): return box.w * box.h"],
        ["def area(box): return box"],
    ),
    Case(
        "a function of its own name in a class and outside",
        call("g", [1], 2),
        ["class A:\n    def g(self): pass\ndef g(x): return x + 1"],
    ),
]

PROGRAMS = [
    Case(
        "U+2028 and others in text",
        prints("3\n3\n3\n3"),
        ["".join(f"print(len('a{c}b'))\n" for c in "\u2028\u0085\x1c\x1e")],
    ),
    Case(
        "form feeds, tabs, carriage returns",
        FOUR,
        ["x = 3\n\x0c\nif x:\n\tprint(x + 1)", "x = 4\r\nprint(x)\r\n", "\ufeffprint(4)"],
    ),
    Case(
        "an encoding that is declared",
        prints("é"),
        ["# -*- coding: latin-1 -*-\nprint('é')", "# coding: gbk\nprint('é')"],
    ),
    Case("odd escapes", prints("\\d"), ["print('\\d')", "print(r'\\d')"]),
    Case("text in several lines", prints("```\nx"), ["print('''```\nx''')", "print('''\\\n```\nx''')"]),
    Case(
        "imports from __future__ behind set-up",
        {**FOUR, "setup": "from typing import List\nimport math"},
        [
            "from __future__ import annotations\nprint(math.floor(4.5))",
            '"""A \\d."""\n# a\n\nfrom __future__ import annotations; from __future__ import division\nprint(4)',
            "from __future__ import (\n    annotations,  # é\n    division,\n); x: Nothing = 4; print(x)",
            "x = 'from __future__ import nothing'\nprint(4)",
            "s = '''\nfrom __future__ import nothing\n'''\nprint(4)",
            "'''\nfrom __future__ import no\n'''\nfrom __future__ import annotations\ndef f(x: No): print(x)\nf(4)",
        ],
        ["import sys\nfrom __future__ import annotations\nprint(4)", "from __future__ import braces\nprint(4)"],
    ),
    Case(
        "set-up with an import from __future__",
        {**FOUR, "setup": "'''Doc.'''\nfrom __future__ import annotations\nimport math"},
        ["'''A.'''\nfrom __future__ import division\nx: math.Unknown = 4\nprint(x)"],
    ),
    Case(
        "input",
        prints("7", "3\n4"),
        [
            "print(int(input()) + int(input()))",
            "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
            "import sys\nprint(sum(map(int, sys.stdin)))",
            "print(sum(map(int, open(0).read().split())))",
            "t = 0\ntry:\n    while True: t += int(input())\nexcept EOFError:\n    print(t)",
            "import sys\ninput = sys.stdin.readline\nprint(int(input()) + int(input()))",
            "print(sum(map(int, open('/dev/stdin'))))",
        ],
        ["print(int(input()) + int(input()))\ninput()", "input('a')\nprint(7)"],
    ),
    Case(
        "much input",
        prints("300000", "1 " * 150_000 + "\n" + "1\n" * 150_000 + "\n" * 900_000),
        ["import sys\nprint(sum(map(int, sys.stdin.read().split())))"],
    ),
    Case(
        "deep recursion",
        prints("50000"),
        [
            f"{DEEP}print(f(50000))",
            f"{DEEP}import functools\nf = functools.lru_cache(None)(f)\nprint(f(50000))",
            f"{DEEP}import threading as t\nt.stack_size(1 << 29)\nt.Thread(target=lambda: print(f(50000))).start()",
            "import resource as r\nr.setrlimit(r.RLIMIT_STACK, [r.RLIM_INFINITY] * 2)\nprint(50000)",
        ],
        ["f = lambda n: 1 + f(n - 1)\nprint(f(1))"],
    ),
]

CASES = [*ENDS, *OUTPUTS, *VALUES, *ROWS, *PROGRAMS]
FIELDS = {"tests_field": ("tests", "input_output"), "setup_field": "setup"}


def fenced(program: str) -> str:
    return f"So:\n````python\n{program}\n````\n"


@pytest.fixture(scope="module")
def values() -> dict[str, tuple[list[Any], list[Any]]]:
    """Every program's value, all scored at once."""
    asked = [(case, fenced(program)) for case in CASES for program in [*case.right, *case.wrong]]
    reward = Code(CodeConfig.model_validate({**FIELDS, "wall_seconds": 5, "cpu_seconds": 4}))
    named = Code(CodeConfig.model_validate({**FIELDS, "wall_seconds": 5, "entry_point_field": "metadata"}))
    found: list[Any] = []
    try:
        for chosen, with_metadata in (reward, False), (named, True):
            part = [(case, text) for case, text in asked if ("metadata" in case.row) is with_metadata]
            scored = outcomes(chosen, [completion(text, **{"setup": None, **case.row}) for case, text in part])
            found += [(case.name, text, outcome) for (case, text), outcome in zip(part, scored, strict=True)]
    finally:
        reward.close()
        named.close()
    plain = {
        (name, text): outcome.value if isinstance(outcome, RewardResult) else outcome for name, text, outcome in found
    }
    return {
        case.name: (
            [plain[case.name, fenced(program)] for program in case.right],
            [plain[case.name, fenced(program)] for program in case.wrong],
        )
        for case in CASES
    }


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_right_programs_get_1_and_others_0(case: Case, values: dict[str, tuple[list[Any], list[Any]]]) -> None:
    right, wrong = values[case.name]
    assert dict(zip(case.right, right, strict=True)) == dict.fromkeys(case.right, 1.0)
    assert dict(zip(case.wrong, wrong, strict=True)) == dict.fromkeys(case.wrong, 0.0)


def test_exact_output_and_values() -> None:
    exact = Code(CodeConfig(compare="exact", wall_seconds=5))
    asked = [
        ("print(3.0)", prints("3.000000"), 0.0),
        ("print(1)\nprint(2)", prints("1 2"), 0.0),
        ("print('1  2')", prints("1 2"), 0.0),
        ("print('1 2 \\n\\n')", prints("1 2\r\n"), 1.0),
        ("def f(): return 0.1 + 0.2", returns(0.3), 0.0),
        ("def f(): return 0.3", returns(0.3), 1.0),
        ("def f(): return {1: 2.0}", returns({"1": 2}), 1.0),
    ]
    try:
        found = outcomes(exact, [completion(fenced(program), **row) for program, row, _ in asked])
    finally:
        exact.close()
    assert [one.value for one in found if isinstance(one, RewardResult)] == [value for _, _, value in asked]


def test_the_tolerance_is_configurable() -> None:
    wide = Code(CodeConfig(float_tolerance=0.01, wall_seconds=5))
    try:
        asked = [(prints("100.0"), "print(100.9)"), (prints("100.0"), "print(101.1)"), (prints("100"), "print(101)")]
        found = outcomes(wide, [completion(fenced(program), **row) for row, program in asked])
    finally:
        wide.close()
    assert [one.value for one in found if isinstance(one, RewardResult)] == [1.0, 0.0, 0.0]
