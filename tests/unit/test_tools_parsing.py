"""Tool calls as policies write them, well and badly."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_like.data.reasoning import KNOWN_TAGS, split_reasoning
from roll_like.errors import ConfigError
from roll_like.tools import CallStyle, MalformedCall, ToolCall, parse_tool_calls
from roll_like.tools.answers import openai_answer
from roll_like.types import ReasoningTags

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
XML = f"<tool_call>\n<function=add>\n{PARAMETERS}</function>\n</tool_call>"
OPENAI = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CLOSES = '<tool_call>{"name": "say", "arguments": {"x": "</tool_call>"}}</tool_call>'
ADD = ToolCall("add", {"a": 1, "b": 2})
SCHEMA = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "lines": {"type": "array"}}},
    },
}


@pytest.mark.parametrize(
    ("text", "style", "rest", "calls"),
    [
        (HERMES, "hermes", "", [ADD]),
        (HERMES, "auto", "", [ADD]),
        (f"I add.\n{HERMES}\nSo.", "auto", "I add.\n\nSo.", [ADD]),
        (HERMES + HERMES, "auto", "", [ADD, ToolCall("add", {"a": 1, "b": 2}, "call_1")]),
        # what a stop string or the end of the turn leaves
        (HERMES.removesuffix("</tool_call>"), "auto", "", [ADD]),
        (HERMES.removesuffix("\n</tool_call>") + HERMES, "auto", "", [ADD, ToolCall("add", ADD.arguments, "call_1")]),
        (CLOSES, "auto", "", [ToolCall("say", {"x": "</tool_call>"})]),
        ('<tool_call>{"name": "now"}</tool_call>', "auto", "", [ToolCall("now", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "auto", "", [ToolCall("f", {"x": 1})]),
        (XML, "auto", "", [ADD]),
        (XML, "qwen_xml", "", [ADD]),
        (f"Well.\n{XML}", "auto", "Well.", [ADD]),
        (XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), "auto", "", [ADD]),
        (XML.removesuffix("</function>\n</tool_call>"), "auto", "", [ADD]),
        (XML + "\n" + HERMES, "auto", "", [ADD, ToolCall("add", ADD.arguments, "call_1")]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', "json", "", [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', "auto", "", [ADD]),
        ('I call {"name": "add", "arguments": {"a": 1, "b": 2}} now.', "json", "I call  now.", [ADD]),
        ('Look:\n```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```', "auto", "Look:", [ADD]),
        ('[{"name": "add", "arguments": {"a": 1, "b": 2}}]', "json", "", [ADD]),
        (json.dumps({"tool_calls": [OPENAI]}), "json", "", [ToolCall("add", ADD.arguments, "x")]),
        # no calls
        ("The answer is 3.", "auto", "The answer is 3.", []),
        ('{"answer": 3}', "auto", '{"answer": 3}', []),
        ('{"name": "Ada", "age": 36}', "json", '{"name": "Ada", "age": 36}', []),
        ('The name: {"name": "Ada"', "json", 'The name: {"name": "Ada"', []),
        (HERMES, "json", "<tool_call>\n\n</tool_call>", [ADD]),
        (f"<think>{HERMES}</think>Done.", "auto", f"<think>{HERMES}</think>Done.", []),
        (f"<think>hm</think>{HERMES}", "auto", "<think>hm</think>", [ADD]),
        (f"hm</think>{HERMES}", "auto", "hm</think>", [ADD]),
        (f"{HERMES}<think>and {HERMES}", "auto", f"<think>and {HERMES}", [ADD]),
        ("", "auto", "", []),
    ],
)  # fmt: skip
def test_calls_are_read(text: str, style: Any, rest: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text, style) == (rest, calls)


@pytest.mark.parametrize(
    ("text", "style", "problem"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "auto", "no valid JSON"),
        ("<tool_call>add(1, 2)</tool_call>", "auto", "no valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "auto", "NaN is not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {}}}</tool_call>', "auto", "text between the call and </tool_call>"),
        ('<tool_call>{"arguments": {}}</tool_call>', "auto", "the tool's name"),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "auto",
            'an object under "arguments", found a list',
        ),
        ('<tool_call>{"name": "add", "arguments": "x"}</tool_call>', "auto", "its arguments are no valid JSON"),
        ("<tool_call>[1]</tool_call>", "auto", "expected a JSON object, found a number"),
        ("<tool_call>" + "[" * 100_000, "auto", "nested too deeply"),
        (HERMES, "qwen_xml", "expected <function=name>"),
        (XML, "hermes", "no valid JSON"),
        ("<function=add><parameter=a>1", "auto", "the parameter 'a' has no </parameter>"),
        ("<function=add>a=1</function>", "auto", "expected <parameter=name> or </function>"),
        ("<function=><parameter=a>1</parameter></function>", "auto", "no name"),
        ('{"name": "add", "arguments": {"a": 1', "json", "no valid JSON"),
        ('{"tool_calls": [3]}', "json", "expected a JSON object, found a number"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, style: Any, problem: str) -> None:
    rest, calls = parse_tool_calls(text, style)
    assert rest == ""
    assert len(calls) == 1
    assert isinstance(calls[0], MalformedCall)
    assert problem in calls[0].problem
    assert calls[0].call_id == "call_0"


_NS = "]<]minimax[>["
_ORDER = {
    "type": "function",
    "function": {
        "name": "order",
        "parameters": {
            "type": "object",
            "properties": {
                "user": {"type": "integer"},
                "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
                "note": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"anyOf": [{"type": "object", "properties": {"n": {"type": "string"}}}, {"type": "null"}]},
            },
            "$defs": {"item": {"type": "object", "properties": {"sku": {"type": "string"}, "n": {"type": "integer"}}}},
        },
    },
}


def _tags(text: str) -> str:
    """Return MiniMax M3's writing of tags: `{` stands for the token before each."""
    return text.replace("{", _NS)


