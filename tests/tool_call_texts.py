"""The texts of `tests/data/tool_calls.jsonl`, and the tools that their calls are of.

A row has a `text`, the `style` in which it is written, and the `calls` in it: `[name, arguments]`, with the call's id
where the format has one, or `{problem}` for one that cannot be read. `rest` is the text without them.
`vllm: differs` is where vLLM's parser of that family reads something else
(`tests/integration/test_tool_parsers_of_vllm.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data" / "tool_calls.jsonl"


def _tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TEXT = {"type": "string"}
TOOLS = [
    _tool(
        "f",
        {
            "s": TEXT,
            "a": {"type": "boolean"},
            "b": {"type": ["integer", "null"]},
            "c": {"type": "array"},
            "d": {"type": "object"},
            "e": {"type": "number"},
            "u": {"anyOf": [TEXT, {"type": "null"}]},
        },
    ),
    _tool("g", {"x": {"type": "integer"}}),
    _tool("write", {"path": TEXT, "text": TEXT}),
    _tool(
        "choose",
        {
            "level": {"enum": ["low", "high", 3, None]},
            "where": {"$ref": "#/$defs/Place"},
            "any": {"oneOf": [{"type": "integer"}, {"type": "array"}, TEXT]},
        },
        **{"$defs": {"Place": {"type": "object", "properties": {"n": {"type": "integer"}}}}},
    ),
]


def rows() -> list[dict[str, Any]]:
    """Return the rows."""
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
