"""The formats of calls: what marks each, and what reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from roll_like.tools.base import AnyCall, MalformedCall
from roll_like.tools.calls.elements import BEFORE_TAG, read_elements
from roll_like.tools.calls.functions import Functions
from roll_like.tools.calls.literals import Unread, read_value, skip_space
from roll_like.tools.calls.payloads import (
    ENDS,
    FUNCTION,
    FUNCTION_HEAD,
    NAMED_FUNCTION,
    PayloadReader,
    called_by_name,
    ended,
    payload_at,
    read_called,
    read_function,
    read_invoke,
    read_keyed,
    read_objects,
    read_plain_objects,
    read_python,
)

CallStyle: TypeAlias = Literal[
    "auto", "hermes", "qwen_xml", "llama", "mistral", "glm", "deepseek", "kimi", "harmony", "minimax", "gemma",
    "pythonic", "json",
]  # fmt: skip


class Found(NamedTuple):
    """Calls in a text: characters `[start, end)`."""

    start: int
    end: int
    calls: Sequence[AnyCall]
    plain: bool = False


Read: TypeAlias = Callable[[str, "re.Match[str]", Functions], Found | None]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of calls.

    Attributes:
        begins: Regular expression of how a call begins, without groups that have names.
        read: Returns the calls at a match; None where it only looks like one.
        plain: Whether text that is no call may look the same: then a call stands alone.
    """

    begins: str
    read: Read
    plain: bool = False


def _broken(text: str, start: int, inner: int, close: str | None, again: str, problem: str) -> Found:
    """Return what cannot be read, up to its closing tag, the next call, reasoning, or the end of the text."""
    stop = re.compile("|".join([*([f"(?P<close>{close})"] if close else []), again]))
    match = stop.search(text, inner)
    end = len(text) if match is None else match.end() if close and match["close"] else match.start()
    return Found(start, end, [MalformedCall(text[start:end], problem)])


# ---- a payload between an opening and a closing mark --------------------------------------------


#: Some models put a fence between the marks.
_FENCE = re.compile(r"\s*```(?:json|python|xml)?\s*\n")
_FENCE_END = re.compile(r"\s*```(?=\s*<)")


def _wrapped(
    text: str, opened: re.Match[str], functions: Functions, *, close: str, allowed: Sequence[PayloadReader]
) -> Found | None:
    fence = _FENCE.match(text, opened.end())
    inner = fence.end() if fence else opened.end()
    if ended(text, inner) is not None:  # a mark and nothing else
        return None
    payload = payload_at(text, inner)
    if payload is None or (payload is read_keyed and not called_by_name(text, inner, functions)):
        closed = re.compile(close).search(text, inner)
        if closed is None or _spoken_of(text, opened.start(), closed.end()):
            return None
    try:
        calls, end = (payload if payload in allowed and payload else allowed[0])(text, inner, functions)
        return Found(opened.start(), _closed(text, end, opened[0], close), calls)
    except Unread as error:
        return _broken(text, opened.start(), inner, close, re.escape(opened[0]), str(error))


def _spoken_of(text: str, start: int, end: int) -> bool:
    """Return whether marks stand in a sentence, which goes on after them."""
    return _BEGINS_APART.match(text, start) is None and _GOES_ON.match(text, end) is not None


def _closed(text: str, end: int, mark: str, close: str) -> int:
    """Return the place after the closing mark of a payload that ends at `end`.

    Raises:
        Unread: Something stands between the two.
    """
    fence = _FENCE_END.match(text, end)
    at = skip_space(text, fence.end() if fence else end)
    pattern = re.compile(close)
    if (closed := pattern.match(text, at)) is not None:
        return closed.end()
    if (after := ended(text, at)) is not None:
        return after
    if text.startswith(mark, at):  # the next call, or the opening mark in place of the closing one
        again = at + len(mark)
        return again if ended(text, again) is not None else at
    if (closed := pattern.search(text, at)) is not None:
        raise Unread(f"text between the call and {closed[0] or 'the end'}")
    return end


