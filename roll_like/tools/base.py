"""What a tool is, and how a call of the policy is carried out.

Two kinds of failure are kept apart. A `ToolError` is the policy's to correct: a wrong argument, a division by zero, a
program that does not run. It becomes the tool's answer. Anything else that a tool raises is a failure of the tool: the
episode is lost and counted (`EnvError`), never scored.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from roll_like.data.images import is_decoded
from roll_like.errors import ConfigError, EnvError, RollLikeError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolError(RollLikeError, ValueError):
    """A call that fails by the policy's fault; the message is the tool's answer."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that a policy may call.

    Attributes:
        name: As the policy writes it: letters, digits, `_`, `.`, `-`.
        description: What it does, for the policy.
        parameters: JSON Schema of its arguments, an object.
        call: Takes the arguments by name; what it returns becomes text, and Pillow images, alone or in a list, are
            images. Raises `ToolError` for what the policy did wrong.

    Raises:
        ConfigError: The name or the schema is invalid.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Awaitable[Any]]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"a tool is called {self.name!r}; expected 1 to 64 letters, digits, '_', '.' or '-'",
                fix="give it another name",
            )
        try:
            Draft202012Validator.check_schema(self.parameters)
        except SchemaError as error:
            raise ConfigError(
                f"tool {self.name!r}: its parameters are not a JSON Schema: {error.message} at {error.json_path}",
                fix="correct the schema",
            ) from error
        if self.parameters.get("type") != "object":
            raise ConfigError(
                f"tool {self.name!r}: its parameters should be a JSON Schema with type: object, "
                f"found type: {self.parameters.get('type')!r}",
                fix="describe the arguments as properties of an object",
            )

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it: OpenAI's function schema."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote.

    Attributes:
        name: Of the tool; whether there is such a tool, `Toolbox` says.
        arguments: By name.
        call_id: Its place among the calls of one answer: `call_0`.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = "call_0"


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What looks like a call and cannot be read.

    Attributes:
        text: As the policy wrote it.
        problem: What is wrong with it, for the policy.
        call_id: As of `ToolCall`.
    """

    text: str
    problem: str
    call_id: str = "call_0"


AnyCall: TypeAlias = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class ToolImages:
    """An answer with images.

    Attributes:
        text: The rest of the answer; it describes each image, for a policy that takes texts only.
        images: The images, as messages take them.
    """

    text: str
    images: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What the policy is told.

    Attributes:
        text: The tool's answer, or what was wrong with the call.
        images: The images in the answer, as messages take them; `text` describes each.
        failed: True where there is no answer: the call was invalid, or the tool refused it.
        invalid: True where the call never reached a tool: malformed, of an unknown tool, with wrong arguments.
    """

    text: str
    failed: bool = False
    invalid: bool = False
    images: tuple[Any, ...] = ()


def text_tool(name: str, description: str, argument: str, meaning: str, call: Callable[..., Awaitable[Any]]) -> Tool:
    """Return a tool with one argument, a text; `meaning` describes it for the policy."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
        "additionalProperties": False,
    }
    return Tool(name, description, parameters, call)


class Toolbox:
    """Tools by name; checks and runs calls.

    Args:
        tools: With different names.
        timeout: Longest call, in seconds.
        max_characters: Longer answers are cut, and say so.

    Raises:
        ConfigError: Two tools have the same name.
    """

    def __init__(self, tools: Sequence[Tool], *, timeout: float = 30.0, max_characters: int = 4000) -> None:
        self._tools: dict[str, tuple[Tool, Draft202012Validator]] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(
                    f"two tools are called {tool.name!r}", fix="leave one out, or give an MCP server a `prefix`"
                )
            # an empty registry: a schema's references are never fetched
            self._tools[tool.name] = tool, Draft202012Validator(tool.parameters, registry=Registry())
        self._timeout = timeout
        self._max_characters = max_characters

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.schema for tool, _ in self._tools.values()]

    async def run(self, call: AnyCall) -> ToolOutcome:
        """Carry out a call.

        Raises:
            EnvError: The tool failed, or took longer than the timeout; nothing that the policy could correct.
        """
        try:
            if isinstance(call, MalformedCall):
                raise ToolError(f"this call cannot be read: {call.problem}")
            tool = self._checked(call)
        except ToolError as error:
            return ToolOutcome(self._short(f"Error: {error.message}"), failed=True, invalid=True)
        try:
            answer = _with_images(await self._call(tool, call))
            return ToolOutcome(self._short(answer.text), images=answer.images)
        except ToolError as error:
            return ToolOutcome(self._short(f"Error: {error.message}"), failed=True)

    def _checked(self, call: ToolCall) -> Tool:
        if call.name not in self._tools:
            near = difflib.get_close_matches(call.name, self._tools, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self._tools) or 'none'}"
            raise ToolError(f"there is no tool {call.name!r}; {hint}")
        tool, validator = self._tools[call.name]
        try:
            problem = best_match(validator.iter_errors(dict(call.arguments)))
        except Unresolvable as error:
            raise EnvError(
                f"the schema of tool {call.name!r} refers to {error.ref!r}, which it does not hold",
                fix="write the definition into the schema, under $defs",
            ) from error
        if problem is not None:
            place = "".join(f"[{step!r}]" for step in problem.absolute_path)
            raise ToolError(f"wrong arguments for {call.name}{f' at {place}' if place else ''}: {problem.message}")
        return tool

    async def _call(self, tool: Tool, call: ToolCall) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await tool.call(**call.arguments)
        except RollLikeError:
            raise
        except TimeoutError as error:
            raise EnvError(
                f"tool {tool.name!r} gave no answer within {self._timeout:g} s", fix="raise `tool_timeout`"
            ) from error
        except Exception as error:  # a tool is foreign code: whatever it raises is a failure of the tool
            raise EnvError(f"tool {tool.name!r} failed: {type(error).__name__}: {error}") from error

    def _short(self, text: str) -> str:
        over = len(text) - self._max_characters
        return text if over <= 0 else f"{text[: self._max_characters]}\n… ({over} more characters)"


def _with_images(value: Any) -> ToolImages:
    if isinstance(value, ToolImages):
        return value
    parts = value if isinstance(value, list | tuple) else [value]
    images = tuple(one for one in parts if is_decoded(one))
    if not images:
        return ToolImages(_as_text(value), ())
    texts = [f"[image, {one.width} × {one.height} pixels]" if is_decoded(one) else _as_text(one) for one in parts]
    return ToolImages("\n".join(texts), images)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
