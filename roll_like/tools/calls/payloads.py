"""What stands between the marks of a call: JSON, tags, or a call of a Python function.

Each reader takes a text and a place in it, and returns the calls there with the place where they end. It raises
`Unread` where it cannot read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from roll_like.tools.base import AnyCall, MalformedCall
from roll_like.tools.calls.elements import INVOKE as _INVOKE_ELEMENT
from roll_like.tools.calls.elements import read_elements
from roll_like.tools.calls.functions import Functions, arguments_key, is_call
from roll_like.tools.calls.literals import Unread, read_bare_mapping, read_python_call, read_value, skip_space

PayloadReader: TypeAlias = Callable[[str, int, Functions], tuple[list[AnyCall], int]]

#: End-of-turn tokens as text, where a text was decoded with them.
ENDS = (
    r"<\|(?:im_end|endoftext|end_of_text|eot_id|eom_id|eot|end|return|call|observation|user)\|>"
    r"|<\|(?:eom|end_message|content_model_end_sampling|message_sep)\|>|</s>|<｜end▁of▁sentence｜>|<end_of_turn>|<eos>"
    r"|<turn\|>|<\|tool_response>|<start_function_response>|\[e~\["
)
_ENDED = re.compile(rf"\s*(?:{ENDS}|\Z)")

FUNCTION_HEAD = re.compile(r"\s*<function=([^>\n]{0,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{0,200})>")
_NEXT_PARAMETER = re.compile(r"<parameter=([^>\n]{0,200})>")
_END_OF_VALUE = re.compile(
    r"</parameter>(?=\s*(?:<parameter=(?P<next>[^>\n]{0,200})>|</function>|</tool_call>|</seed:tool_call>|\Z))"
)
_INVENTED = re.compile(r"\n<parameter=[\w.-]{1,200}>\n")
_OTHER_END_OF_VALUE = re.compile(r"(?=<parameter=(?P<next>[^>\n]{0,200})>|</function>|</tool_call>)")

#: Where tags have a prefix in the dialects of DeepSeek, Muse and Step.
_PREFIX = "(?:｜DSML｜ ?|atem:|steptml:)?"
_QUOTED = r"""\s*=\s*(?:"([^"\n]{0,200})"|'([^'\n]{0,200})'|([^>\s]{1,200}))"""
_INVOKE = re.compile(
    rf"""\s*(?:<(?:{_PREFIX}invoke|function)\s+name|<\|open\|>call\s+tool){_QUOTED}"""
    r"""(?:\s+index="\d*")?\s*(?:>|<\|sep\|>)"""
)
#: Its first parameter, JSON or its end follows, unlike in a sentence about the tag.
FUNCTION = re.compile(r"<function=[^>\n]{0,200}>\s*(?:<parameter=|\{|</function>|</tool_call>)")
#: Its first parameter or its end follows, unlike in XML that an answer is about.
NAMED_FUNCTION = re.compile(rf"<function\s+name{_QUOTED}\s*>\s*(?:<param|</function>)")
_NAMED_TAG = rf"(?:<{_PREFIX}param(?:eter)?\s+name|<\|open\|>argument\s+key)"
_NAMED = re.compile(
    rf"""\s*{_NAMED_TAG}{_QUOTED}(?:\s+(?:string|type)\s*=\s*["']?(\w+)["']?)?\s*(?:>|<\|sep\|>)(<!\[CDATA\[)?"""
)
_INVOKE_TAG_END = rf"(?:</(?:{_PREFIX}invoke|function)>|<\|close\|>call<\|sep\|>)"
_END_OF_NAMED = re.compile(
    rf"(?:</{_PREFIX}param(?:eter)?>|<\|close\|>argument<\|sep\|>)(?=\s*(?:{_NAMED_TAG}|{_INVOKE_TAG_END}|\Z))"
)
_END_OF_INVOKE = re.compile(rf"\s*{_INVOKE_TAG_END}")


def _tag(name: str) -> str:
    """Return a pattern of a tag's name: some models write `ifm|` before it, or a code of their own after it."""
    return rf"(?:ifm\|)?{name}(?::\w+)?"


