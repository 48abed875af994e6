"""Reading tool calls out of what a policy wrote.

hermes     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>            Hermes, Qwen2.5, Qwen3
qwen_xml   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   Qwen3-Coder
llama      <|python_tag|>{"name": "add", "parameters": {"a": 1}}, <function=add>{"a": 1}</function>, [add(a=1)]
mistral    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}], [TOOL_CALLS]add[ARGS]{"a": 1}
glm        <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>   GLM 4.5 and later
deepseek   <｜tool▁calls▁begin｜>…, <｜DSML｜function_calls>…                          V3, R1, V3.1, V3.2
kimi       <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}…
harmony    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>   gpt-oss
minimax    <minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke></minimax:tool_call>
gemma      <|tool_call>call:add{a:1}<tool_call|>                                     Gemma 4, FunctionGemma
pythonic   [add(a=1)]                                                               Llama 3.2, Llama 4, ToolACE
json       {"name": "add", "arguments": {"a": 1}}, also in a fence, in a list, or as OpenAI writes it
auto       whichever is there, and the marks of some more models

**No false calls.** JSON, Python and `add{"a": 1}` have no marks of their own: an answer may quote them. They are calls
only where they stand alone: they are the whole answer, or begin or end it on lines of their own, and then a tool has
that name, where the tools are known. With the style `json`, objects in a sentence are calls too.

**Reasoning.** What stands before the last closing tag of the reasoning, or after an opening one, is no call. A closing
tag that ends messages of every kind (gpt-oss, Inkling, Muse) closes only a reasoning that was opened. A tag in an
argument is part of the argument.

A closing tag may be missing, where a stop string or the token limit took it, as long as the call itself is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from roll_like.errors import ConfigError
from roll_like.tools.base import AnyCall, MalformedCall
from roll_like.tools.calls.formats import FORMATS, NAMED, CallFormat, CallStyle, Found, named_json
from roll_like.tools.calls.functions import Functions
from roll_like.tools.calls.payloads import ENDS
from roll_like.types import THINK, ReasoningTags

#: Reasoning that some models mark by tokens of their own.
_OWN_REASONING = {
    r"<\|channel\|>analysis<\|message\|>": r"<\|end\|>|(?=<\|start\|>)",
    r"<\|channel>thought": r"<channel\|>",
    r"<\|content_thinking\|>": r"<\|end_message\|>",
    r"\bto=self<\|message\|>": r"<\|eom\|>",
    r"\[THINK\]": r"\[/THINK\]",
    r"<\|START_THINKING\|>": r"<\|END_THINKING\|>",
}
_MOST_CALLS = 64  # of one answer; what follows is text
_MOST_FAILURES = 64  # places that only look like calls; each costs at most the length of the text
_FENCED = re.compile(r"```(?:json|python|tool_call)?\s*\Z")
_FENCE_END = re.compile(r"\s*```")
_BETWEEN = re.compile(r"(?:\s|[,;]|```(?:json|python)?)*")
_BLANK = re.compile(rf"(?:\s|{ENDS})*")
_EMPTY_FENCE = re.compile(r"```(?:json|python|tool_code|xml|tool_call)?\s*```")
_TRAILING = re.compile(rf"(?:{ENDS})\s*\Z")
#: What begins and ends messages to the user, of gpt-oss, Inkling, Muse and Kimi K3.
_MESSAGES = (
    (
        r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>",
        r"<\|end\|>|<\|return\|>",
    ),
    (r"(?:<\|message_model\|>)?<\|content_text\|>", r"<\|end_message\|>"),
    (r"(?:<\|start\|>assistant)? ?\bto=user<\|message\|>", r"<\|eom\|>|<\|eot\|>"),
    (r"<\|open\|>response<\|sep\|>", r"<\|close\|>response<\|sep\|>"),
)
_WORDS = [re.compile(rf"{begins}(.*?)(?:{ends}|\Z)", re.DOTALL) for begins, ends in _MESSAGES]


def parse_tool_calls(
    text: str, style: CallStyle = "auto", tools: Sequence[Mapping[str, Any]] = (), *, reasoning: ReasoningTags = THINK
) -> tuple[str, list[AnyCall]]:
    """Return the text without its calls, and the calls in order.

    >>> parse_tool_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [ToolCall(name='add', arguments={'a': 1}, call_id='call_0')])

    Args:
        text: One answer, decoded with the special tokens that mark calls (`roll_like.data.marks`), or without them.
        style: How calls are written; see above.
        tools: Function schemas. They say what bare texts mean, and which names may be called. Without them a bare text
            that is JSON is read as JSON.
        reasoning: What stands before and after the policy's reasoning, and whether the prompt opened it.

    Raises:
        ConfigError: There is no such style.
    """
    if style not in get_args(CallStyle):
        raise ConfigError(f"unknown call style {style!r}; expected one of {', '.join(get_args(CallStyle))}")
    if reasoning.opened and reasoning.close not in text:
        return text, []
    functions = Functions(tools)
    scan = _Scan(text, _formats(style, functions), functions, reasoning)
    scan.run()
    found = scan.marked
    if not found:
        found = scan.plain if style == "json" else _standing_alone(text[: scan.end], scan.begin, scan.plain)
        found = _known(text[: scan.end], scan.begin, found, functions)
    return _without(text, found), _numbered(found)


def call_beginnings(functions: Functions) -> list[str]:
    """Return regular expressions of where calls, or what is written around them and the words, may begin."""
    fences = r"```(?:json|python|tool_code|xml|tool_call)?\s*(?=[{\[<])"
    return [*(each.begins for each in _formats("auto", functions)), fences, *(begins for begins, _ in _MESSAGES)]


def _formats(style: CallStyle, functions: Functions) -> tuple[CallFormat, ...]:
    named = named_json(functions) if style in NAMED else None
    return FORMATS[style] if named is None else (*FORMATS[style], named)


@dataclass(slots=True)
class _Scan:
    """Goes through a text once.

    Attributes:
        begin: Where the reasoning ends.
        end: Where reasoning begins that is not closed.
        marked: Calls with marks.
        plain: What may be calls.
    """

    text: str
    formats: Sequence[CallFormat]
    functions: Functions
    tags: ReasoningTags
    begin: int = 0
    end: int = field(init=False)
    marked: list[Found] = field(default_factory=list)
    plain: list[Found] = field(default_factory=list)

    def run(self) -> None:
        self.end = len(self.text)
        own = "|".join(_OWN_REASONING)
        reasoning = [f"(?P<open>{re.escape(self.tags.open)}|{own})"]
        if not self.tags.ends_messages:
            reasoning.append(f"(?P<close>{re.escape(self.tags.close)})")
        calls = [f"(?P<f{number}>{each.begins})" for number, each in enumerate(self.formats)]
        pattern = re.compile("|".join([*reasoning, *calls]))
        if self.tags.ends_messages and self.tags.opened:
            self.begin = self.text.find(self.tags.close) + len(self.tags.close)
        at, failures = self.begin, 0
        while failures < _MOST_FAILURES and (match := pattern.search(self.text, at)) is not None:
            if match.lastgroup == "close":
                at = self.begin = match.end()
                self.marked.clear()
                self.plain.clear()
            elif match.lastgroup == "open":
                closed = self._closing(match[0]).search(self.text, match.end())
                if closed is None:
                    self.end = match.start()
                    return
                if match[0] != self.tags.open:
                    at = closed.end()
                elif self.tags.ends_messages:
                    at = self.begin = closed.end()
                    self.plain.clear()
                else:
                    at = closed.start()
            else:
                found = self._read(self.formats[int(str(match.lastgroup)[1:])], match)
                unread = found is None or (found.plain and _is_broken(found))
                failures += unread
                at = match.end() if found is None or unread else found.end
            if len(self.marked) == _MOST_CALLS:
                at = -1 if self.tags.ends_messages else self.text.rfind(self.tags.close, at)
                if at < 0:
                    return

    def _closing(self, opened: str) -> re.Pattern[str]:
        own = (close for begins, close in _OWN_REASONING.items() if re.fullmatch(begins, opened))
        return re.compile(next(own, re.escape(self.tags.close)))

    def _read(self, kind: CallFormat, match: re.Match[str]) -> Found | None:
        found = kind.read(self.text, match, self.functions)
        if found is None or not found.calls:
            return found
        if self.text[found.start - 1 : found.start] == "`" == self.text[found.end : found.end + 1] and (
            self.text[found.start - 3 : found.start] != "```"
        ):
            return found._replace(calls=())  # quoted as code
        if _is_broken(found):
            found = self._before_reasoning(found)
        kept = self.plain if kind.plain else self.marked
        if len(kept) < _MOST_CALLS and not (kind.plain and _is_broken(found) and kept and _is_broken(kept[-1])):
            kept.append(found)
        return found

    def _before_reasoning(self, found: Found) -> Found:
        """Return what cannot be read, up to where reasoning begins or ends, or with the end of its message."""
        tag = re.compile(f"{re.escape(self.tags.open)}|{re.escape(self.tags.close)}").search(
            self.text, found.start, found.end
        )
        if tag is None:
            return found
        last = found.calls[-1]
        assert isinstance(last, MalformedCall), "the caller has seen it"
        end = tag.end() if self.tags.ends_messages and tag[0] == self.tags.close else tag.start()
        return found._replace(end=end, calls=[*found.calls[:-1], replace(last, text=self.text[found.start : end])])


def _is_broken(found: Found) -> bool:
    return bool(found.calls) and isinstance(found.calls[-1], MalformedCall)


def _known(text: str, begin: int, found: Sequence[Found], functions: Functions) -> list[Found]:
    """Return calls of tools that there are; of any tool, where a call is the whole answer."""
    if found and _blank(text[begin : found[0].start], "") and _blank("", text[found[-1].end :]):
        return list(found)
    return [
        each
        for each in found
        if all(isinstance(call, MalformedCall) or functions.maybe(call.name) for call in each.calls)
    ]


def _standing_alone(text: str, begin: int, found: Sequence[Found]) -> list[Found]:
    """Return those of the calls without marks that are no quotations in an answer.

    Args:
        text: Up to where unclosed reasoning begins.
        begin: Where the reasoning ends.
        found: What may be calls, in order.
    """
    groups: list[list[Found]] = []
    for each in found:
        if groups and _BETWEEN.fullmatch(text, groups[-1][-1].end, each.start):
            groups[-1].append(each)
        else:
            groups.append([each])
    if not groups:
        return []
    first, last = groups[0], groups[-1]
    before, after = text[begin : last[0].start], text[last[-1].end :]
    if _blank("", after) and not _is_broken(last[-1]):
        fence = _FENCED.search(before)
        line = before[: fence.start()] if fence else before
        inline = text[last[0].start] not in "{["  # a name, which a special token stood before
        if inline or not line.strip() or line.rstrip(" \t").endswith("\n"):
            return last
    before, after = text[begin : first[0].start], text[first[-1].end :]
    own_line = after[:1] == "\n" or _FENCE_END.match(after) or _is_broken(first[-1])
    return first if _blank(before, "") and own_line else []


def _blank(before: str, after: str) -> bool:
    """Return whether nothing is said before and after a call: a fence and the end of the turn say nothing."""
    fenced = _FENCED.search(before)
    before = before[: fenced.start()] if fenced else before
    closed = _FENCE_END.match(after)
    return not before.strip() and _BLANK.fullmatch(after, closed.end() if closed else 0) is not None


def _without(text: str, found: Sequence[Found]) -> str:
    """Return what is no call."""
    if not found:
        return text.strip()
    parts, at = [], 0
    for each in found:
        part = text[at : each.start]
        parts.append("" if at and not part.strip(" \t;,") else part)
        at = each.end
    rest = _EMPTY_FENCE.sub("", "".join([*parts, _TRAILING.sub("", text[at:])]))
    for words in _WORDS:
        rest = words.sub(r"\1", rest)
    return rest.strip()


def _numbered(found: Sequence[Found]) -> list[AnyCall]:
    """Return all calls with ids: those of the format, where each is there once."""
    calls = [call for each in found for call in each.calls]
    ids = [call.call_id for call in calls]
    return [
        call if call.call_id and ids.count(call.call_id) == 1 else replace(call, call_id=f"call_{number}")
        for number, call in enumerate(calls)
    ]
