"""What a policy reads of an MCP tool's result."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

types = pytest.importorskip("mcp_types")

from roll_like.tools.base import ToolImages  # noqa: E402 - mcp is an extra
from roll_like.tools.config import McpConfig  # noqa: E402
from roll_like.tools.mcp_server import McpServer, _text  # noqa: E402


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "text", "text": "5"}, "5"),
        ({"type": "resource", "resource": {"uri": "file:///a.md", "mimeType": "text/plain", "text": "A\n1"}}, "A\n1"),
        ({"type": "resource", "resource": {"uri": "file:///a.md", "text": ""}}, ""),
        (
            {"type": "resource", "resource": {"uri": "file:///a.bin", "mimeType": "application/zip", "blob": "QUJD"}},
            "[resource file:///a.bin, application/zip, 3 bytes]",
        ),
        (
            {"type": "resource_link", "name": "a.md", "uri": "file:///a.md", "description": "The first"},
            "a.md [resource file:///a.md]: The first",
        ),
        (
            {"type": "resource_link", "name": "a", "title": "A", "uri": "file:///a", "mimeType": "text/plain"},
            "A [resource file:///a, text/plain]",
        ),
        ({"type": "image", "data": "QUJD", "mimeType": "image/png"}, "[image, image/png, 3 bytes]"),
        ({"type": "audio", "data": "QUJDREVG", "mimeType": "audio/wav"}, "[audio, audio/wav, 6 bytes]"),
    ],
)  # fmt: skip
def test_blocks_are_read_or_described(block: dict[str, object], text: str) -> None:
    first = {"type": "text", "text": "Found:"}
    result = types.CallToolResult.model_validate({"content": [first, block]})
    assert _text(result) == f"Found:\n{text}"


async def test_images_are_shown_and_described() -> None:
    server = McpServer(McpConfig(name="a", command="a"))
    block = {"type": "image", "data": "QUJD", "mimeType": "image/png"}
    result = types.CallToolResult.model_validate({"content": [{"type": "text", "text": "Found:"}, block]})
    server._client = SimpleNamespace(call_tool=AsyncMock(return_value=result))  # type: ignore[assignment]
    answer = await server.call("look", {})
    assert answer == ToolImages("Found:\n[image, image/png, 3 bytes]", ("data:image/png;base64,QUJD",))


def test_structured_content_stands_for_a_result_without_blocks() -> None:
    result = types.CallToolResult.model_validate({"content": [], "structuredContent": {"sum": 5, "é": None}})
    assert _text(result) == '{"sum": 5, "é": null}'