_KEYED_HEAD = re.compile(
    rf"\s*([\w.-]+)\s*(?:<{_tag('tool_sep')}>\s*)?(?=<{_tag('arg_key')}>|</{_tag('tool_call')}>|<\|)"
)
_KEY = re.compile(
    rf"\s*<{_tag('arg_key')}>(.*?)</{_tag('arg_key')}>\s*(?:<ifm\|arg_type>\w*</ifm\|arg_type>\s*)?<{_tag('arg_value')}>",
    re.DOTALL,
)
_END_OF_KEYED = re.compile(rf"</{_tag('arg_value')}>(?=\s*(?:<{_tag('arg_key')}>|</{_tag('tool_call')}>|\Z))")

_CALLED = re.compile(r"\s*(?:call)?:\s*([\w.-]+)\s*(?=\{)")

_BETWEEN = re.compile(r"\s*[,;]?\s*(?=\{)")
_PYTHON_LIST = re.compile(r"\[\s*(?=[A-Za-z_][\w.-]*\s*\()")
_PYTHON = re.compile(r"[A-Za-z_][\w.-]*\s*\(")


def ended(text: str, at: int) -> int | None:
    """Return the place after an end-of-turn token, or None where the turn goes on."""
    match = _ENDED.match(text, at)
    return match.end() if match else None


def read_objects(text: str, at: int, functions: Functions) -> tuple[list[AnyCall], int]:
    """Read JSON objects, one after the other, or a list of them."""
    calls: list[AnyCall] = []
    while True:
        at = skip_space(text, at)
        try:
            value, end = read_value(text, at)
        except ValueError as error:
            raise Unread(f"no valid JSON: {error}") from error
        found = value if isinstance(value, list) else [value]
        calls += [functions.from_json(_named(each, functions), text[at:end]) for each in found]
        following = _BETWEEN.match(text, end)
        if following is None or isinstance(value, list):
            return calls, end
        at = following.end()


def _named(value: Any, functions: Functions) -> Any:
    """Return an object such as `{"add": {"a": 1}}`, with a function as its key (Apertus), in the usual form."""
    if isinstance(value, Mapping) and len(value) == 1:
        name, arguments = next(iter(value.items()))
        if isinstance(arguments, Mapping) and name in functions.parameters:
            return {"name": name, "arguments": arguments}
    return value


def read_plain_objects(text: str, at: int, functions: Functions) -> tuple[list[AnyCall], int]:
    """Read a JSON value that has the form of a call, of a list of them, or of OpenAI's `tool_calls`; else none."""
    try:
        value, end = read_value(text, at)
    except ValueError as error:
        raise Unread(f"no valid JSON: {error}") from error
    if isinstance(value, Mapping) and isinstance(value.get("tool_calls"), list):
        found = value["tool_calls"]
    else:
        found = value if isinstance(value, list) else [value]
        found = found if all(map(is_call, found)) else []
    return [functions.from_json(each, text[at:end]) for each in found], end


def read_function(text: str, at: int, functions: Functions) -> tuple[list[AnyCall], int]:
    """Read `<function=name>` with `<parameter=key>` tags, as Qwen3-Coder writes it, or with JSON, as Llama 3.1 does."""
    head = FUNCTION_HEAD.match(text, at)
    if head is None:
        raise Unread("expected <function=name>")
    start, name, at = at, head[1].strip().strip("\"'"), head.end()
    inner = skip_space(text, at)
    if text.startswith("{", inner):
        try:
            value, at = read_value(text, inner)
        except ValueError as error:
            raise Unread(f"no valid JSON: {error}") from error
        at = _after(text, at, "</function>", "<parameter=name> or </function>")
        return [_with_arguments(functions, name, value, text[start:at])], at
    arguments: dict[str, str] = {}
    values = _Values(text, functions.properties(functions.name(name)))
    while (parameter := _PARAMETER.match(text, at)) is not None:
        end, at = values.end(parameter)
        arguments[_key(parameter[1])] = text[parameter.end() : end]
    at = _after(text, at, "</function>", "<parameter=name> or </function>")
    return [functions.from_texts(name, arguments, text[start:at], lines=True)], at


