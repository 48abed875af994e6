"""Tools that a policy may call: functions, built-ins and MCP servers; and how its calls are read."""

from roll_like.tools.base import AnyCall, MalformedCall, Tool, Toolbox, ToolCall, ToolError, ToolOutcome
from roll_like.tools.calculator import calculate, calculator
from roll_like.tools.config import (
    CalculatorConfig,
    FunctionConfig,
    McpConfig,
    PythonConfig,
    SearchConfig,
    ToolConfig,
)
from roll_like.tools.functions import tool_from_function
from roll_like.tools.host import SharedTools, ToolHost, open_tools, read_tool_configs
from roll_like.tools.mcp_server import McpServer
from roll_like.tools.parsing import CallStyle, parse_tool_calls
from roll_like.tools.search import Passage, SearchIndex, read_corpus, search_tool

__all__ = [
    "AnyCall",
    "CalculatorConfig",
    "CallStyle",
    "FunctionConfig",
    "MalformedCall",
    "McpConfig",
    "McpServer",
    "Passage",
    "PythonConfig",
    "SearchConfig",
    "SearchIndex",
    "SharedTools",
    "Tool",
    "ToolCall",
    "ToolConfig",
    "ToolError",
    "ToolHost",
    "ToolOutcome",
    "Toolbox",
    "calculate",
    "calculator",
    "open_tools",
    "parse_tool_calls",
    "read_corpus",
    "read_tool_configs",
    "search_tool",
    "tool_from_function",
]
