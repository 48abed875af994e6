r"""Test cases of a row, in the shapes that datasets have.

{"tests": [{"input": "3 4\n", "output": "7\n"}]}                       stdin and stdout
{"tests": {"inputs": ["3 4\n"], "outputs": ["7\n"]}}                   APPS, TACO; with "fn_name" calls (below)
{"tests": {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}}
{"tests": {"inputs": ["3\n4"], "outputs": ["7"], "fn_name": "add"}}    arguments and results as JSON text
{"tests": {"input": ["3 4\n"], "output": ["7\n"]}}                     CodeContests
{"tests": [{"input": "3\n4", "output": "7", "testtype": "functional"}], "entry_point": "add"}   LiveCodeBench
{"tests": [{"input": [3, 4], "output": [7], "type": "function_call", "fn_name": "add"}]}        PrimeIntellect
{"tests": [{"args": [3, 4], "expected": 7}], "entry_point": "add"}      calls
{"tests": "def check(candidate): …", "entry_point": "add"}               HumanEval, LeetCodeDataset
{"tests": ["assert add(3, 4) == 7"]}                                     MBPP

Rows that mix them, or that would pass a program that does nothing, are refused.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from roll_like.builtin.rewards.code_asserts import read_assertions
from roll_like.sandbox import AssertTest, CallTest, StdioTest, TestCase
from roll_like.sandbox.compare import short_repr

#: Values of `testtype` (LiveCodeBench) and `type` (PrimeIntellect).
_FUNCTIONAL, _PROGRAM = ("functional", "function_call"), ("stdin", "stdin_stdout", "stdio")
#: Keys of one test that mean a call, and those that mean a program.
_OF_CALL, _OF_PROGRAM = ("args", "kwargs", "expected"), ("input", "output")
#: Keys under which a row's function is named, where its field holds more than the name.
_NAMES = ("func_name", "fn_name", "entry_point")
#: A function, a method (`Solution.f`, `Solution().f`), or nothing.
_NAME = re.compile(r"(?:[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*)*)?")
#: What zlib's and gzip's output looks like in Base64.
_COMPRESSED = re.compile(r"(?:eJ|eA|eN|H4sI)[A-Za-z0-9+/]{12,}={0,2}")
#: Largest compressed tests that are read. Bytes.
_LARGEST = 1 << 30
_KINDS = {StdioTest: "input and output of a program", CallTest: "calls of a function", AssertTest: "assertions"}
#: Digits up to which `int` reads a number; Python refuses longer ones.
_INT_DIGITS = 4000


def read_tests(
    metadata: Mapping[str, Any], *, tests_field: str | Sequence[str], entry_point_field: str, numpy: bool = False
) -> tuple[TestCase, ...]:
    """Return the test cases of a row.

    Args:
        tests_field: The field with the tests, in a shape that the module's text lists, or that as JSON text. Of several
            fields, the tests of all; some may be empty.
        entry_point_field: The field with the name of the function under test, where the tests do not name it. It may
            be a mapping or JSON text with the name under `func_name`, as LiveCodeBench's `metadata`.
        numpy: Whether assertions may import NumPy.

    Raises:
        ValueError: There are none, their shape is another, or they mix shapes.
    """
    fields = (tests_field,) if isinstance(tests_field, str) else tuple(tests_field)
    name = _entry_point(metadata.get(entry_point_field), entry_point_field)
    tests: list[TestCase] = []
    for field in fields:
        found = _decoded(metadata.get(field), f"the field {field!r}")
        if found is not None or len(fields) == 1:
            tests += _Reader(field, name, entry_point_field, numpy).tests(found)
    named = f"the field {' + '.join(map(repr, fields))}"
    if not tests:
        raise ValueError(f"{named} holds no tests; a program without tests would always pass")
    kinds: dict[str, int] = {}
    for number, test in enumerate(tests):
        kinds.setdefault(_KINDS[type(test)], number)
    if len(kinds) > 1:
        places = " and ".join(f"{kind} (test {number})" for kind, number in kinds.items())
        raise ValueError(f"{named} mixes {places}; one program cannot be meant by both, keep one kind of tests")
    return tuple(tests)


class _Reader:
    """Reads the tests of one field.

    Args:
        name: The function under test, "" for none.
        entry_point_field: Where that was looked for.
        numpy: Whether assertions may import NumPy.
    """

    def __init__(self, field: str, name: str, entry_point_field: str, numpy: bool) -> None:
        self._field, self._name, self._entry_point_field, self._numpy = field, name, entry_point_field, numpy

    def tests(self, found: Any) -> list[TestCase]:
        """Return the tests that a field's content means."""
        where = f"the field {self._field!r}"
        if isinstance(found, str):
            return [self._assertions(found)] if found.strip() else []
        if isinstance(found, Mapping):
            return self._mapping(found, where)
        if not isinstance(found, Sequence) or isinstance(found, (bytes, bytearray)):
            raise ValueError(f"{where} should hold tests, found {short_repr(found)}")
        return [self._entry(_decoded(one, self._at(index)), self._at(index)) for index, one in enumerate(found)]

    def _at(self, index: int) -> str:
        return f"{self._field}[{index}]"

    def _assertions(self, code: str) -> AssertTest:
        return AssertTest(read_assertions(code, self._name, self._entry_point_field, numpy=self._numpy))

    def _mapping(self, found: Mapping[str, Any], where: str) -> list[TestCase]:
        given = {key: value for key, value in found.items() if value is not None}
        if isinstance(given.get("test_cases"), (list, tuple)):
            return self.tests(given["test_cases"])
        columns = [pair for pair in (("inputs", "outputs"), _OF_PROGRAM) if any(key in given for key in pair)]
        if len(columns) > 1:
            raise ValueError(f"{where} holds both inputs and outputs, and input and output; keep one pair")
        lists = bool(columns) and all(isinstance(given.get(key), (list, tuple)) for key in columns[0])
        if not lists and (given.keys() & set(_OF_CALL) or (columns == [_OF_PROGRAM] and "inputs" not in given)):
            return [self._entry(found, where)]
        if not lists or len(given[columns[0][0]]) != len(given[columns[0][1]]):
            raise ValueError(
                f"{where} should hold inputs and outputs, as many of each, found {short_repr(dict(found))}"
            )
        if extra := sorted(given.keys() & set(_OF_CALL)):
            raise ValueError(f"{where} mixes {' and '.join((*columns[0], *extra))}; keep one shape of tests")
        inputs, outputs = (given[key] for key in columns[0])
        name = _entry_point(given.get("fn_name"), "fn_name") or self._name
        pairs = [(self._at(index), *pair) for index, pair in enumerate(zip(inputs, outputs, strict=True))]
        if not name:
            return [_program(*pair) for pair in pairs]
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        return [_call(*pair, name=name, wrapped=wrapped) for pair in pairs]

    def _entry(self, entry: Any, where: str) -> TestCase:
        if isinstance(entry, str):
            return self._assertions(entry)
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where} should be a mapping or assertions, found {short_repr(entry)}")
        # tables such as Arrow's give every entry the keys of all others, as null
        given = {key: value for key, value in entry.items() if value is not None}
        name = next((_entry_point(given[key], key) for key in _NAMES if key in given), "") or self._name
        of_call, of_program = ([key for key in keys if key in given] for keys in (_OF_CALL, _OF_PROGRAM))
        if of_call and of_program:
            raise ValueError(
                f"{where} mixes {' and '.join([*of_call, *of_program])}: a call has args and expected, "
                "a program has input and output"
            )
        if of_program:
            return self._pair(given, name, where)
        if not of_call and "expected" not in entry:
            raise ValueError(
                f"{where} should hold input and output, or args and expected, found {short_repr(dict(entry))}"
            )
        if not name:
            raise ValueError(f"{where} is a call, and no field {self._entry_point_field!r} names the function")
        if "expected" not in entry:
            raise ValueError(f"{where} is a call without the key expected, found {short_repr(dict(entry))}")
        args, kwargs = given.get("args", ()), given.get("kwargs", {})
        if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
            raise ValueError(
                f"{where} should hold args as a list and kwargs as a mapping, found {short_repr(dict(entry))}"
            )
        return CallTest(_dotted(name), tuple(args), dict(kwargs), entry["expected"])

    def _pair(self, given: Mapping[str, Any], name: str, where: str) -> TestCase:
        """Return a test of input and output: a program's, or a call's where that is said."""
        missing = [key for key in _OF_PROGRAM if key not in given]
        if missing:
            raise ValueError(
                f"{where} should hold input and output, found no {missing[0]} in {short_repr(dict(given))}; "
                'give a program without input ""'
            )
        kind = given.get("testtype")
        kind = given.get("type") if kind is None else kind
        if kind in _FUNCTIONAL:
            if not name:
                raise ValueError(f"{where} is a call, and no field {self._entry_point_field!r} names the function")
            output = given["output"]
            wrapped = isinstance(given["input"], list) and isinstance(output, list) and len(output) == 1
            return _call(where, given["input"], output, name=name, wrapped=wrapped)
        if "testtype" in given and kind not in _PROGRAM:
            raise ValueError(
                f"{where} has the testtype {short_repr(kind)}; known are {', '.join(_FUNCTIONAL + _PROGRAM)}"
            )
        if name and kind not in _PROGRAM:
            raise ValueError(
                f"{where} holds input and output, which are a program's, and {name!r} is named as the function under "
                "test; give args and expected for calls, or testtype: functional (JSON) or stdin"
            )
        return _program(where, given["input"], given["output"])