def _with_arguments(functions: Functions, name: str, value: Mapping[str, Any], text: str) -> AnyCall:
    if not name:
        return MalformedCall(text, "the function has no name")
    inner = arguments_key(value)
    repeats = inner is not None and value.get("name") == name  # the whole call within the tag
    return functions.call(name, value[inner] if repeats and inner else value, text)


class _Values:
    """Finds where the values of `<parameter=key>` tags end.

    A value may hold tags itself. So the closing tag is one after which the call goes on as it should: with another
    parameter of the function, or its end. A parameter that the function does not have is one where its tags stand on
    lines of their own, as the format has them. A closing tag may be missing before the next of these.

    Args:
        text: Holds the call.
        known: The function's parameters; empty where they are not known.
    """

    def __init__(self, text: str, known: Mapping[str, Any]) -> None:
        self.text = text
        self.known = known
        self._closed = True  # whether there may be closing tags; a search in vain reads the whole text

    def end(self, parameter: re.Match[str]) -> tuple[int, int]:
        """Return where a parameter's value ends, and the place after its closing tag."""
        found = self._first(_END_OF_VALUE, parameter) if self._closed else None
        self._closed = found is not None
        if found is not None and self.known:
            within = self.text[parameter.end() : found.start()]
            unclosed = next((one for one in _NEXT_PARAMETER.finditer(within) if self._is_next(one[1], parameter)), None)
            if unclosed is not None:
                return (parameter.end() + unclosed.start(),) * 2
        found = found or self._first(_OTHER_END_OF_VALUE, parameter)
        if found is None:
            raise Unread(f"the parameter {parameter[1]!r} has no </parameter>")
        return found.start(), found.end()

    def _first(self, pattern: re.Pattern[str], parameter: re.Match[str]) -> re.Match[str] | None:
        for end in pattern.finditer(self.text, parameter.end()):
            if end["next"] is None or not self.known or _key(end["next"]) in self.known:
                return end
            if self._invented(end, parameter):
                return end
        return None

    def _invented(self, end: re.Match[str], parameter: re.Match[str]) -> bool:
        """Return whether a parameter follows that the function does not have: tags in a value are pairs."""
        within = self.text[parameter.end() : end.start()]
        alone = within.endswith("\n") and _INVENTED.match(self.text, end.end()) is not None
        return alone and within.count("<parameter=") == within.count("</parameter>")

    def _is_next(self, written: str, parameter: re.Match[str]) -> bool:
        return _key(written) in self.known and _key(written) != _key(parameter[1])


def _key(written: str) -> str:
    return written.strip().strip("\"'")


def _after(text: str, at: int, tag: str, expected: str) -> int:
    """Return the place after a closing tag, which may be missing where the text or an enclosing tag ends."""
    place = skip_space(text, at)
    if text.startswith(tag, place):
        return place + len(tag)
    if ended(text, place) is not None or text.startswith("</", place):
        return at
    raise Unread(f"expected {expected}, found {text[place : place + 20]!r}")


def read_invoke(text: str, at: int, functions: Functions) -> tuple[list[AnyCall], int]:
    """Read `<invoke name="f"><parameter name="key">value</parameter></invoke>`, one or more, and its dialects.

    MiniMax M2 and dots write it so; DeepSeek, Muse and Step with a prefix; MiniCPM 5 as `<function name="f">` and
    `<param name="key">`; Kimi K3 with `<|open|>`, `<|close|>` and `<|sep|>`.
    """
    calls: list[AnyCall] = []
    while (head := _INVOKE.match(text, at)) is not None:
        name, at = next(part for part in head.groups() if part is not None), head.end()
        texts: dict[str, str] = {}
        values: dict[str, Any] = {}
        while (parameter := _NAMED.match(text, at)) is not None:
            key = next(part for part in parameter.groups()[:3] if part is not None)
            end = _END_OF_NAMED.search(text, parameter.end())
            if end is None:
                raise Unread(f"the parameter {key!r} has no </parameter>")
            written, at = text[parameter.end() : end.start()], end.end()
            written = written.removesuffix("]]>") if parameter[5] else written
            if parameter[4] in ("true", "string"):
                values[key] = written
            else:
                texts[key] = written
        closing = _END_OF_INVOKE.match(text, at)
        if closing is None and ended(text, at) is None:
            raise Unread(f"expected <parameter name=…> or </invoke>, found {text[at : at + 20].strip()!r}")
        at = closing.end() if closing else at
        call = functions.from_texts(name, texts, text[head.start() : at].strip())
        calls.append(_added(functions, call, values, text[head.start() : at].strip()))
    if not calls:
        raise Unread("expected <invoke name=…>")
    return calls, at