def _tagged(begins: str, close: str, *allowed: PayloadReader) -> CallFormat:
    return CallFormat(begins, partial(_wrapped, close=close, allowed=allowed))


_HERMES = _tagged("<tool_call>", "</tool_call>", read_objects)
_QWEN = _tagged("<tool_call>", "</tool_call>", read_function)
#: As the families name it: Hermes, GLM; Seed; LongCat; K2 Horizon; Hunyuan 3 and 4, which add a code of their own.
_MARK, _CODE = r"(?:seed:|longcat_|ifm\|)?tool_call", r"(?::\w+)?"
_TOOL_CALL_MARKS = (
    # after a code, the tool's name or JSON: XML may have tags of this form
    rf"(?:<{_MARK}s{_CODE}>\s*)?<{_MARK}(?:>|:\w+>(?=[\w.-]+\s*<|\s*[{{\[]))",
    rf"</{_MARK}{_CODE}>(?:\s*</{_MARK}s{_CODE}>)?",
)  # fmt: skip
_KEYED = _tagged(*_TOOL_CALL_MARKS, read_keyed)
_TOOL_CALL = _tagged(*_TOOL_CALL_MARKS, read_objects, read_function, read_keyed, read_invoke)
#: At the beginning of a line, or after a mark or JSON: a sentence may have the word too.
_APART = r"(?:(?<![^\n>}\]])|(?<=\s)(?<![^\n>}\]]\s))"
_BEGINS_APART = re.compile(_APART)
#: Words or punctuation on the same line.
_GOES_ON = re.compile(r"[^\S\n]*[^\s<\[]")
#: Of models that have one mark of their own around JSON or Python.
_OTHERS = (
    _tagged("<tool_calls>", "</tool_calls>", read_objects),
    _tagged("<TOOLCALL>", "</TOOLCALL>", read_objects),
    _tagged(r"<\|tool_call\|>", r"<\|/tool_call\|>", read_objects),
    _tagged(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>", read_objects),
    _tagged(r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>", read_objects),
    _tagged(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>", read_objects),
    _tagged(r"(?:<\|message_model\|>)?<\|content_invoke_tool_json\|>", r"<\|end_message\|>", read_objects),
    _tagged(rf"{_APART}<function_call>(?=\s*[{{\[])", "</function_call>", read_objects),
    _tagged(rf"<\|function_call\|>|function call<\|role_sep\|>|{_APART}functools(?=\[\s*\{{)", ENDS, read_objects),
)
_PYTHON_TAGS = (
    _tagged(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", read_python, read_objects),
    _tagged(r"<\|python_start\|>", r"<\|python_end\|>", read_python, read_objects),
    _tagged("<function_calls>", "</function_calls>", read_python, read_invoke),
    _tagged("```tool_code\n", r"\s*```", read_python),
)


# ---- single formats ----------------------------------------------------------------------------


_TO_FUNCTION_END = re.compile(r"(?s:(?!<function=).)*?</function>")


def _function(text: str, opened: re.Match[str], functions: Functions) -> Found | None:
    """`<function=f>…</function>` or `<function name="f">…` without a tag around it; `</tool_call>` may be left."""
    named = "name" in opened[0]
    if named and NAMED_FUNCTION.match(text, opened.start()) is None:
        return None
    if not named and not (
        _BEGINS_APART.match(text, opened.start()) or _calls_function(text, opened.start(), functions)
    ):
        return None  # the tag stands in a sentence
    read = read_invoke if named else read_function
    try:
        calls, end = read(text, opened.start(), functions)
    except Unread as error:
        return _broken(text, opened.start(), opened.end(), "</tool_call>", "<tool_call>|<function", str(error))
    stray = re.compile(r"\s*</tool_call>").match(text, end)
    return Found(opened.start(), stray.end() if stray else end, calls)


def _calls_function(text: str, at: int, functions: Functions) -> bool:
    """Return whether what follows `<function=f>` shows a call; of a tool, the end of the turn or a closing tag does."""
    if FUNCTION.match(text, at) is not None:
        return True
    head = FUNCTION_HEAD.match(text, at)
    if head is None or functions.name(head[1].strip("\"' ")) not in functions.parameters:
        return False
    if ended(text, head.end()) is not None:
        return True
    closed = _TO_FUNCTION_END.match(text, head.end())
    return closed is not None and _GOES_ON.match(text, closed.end()) is None


_MISTRAL_NAME = re.compile(r"\s*([\w./-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\])?\s*(?=[{\[]|\Z)")


def _mistral(text: str, opened: re.Match[str], functions: Functions) -> Found:
    """`[TOOL_CALLS]` before JSON (old), or before a name and its arguments (from v11 on), one or more."""
    start, at = opened.span()
    try:
        named = _MISTRAL_NAME.match(text, at)
        if named is None:
            calls, end = read_objects(text, at, functions)
            return Found(start, ended(text, end) or end, calls)
        calls = []
        while named is not None:
            arguments, end = _arguments(text, named.end())
            calls.append(functions.call(named[1], arguments, text[start:end], named[2] or ""))
            named = _MISTRAL_NAME.match(text, end) if functions.parameters else None
            named = named if named and functions.maybe(named[1]) else None
        return Found(start, ended(text, end) or end, calls)
    except Unread as error:
        return _broken(text, start, at, None, r"\[TOOL_CALLS\]", str(error))


def _arguments(text: str, at: int) -> tuple[object, int]:
    try:
        return read_value(text, skip_space(text, at))
    except ValueError as error:
        raise Unread(f"its arguments are no valid JSON: {error}") from error


def _headed(
    text: str, opened: re.Match[str], functions: Functions, *, head: str, after: str, section: tuple[str, str]
) -> Found:
    """JSON arguments behind heads that name the function, in a section.

    Args:
        text: Holds the section.
        opened: Its opening mark, or a call's.
        functions: That may be called.
        head: Of a call, with the group `name`; `id` is the call's.
        after: What ends a call.
        section: What opens and closes the section.
    """
    start, at = opened.span()
    at = at if re.fullmatch(section[0], opened[0]) else start
    calls: list[AnyCall] = []
    try:
        while (called := re.compile(rf"\s*{head}").match(text, at)) is not None:
            if not called["name"]:
                raise Unread("the function has no name")
            arguments, end = _arguments(text, called.end())
            call_id = called.groupdict("").get("id", "")
            call_id = "" if call_id == called["name"] else call_id
            calls.append(functions.call(called["name"], arguments, text[called.start() : end].strip(), call_id))
            closed = re.compile(rf"\s*{after}").match(text, end)
            at = closed.end() if closed else end
        if not calls:
            raise Unread("expected the mark of a call, and the tool's name")
    except Unread as error:
        broken = _broken(text, start, at, section[1], section[0], str(error))
        return broken._replace(calls=[*calls, *broken.calls])
    closed = re.compile(rf"\s*{section[1]}").match(text, at)
    at = closed.end() if closed else at
    return Found(start, ended(text, at) or at, calls)


def _section(begins: str, ends: str, call: str, head: str, after: str) -> CallFormat:
    return CallFormat(f"{begins}|{call}", partial(_headed, head=call + head, after=after, section=(begins, ends)))


_HARMONY_HEAD = re.compile(
    r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:<\|channel\|>)?\s*(?:commentary|analysis)?\s*"
    r"to=([\w.-]+)\s*(?:<\|channel\|>\s*(?:commentary|analysis)\s*)?(?:<\|constrain\|>)?\s*(?:json|code)?\s*"
    r"(?:<\|message\|>)?\s*(?=\{|\Z|<\|call\|>)"
)


def _harmony(text: str, opened: re.Match[str], functions: Functions) -> Found | None:
    """A message of gpt-oss to `functions.f`, from its first mark to `<|call|>`."""
    start = opened.start()
    head = _HARMONY_HEAD.match(text, start)
    if head is None:
        if "<|message|>" not in opened[0]:
            return None
        again = r"<\|start\|>|<\|channel\|>"
        return _broken(text, start, opened.end(), r"<\|call\|>", again, "its arguments are no valid JSON")
    if text.startswith("<|call|>", head.end()) or head.end() == len(text):
        arguments, end = None, head.end()
    else:
        try:
            arguments, end = _arguments(text, head.end())
        except Unread as error:
            return _broken(text, start, head.end(), r"<\|call\|>", r"<\|start\|>|<\|channel\|>", str(error))
    call = functions.call(head[1], arguments, text[start:end])
    return Found(start, ended(text, end) or end, [call])


# ---- formats without marks: a call stands alone ------------------------------------------------------


def _plain_json(text: str, opened: re.Match[str], functions: Functions) -> Found | None:
    start = opened.start()
    try:
        calls, end = read_plain_objects(text, start, functions)
    except Unread as error:
        rest = text[start:]
        if '"name"' in rest and ('"arguments"' in rest or '"parameters"' in rest):
            return Found(start, len(text), [MalformedCall(rest, str(error))], plain=True)
        return None
    return Found(start, end, calls, plain=True)


def _plain_python(text: str, opened: re.Match[str], functions: Functions) -> Found | None:
    start = opened.start()
    try:
        calls, end = read_python(text, start, functions)
    except Unread:
        return None
    readable = [call for call in calls if not isinstance(call, MalformedCall)]
    named = readable and all(call.name in functions.parameters or call.arguments for call in readable)
    return Found(start, end, calls, plain=True) if named and len(readable) == len(calls) else None


def _named_json(text: str, opened: re.Match[str], functions: Functions) -> Found | None:
    """`f{"a": 1}`: what is left of a call of Mistral's without its special tokens; `f` is known."""
    try:
        arguments, end = read_value(text, skip_space(text, opened.end()))
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    return Found(opened.start(), end, [functions.call(opened[0], arguments, text[opened.start() : end])], plain=True)


_FUNCTION_TAG = CallFormat(r"<function(?:=|\s+name\s*=)", _function)
_INVOKES = _tagged(
    r"<minimax:tool_call>|<dots_function_call>|<｜DSML｜(?:function_calls|tool_calls| calls)>|<\|open\|>tools<\|sep\|>"
    r"|(?:(?:<\|start\|>assistant)? ?to=[\w.-]{1,99}<\|message\|>\s*)?<atem:function_calls>"
    r"|(?:<｜tool_calls_begin｜>\s*)?<｜tool_call_begin｜>\s*function<｜tool_sep｜>",
    r"</minimax:tool_call>|</dots_function_call>|</｜DSML｜(?:function_calls|tool_calls| calls)>"
    r"|<\|close\|>tools<\|sep\|>|</atem:function_calls>(?:\s*<\|eom\|>)?|<｜tool_call_end｜>(?:\s*<｜tool_calls_end｜>)?",
    read_invoke,
)
_ELEMENTS = _tagged(f"{BEFORE_TAG}<tool_call>", rf"{BEFORE_TAG}</tool_call>", read_elements)
_GEMMA = (
    _tagged(r"<\|tool_call>", r"<tool_call\|>", read_called),
    _tagged("<start_function_call>", "<end_function_call>", read_called),
)
_MISTRAL = CallFormat(r"\[TOOL_CALLS\]", _mistral)
#: `function<｜tool▁sep｜>f` with a fence (V3, R1), or `f<｜tool▁sep｜>{…}` (V3.1).
_DEEPSEEK = _section(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    r"(?:function\s*(?=<｜tool▁sep｜>[^\n{]*\n))?(?:<｜tool▁sep｜>)?\s*(?P<name>[\w./-]+)\s*(?:<｜tool▁sep｜>)?\s*"
    r"(?:```(?:json)?)?",
    r"(?:(?:```)?\s*<｜tool▁call▁end｜>|```)",
)
#: `functions.f:0` is the call's id.
_KIMI = _section(
    r"<\|tool_calls_section_begin\|>",
    r"<\|tool_calls_section_end\|>",
    r"<\|tool_call_begin\|>",
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^<\n]*?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
    r"<\|tool_call_end\|>",
)
_PLAMO = _section(
    r"<\|plamo:begin_tool_requests:plamo\|>",
    r"<\|plamo:end_tool_requests:plamo\|>",
    r"<\|plamo:begin_tool_request:plamo\|>",
    r"<\|plamo:begin_tool_name:plamo\|>\s*(?P<name>[^<\n]*?)\s*<\|plamo:end_tool_name:plamo\|>"
    r"<\|plamo:begin_tool_arguments:plamo\|>(?:<\|plamo:constrain\|>json)?(?:<\|plamo:msg\|>)?",
    r"<\|plamo:end_tool_arguments:plamo\|>(?:<\|plamo:end_tool_request:plamo\|>)?",
)
_HARMONY = CallFormat(
    r"(?:<\|start\|>)?(?:assistant)?(?:<\|channel\|>)?(?:commentary|analysis)\s+to=functions\.[\w.-]+"
    r"|(?:<\|start\|>assistant\s*|(?:<\|start\|>assistant)?<\|channel\|>\s*(?:commentary|analysis)\s+|\A\s*)"
    r"to=(?!(?:user|self)<\|message\|>)[\w.-]+[^{\n]{0,60}<\|message\|>",  # those are Muse's messages
    _harmony,
)
_PYTHON_TAG = _tagged(r"<\|python_tag\|>", rf"(?:{ENDS}|\Z)", read_objects, read_python)
_OBJECTS = CallFormat(
    r"\{\s*[\"'](?:name|arguments|parameters|type|function|id|tool_calls|tool_name|tool_call_id)[\"']\s*:"
    r"|\[\s*(?=\{\s*[\"'](?:name|arguments|parameters|type|function|id|tool_name|tool_call_id)[\"']\s*:)",
    _plain_json,
    plain=True,
)
_PYTHON_CALLS = CallFormat(r"\[\s*(?=[A-Za-z_][\w.-]{0,63}\s*\()", _plain_python, plain=True)


def named_json(functions: Functions) -> CallFormat | None:
    """Return the format of a known name before its arguments; None where no names are known."""
    if not functions.parameters:
        return None
    names = "|".join(re.escape(name) for name in sorted(functions.parameters, key=len, reverse=True))
    return CallFormat(rf"(?<![\w.\\/{{-])(?:{names})(?=\s{{0,2}}\{{)", _named_json, plain=True)


FORMATS: dict[CallStyle, tuple[CallFormat, ...]] = {
    "hermes": (_HERMES,),
    "qwen_xml": (_QWEN, _FUNCTION_TAG),
    "json": (_OBJECTS,),
    "llama": (_PYTHON_TAG, _FUNCTION_TAG, *_PYTHON_TAGS, _OBJECTS, _PYTHON_CALLS),
    "mistral": (_MISTRAL, _OBJECTS),
    "glm": (_KEYED,),
    "deepseek": (_DEEPSEEK, _INVOKES),
    "kimi": (_KIMI,),
    "harmony": (_HARMONY,),
    "minimax": (_INVOKES, _ELEMENTS),
    "gemma": _GEMMA,
    "pythonic": (*_PYTHON_TAGS, _PYTHON_CALLS),
    "auto": (
        _TOOL_CALL, _FUNCTION_TAG, *_OTHERS, *_PYTHON_TAGS, _PYTHON_TAG, _INVOKES, _ELEMENTS, *_GEMMA, _MISTRAL,
        _DEEPSEEK, _KIMI, _PLAMO, _HARMONY, _OBJECTS, _PYTHON_CALLS,
    ),
}  # fmt: skip
#: Styles that take a known name before its arguments.
NAMED = frozenset({"auto", "mistral", "glm"})
