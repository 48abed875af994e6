"""A real MCP server for tests: `python mcp_demo_server.py stdio`, or `http PORT`."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("demo", instructions="For tests.")
_calls: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    _calls.append("add")
    return a + b


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide."""
    if b == 0:
        raise ToolError("b should not be 0")
    return a / b


@server.tool()
def variable(name: str) -> str:
    """Return one of the server's environment variables."""
    return os.environ.get(name, "(not set)")


@server.tool()
def sleep(seconds: float) -> str:
    """Wait."""
    import time

    time.sleep(seconds)
    return "awake"


@server.tool()
def leave() -> str:
    """End the server in the middle of a call."""
    print("leaving on request", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stdio"]:
            server.run("stdio")
        case ["http", port]:
            server.run("streamable-http", host="127.0.0.1", port=int(port))
        case ["broken"]:
            print("cannot open /etc/demo.conf: no such file", file=sys.stderr, flush=True)
            sys.exit(2)
        case ["silent"]:
            sys.stdin.read()
        case other:
            sys.exit(f"expected stdio, http PORT, broken or silent, found {other}")