_ITEMS = (
    "{<items>\n{<item>{<sku>007{</sku>{<n>2{</n>{</item>\n{<item>{<sku>a <b>x</b>{</sku>{</item>{</items>"
    "{<user>42{</user>{<note> x\n{</note>{<tags>{</tags>{<more>{<n>5{</n>{</more>\n"
)
_ORDERED = {
    "items": [{"sku": "007", "n": 2}, {"sku": "a <b>x</b>"}],
    "user": 42,
    "note": " x\n",
    "tags": [],
    "more": {"n": "5"},
}


@pytest.mark.parametrize("style", ["auto", "minimax"])
def test_tags_within_tags_are_objects_and_lists(style: Any) -> None:
    begins, ends = "Sure.\n{<tool_call>\n", "{</tool_call>"
    order, now = f'{{<invoke name="order">\n{_ITEMS}{{</invoke>\n', '{<invoke name="now">\n{</invoke>\n'
    calls = [ToolCall("order", _ORDERED), ToolCall("now", {}, "call_1")]
    for text in (begins + order + now + ends, begins + order + now):  # a stop string or the limit may take the end
        assert parse_tool_calls(_tags(text), style, [_ORDER]) == ("Sure.", calls)
    # without a schema a list is where every tag is an item, and tags of one name are a list as well
    text = _tags("{<tool_call>{<invoke name='f'>{<a>{<item>1{</item>{</a>{<b>x{</b>{<b>y{</b>{</invoke>{</tool_call>")
    assert parse_tool_calls(text, style) == ("", [ToolCall("f", {"a": [1], "b": ["x", "y"]})])


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        ("{<a>1{</b>", "expected </a>, found </b>"),
        ("{<a>1{<b>2{</b>{</a>", "text beside the tags within <a>"),
        ("{<a>1", "expected </a>, found </invoke>"),
        ("{<a>" * 200, "nested too deeply"),
        ("5", "its arguments are text"),
    ],
)
def test_tags_that_do_not_fit_say_why(inner: str, problem: str) -> None:
    text = _tags(f'{{<tool_call>{{<invoke name="f">{inner}{{</invoke>{{</tool_call>')
    rest, (call,) = parse_tool_calls(text)
    assert rest == ""
    assert isinstance(call, MalformedCall)
    assert problem in call.problem


def test_a_tools_own_tag_in_a_line_is_a_call_where_nothing_goes_on() -> None:
    tools = [{"function": {"name": "get_time"}}, {"function": {"name": "add"}}]
    for end in ("", "\n", "</function>", "<|im_end|>"):
        found = parse_tool_calls(f"Let me look. <function=get_time>{end}", tools=tools)
        assert found == ("Let me look.", [ToolCall("get_time", {})])
    text = "Let me call <function=add>a=1</function>"
    rest, (broken,) = parse_tool_calls(text, tools=tools)
    assert rest == "Let me call"
    assert isinstance(broken, MalformedCall)
    assert "expected <parameter=name> or </function>" in broken.problem
    for unknown in (text, "Let me look. <function=get_time>"):
        assert parse_tool_calls(unknown) == (unknown, [])


