"""Tools that a policy may call: functions, built-ins and MCP servers; and how its calls are read."""

from roll_like.tools.base import AnyCall, MalformedCall, Tool, Toolbox, ToolCall, ToolError, ToolImages, ToolOutcome
from roll_like.tools.calls.formats import CallStyle
from roll_like.tools.functions import tool_from_function
from roll_like.tools.host import SharedTools, ToolHost, read_tool_configs
from roll_like.tools.parsing import parse_tool_calls

__all__ = [
    "AnyCall",
    "CallStyle",
    "MalformedCall",
    "SharedTools",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolHost",
    "ToolImages",
    "ToolOutcome",
    "Toolbox",
    "parse_tool_calls",
    "read_tool_configs",
    "tool_from_function",
]
