"""Rows of data sets for the code reward: read as meant, or refused with words."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from typing import Any

import pytest
from reward_support import row

from roll_like.builtin.rewards.code import Code, CodeConfig
from roll_like.builtin.rewards.code_asserts import resolve_entry_points
from roll_like.builtin.rewards.code_tests import read_tests
from roll_like.errors import DataError
from roll_like.sandbox import AssertTest, CallTest, StdioTest, TestCase

CASES = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("false",)


RUNNING = base64.b64encode(zlib.compress(pickle.dumps(_Runs()) + b" " * 20)).decode()
PRIVATE = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(CASES)))).decode()
PYTEST = "import pytest\nfrom solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
DIGITS = "9" * 5000


def read(tests: Any, **metadata: Any) -> tuple[TestCase, ...]:
    return read_tests({"tests": tests, **metadata}, tests_field="tests", entry_point_field="entry_point")


@pytest.mark.parametrize(
    ("tests", "entry_point", "expected"),
    [
        # APPS, TACO
        ('{"inputs": ["1\\n"], "outputs": ["2\\n"], "fn_name": null}', None, [StdioTest("1\n", "2\n")]),
        ({"inputs": [["1", "2"]], "outputs": [["3", "4"]]}, None, [StdioTest("1\n2\n", "3\n4\n")]),
        ({"fn_name": "f", "inputs": [["a"]], "outputs": [["b"]]}, None, [CallTest("f", ("a",), {}, ["b"], True)]),
        (
            {"fn_name": "f", "inputs": [["a"], ["b"]], "outputs": [["b"], []]},
            None,
            [CallTest("f", ("a",), {}, ["b"]), CallTest("f", ("b",), {}, [])],
        ),
        ({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [3]}, None, [CallTest("f", ({1: 2},), {}, 3)]),
        (
            {"fn_name": "f", "inputs": [[{"a": 2, "1": 2}]], "outputs": [3]},
            None,
            [CallTest("f", ({"a": 2, "1": 2},), {}, 3)],
        ),
        (
            {"fn_name": "f", "inputs": ['[1]\n"a\u2028"'], "outputs": ["2.5"]},
            None,
            [CallTest("f", ([1], "a\u2028"), {}, 2.5)],
        ),
        ({"inputs": ["1"], "outputs": ["null"]}, "f", [CallTest("f", (1,), {}, None)]),
        # LiveCodeBench
        (json.dumps(CASES), '{"func_name": "f"}', [CallTest("f", ([1, 2], 3), {}, 6)]),
        (PRIVATE, '{"func_name": "f"}', [CallTest("f", ([1, 2], 3), {}, 6)]),
        (CASES, {"func_name": "f"}, [CallTest("f", ([1, 2], 3), {}, 6)]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], "{}", [StdioTest("1", "2")]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], "f", [StdioTest("1", "2")]),
        # CodeContests, PrimeIntellect, one test by itself
        ({"input": ["1", "2"], "output": ["2", "3"]}, None, [StdioTest("1", "2"), StdioTest("2", "3")]),
        (
            {"test_cases": [{"fn_name": None, "type": "stdin_stdout", "input": "1", "output": "2"}]},
            None,
            [StdioTest("1", "2")],
        ),
        (
            [{"fn_name": "f", "type": "function_call", "input": [[1]], "output": [2]}],
            None,
            [CallTest("f", ([1],), {}, [2], True)],
        ),
        ({"input": "1", "output": "2"}, None, [StdioTest("1", "2")]),
        ({"args": [1], "expected": 2}, "f", [CallTest("f", (1,), {}, 2)]),
        # LeetCodeDataset, HumanEval
        (CHECK, "Solution().add", [AssertTest(f"{CHECK}\n\ncheck(Solution().add)\n".replace("\n\n\n", "\n\n"))]),
        (CHECK, "Solution.add", [AssertTest(f"{CHECK}\n\ncheck(Solution().add)\n".replace("\n\n\n", "\n\n"))]),
        ([{"args": [1], "expected": 2}], "Solution().f", [CallTest("Solution.f", (1,), {}, 2)]),
        (f"{CHECK}\nfor f in [add]:\n    check(f)\n", "add", [AssertTest(f"{CHECK}\nfor f in [add]:\n    check(f)\n")]),
        (
            "if add(1, 2) != 3:\n    raise AssertionError",
            None,
            [AssertTest("if add(1, 2) != 3:\n    raise AssertionError")],
        ),
        # numbers and marks
        (f'[{{"args": [{DIGITS}], "expected": -{DIGITS}}}]', "f", [CallTest("f", (10**5000 - 1,), {}, 1 - 10**5000)]),
        ([{"input": 3, "output": 4}], None, [StdioTest("3", "4")]),
        ([{"input": "\ufeff3", "output": "\ufeff4"}], None, [StdioTest("3", "4")]),
        ([{"input": "", "output": ""}], None, [StdioTest("", "")]),
        ([{"args": [], "expected": None}], "f", [CallTest("f")]),
    ],
)
def test_rows_are_read(tests: Any, entry_point: Any, expected: list[TestCase]) -> None:
    assert list(read(tests, entry_point=entry_point)) == expected


@pytest.mark.parametrize(
    ("tests", "entry_point", "message"),
    [
        # what would let a program pass that does nothing
        ([{"args": [3, 4], "output": 7}], "f", "mixes args and output"),
        ([{"args": [3, 4], "output": 7, "expected": None}], "f", "mixes args and output"),
        ([{"input": "3", "expected": "4"}], "f", "mixes expected and input"),
        ([{"args": [3, 4]}], "f", "without the key expected"),
        ([{"args": [3, 4], "expect": 7}], "f", "without the key expected"),
        ([{"args": [3, 4], "expected_output": 7}], "f", "without the key expected"),
        ([{"kwargs": {"a": 1}}], "f", "without the key expected"),
        ([{"input": "3"}], None, "found no output"),
        ([{"input": "3", "output": None}], None, "found no output"),
        ([{"output": "3"}], None, 'without input ""'),
        ({"inputs": ["1"], "outputs": [None]}, None, "output of tests.0. should be text"),
        ({"inputs": [None], "outputs": ["1"]}, None, "input of tests.0. should be text"),
        # what is meant as something else
        ([{"args": "ab", "expected": 1}], "f", "args as a list"),
        ([{"args": {"a": 1}, "expected": 1}], "f", "args as a list"),
        ([{"args": [1], "kwargs": [1], "expected": 1}], "f", "kwargs as a mapping"),
        ([{"input": "3 4", "output": "7"}], "f", "named as the function under test"),
        ([{"input": [3, 4], "output": 7}], None, "text or a list of lines"),
        ({"inputs": [[3, 4]], "outputs": [7]}, None, "calls need a function's name"),
        ([{"input": "1", "output": True}], None, "text or a list of lines"),
        ([{"input": "1", "output": "2", "testtype": "interactive"}], None, "testtype 'interactive'"),
        ({"inputs": ["1"], "outputs": ["1"], "input": ["1"], "output": ["1"]}, None, "keep one pair"),
        ({"inputs": ["1"], "outputs": ["1"], "args": [1]}, None, "mixes inputs and outputs and args"),
        ([{"input": "1", "output": "1"}, "assert f(1) == 1"], None, r"program \(test 0\) and assertions \(test 1\)"),
        (
            [{"args": [1], "expected": 1}, {"input": "1", "output": "1", "type": "stdin"}],
            "f",
            "mixes calls of a function",
        ),
        ([[1, 2]], None, "a mapping or assertions"),
        # files for other tools, and code that asserts nothing
        (PYTEST, "add", "for pytest"),
        (PYTEST.replace("import pytest\n", ""), "add", "import solution"),
        ("def test_add():\n    assert add(1, 2) == 3\n", None, "define test_add and call none"),
        ("class TestAdd:\n    def test(self):\n        assert add(1, 2) == 3\n", None, "define TestAdd"),
        ("import unittest\nclass T(unittest.TestCase):\n    pass\n", None, "for unittest"),
        ("import numpy as np\n" + CHECK, "add", "import numpy; set `numpy: true` of the reward `code`"),
        ("def f():\n    assert add(1, 2) == 3\n", None, "assert nothing when"),
        ("if __name__ == '__main__':\n    assert add(1, 2) == 3\n", None, "assert nothing when"),
        ("x = lambda: check(add)\n", "add", "assert nothing when"),
        # texts that are no tests
        (RUNNING, "f", "names .*system"),
        (base64.b64encode(zlib.compress(pickle.dumps([1]))).decode(), "f", "bytes of list"),
        (base64.b64encode(zlib.compress(b"\x80")).decode() + "AAAA", "f", "cannot be read"),
        (b"eJw", "f", "should hold tests"),
        ("[" * 100_000, "f", "not valid"),
        ("['assert f(1) == 1']", None, "looks like JSON"),
        ([{"input": "[1\n", "output": "1", "testtype": "functional"}], "f", "should be JSON"),
        ([{"args": [1], "expected": 1}], "def f(x):", "a function's name"),
        ([{"args": [1], "expected": 1}], "no name", "a function's name"),
        ([{"args": [1], "expected": 1}], ["f"], "a function's name"),
        ([{"input": "\ud800", "output": "1"}], None, "surrogates"),
        ([{"input": "1", "output": "\ud800"}], None, "surrogates"),
        ([10**5000], None, "a mapping or assertions"),
    ],
)
def test_rows_are_refused(tests: Any, entry_point: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        Code(CodeConfig()).check_row(row(tests=tests, entry_point=entry_point))
    assert str(raised.value).startswith("data.jsonl:7: ")
    assert len(str(raised.value)) < 600


def test_several_fields() -> None:
    fields = ("public_tests", "private_tests", "generated_tests")
    one = {"input": ["1"], "output": ["2"]}
    empty: dict[str, list[str]] = {"input": [], "output": []}
    metadata = {"public_tests": one, "private_tests": empty, "generated_tests": None}
    assert read_tests(metadata, tests_field=fields, entry_point_field="f") == (StdioTest("1", "2"),)
    with pytest.raises(ValueError, match=r"'public_tests' \+ 'private_tests' \+ 'generated_tests' holds no tests"):
        read_tests({"public_tests": empty}, tests_field=fields, entry_point_field="f")


def test_setup_is_checked() -> None:
    reward = Code(CodeConfig(setup_field="setup"))
    tests = ["assert f() == 1"]
    for setup in ("import math", ["import math", "import sys"], "", None):
        reward.check_row(row(tests=tests, setup=setup))
    for wrong in ("import math as", 5, "x = '\0'"):
        with pytest.raises(DataError, match="'setup' should hold Python"):
            reward.check_row(row(tests=tests, setup=wrong))
    with pytest.raises(DataError, match="found none"):
        reward.check_row(row(tests=tests))


def test_setup_of_all_rows_comes_first() -> None:
    reward = Code(CodeConfig(setup="from typing import *", setup_field="setup"))
    assert reward._setup({"setup": "import math"}) == "from typing import *\n\nimport math"
    assert reward._setup({"setup": None}) == "from typing import *"
    assert Code(CodeConfig(setup="import math"))._setup({}) == "import math"
    with pytest.raises(ValueError, match="should be Python"):
        CodeConfig(setup="import")


def test_methods_are_found_in_whichever_class_has_them() -> None:
    call, test = CallTest("add", (1,), expected=1), AssertTest("assert len(add(1)) == 1")
    method = "class Answer:\n    def len(self):\n        pass\n\n    async def add(self, a):\n        return a\n"
    assert resolve_entry_points((call, test), method) == (
        CallTest("Answer.add", (1,), expected=1),
        AssertTest("add = Answer().add\nassert len(add(1)) == 1"),
    )
    both = f"{method}class Solution:\n  def add(self, a):\n    return a\n"
    assert resolve_entry_points((call,), both) == (CallTest("Solution.add", (1,), expected=1),)
    assert resolve_entry_points((call,), f"{both}add = Solution().add\n") == (call,)
    assert resolve_entry_points((call,), method.replace("def add", "def adds")) == (call,)
