r"""Test cases of a row, in the shapes that datasets have.

{"tests": [{"input": "3 4\n", "output": "7\n"}]}                       stdin and stdout
{"tests": {"inputs": ["3 4\n"], "outputs": ["7\n"]}}                   APPS; with "fn_name" calls (below)
{"tests": {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}}
{"tests": [{"input": "3\n4", "output": "7", "testtype": "functional"}], "entry_point": "add"}   LiveCodeBench
{"tests": [{"args": [3, 4], "expected": 7}], "entry_point": "add"}      calls
{"tests": "def check(candidate): …", "entry_point": "add"}               HumanEval
{"tests": ["assert add(3, 4) == 7"]}                                     MBPP
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll_like.sandbox import AssertTest, CallTest, StdioTest, TestCase


def read_tests(metadata: Mapping[str, Any], *, tests_field: str, entry_point_field: str) -> tuple[TestCase, ...]:
    """Return the test cases of a row.

    Args:
        metadata: The row's fields.
        tests_field: The field with the tests, in a shape that the module's text lists, or that as JSON text.
        entry_point_field: The field with the name of the function under test, where the tests do not name it.

    Raises:
        ValueError: There are none, or their shape is another.
    """
    found = metadata.get(tests_field)
    if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise ValueError(f"the field {tests_field!r} looks like JSON but is not valid: {error}") from error
    entry_point = metadata.get(entry_point_field)
    if entry_point is not None and not isinstance(entry_point, str):
        raise ValueError(f"the field {entry_point_field!r} should hold a function's name, found {entry_point!r}")
    tests = _tests(found, entry_point or "", tests_field, entry_point_field)
    if not tests:
        raise ValueError(f"the field {tests_field!r} holds no tests; a program without tests would always pass")
    return tests


def resolve_entry_points(tests: Sequence[TestCase], program: str) -> tuple[TestCase, ...]:
    """Return the tests with calls of a method of `class Solution`, where the program has no such function.

    LeetCode's problems are answered either way.
    """
    return tuple(
        replace(test, entry_point=f"Solution.{test.entry_point}")
        if isinstance(test, CallTest) and _is_method(test.entry_point, program)
        else test
        for test in tests
    )


def _is_method(name: str, program: str) -> bool:
    """Return whether `class Solution` has the function and the module does not. Hostile text is not parsed."""
    function = rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*="
    method = rf"^[ \t]+(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b"
    in_class = all(re.search(line, program, re.MULTILINE) for line in (r"^class[ \t]+Solution\b", method))
    return in_class and not re.search(function, program, re.MULTILINE)


def _tests(found: Any, entry_point: str, field: str, entry_point_field: str) -> tuple[TestCase, ...]:
    if isinstance(found, str):
        return (_assertions(found, entry_point, entry_point_field),) if found.strip() else ()
    if isinstance(found, Mapping):
        return _columns(found, entry_point, field)
    if not isinstance(found, Sequence):
        raise ValueError(f"the field {field!r} should hold tests, found {_short(found)}")
    return tuple(
        _assertions(one, entry_point, entry_point_field)
        if isinstance(one, str)
        else _entry(one, entry_point, f"{field}[{index}]", entry_point_field)
        for index, one in enumerate(found)
    )


def _assertions(code: str, entry_point: str, entry_point_field: str) -> AssertTest:
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise ValueError(f"the tests are not valid Python: {error}") from error
    defines_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    calls_check = re.search(r"^check\(", code, flags=re.MULTILINE)
    if defines_check and not calls_check:
        if not entry_point:
            raise ValueError(
                f"the tests define check(candidate), and no field {entry_point_field!r} names the function"
            )
        code = f"{code.rstrip()}\n\ncheck({entry_point})\n"
    elif not calls_check and not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError(f"the tests assert nothing: {_short(code)}")
    return AssertTest(code)


def _columns(found: Mapping[str, Any], entry_point: str, field: str) -> tuple[TestCase, ...]:
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"the field {field!r} should hold inputs and outputs, as many of each, found {_short(found)}")
    name = found.get("fn_name") or entry_point
    if name:
        if not all(isinstance(args, list) for args in inputs):
            raise ValueError(f"the field {field!r} names the function {name!r}; then each input is a list of arguments")
        return tuple(CallTest(name, tuple(args), expected=out) for args, out in zip(inputs, outputs, strict=True))
    return tuple(StdioTest(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True))


def _entry(entry: Any, entry_point: str, where: str, entry_point_field: str) -> TestCase:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} should be a mapping or assertions, found {_short(entry)}")
    # tables such as Arrow's give every entry the keys of all others, as null
    given = {key: value for key, value in entry.items() if value is not None}
    name = given.get("entry_point") or given.get("fn_name") or entry_point
    functional = given.get("testtype") == "functional"
    if not functional and "input" in given and "output" in given:
        return StdioTest(_text(given["input"]), _text(given["output"]))
    if not functional and not given.keys() & {"args", "kwargs", "expected"}:
        raise ValueError(f"{where} should hold input and output, or args and expected, found {_short(entry)}")
    if not name:
        raise ValueError(f"{where} is a call, and no field {entry_point_field!r} names the function")
    if functional:
        return _functional(given, name, where)
    return CallTest(name, tuple(given.get("args", ())), dict(given.get("kwargs", {})), given.get("expected"))


def _functional(entry: Mapping[str, Any], name: str, where: str) -> CallTest:
    """LiveCodeBench: one argument a line, each as JSON, and the result as JSON."""
    try:
        args = [json.loads(line) for line in str(entry["input"]).splitlines() if line.strip()]
        return CallTest(name, tuple(args), expected=json.loads(entry["output"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: arguments and result should be JSON, one argument a line: {error!r}") from error


def _text(value: Any) -> str:
    """APPS gives some inputs as a list of lines."""
    return "\n".join(map(str, value)) + "\n" if isinstance(value, list) else str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