@pytest.mark.parametrize(
    "text",
    [
        "Use <function=x> to call it.",
        "The tag is <function=x>",
        "The tags are <function=add> and </function>, I think.",
        "Use <function=add> first.",
        "Write <tool_calls> and </tool_calls> around a list.",
        "It stands between <tool_call> and </tool_call>.",
        "Between <tool_call>and</tool_call>, I mean.",
    ],
)
def test_marks_in_a_sentence_are_words(text: str) -> None:
    for tools in ((), [{"function": {"name": "add"}}]):
        assert parse_tool_calls(text, tools=tools) == (text, [])
        rest, calls = parse_tool_calls(f"{text}\n{HERMES}", tools=tools)
        assert (rest, calls) == (text, [ADD])


def test_a_malformed_call_does_not_take_the_next_with_it() -> None:
    rest, calls = parse_tool_calls(f"a <tool_call>{{broken</tool_call> b {HERMES} c")
    assert rest == "a  b  c"
    assert [type(call) for call in calls] == [MalformedCall, ToolCall]
    rest, calls = parse_tool_calls(f"<tool_call>{{broken {HERMES}")
    assert [type(call) for call in calls] == [MalformedCall, ToolCall]


def test_the_schema_says_what_values_of_the_xml_style_mean() -> None:
    text = "<function=write><parameter=text>\n12\n\n</parameter><parameter=lines>[1, 2]</parameter></function>"
    assert parse_tool_calls(text, tools=[SCHEMA])[1] == [ToolCall("write", {"text": "12\n", "lines": [1, 2]})]
    assert parse_tool_calls(text)[1] == [ToolCall("write", {"text": 12, "lines": [1, 2]})]
    unread = text.replace("[1, 2]", "[1, 2")
    assert parse_tool_calls(unread, tools=[SCHEMA])[1] == [ToolCall("write", {"text": "12\n", "lines": "[1, 2"})]


def _invoked(prefix: str, name: str) -> str:
    return f'<{prefix}invoke name="{name}"><{prefix}parameter name="text">x</{prefix}parameter></{prefix}invoke>'


#: By the mark before the answer: reasoning, a call, one that cannot be read, and words, as messages.
_MESSAGES = {
    "<|channel|>final<|message|>": (
        "<|channel|>analysis<|message|>Hm.<|end|>",
        '<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"text": "x"}<|call|>',
        '<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"text<|call|>',
        "<|start|>assistant<|channel|>final<|message|>{}<|end|>",
    ),
    "<|open|>response<|sep|>": (
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|>",
        '<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|><|open|>argument key="text" type="string"<|sep|>'
        "x<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        '<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|>x<|close|>tools<|sep|>',
        "<|open|>response<|sep|>{}<|close|>response<|sep|>",
    ),
    "to=user<|message|>": (
        " to=self<|message|>Hm.<|eom|>",
        "<|start|>assistant to=write<|message|><atem:function_calls>"
        f"{_invoked('atem:', 'write')}</atem:function_calls><|eom|>",
        "<|start|>assistant to=write<|message|><atem:function_calls>x</atem:function_calls><|eom|>",
        "<|start|>assistant to=user<|message|>{}<|eom|>",
    ),
    "<|content_text|>": (
        "<|content_thinking|>Hm.<|end_message|>",
        '<|message_model|><|content_invoke_tool_json|>{"name": "write", "args": {"text": "x"}}<|end_message|>',
        '<|message_model|><|content_invoke_tool_json|>{"name": <|end_message|>',
        "<|message_model|><|content_text|>{}<|end_message|>",
    ),
}


@pytest.mark.parametrize("tags", [tags for tags in KNOWN_TAGS if tags.final], ids=lambda tags: tags.final)
def test_a_call_between_messages_of_other_kinds_is_read(tags: ReasoningTags) -> None:
    reasoning, call, broken, words = _MESSAGES[tags.final]
    before, after = words.replace("{}", "Calling."), words.replace("{}", "Called.")
    for text, expected in (
        (call + after, (None, "Called.")),
        (before + call, (None, "Calling.")),
        (before + call + after, (None, "Calling.Called.")),
        (reasoning + call + after, ("Hm.", "Called.")),
        (reasoning + before + call + after, ("Hm.", "Calling.Called.")),
    ):
        assert parse_tool_calls(text, tools=[SCHEMA], reasoning=tags)[1] == [ToolCall("write", {"text": "x"})], text
        content, (called,) = openai_answer(text, [SCHEMA], reasoning=tags)
        assert called["function"]["name"] == "write"
        assert split_reasoning(content, tags) == expected, text
        if not text.startswith(reasoning):
            assert content == expected[1]  # as `serve` sends it
    content, calls = openai_answer(before + broken + call, [SCHEMA], reasoning=tags)
    assert len(calls) == 1
    assert content == f"Calling.\n{broken}"
    thought, said = split_reasoning(content, tags)
    assert thought is None
    assert said.startswith("Calling.\n")


