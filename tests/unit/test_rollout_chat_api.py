"""OpenAI's chat completions on the wire: what is read, what is refused and how, what an answer looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from roll_like.agents.chat_api import (
    ApiError,
    ChatRequest,
    ChatResponse,
    finite_number,
    flag,
    read_arguments,
    read_body,
    read_chat_request,
)
from roll_like.inference.interface import Sampling

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SAMPLING = Sampling(temperature=0.8, top_p=0.9, max_tokens=64)


def read(**fields: Any) -> ChatRequest:
    return read_chat_request({"model": "any", "messages": HELLO, **fields}, SAMPLING)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    return caught.value


def test_the_smallest_request() -> None:
    request = read()
    assert request.messages == tuple(HELLO)
    assert (request.tools, request.stop, request.ignored, request.max_tokens) == ((), (), (), None)
    assert not any((request.stream, request.include_usage, request.logprobs, request.parse_calls))


def test_messages_become_what_templates_take() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    request = read(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "1+1?", "name": "Ada"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "hm"},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ]
    )
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?", "name": "Ada"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    )


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        (None, "messages", "expected a list of messages, found nothing"),
        ([], "messages", "expected a list of messages"),
        (["hello"], "messages[0]", "expected an object, found a text"),
        ([{"role": "robot", "content": ""}], "messages[0].role", "'robot'; expected one of system, user"),
        ([{"role": "user", "content": 3}], "messages[0].content", "found a number"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0]",
            "expected an image as `data:image/png;base64,…`, found nothing",
        ),
        ([{"role": "user", "content": ["text"]}], "messages[0].content", "'a text'"),
        ([{"role": "assistant", "tool_calls": {}}, 1], "messages[1]", "expected an object"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0]", "expected a list, found a text"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]", "a function and its name"),
    ],
)
def test_messages_that_are_refused(messages: Any, param: str, says: str) -> None:
    error = refused(messages=messages)
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 2}, "n", "n is 2; expected 1"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "only the sampled tokens'"),
        ({"functions": []}, "functions", "use tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", 'or an object, found "any"'),
        (
            {"tools": [TOOL], "tool_choice": 3},
            "tool_choice",
            "expected 'none', 'auto', 'required' or an object, found 3",
        ),
        (
            {"tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "patch"}}]},
            "tools",
            "found custom, web_search and no function",
        ),
        ({"tools": {}}, "tools", "expected a list, found an object"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "expected {type: function"),
        ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools[0]", "expected a JSON Schema"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, found 0"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "found 1.5"),
        ({"max_tokens": True}, "max_tokens", "found True"),
        ({"stop": 3}, "stop", "a list of texts"),
        ({"stop": ["a", ""]}, "stop", "not empty"),
        ({"stop": ["x"] * 17}, "stop", "17 strings; at most 16"),
        ({"stream": "yes"}, "stream", "expected true or false, found a text"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], param: str, says: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert says in error.message


def test_limits_and_stops() -> None:
    assert read(max_tokens=5, max_completion_tokens=9).max_tokens == 5
    assert read(stop="x").stop == ("x",)
    assert read(stop=["x", "y"]).stop == ("x", "y")
    assert read(n=1, logprobs=True, stream=True, stream_options={"include_usage": True}).include_usage


def test_tools_are_called_unless_told_otherwise() -> None:
    assert read(tools=[TOOL]).parse_calls
    assert read(tools=[TOOL], tool_choice="auto").parse_calls
    assert not read(tools=[TOOL], tool_choice="none").parse_calls


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_calls_that_frameworks_force_are_asked_for_and_named(choice: Any) -> None:
    asked = read(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert asked.parse_calls
    assert asked.ignored == ("parallel_tool_calls", "tool_choice")


def test_tools_that_are_no_functions_are_not_shown_and_named() -> None:
    others = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": [TOOL]}]
    asked = read(tools=[others[0], TOOL, others[1]], parallel_tool_calls=True)
    assert asked.tools == (TOOL,)
    assert asked.ignored == ("tools.namespace", "tools.web_search")


def test_options_that_the_run_decides_are_named() -> None:
    assert (
        read(temperature=0.8, top_p=0.9, top_k=-1, presence_penalty=0, response_format={"type": "text"}).ignored == ()
    )
    assert read(temperature=0, seed=3, presence_penalty=1, response_format={"type": "json_object"}).ignored == (
        "presence_penalty",
        "response_format",
        "seed",
        "temperature",
    )
    assert read(seed=0).ignored == ("seed",)


def test_options_that_are_not_known_are_named_where_they_ask_for_something() -> None:
    asked = {"parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 5}
    assert read(**asked, temprature=0.5).ignored == (
        "chat_template_kwargs",
        "min_tokens",
        "parallel_tool_calls",
        "temprature",
    )
    nothing = {"parallel_tool_calls": True, "chat_template_kwargs": {}, "min_tokens": 0, "ignore_eos": False}
    account = {"model": "m", "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    assert read(**nothing, **account, stop=["x"], max_tokens=4, logprobs=True, n=1).ignored == ()


def test_what_a_tool_leaves_out_may_be_null() -> None:
    bare = {"name": "add", "description": None, "strict": None}
    for parameters in (None, {"type": "object", "properties": None}):
        tool = {"type": "function", "function": {**bare, "parameters": parameters}}
        assert read(tools=[tool]).tools == (tool,)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(ApiError, match="the body is not valid JSON"):
        read_body(raw)


def test_what_is_no_object_and_what_is_no_text() -> None:
    with pytest.raises(ApiError, match="expected a JSON object, found a list"):
        read_body(b"[]")
    with pytest.raises(ApiError, match="text that is not valid Unicode"):
        read_body(b'{"a": "\\ud83d"}')
    assert read_body(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ("not json", "not json"),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),  # no tokenizer takes that
        ('{"a": 1e400}', '{"a": 1e400}'),  # a template would write Infinity
    ],
)
def test_arguments_of_a_call(written: Any, expected: Any) -> None:
    assert read_arguments(written) == expected


def test_numbers_and_flags_of_a_body() -> None:
    body = {"a": 1, "b": True, "c": float("nan"), "d": "1", "e": 10**400, "f": None}
    assert finite_number(body, "a") == 1.0
    for key, found in {"b": "a truth value", "c": "nan", "d": "a text", "e": "a number", "g": "nothing"}.items():
        with pytest.raises(ApiError, match=f"expected a finite number, found {found}"):
            finite_number(body, key)
    assert flag(body, "b", False) is True
    assert flag(body, "f", None) is None
    with pytest.raises(ApiError, match="expected true or false, found a text"):
        flag(body, "d", None)


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def answer(**changes: Any) -> ChatResponse:
    fields: dict[str, Any] = {
        "answer_id": "chatcmpl-1",
        "created": 1_800_000_000,
        "model": "policy",
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "logprobs": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    return ChatResponse(**(fields | changes))


def chunks(one: ChatResponse, *, include_usage: bool = False) -> list[ChatCompletionChunk]:
    events = list(one.events(include_usage=include_usage))
    assert events.pop() == "data: [DONE]\n\n"
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
    return [ChatCompletionChunk.model_validate(json.loads(event.removeprefix("data: "))) for event in events]


def test_an_answer_is_what_the_client_knows() -> None:
    read_back = ChatCompletion.model_validate(answer().body())
    assert read_back.choices[0].message.content == "hi"
    calling = answer(message={"role": "assistant", "content": None, "tool_calls": [CALL]}, finish_reason="tool_calls")
    (call,) = ChatCompletion.model_validate(calling.body()).choices[0].message.tool_calls or ()
    assert call.to_dict() == CALL


def test_a_stream_adds_up_to_the_answer() -> None:
    calls = [CALL, {**CALL, "id": "call_2"}]
    logprobs = {"content": [{"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}], "refusal": None}
    one = answer(
        message={"role": "assistant", "content": "hi", "tool_calls": calls},
        finish_reason="tool_calls",
        logprobs=logprobs,
    )
    *parts, last, usage = chunks(one, include_usage=True)
    deltas = [part.choices[0].delta for part in parts]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "hi"
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id, call.function and call.function.name) for call in streamed] == [
        (0, "call_1", "add"),
        (1, "call_2", "add"),
    ]
    assert sum(part.choices[0].logprobs is not None for part in parts) == 1
    assert last.choices[0].finish_reason == "tool_calls"
    assert (usage.choices, usage.usage and usage.usage.total_tokens) == ([], 5)
    assert all(part.usage is None for part in parts)


def test_errors_have_openais_shape() -> None:
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 503: "server_error"}
    for status, kind in kinds.items():
        error = ApiError(status, "why", code="c", param="p")
        assert error.body == {"error": {"message": "why", "type": kind, "param": "p", "code": "c"}}