def _added(functions: Functions, call: AnyCall, values: Mapping[str, Any], text: str) -> AnyCall:
    if isinstance(call, MalformedCall) or not values:
        return call
    return functions.call(call.name, {**call.arguments, **values}, text)


def read_keyed(text: str, at: int, functions: Functions) -> tuple[list[AnyCall], int]:
    """Read a name with `<arg_key>` and `<arg_value>` tags, as GLM writes it."""
    head = _KEYED_HEAD.match(text, at)
    if head is None:
        raise Unread("expected the tool's name and <arg_key>")
    start, at = at, head.end()
    arguments: dict[str, str] = {}
    while (key := _KEY.match(text, at)) is not None:
        end = _END_OF_KEYED.search(text, key.end())
        if end is None:
            raise Unread(f"the argument {key[1].strip()!r} has no </arg_value>")
        arguments[key[1].strip()] = text[key.end() : end.start()]
        at = end.end()
    return [functions.from_texts(head[1], arguments, text[start:at])], at


def called_by_name(text: str, at: int, functions: Functions) -> bool:
    """Return whether what GLM writes names a function that there is, or has arguments; any word is a name."""
    head = _KEYED_HEAD.match(text, at)
    if head is None:
        return False
    return bool(_KEY.match(text, head.end())) or functions.name(head[1]) in functions.parameters


def read_called(text: str, at: int, functions: Functions) -> tuple[list[AnyCall], int]:
    """Read `call:f{key:<|"|>text<|"|>,other:1}`, as Gemma 4 writes it; FunctionGemma's marks are `<escape>`."""
    head = _CALLED.match(text, at)
    if head is None:
        raise Unread("expected call:name{…}")
    try:
        arguments, end = read_bare_mapping(text, head.end())
    except ValueError as error:
        raise Unread(f"its arguments cannot be read: {error}") from error
    return [functions.call(head[1], arguments, text[at:end])], end


def read_python(text: str, at: int, functions: Functions) -> tuple[list[AnyCall], int]:
    """Read `[f(a=1), g()]`, or calls one after the other without a list."""
    calls: list[AnyCall] = []
    listed = _PYTHON_LIST.match(text, at)
    at = listed.end() if listed else at
    while True:
        start = skip_space(text, at)
        try:
            name, placed, named, end = read_python_call(text, start)
        except (ValueError, RecursionError) as error:
            raise Unread(f"no call of a function with literals: {error}") from error
        calls.append(functions.from_python(name, placed, named, text[start:end]))
        at = skip_space(text, end)
        if listed and text.startswith("]", at):
            return calls, at + 1
        if text.startswith((",", ";"), at):
            at = skip_space(text, at + 1)
            if listed and text.startswith("]", at):
                return calls, at + 1
        elif listed:
            raise Unread("expected ',' or ']' after a call")
        if not listed and _PYTHON.match(text, at) is None:
            return calls, end


#: How payloads begin.
_BEGINNINGS: tuple[tuple[re.Pattern[str], PayloadReader], ...] = (
    (re.compile("<function="), read_function),
    (_INVOKE, read_invoke),
    (_INVOKE_ELEMENT, read_elements),
    (_PYTHON_LIST, read_python),
    (_PYTHON, read_python),
    (re.compile(r"[{\[]"), read_objects),
    (_CALLED, read_called),
    (_KEYED_HEAD, read_keyed),
)


def payload_at(text: str, at: int) -> PayloadReader | None:
    """Return what reads the payload at a place, judged by how it begins."""
    at = skip_space(text, at)
    return next((read for begins, read in _BEGINNINGS if begins.match(text, at)), None)