@pytest.mark.parametrize("tags", [tags for tags in KNOWN_TAGS if tags.final], ids=lambda tags: tags.final)
def test_a_call_in_reasoning_that_the_prompt_opened_is_none(tags: ReasoningTags) -> None:
    _, call, _, words = _MESSAGES[tags.final]
    quoted = "<tool_call>{}</tool_call>".format('{"name": "write", "arguments": {}}')
    text = f"Hm, {quoted}{tags.close}{call}{words.format('Called.')}"
    opened = replace(tags, opened=True)
    assert parse_tool_calls(text, tools=[SCHEMA], reasoning=opened)[1] == [ToolCall("write", {"text": "x"})]
    assert split_reasoning(openai_answer(text, [SCHEMA], reasoning=opened)[0], opened) == (f"Hm, {quoted}", "Called.")


def test_reasoning_of_harmony_ends_where_a_message_begins() -> None:
    reasoning, call, _, _ = _MESSAGES["<|channel|>final<|message|>"]
    text = reasoning.removesuffix("<|end|>") + call
    assert parse_tool_calls(text, reasoning=KNOWN_TAGS[0])[1] == [ToolCall("write", {"text": "x"})]


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown call style 'xml'; expected one of auto, hermes"):
        parse_tool_calls("", "xml")  # type: ignore[arg-type]


_plain = st.text(st.characters(exclude_characters="<>{}[]", exclude_categories=["Cs"]))
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_calls = st.tuples(st.text("abc_", min_size=1), st.dictionaries(st.text(), _values, max_size=3))


@given(before=_plain, written=st.lists(_calls, min_size=1, max_size=3))
def test_whatever_is_written_in_hermes_style_is_read_back(before: str, written: Any) -> None:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in written]
    tags = [f"<tool_call>\n{each}\n</tool_call>" for each in objects]
    rest, calls = parse_tool_calls(before + "".join(tags))
    assert rest == before.strip()
    assert calls == [ToolCall(name, arguments, f"call_{at}") for at, (name, arguments) in enumerate(written)]


_TAGS = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=p>", "</parameter>"]
_MARKS = [
    "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[f(", "a=1",
    ")", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|channel|>", "commentary to=functions.f", "<|message|>", "<|call|>",
    "]<]minimax[>[", "]<]minimax[>[<tool_call>", ']<]minimax[>[<invoke name="f">', "]<]minimax[>[<a>",
    "<minimax:tool_call>", '<invoke name="f">', "</invoke>", "<|im_end|>", "f", "'", "<|tool_call>", "call:f{", "a:",
    '<|"|>', "<tool_call|>", "<tool_calls>", '<function name="f">', "<atem:function_calls>", "to=f<|message|>",
    "<|open|>tools<|sep|>", '<|open|>argument key="a"<|sep|>', "functools[{", "<|plamo:begin_tool_request:plamo|>",
]  # fmt: skip
_PIECES = ['{"name": "f", ', '"arguments": {', "}", "}}", "[", "]", '"', "\\", "1", "x", " ", "\n", "```json\n", "```"]
_scraps = st.lists(
    st.sampled_from([*_TAGS, *_MARKS, "<think>", "</think>", *_PIECES]) | st.text(max_size=3),
    max_size=20,
).map("".join)


@settings(max_examples=3 * settings().max_examples)
@given(text=_scraps, style=st.sampled_from(get_args(CallStyle)), known=st.booleans())
def test_nothing_that_is_written_breaks_the_parser(text: str, style: Any, known: bool) -> None:
    rest, calls = parse_tool_calls(text, style, [{"function": {"name": "f"}}] if known else [])
    assert [call.call_id for call in calls] == [f"call_{at}" for at in range(len(calls))]
    assert len(rest) <= len(text)
    assert calls or rest == text.strip()


_NESTED = '{"name": "f", "arguments": {"a": '


@pytest.mark.parametrize("unit", [*_TAGS, *_MARKS, '{"name": ', _NESTED, "<function=f><parameter=p>", "```", " "])
def test_hostile_text_takes_no_time(unit: str) -> None:
    text = unit * (64_000 // len(unit))
    began = time.process_time()
    for style in ("auto", "hermes", "qwen_xml", "json"):
        parse_tool_calls(text, style, [{"function": {"name": "f"}}])  # type: ignore[arg-type]
    assert time.process_time() - began < 2
