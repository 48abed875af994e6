"""The functions that may be called, as calls are read against them: their names, and what their arguments are."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from roll_like.tools.base import AnyCall, MalformedCall, ToolCall
from roll_like.tools.calls.literals import loads

_DEEPEST_REFERENCE = 20
#: An argument that was written as tags: a text, or tags within it in order.
Element: TypeAlias = "str | list[tuple[str, Element]]"

#: What may stand beside the name of a call without arguments.
_BESIDE = {"id", "type", "index", "tool_call_id", "function"}


class Functions:
    """The functions of a request."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.parameters: dict[str, Mapping[str, Any]] = {
            str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools
        }

    def name(self, written: str) -> str:
        """Return the function that a name means: some models write `functions.` before it."""
        name = written.strip()
        if name in self.parameters:
            return name
        short = name.removeprefix("functions.").removesuffix(".call")  # Llama's built-in tools are called by `.call`
        last = name.rpartition(".")[2]
        return last if last in self.parameters else short

    def maybe(self, written: str) -> bool:
        """Return whether there may be a function of this name: always, if none are known."""
        return not self.parameters or self.name(written) in self.parameters

    def properties(self, name: str) -> Mapping[str, Any]:
        """Return the schemas of a function's arguments."""
        properties = self.parameters.get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def from_texts(self, written: str, arguments: Mapping[str, str], text: str, *, lines: bool = False) -> AnyCall:
        """Return a call whose arguments were written as bare texts.

        Args:
            written: The name.
            arguments: By name; the schema says what each means.
            text: The call as written.
            lines: Whether the format puts values on lines of their own.
        """
        name = self.name(written)
        if not name:
            return MalformedCall(text, "the function has no name")
        properties = self.properties(name)
        root = self.parameters.get(name, {})
        read: dict[str, Any] = {}
        for key, value in arguments.items():
            bare = value.removeprefix("\n").removesuffix("\n") if lines else value
            read[key] = meaning(bare, properties.get(key), root)
        return _sound(ToolCall(name, read, ""), text)

    def from_elements(self, written: str, arguments: list[tuple[str, Element]], text: str) -> AnyCall:
        """Return a call whose arguments were written as tags within tags."""
        name = self.name(written)
        if not name:
            return MalformedCall(text, "the function has no name")
        root = self.parameters.get(name, {})
        return _sound(ToolCall(name, _object(arguments, root, root), ""), text)

    def from_python(self, written: str, placed: Sequence[Any], named: Mapping[str, Any], text: str) -> AnyCall:
        """Return a call that was written as one of a Python function."""
        name = self.name(written)
        keys = list(self.properties(name))
        if len(placed) > len(keys):
            return MalformedCall(text, "its arguments have no names; expected name=value")
        return self.call(name, {**dict(zip(keys, placed, strict=False)), **named}, text)

    def from_json(self, value: Any, text: str) -> AnyCall:
        """Return the call that a JSON object is, or what is wrong with it."""
        if not isinstance(value, Mapping):
            return MalformedCall(text, f"expected a JSON object, found {kind(value)}")
        inner, name = _named(value)
        if not isinstance(name, str) or not name.strip():
            return MalformedCall(text, 'expected the tool\'s name under "name"')
        key = arguments_key(inner)
        others = inner.keys() - _BESIDE - {"name", "tool_name"}
        if key is None and others:
            return MalformedCall(text, f'expected an object under "arguments", found {", ".join(map(repr, others))}')
        call_id = value.get("id") or value.get("tool_call_id") or ""
        return self.call(name, {} if key is None else inner[key], text, str(call_id))

    def call(self, written: str, arguments: Any, text: str, call_id: str = "") -> AnyCall:
        """Return a call with the arguments as a format holds them, or what is wrong with them.

        Args:
            written: The name.
            arguments: An object, also as JSON text; nothing, or an empty text, is none.
            text: The call as written.
            call_id: Where the format has one.
        """
        if isinstance(arguments, str) and arguments.strip():
            try:
                arguments = loads(arguments)
            except ValueError as error:
                return MalformedCall(text, f"its arguments are no valid JSON: {error}")
        if arguments is None or isinstance(arguments, str):
            arguments = {}
        if not isinstance(arguments, Mapping):
            return MalformedCall(text, f'expected an object under "arguments", found {kind(arguments)}')
        name = self.name(written)
        properties, root = self.properties(name), self.parameters.get(name, {})
        read = {key: _typed(value, properties.get(key), root) for key, value in arguments.items()}
        return _sound(ToolCall(name, read, call_id), text)


def arguments_key(value: Mapping[str, Any]) -> str | None:
    """Return under which key an object has a call's arguments."""
    return next((key for key in ("arguments", "parameters", "args", "input") if key in value), None)


