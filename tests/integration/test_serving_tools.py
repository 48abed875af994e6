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

    import roll_like.serving.reasoning_parser  # vLLM imports both by the names in the command
    import roll_like.serving.tool_parser  # noqa: F401

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


def deltas_of(text: str, asked: Any, reasoning: str | None = None, prompt: str = "", size: int = 7) -> list[Any]:
    """What is sent of an answer that comes in pieces."""
    tokenizer = renderer("Qwen3").tokenizer
    parser, prompt_ids = parsers(reasoning)(tokenizer, asked.tools), tokenizer.encode(prompt) or [1]
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [
        parser.parse_delta(piece, [1], asked, prompt_ids, finished=number == len(pieces))
        for number, piece in enumerate(pieces, start=1)
    ]
    return [delta for delta in deltas if delta is not None]


def streamed(text: str, asked: Any) -> tuple[list[str], list[tuple[str, Any]]]:
    """Pieces of content and calls of an answer that comes in pieces."""
    sent = deltas_of(text, asked)
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


def test_streams_send_calls_whole_and_text_as_it_comes() -> None:
    added = [("add", {"a": 1, "b": "x"})]
    assert streamed(f"I add. {CALL}{CALL}", request()) == (["I add."], added * 2)
    pieces, calls = streamed("It is two, I think: 1 < 2, and so on.", request())
    assert ("".join(pieces), calls) == ("It is two, I think: 1 < 2, and so on.", [])
    assert len(pieces) > 3
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


SIZES = pytest.mark.parametrize("size", [1, 4, 7, 1000])


@SIZES
def test_reasoning_is_apart_from_content_and_calls(size: int) -> None:
    tokenizer, added = renderer("Qwen3").tokenizer, [("add", {"a": 1, "b": "x"})]
    for text, reasoning, content, called in (
        (f"<think>\nYes: {CALL}\n</think>\n\nI add. {CALL}", f"Yes: {CALL}", "I add.", added),
        ("<think>Hm</think>Two.", "Hm", "Two.", []),
        ("<think>\nHm\n</think>\n\nTwo.", "Hm", "Two.", []),
        ("Two.", None, "Two.", []),
        ("<think>Never", "Never", None, []),
    ):
        parser = parsers("roll_like")(tokenizer, request().tools)
        found, said, calls = parser.parse(text, request(), enable_auto_tools=True)
        assert (found, said) == (reasoning, content), text
        assert [(call.name, json.loads(call.arguments)) for call in calls or ()] == called
        sent = deltas_of(text, request(), "roll_like", size=size)
        assert "".join(delta.reasoning or "" for delta in sent) == (reasoning or ""), text
        assert "".join(delta.content or "" for delta in sent) == (content or ""), text
        assert len([call for delta in sent for call in delta.tool_calls or ()]) == len(called)
        if not called:
            sent = deltas_of(text, request(tools=None), "roll_like", size=size)
            assert "".join(delta.content or "" for delta in sent) == (content or ""), text


OPENED = "<|im_start|>assistant\n<think>\n"


@SIZES
def test_the_prompt_says_whether_reasoning_has_begun_or_ended(size: int) -> None:
    for prompt, text, reasoning, content in (
        (OPENED, "Hm</think>Two.", "Hm", "Two."),
        (OPENED, "[Step 1] hm\n</think>\n\nTwo.", "[Step 1] hm", "Two."),
        (OPENED, "{x} is a set</think>Two.", "{x} is a set", "Two."),
        (OPENED, "[", "[", ""),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hm</think>Two.", "", "Hm</think>Two."),
    ):
        sent = deltas_of(text, request(), "roll_like", prompt, size)
        assert "".join(delta.reasoning or "" for delta in sent) == reasoning
        assert "".join(delta.content or "" for delta in sent) == content


@SIZES
def test_an_answer_that_is_forced_into_a_format_has_no_reasoning(size: int) -> None:
    forced = '[{"name": "add", "parameters": {"a": 1, "b": "x"}}]'
    sent = deltas_of(forced, request(tool_choice="required"), "roll_like", OPENED, size)
    assert not any(delta.reasoning for delta in sent)
    assert [call.function.name for delta in sent for call in delta.tool_calls or () if call.function.name] == ["add"]


def test_only_what_a_request_forces_is_an_answer_without_reasoning() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for more, text, expected in (
        ({}, "[Step 1] hm", ("[Step 1] hm", None)),
        ({"response_format": {"type": "text"}}, "{x} hm</think>Two", ("{x} hm", "Two")),
        ({"response_format": schema}, '{"a": "</think>"}', (None, '{"a": "</think>"}')),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", (None, "yes")),
        ({"tool_choice": "required"}, '[{"name": "add"}]', (None, '[{"name": "add"}]')),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, '{"a": 1}', (None, '{"a": 1}')),
    ):
        asked = request(**more)
        parser = parsers("roll_like")(renderer("Qwen3").tokenizer, asked.tools).reasoning_parser
        parser.adjust_initial_state_from_prompt(renderer("Qwen3").tokenizer.encode(OPENED))
        assert parser.extract_reasoning(text, asked) == expected, text


def test_reasoning_tokens_are_counted() -> None:
    tokenizer = renderer("Qwen3").tokenizer
    parser = parsers("roll_like")(tokenizer, None)
    for text, count in (("<think>a b</think>Two.", 4), ("<think>a b", 3), ("Two.", 0)):
        assert parser.count_reasoning_tokens(tokenizer.encode(text)) == count
