"""Tool calls as `roll-like serve` returns them: vLLM reads answers with the parser that the command names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import renderer

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]


def parsers(reasoning: str | None = None) -> Any:
    """What vLLM reads an answer with."""
    from vllm.parser.parser_manager import ParserManager

    import roll_like.serving.tool_parser  # noqa: F401 - vLLM imports it by the name in the command

    return ParserManager.get_parser("roll_like", reasoning, enable_auto_tools=True)


def request(**more: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"messages": [{"role": "user", "content": "1+1?"}], "tools": [{"type": "function", "function": TOOL}]}
    return ChatCompletionRequest.model_validate(body | more)


def read(text: str, asked: Any, reasoning: str | None = None) -> tuple[str | None, list[tuple[str, Any]]]:
    """Content and calls of a whole answer."""
    tokenizer = renderer("Qwen3").tokenizer
    parser = parsers(reasoning)(tokenizer, asked.tools)
    asked = parser.adjust_request(asked)
    _, content, calls = parser.parse(text, asked, enable_auto_tools=True)
    return content, [(call.name, json.loads(call.arguments)) for call in calls or ()]


def streamed(text: str, asked: Any) -> tuple[list[str], list[tuple[str, Any]]]:
    """Pieces of content and calls of an answer that comes in pieces."""
    parser = parsers()(renderer("Qwen3").tokenizer, asked.tools)
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    deltas = [
        parser.parse_delta(piece, [1], asked, [1], finished=number == len(pieces))
        for number, piece in enumerate(pieces, start=1)
    ]
    sent = [delta for delta in deltas if delta is not None]
    calls: dict[int, list[Any]] = {}
    for call in (call for delta in sent for call in delta.tool_calls or ()):
        calls.setdefault(call.index, []).append(call.function)
    whole = [(parts[0].name, json.loads("".join(part.arguments or "" for part in parts))) for parts in calls.values()]
    return [delta.content for delta in sent if delta.content], whole


def test_calls_are_read_as_in_a_run() -> None:
    added = [("add", {"a": 1, "b": "x"})]
    assert read(f"I add. {CALL}", request()) == ("I add.", added)
    assert read(CALL, request()) == (None, added)
    # another format than the model's, which none of vLLM's parsers for the model would read
    assert read('[add(a=1, b="x")]', request()) == (None, added)
    assert read(f"<think>{CALL}? No.</think>Two.", request())[1] == []
    assert read(f"<think>Yes.</think>{CALL}", request(), "qwen3") == (None, added)
    assert read(CALL, request(tool_choice="none")) == (CALL, [])
    assert read(CALL, request(tools=None)) == (CALL, [])
    assert read("Two.", request()) == ("Two.", [])


def test_streams_send_calls_whole_and_text_without_tools_at_once() -> None:
    added = [("add", {"a": 1, "b": "x"})]
    assert streamed(f"I add. {CALL}{CALL}", request()) == (["I add."], added * 2)
    assert streamed("It is two, I think.", request()) == (["It is two, I think."], [])
    pieces, calls = streamed(CALL, request(tools=None))
    assert ("".join(pieces), calls) == (CALL, [])
    assert len(pieces) > 5


def test_streams_of_forced_calls_send_them() -> None:
    calls = '[{"name": "add", "parameters": {"a": 1, "b": "x"}}]'
    assert streamed(calls, request(tool_choice="required"))[1] == [("add", {"a": 1, "b": "x"})]


def test_special_tokens_that_mark_calls_stay_in_the_text() -> None:
    parser = parsers()(renderer("Qwen3").tokenizer, request().tools)
    assert not parser.adjust_request(request()).skip_special_tokens
    assert parser.adjust_request(request(tools=None)).skip_special_tokens
