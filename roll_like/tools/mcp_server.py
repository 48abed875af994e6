"""Tools of MCP servers (Model Context Protocol), over stdio or HTTP.

    async with McpServer(McpConfig(name="files", command="my-server")) as server:
        server.tools                                   # Tools like any other

Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from contextlib import AsyncExitStack
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from roll_like.errors import ConfigError, EnvError
from roll_like.tools.base import Tool, ToolError, ToolImages
from roll_like.tools.config import McpConfig

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, ContentBlock

_STDERR_SHOWN = 2000  # bytes
_MOST_PAGES = 100


class McpServer:
    """A connection to an MCP server, open within `async with`; one task enters and leaves it.

    Args:
        config: The command to start, or the address.

    Attributes:
        tools: The server's tools, or those that the configuration names.
    """

    def __init__(self, config: McpConfig) -> None:
        self.config = config
        self._stack = AsyncExitStack()
        self._stderr: IO[str] | None = None
        self._client: Client | None = None
        self.tools: tuple[Tool, ...] = ()

    async def __aenter__(self) -> Self:
        """Start or reach the server and ask for its tools.

        Raises:
            EnvError: It does not start, or cannot be reached; the message ends with its standard error.
            ConfigError: It does not have a tool that the configuration names, or has one with an invalid schema.
        """
        try:
            from mcp import Client
        except ImportError as error:
            raise ConfigError(
                "tools of MCP servers need the package mcp", fix="run `pip install 'roll-like[mcp]'`"
            ) from error
        try:
            async with asyncio.timeout(self.config.start_seconds):
                transport = self._http() if self.config.url else self._stdio()
                client = Client(transport)  # no limit of its own: a server may start more slowly than it answers
                self._client = await self._stack.enter_async_context(client)
                self.tools = tuple(await self._list(self._client))
        except BaseException as error:
            problem = self._failure(error)
            await self._close()
            if problem is None:
                raise
            raise problem from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def call(self, name: str, arguments: dict[str, Any]) -> str | ToolImages:
        """Call a tool by the server's own name for it.

        Raises:
            ToolError: The server says that the call failed, or that its arguments are wrong.
            EnvError: The connection is lost, or there was no answer in time.
        """
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        if self._client is None:
            raise EnvError(f"MCP server {self.config.name!r} is not running")
        try:
            result = await self._client.call_tool(name, arguments, read_timeout_seconds=self.config.call_seconds)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from error
            raise EnvError(
                f"MCP server {self.config.name!r} failed in {name!r}: {error}{self._stderr_end()}"
            ) from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text or "the call failed")
        images = [f"data:{one.mime_type};base64,{one.data}" for one in result.content if one.type == "image"]
        return ToolImages(text, tuple(images)) if images else text

    def _stdio(self) -> Any:
        from mcp import StdioServerParameters, stdio_client

        config = self.config
        stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - the stack closes it
        self._stderr = self._stack.enter_context(stderr)
        parameters = StdioServerParameters(
            command=str(config.command), args=list(config.args), env=dict(config.env), cwd=config.cwd
        )
        return stdio_client(parameters, errlog=self._stderr)

    def _http(self) -> Any:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        start, call = self.config.start_seconds, self.config.call_seconds
        timeout = httpx2.Timeout(start, read=max(start, call))  # `call` has its own limit
        client = httpx2.AsyncClient(headers=dict(self.config.headers), timeout=timeout)
        self._stack.push_async_callback(client.aclose)
        return streamable_http_client(str(self.config.url), http_client=client)

    async def _list(self, client: Client) -> list[Tool]:
        wanted, found = self.config.tools, []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        names = [tool.name for tool in found]
        for name in wanted or ():
            if name not in names:
                raise ConfigError(
                    f"MCP server {self.config.name!r} has no tool {name!r}; it has: {', '.join(names) or 'none'}",
                    fix="correct `tools` of that server",
                )
        return [
            self._tool(tool.name, tool.description or "", tool.input_schema)
            for tool in found
            if wanted is None or tool.name in wanted
        ]

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> Tool:
        async def call(**arguments: Any) -> str | ToolImages:
            return await self.call(name, arguments)

        try:
            return Tool(f"{self.config.prefix}{name}", description, parameters, call)
        except ConfigError as error:
            raise ConfigError(
                f"MCP server {self.config.name!r}: {error.message}",
                fix="correct the server, or name the tools to use in its `tools`",
            ) from error

    def _failure(self, error: BaseException) -> Exception | None:
        """Return what to raise instead; None for what is raised as it is."""
        cause = _innermost(error)
        if isinstance(cause, ConfigError | asyncio.CancelledError) or not isinstance(cause, Exception):
            return cause if isinstance(cause, ConfigError) else None
        config = self.config
        if isinstance(cause, TimeoutError):
            what = f"did not answer within {config.start_seconds:g} s"
        elif config.url:
            what = f"cannot be reached at {config.url}: {type(cause).__name__}: {cause}"
        else:
            what = f"did not start: {type(cause).__name__}: {cause}"
        run = config.url or " ".join([str(config.command), *config.args])
        fix = "check `url` and `headers`" if config.url else f"run it by hand: {run}"
        return EnvError(f"MCP server {config.name!r} {what}{self._stderr_end()}", fix=fix)

    def _stderr_end(self) -> str:
        """Return the end of the server's standard error."""
        if self._stderr is None:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        # the server writes at the file's own position, so that reading must not move it
        end = os.pread(self._stderr.fileno(), _STDERR_SHOWN, max(0, size - _STDERR_SHOWN))
        text = end.decode(errors="replace").strip()
        return f"\n  its standard error: {text}" if text else "\n  its standard error is empty"

    async def _close(self) -> None:
        self._client, self._stderr = None, None
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()


def _text(result: CallToolResult) -> str:
    """Return what a policy can read of a result."""
    texts = [_block_text(block) for block in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _block_text(block: ContentBlock) -> str:
    """Return a block as text; what is no text is described in brackets."""
    match block.type:
        case "text":
            return block.text
        case "resource":
            resource = block.resource
            text = getattr(resource, "text", None)  # one in bytes has none
            if text is not None:
                return str(text)
            return _described("resource", resource.uri, resource.mime_type, len(getattr(resource, "blob", "")))
        case "resource_link":
            link = _described("resource", block.uri, block.mime_type)
            named = f"{block.title or block.name} {link}"
            return f"{named}: {block.description}" if block.description else named
        case _:
            return _described(block.type, "", block.mime_type, len(block.data))


def _described(kind: str, uri: str, mime_type: str | None, base64_characters: int = 0) -> str:
    size = f"{base64_characters * 3 // 4} bytes" if base64_characters else ""
    return f"[{', '.join(part for part in (f'{kind} {uri}'.strip(), mime_type, size) if part)}]"


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