def _entry_point(found: Any, field: str) -> str:
    """Return the name of a function; "" for none."""
    if isinstance(found, str) and found.lstrip().startswith("{"):
        found = _decoded(found, f"the field {field!r}")
    if isinstance(found, Mapping):
        found = next((found[key] for key in _NAMES if found.get(key) is not None), None)
    if found is None:
        return ""
    if not isinstance(found, str) or not _NAME.fullmatch(found.strip()):
        raise ValueError(f"the field {field!r} should hold a function's name, found {short_repr(found)}")
    return found.strip()


def _dotted(name: str) -> str:
    """Return `Solution.f` for `Solution().f`, as LeetCode's data sets write it."""
    return re.sub(r"^(\w+)\(\)\.", r"\1.", name)


def _decoded(found: Any, where: str) -> Any:
    """Return the value of JSON text, and everything else as it is."""
    if not isinstance(found, str):
        return found
    if found.lstrip()[:1] in ("[", "{"):
        try:
            return _json(found)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} looks like JSON but is not valid: {error}") from error
    if _COMPRESSED.fullmatch(found.strip()):
        return _decoded(_unpacked(found.strip(), where), where)
    return found


class _TextUnpickler(pickle.Unpickler):
    """Reads pickles of plain data: what names a class or a function is refused, so nothing can be run."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse it."""
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _unpacked(found: str, where: str) -> str:
    """Return the text that LiveCodeBench's private tests hold: JSON, pickled, compressed, in Base64.

    Raises:
        ValueError: They hold something else, or are larger than any such test.
    """
    problem = f"{where} holds compressed bytes"
    try:
        unzip = zlib.decompressobj(wbits=47)  # zlib's or gzip's header
        content = unzip.decompress(base64.b64decode(found), _LARGEST)
        if unzip.unconsumed_tail:
            raise ValueError(f"{problem} of more than {_LARGEST >> 20} MiB")
        text = content.decode() if content[:1] in b"[{" else _TextUnpickler(io.BytesIO(content)).load()
    except (zlib.error, pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{problem} that cannot be read as LiveCodeBench's private tests (a pickled text): {error}; write the "
            "tests as JSON text"
        ) from error
    if not isinstance(text, str):
        raise ValueError(f"{problem} of {type(text).__name__}; expected the text of JSON, as in LiveCodeBench")
    return text


