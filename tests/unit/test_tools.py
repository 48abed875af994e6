"""Tools: functions, checks of calls, the calculator, search, hosts."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from roll_like.errors import ConfigError, DataError, EnvError, SandboxError
from roll_like.sandbox.box import BoxReport, Ended, Program
from roll_like.sandbox.types import Limits
from roll_like.tools import (
    MalformedCall,
    SharedTools,
    Tool,
    Toolbox,
    ToolCall,
    ToolError,
    ToolHost,
    read_tool_configs,
    tool_from_function,
)
from roll_like.tools.calculator import calculate, calculator
from roll_like.tools.config import PythonConfig
from roll_like.tools.python_runner import python_tool
from roll_like.tools.search import Passage, SearchIndex, read_corpus, search_tool


class Unit(Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(BaseModel):
    city: str


def forecast(place: Place, days: int = 1, unit: Unit = Unit.CELSIUS) -> str:
    """Forecast the weather,
    day by day.

    Args:
        place: Where,
            in which city.
        days: How many days ahead.

    Returns:
        unit: this line describes no argument.
    """
    return f"{place.city} {days} {unit.name} {threading.current_thread() is threading.main_thread()}"


async def greet(name: Literal["Ada", "Bob"]) -> dict[str, str]:
    """Say hello."""
    return {"hello": name}


def ask(tool: Tool, **arguments: Any) -> str:
    """The text of a call that succeeds, or of what a policy is told."""
    return asyncio.run(Toolbox([tool]).run(ToolCall(tool.name, arguments))).text


def test_a_functions_schema_comes_from_its_hints_and_docstring() -> None:
    schema = tool_from_function(forecast).schema["function"]
    assert (schema["name"], schema["description"]) == ("forecast", "Forecast the weather, day by day.")
    parameters = schema["parameters"]
    assert parameters["required"] == ["place"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["days"] == {
        "type": "integer",
        "default": 1,
        "description": "How many days ahead.",
    }
    assert parameters["properties"]["place"]["description"] == "Where, in which city."
    assert "description" not in parameters["properties"]["unit"]
    assert parameters["$defs"]["Unit"]["enum"] == ["celsius", "kelvin"]


def test_arguments_are_converted_and_blocking_functions_run_in_a_thread() -> None:
    assert ask(tool_from_function(forecast), place={"city": "Rome"}, unit="kelvin") == "Rome 1 KELVIN False"
    assert ask(tool_from_function(greet, name="hello"), name="Ada") == '{"hello": "Ada"}'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "'place' is a required property"),
        ({"place": {"city": 3}}, "3 is not of type 'string'"),
        ({"place": {"city": "Rome"}, "unit": "f"}, "is not one of ['celsius', 'kelvin']"),
        ({"place": {"city": "Rome"}, "when": 1}, "'when' was unexpected"),
    ],
)
def test_wrong_arguments_are_told_to_the_policy(arguments: dict[str, Any], told: str) -> None:
    box = Toolbox([tool_from_function(forecast)])
    outcome = asyncio.run(box.run(ToolCall("forecast", arguments)))
    assert outcome.failed
    assert outcome.text.startswith("Error: wrong arguments for forecast")
    assert told in outcome.text


def test_what_cannot_become_a_tool_is_refused() -> None:
    def no_hint(text):  # type: ignore[no-untyped-def]
        return text

    def starred(*texts: str) -> None:
        del texts

    def odd(call: threading.Thread) -> None:
        del call

    for function, message in ((no_hint, "'text' has no type hint"), (starred, "by name"), (odd, "no JSON Schema")):
        with pytest.raises(ConfigError, match=f"tool '{function.__name__}'.*{message}"):
            tool_from_function(function)
    for name, parameters, message in (
        ("a b", {"type": "object"}, "a tool is called 'a b'"),
        ("f", {"type": "objekt"}, "tool 'f': its parameters are not a JSON Schema: 'objekt' .* at \\$.type"),
        ("f", {"type": "string"}, "tool 'f': .* type: object, found type: 'string'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Tool(name, "", parameters, greet)
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        Toolbox([calculator(), calculator()])


async def test_calls_that_the_policy_got_wrong_are_answered() -> None:
    box = Toolbox([calculator()], max_characters=60)
    near = await box.run(ToolCall("calculater", {}))
    assert near.text.startswith("Error: there is no tool 'calculater'; did you mean 'calcula")
    assert (await box.run(ToolCall("zzz", {}))).text == "Error: there is no tool 'zzz'; there are: calculator"
    malformed = await box.run(MalformedCall("{", "no valid JSON"))
    assert (malformed.text, malformed.failed) == ("Error: this call cannot be read: no valid JSON", True)
    assert malformed.invalid
    refused = await box.run(ToolCall("calculator", {"expression": "1/0"}))
    assert (refused.text, refused.failed, refused.invalid) == ("Error: division by zero", True, False)
    long = await box.run(ToolCall("calculator", {"expression": "10**100"}))
    assert long.text == "1" + "0" * 59 + "\n… (41 more characters)"
    assert not long.failed


async def test_failures_of_a_tool_are_not_the_policys() -> None:
    def breaks() -> str:
        raise KeyError("database")

    def ends() -> str:
        return str(next(iter(())))  # no future takes it, and a task would wait for ever

    async def hangs() -> None:
        await asyncio.sleep(60)

    with pytest.raises(EnvError, match="tool 'breaks' failed: KeyError: 'database'"):
        await Toolbox([tool_from_function(breaks)]).run(ToolCall("breaks", {}))
    with pytest.raises(EnvError, match="tool 'ends' failed: RuntimeError: StopIteration"):
        await Toolbox([tool_from_function(ends)], timeout=60).run(ToolCall("ends", {}))
    box = Toolbox([tool_from_function(hangs)], timeout=0.05)
    with pytest.raises(EnvError, match=r"tool 'hangs' gave no answer within 0.05 s"):
        await box.run(ToolCall("hangs", {}))


async def test_references_of_a_schema_are_never_fetched() -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}}
    box = Toolbox([Tool("f", "", parameters, greet)])
    with pytest.raises(EnvError, match=r"refers to 'http://127.0.0.1:9/schema.json', which it does not hold"):
        await box.run(ToolCall("f", {"a": 1}))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(2 + 3) * 7 / 5", "7"),
        ("2^10", "1024"),
        ("-7 // 2 + 7 % 3", "-3"),
        ("1/3", "0.333333333333"),
        ("sqrt(2) * max(1, 2, 3)", "4.24264068712"),
        ("gcd(12, 18) + round(2.567, 1)", "8.6"),
        ("10**40", "1" + "0" * 40),
        ("2 × 3 − 4", "2"),
        ("1e3", "1000"),
        ("pi", "3.14159265359"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("1 / 0", "division by zero"),
        ("2 ** 100000", "too large"),
        ("(" * 5 + "9**9" + ")**999" * 5, "too large"),
        ("1e308 * 10", "too large"),
        ("exp(1000)", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("sqrt(-1)", "has no value"),
        ("round(1, 2, 3)", "has no value"),
        ("2 +", "not an arithmetic expression"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("'a' * 10", "not arithmetic"),
        ("[1][0]", "not arithmetic"),
        ("True", "not arithmetic"),
        ("max(1, key=2)", "not arithmetic"),
        ("1" * 2000, "at most 1000"),
        ("(" * 500 + "1" + ")" * 400, "not an arithmetic expression"),
        ("x\udcff", "no"),
    ],
)
def test_the_calculator_says_what_is_wrong(expression: str, told: str) -> None:
    with pytest.raises(ToolError, match=told):
        calculate(expression)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_the_calculator_agrees_with_python(a: int, b: int, c: int) -> None:
    assert int(calculate(f"({a}) * ({b}) - {c}")) == a * b - c
    assert math.isclose(float(calculate(f"({a}) / {c}")), a / c, rel_tol=1e-11, abs_tol=1e-12)


CORPUS = [
    Passage("Rome", "Rome is the capital of Italy."),
    Passage("Paris", "Paris is the capital of France, and of fashion, and of France."),
    Passage("", "A capital letter begins a sentence."),
    Passage("Cats", "Cats sleep."),
]


def test_scores_are_those_of_the_formula() -> None:
    found = SearchIndex(CORPUS, k1=1.2, b=0.5).search("France", 3)
    assert [passage.title for passage, _ in found] == ["Paris"]
    lengths = [7, 13, 6, 3]  # titles count
    norm = 1 - 0.5 + 0.5 * 13 / (sum(lengths) / 4)
    assert found[0][1] == pytest.approx(math.log(1 + 3.5 / 1.5) * 2 * 2.2 / (2 + 1.2 * norm))


def test_rare_words_count_more_and_ties_keep_the_order() -> None:
    index = SearchIndex(CORPUS)
    assert [passage.title for passage, _ in index.search("the capital of italy", 2)] == ["Rome", "Paris"]
    assert index.search("ROME!", 5)[0][0].title == "Rome"
    assert index.search("zebra", 5) == []
    twins = SearchIndex([Passage(title, "x") for title in "abcde"])
    assert [passage.title for passage, _ in twins.search("x", 2)] == ["a", "b"]
    assert [passage.title for passage, _ in twins.search("d x", 3)] == ["d", "a", "b"]


def test_search_shows_passages_or_says_that_there_are_none() -> None:
    tool = search_tool(SearchIndex(CORPUS), results=2, max_characters=12)
    assert ask(tool, query="capital of France") == "[1] Paris: Paris is the…\n[2] Rome: Rome is the …"
    assert ask(tool, query="zebra") == "Error: nothing in the corpus has a word of 'zebra'"


def test_a_corpus_is_read_from_lines_or_paragraphs(tmp_path: Path) -> None:
    lines, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text('{"title": "T", "text": "one"}\n\n{"text": "two"}\n')
    text.write_text("one\nmore\n\n\ntwo\n")
    assert read_corpus(lines) == [Passage("T", "one"), Passage("", "two")]
    assert read_corpus(text) == [Passage("", "one\nmore"), Passage("", "two")]
    for content, message in (
        ("{", "a.jsonl:1: not JSON"),
        ('{"title": "x"}', r'a.jsonl:1: expected \{"text"'),
        ("", "no passages"),
    ):
        lines.write_text(content)
        with pytest.raises(DataError, match=message):
            read_corpus(lines)
    with pytest.raises(DataError, match="cannot be read"):
        read_corpus(tmp_path / "missing.txt")


class FakeBox:
    """Ends every program as told."""

    name = "fake"

    def __init__(self, ended: Ended, stdout: bytes = b"", stderr: str = "") -> None:
        self.report = BoxReport(ended, 0, stdout, stderr, 0.0, 0, "the detail")
        self.closed = False

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        return self.report

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("box", "text", "failed"),
    [
        (FakeBox(Ended.EXITED, b"42\n"), "42", False),
        (FakeBox(Ended.EXITED), "(nothing was printed)", False),
        (FakeBox(Ended.ERROR, b"1\n", "ValueError: no"), "Error: ValueError: no\nprinted before: 1", True),
        (FakeBox(Ended.TIMEOUT), "Error: the time limit was reached", True),
    ],
)  # fmt: skip
async def test_programs_are_answered(box: FakeBox, text: str, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(backend: str, *, workers: int) -> FakeBox:
        return box

    monkeypatch.setattr("roll_like.tools.python_runner.open_box", opened)
    async with python_tool(PythonConfig()) as tool:
        outcome = await Toolbox([tool]).run(ToolCall("python", {"code": "1"}))
    assert (outcome.text, outcome.failed, box.closed) == (text, failed, True)


async def test_a_sandbox_that_fails_is_no_fault_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(backend: str, *, workers: int) -> FakeBox:
        return FakeBox(Ended.BROKEN)

    monkeypatch.setattr("roll_like.tools.python_runner.open_box", opened)
    async with python_tool(PythonConfig()) as tool:
        with pytest.raises(SandboxError, match="failed: the detail"):
            await tool.call(code="1")


def tool_threads() -> set[threading.Thread]:
    """Threads of hosts; those of environments that other tests made stay until the process ends."""
    return {thread for thread in threading.enumerate() if thread.name == "tools"}


def test_a_host_runs_tools_for_callers_without_a_loop(tmp_path: Path) -> None:
    before = tool_threads()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Rome is in Italy.")
    configs = read_tool_configs(["calculator", {"type": "search", "corpus": str(corpus)}])
    host = ToolHost(configs)
    host.start()
    try:
        host.start()
        assert [schema["function"]["name"] for schema in host.schemas] == ["calculator", "search"]
        outcomes = host.run([ToolCall("calculator", {"expression": "6*7"}), ToolCall("search", {"query": "italy"})])
        assert [outcome.text for outcome in outcomes] == ["42", "[1] Rome is in Italy."]
        assert not host.failed
    finally:
        host.close()
        host.close()
    with pytest.raises(EnvError, match="have been closed"):
        host.run([ToolCall("calculator", {"expression": "1"})])
    assert tool_threads() <= before


def test_hosts_are_shared_and_stay_until_they_are_closed() -> None:
    before = tool_threads()
    shared = SharedTools()
    configs = read_tool_configs(["calculator"])
    first, second, other = shared.take(configs), shared.take(configs), shared.take(configs, timeout=5)
    assert first is second
    assert first is not other
    for host in (first, second, other, other):
        shared.give_back(host)
    again = shared.take(configs)
    assert again is first
    assert again.run([ToolCall("calculator", {"expression": "1+1"})])[0].text == "2"
    shared.close()
    assert tool_threads() <= before
    assert shared.take(configs) is not first
    shared.close()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"type": "calculater"}], r"tools\[0\]: unknown tool type; expected `type`: calculator, search"),
        (["calculator", {"type": "search"}], r"tools\[1\].search.corpus: Field required"),
        ([{"type": "calculator", "x": 1}], r"tools\[0\].calculator.x: Extra inputs"),
        ([3], r"tools\[0\]: unknown tool type"),
    ],
)
def test_a_wrong_entry_is_named_by_its_place(entries: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tool_configs(entries)


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ({"type": "function", "target": "nowhere:f"}, ConfigError, "'nowhere:f' cannot be imported"),
        ({"type": "function", "target": "json:dumb"}, ConfigError, "'json:dumb' cannot be imported"),
        ({"type": "search", "corpus": "/nowhere.txt"}, DataError, "cannot be read"),
    ],
)
def test_a_host_that_cannot_start_says_why(entry: dict[str, str], error: type[Exception], message: str) -> None:
    shared = SharedTools()
    for _ in range(2):
        with pytest.raises(error, match=message):
            shared.take(read_tool_configs([entry]))


def test_function_tools_are_found_by_name() -> None:
    host = ToolHost(read_tool_configs([{"type": "function", "target": "test_tools:forecast", "name": "weather"}]))
    host.start()
    try:
        text = host.run([ToolCall("weather", {"place": {"city": "Rome"}})])[0].text
    finally:
        host.close()
    assert json.dumps(text).startswith('"Rome 1 CELSIUS')