def _named(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """Return the part of an object that holds a call's name and arguments, and the name."""
    inner = value.get("function", value)
    inner = inner if isinstance(inner, Mapping) else {**value, "name": inner}
    return inner, inner.get("name", inner.get("tool_name"))


def is_call(value: Any) -> bool:
    """Return whether a JSON value has the form of a call."""
    if not isinstance(value, Mapping):
        return False
    inner, name = _named(value)
    return isinstance(name, str) and ("arguments" in inner or "parameters" in inner)


def meaning(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a bare text means as an argument.

    Args:
        text: As the policy wrote it.
        schema: Of the argument; None where nothing is known of it: then what is JSON is read as JSON.
        root: The function's parameters, which `schema` may refer to.
    """
    types, choices = _types(schema, root, 0)
    for choice in choices:
        if choice == text or (not isinstance(choice, str) and _same(choice, text)):
            return choice
    if not types:
        return _guess(text)
    for name, read in _READERS.items():
        if name in types and (found := read(text, "string" in types)) is not _NO:
            return found
    return text


def kind(value: Any) -> str:
    """Return what a JSON value is, for messages."""
    return {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}.get(
        type(value), "a number"
    )


_NO: Any = object()
_NUMBER = re.compile(r"[-+]?(?:\d+|(?=\.\d))(?P<point>\.\d*)?(?P<power>[eE][-+]?\d+)?")


def _typed(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return an argument; a text, where the schema allows none, as what it means: "5" is a number."""
    if not isinstance(value, str):
        return value
    types, choices = _types(schema, root, 0)
    return value if not types or "string" in types or value in choices else meaning(value, schema, root)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> tuple[set[str], list[Any]]:
    """Return the types that a schema allows, none where it does not say, and the values that it names."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST_REFERENCE:
        return set(), []
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth + 1)
    choices = [*schema["enum"]] if isinstance(schema.get("enum"), list) else []
    choices += [schema["const"]] if "const" in schema else []
    types = schema.get("type")
    if types is not None:
        return ({types} if isinstance(types, str) else {str(each) for each in types}), choices
    found = {_JSON_TYPES[type(choice)] for choice in choices if type(choice) in _JSON_TYPES}
    for each in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(each) or ():
            inner, named = _types(option, root, depth + 1)
            found |= inner
            choices += named
    if not found and schema.get("nullable") is True:
        return set(), choices
    return found, choices


def _object(fields: Sequence[tuple[str, Element]], schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object that tags are; tags of one name are a list."""
    options = list(_options(schema, root, 0))
    known = {key: each for option in options for key, each in (option.get("properties") or {}).items()}
    other = next((option["additionalProperties"] for option in options if "additionalProperties" in option), None)
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for name, _ in fields):
        values = [value for key, value in fields if key == name]
        inner = known.get(name, other)
        found[name] = _meant(values[0] if len(values) == 1 else [("item", each) for each in values], inner, root)
    return found


def _meant(value: Element, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what an argument means that was written as tags."""
    types, _ = _types(schema, root, 0)
    if isinstance(value, str):
        empty: Any = [] if "array" in types else {} if "object" in types else None
        return (
            empty if empty is not None and "string" not in types and not value.strip() else meaning(value, schema, root)
        )
    named_items = all(name == "item" for name, _ in value)
    if "array" in types or (named_items and "object" not in types):
        items = next((option["items"] for option in _options(schema, root, 0) if "items" in option), None)
        return [_meant(each, items, root) for _, each in value]
    return _object(value, schema, root)


def _options(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, what it refers to, and its alternatives."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST_REFERENCE:
        return
    yield schema
    referred = [_referred(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    for each in (*referred, *(each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ())):
        yield from _options(each, root, depth + 1)


_JSON_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _guess(text: str) -> Any:
    bare = text.strip()
    if bare in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[bare]
    try:
        return loads(text)
    except ValueError:
        return text


def _same(choice: Any, text: str) -> bool:
    read = _guess(text)
    return type(read) is type(choice) and bool(read == choice)


def _null(text: str, or_text: bool) -> Any:
    bare = text.strip()
    return None if bare in ("null", "None") or (not or_text and bare.lower() in ("null", "none", "")) else _NO


def _boolean(text: str, or_text: bool) -> Any:
    bare = text.strip() if or_text else text.strip().lower()
    return {"true": True, "false": False, "True": True, "False": False}.get(bare, _NO)


def _integer(text: str, or_text: bool) -> Any:
    number = _number(text, or_text)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number if isinstance(number, int) else _NO


def _number(text: str, _: bool) -> Any:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return _NO
    try:
        found = float(match[0]) if match["point"] or match["power"] else int(match[0])
    except ValueError:  # more digits than Python converts
        return _NO
    return found if isinstance(found, int) or math.isfinite(found) else _NO


def _of_kind(text: str, wanted: type) -> Any:
    try:
        found = loads(text)
        found = loads(found) if isinstance(found, str) else found
    except ValueError:
        return _NO
    return found if isinstance(found, wanted) else _NO


#: What a text is tried as, in this order, where a schema allows several types.
_READERS: dict[str, Callable[[str, bool], Any]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "array": lambda text, _: _of_kind(text, list),
    "object": lambda text, _: _of_kind(text, dict),
}


def _sound(call: ToolCall, text: str) -> AnyCall:
    """Return a call that can be sent on as UTF-8."""
    try:
        json.dumps([call.name, dict(call.arguments)], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return MalformedCall(text, "its arguments hold half of a surrogate pair")
    except ValueError:
        return MalformedCall(text, "its arguments hold a number that is too large")
    except RecursionError:
        return MalformedCall(text, "it is nested too deeply")
    return call