def _json(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: int(digits if len(digits) < _INT_DIGITS else Decimal(digits)))


def _call(where: str, given: Any, wanted: Any, *, name: str, wrapped: bool) -> CallTest:
    """Return a call, whose arguments are a list or one a line as JSON.

    As in APPS' own evaluation, keys that JSON made text are numbers again in arguments, and the result may be wrapped
    in a list of one.
    """
    if isinstance(given, str):
        try:
            args = [_json(line) for line in given.split("\n") if line.strip()]
            expected = _json(wanted) if isinstance(wanted, str) else wanted
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: arguments and result should be JSON, one argument a line: {error}") from error
        return CallTest(_dotted(name), tuple(args), expected=expected)
    if not isinstance(given, list):
        raise ValueError(
            f"{where} is a call of {name!r}; its input should be a list of arguments, or JSON, one argument a line; "
            f"found {short_repr(given)}"
        )
    return CallTest(_dotted(name), tuple(map(_with_numbers, given)), expected=wanted, wrapped=wrapped)


def _with_numbers(value: Any) -> Any:
    """Return a mapping whose keys are all integers as text with integers as keys."""
    if isinstance(value, dict) and value and all(re.fullmatch(r"-?\d{1,18}", key, re.ASCII) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _program(where: str, given: Any, wanted: Any) -> StdioTest:
    return StdioTest(_text(given, f"the input of {where}"), _text(wanted, f"the output of {where}"))


def _text(value: Any, where: str) -> str:
    """Return what is on standard input or output; APPS gives some as a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "".join(f"{line}\n" for line in value)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value).removeprefix("\ufeff")
    raise ValueError(
        f"{where} should be text or a list of lines, found {short_repr(value)}; calls need a function's name"
    )
