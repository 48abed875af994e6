"""An answer with tool calls in OpenAI's form, for what serves a policy over its API."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from roll_like.tools.base import ToolCall
from roll_like.tools.parsing import parse_tool_calls
from roll_like.types import THINK, ReasoningTags

#: An id that the parser gave.
_NUMBERED = re.compile(r"call_\d+")


def openai_answer(
    text: str, tools: Sequence[Mapping[str, Any]], *, reasoning: ReasoningTags = THINK
) -> tuple[str, list[dict[str, Any]]]:
    """Return the content and the `tool_calls` of an answer; without calls the content is the whole text.

    Args:
        text: As `parse_tool_calls` takes it.
        reasoning: What stands before and after the policy's reasoning, and whether the prompt opened it.
    """
    rest, found = parse_tool_calls(text, "auto", tools, reasoning=reasoning)
    calls = [call for call in found if isinstance(call, ToolCall)]
    if not calls:
        return text, []
    # what looks like a call and cannot be read is text
    content = "\n".join(part for part in (rest, *(one.text for one in found if not isinstance(one, ToolCall))) if part)
    return content, [
        {
            # some models write ids, and their templates repeat them
            "id": f"call_{uuid.uuid4().hex[:24]}" if _NUMBERED.fullmatch(call.call_id) else call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]
