"""Python functions as tools."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from roll_like.errors import ConfigError, whole_call
from roll_like.tools.base import Tool, ToolError

_SECTION = re.compile(r"^(\s*)(Args|Arguments|Parameters):\s*$")
_ARGUMENT = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_OTHER_SECTION = re.compile(r"^(Returns|Raises|Yields|Examples?|Notes?):\s*$")


def tool_from_function(function: Callable[..., Any], *, name: str | None = None) -> Tool:
    """Return a function as a tool: its schema comes from type hints, its descriptions from the docstring.

    Examples:
        >>> def weather(city: str, days: int = 1) -> str:
        ...     "Forecast the weather."
        >>> tool_from_function(weather).schema["function"]["parameters"]["required"]
        ['city']

    What the docstring says under `Args:` describes the parameters. A function that is not `async` runs in a thread.
    Arguments are checked and converted by pydantic, so that a parameter may be an enum, a literal or a model.

    Args:
        function: Every parameter has a type hint and can be given by name.
        name: Default: the function's name.

    Raises:
        ConfigError: A parameter has no type hint, cannot be given by name, or has a type without JSON Schema.
    """
    tool_name = name or function.__name__
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    model = _model(function, tool_name, described)
    schema = model.model_json_schema()
    parameters = {key: value for key, value in schema.items() if key not in ("title", "description")}
    for each in parameters.get("properties", {}).values():
        each.pop("title", None)

    async def call(**arguments: Any) -> Any:
        try:
            checked = model.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ToolError(f"wrong arguments for {tool_name} at {place}: {first['msg']}") from error
        values = {key: getattr(checked, key) for key in checked.model_fields_set}
        if inspect.iscoroutinefunction(function):
            return await function(**values)
        return await asyncio.to_thread(lambda: whole_call(function, **values))

    return Tool(tool_name, summary, parameters, call)


def _model(function: Callable[..., Any], name: str, described: dict[str, str]) -> type[BaseModel]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name!r}: the parameter {parameter} cannot be given by name",
                fix="write every parameter out, without / and *",
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"tool {name!r}: the parameter {parameter.name!r} has no type hint", fix="give it one: text: str"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default, description=described.get(parameter.name)))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except PydanticUserError as error:
        raise ConfigError(
            f"tool {name!r}: its parameters have no JSON Schema: {error.message}",
            fix="use plain types, enums, literals or pydantic models as type hints",
        ) from error
    return model


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the part before the sections, and what `Args:` says about each argument."""
    before: list[str] = []
    described: dict[str, str] = {}
    indent: int | None = None
    inside, last = False, ""
    for line in text.splitlines():
        if _SECTION.match(line):
            inside, indent = True, None
        elif _OTHER_SECTION.match(line):
            break
        elif not inside:
            before.append(line)
        elif (found := _ARGUMENT.match(line)) and (indent is None or len(found[1]) <= indent):
            indent, last = len(found[1]), found[2]
            described[last] = found[3].strip()
        elif line.strip() and last:
            described[last] = f"{described[last]} {line.strip()}".strip()
    return " ".join(" ".join(before).split()), described
