"""Reading tool calls out of what a policy wrote.

hermes     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>            Hermes, Qwen2.5, Qwen3
qwen_xml   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   Qwen3-Coder
json       {"name": "add", "arguments": {"a": 1}}, also in a fence, in a list, or as OpenAI writes it
auto       whichever is there; plain JSON only where there is no tag

What stands within `<think>…</think>` is no call. A closing tag may be missing at the very end, where a stop string or
the token limit took it, as long as the call itself is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

from roll_like.errors import ConfigError
from roll_like.tools.base import AnyCall, MalformedCall, ToolCall

CallStyle: TypeAlias = Literal["auto", "hermes", "qwen_xml", "json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_TAG = re.compile(r"<tool_call>|<function=")
#: Where an object that may be a call begins in prose.
_OBJECT = re.compile(r'\{\s*"(?:name|arguments|parameters|type|function|id|tool_calls)"\s*:')
_FENCE = re.compile(r"^```(?:json)?\s*$", flags=re.MULTILINE)
_EMPTY_FENCE = re.compile(r"```(?:json)?\s*```")
_MOST_CALLS = 64  # of one answer; what follows is text
_MOST_ATTEMPTS = 32  # objects in prose that are tried; each costs at most the length of the text


def parse_tool_calls(
    text: str, style: CallStyle = "auto", tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, list[AnyCall]]:
    """Return the text without its calls, and the calls in order.

    >>> parse_tool_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [ToolCall(name='add', arguments={'a': 1}, call_id='call_0')])

    Args:
        text: One answer, decoded without special tokens.
        style: How calls are written; see above.
        tools: Function schemas. The XML style writes all values as text; the schema says what they mean. Without it
            a value that is JSON is read as JSON.

    Raises:
        ConfigError: There is no such style.
    """
    if style not in get_args(CallStyle):
        raise ConfigError(f"unknown call style {style!r}; expected one of {', '.join(get_args(CallStyle))}")
    begin = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    thinking = text.find("<think>", begin)
    body, rest = (text[begin:], "") if thinking < 0 else (text[begin:thinking], text[thinking:])
    reader = _Reader(body, style, tools)
    if style != "json":
        reader.read_tags()
    if style == "json" or (style == "auto" and not reader.calls):
        reader.read_json()
    return (text[:begin] + reader.remaining() + rest).strip(), reader.calls


class _Reader:
    """Goes through a text once, takes calls out of it, and keeps the rest."""

    def __init__(self, text: str, style: CallStyle, tools: Sequence[Mapping[str, Any]]) -> None:
        self.text = text
        self.style = style
        self.calls: list[AnyCall] = []
        self._types = {
            str(tool["function"]["name"]): tool["function"].get("parameters", {}).get("properties", {})
            for tool in tools
        }
        self._taken: list[tuple[int, int]] = []

    def remaining(self) -> str:
        """Return what was not taken."""
        if not self._taken:
            return self.text
        parts, at = [], 0
        for start, end in self._taken:
            parts.append(self.text[at:start])
            at = end
        return _EMPTY_FENCE.sub("", "".join([*parts, self.text[at:]]))

    def read_tags(self) -> None:
        """Take calls in `<tool_call>` or `<function=…>` tags."""
        at = 0
        while len(self.calls) < _MOST_CALLS and (tag := _TAG.search(self.text, at)) is not None:
            wrapped = tag[0] == _OPEN
            inner = tag.end() if wrapped else tag.start()
            if self.style == "hermes" and not wrapped:
                at = tag.end()
                continue
            xml = _FUNCTION.match(self.text, inner) is not None
            if xml and self.style != "hermes":
                at = self._xml(tag.start(), inner)
            elif self.style == "qwen_xml":
                at = self._malformed(tag.start(), inner, "expected <function=name> after <tool_call>")
            else:
                at = self._tagged_json(tag.start(), inner)

    def read_json(self) -> None:
        """Take calls that are plain JSON."""
        whole = _FENCE.sub("", self.text).strip()
        try:
            value = _loads(whole)
        except ValueError:
            self._json_in_prose()
            return
        found = _calls_in(value)
        if found:
            self._take(0, len(self.text), found)

    def _json_in_prose(self) -> None:
        at = 0
        for _ in range(_MOST_ATTEMPTS):
            start = _OBJECT.search(self.text, at)
            if start is None:
                return
            try:
                value, end = _decode(self.text, start.start())
            except ValueError as error:
                rest = self.text[start.start() :]
                if '"name"' in rest and ('"arguments"' in rest or '"parameters"' in rest):
                    self._take(start.start(), len(self.text), [MalformedCall(rest, f"no valid JSON: {error}")])
                    return
                at = start.end()
                continue
            found = _calls_in(value)
            if found:
                self._take(start.start(), end, found)
            at = end

    def _tagged_json(self, start: int, inner: int) -> int:
        try:
            value, end = _decode(self.text, self._skip_space(inner))
        except ValueError as error:
            return self._malformed(start, inner, f"no valid JSON: {error}")
        after = self._skip_space(end)
        if self.text.startswith(_CLOSE, after):
            end = after + len(_CLOSE)
        elif after < len(self.text) and not self.text.startswith(_OPEN, after):
            return self._malformed(start, inner, "text between the JSON object and </tool_call>")
        return self._take(start, end, [_call(value, self.text[start:end])])

    def _xml(self, start: int, inner: int) -> int:
        head = _FUNCTION.match(self.text, inner)
        assert head is not None, "the caller has seen the tag"
        name, at = head[1].strip(), head.end()
        types = self._types.get(name, {})
        arguments: dict[str, Any] = {}
        while (parameter := _PARAMETER.match(self.text, at)) is not None:
            end = self.text.find("</parameter>", parameter.end())
            if end < 0:
                return self._malformed(start, inner, f"the parameter {parameter[1]!r} has no </parameter>")
            key = parameter[1].strip()
            arguments[key] = _value(self.text[parameter.end() : end], types.get(key))
            at = end + len("</parameter>")
        for tag in ("</function>", *((_CLOSE,) if self.text.startswith(_OPEN, start) else ())):
            place = self._skip_space(at)
            if self.text.startswith(tag, place):
                at = place + len(tag)
            elif place < len(self.text):
                found = self.text[place : place + 20]
                return self._malformed(start, inner, f"expected <parameter=name> or {tag}, found {found!r}")
        call = ToolCall(name, arguments) if name else MalformedCall(self.text[start:at], "the function has no name")
        return self._take(start, at, [call])

    def _malformed(self, start: int, inner: int, problem: str) -> int:
        close = self.text.find(_CLOSE, inner)
        again = self.text.find(_OPEN, inner)
        ends = [close + len(_CLOSE)] if close >= 0 else []
        ends += [again] if again >= 0 else []
        end = min(ends, default=len(self.text))
        return self._take(start, end, [MalformedCall(self.text[start:end], problem)])

    def _skip_space(self, at: int) -> int:
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at

    def _take(self, start: int, end: int, calls: Sequence[AnyCall]) -> int:
        """Take calls out of the text between two places, and return the second."""
        self._taken.append((start, end))
        for call in calls:
            self.calls.append(replace(call, call_id=f"call_{len(self.calls)}"))
        return end


def _calls_in(value: Any) -> list[AnyCall]:
    """Return the calls that a JSON value holds: one, a list of them, or OpenAI's `tool_calls`; none otherwise."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        return [_call(each, json.dumps(each)) for each in value["tool_calls"]]
    if isinstance(value, list) and value and all(_is_call(each) for each in value):
        return [_call(each, json.dumps(each)) for each in value]
    return [_call(value, json.dumps(value))] if _is_call(value) else []


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    inner = value.get("function", value)
    return isinstance(inner, dict) and "name" in inner and ("arguments" in inner or "parameters" in inner)


def _call(value: Any, text: str) -> AnyCall:
    inner = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(inner, dict):
        return MalformedCall(text, f"expected a JSON object, found {_kind(inner)}")
    name = inner.get("name")
    arguments = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI writes them as JSON within JSON
        try:
            arguments = _loads(arguments)
        except ValueError as error:
            return MalformedCall(text, f"its arguments are no valid JSON: {error}")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'expected the tool\'s name under "name"')
    if not isinstance(arguments, dict):
        return MalformedCall(text, f'expected an object under "arguments", found {_kind(arguments)}')
    return ToolCall(name, arguments)


def _value(text: str, schema: Any) -> Any:
    """Return what a parameter of the XML style means."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return _loads(text)
    except ValueError:
        return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _loads(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}.get(
        type(value), "a number"
    )
