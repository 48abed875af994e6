"""What vLLM's own tool parsers read in the texts of `tests/data/tool_calls.jsonl`."""

from __future__ import annotations

import json
from typing import Any

from tiny_model import make_tiny_tokenizer
from tool_call_texts import TOOLS

#: Rows whose names begin so → vLLM's parser.
PARSERS = {
    "hermes": "hermes",
    "qwen_xml": "qwen3_coder",
    "llama json": "llama3_json",
    "pythonic": "pythonic",
    "mistral": "mistral",
    "glm": "glm45",
    "deepseek v3.1": "deepseek_v31",
    "deepseek v3.2": "deepseek_v32",
    "deepseek v4": "deepseek_v4",
    "deepseek v3": "deepseek_v3",
    "kimi_k3": "kimi_k3",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "gemma4": "gemma4",
    **{
        family: family
        for family in (
            "functiongemma",
            "dots",
            "gigachat3",
            "granite-20b-fc",
            "hy_v3",
            "hy_v4",
            "k2_horizon",
            "longcat",
            "minicpm5",
            "muse_glimmer",
            "plamo3",
            "step3",
            "inkling",
            "phi4_mini_json",
            "deepseek_v41",
        )
    },
}
_MARKS = (
    "<tool_call> </tool_call> <think> </think> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID] [THINK] [/THINK] <arg_key> "
    "</arg_key> <arg_value> </arg_value> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜DSML｜function_calls> </｜DSML｜function_calls> <｜DSML｜tool_calls> "
    "</｜DSML｜tool_calls> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_end|> <|tool_call_argument_begin|> <minimax:tool_call> </minimax:tool_call> <|tool_call> <tool_call|> "
    '<|"|> <|channel> <channel|> <start_function_call> <end_function_call> <escape> <tool_calls> </tool_calls> '
    "<tool_sep> <ifm|tool_calls> </ifm|tool_calls> <|open|> <|close|> <|sep|> <|message_model|> "
    "<|content_invoke_tool_json|> <|content_text|> <|content_thinking|> <|end_message|> <｜DSML｜ "
    "</｜DSML｜ <|message|> <|eom|> <|eot|> "
    "<|plamo:begin_ <|plamo:end_ :plamo|> <｜tool_calls_begin｜> <｜tool_calls_end｜> <｜tool_call_begin｜> "
    "<｜tool_call_end｜> <｜tool_sep｜>"
)


def parser_of(name: str) -> str | None:
    """Return vLLM's parser for a row."""
    return next((parser for begins, parser in PARSERS.items() if name.startswith(begins)), None)


def read_by_vllm(rows: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """Return the names and arguments that vLLM reads, by the rows' names; of rows that it has a parser for."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(_MARKS.split())
    request = ChatCompletionRequest(messages=[], model="m", tools=TOOLS, tool_choice="auto")
    found: dict[str, list[list[Any]]] = {}
    for row in rows:
        if (name := parser_of(row["name"])) is None:
            continue
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        answer = parser.extract_tool_calls(row["text"], request)
        found[row["name"]] = [[call.function.name, _loaded(call.function.arguments)] for call in answer.tool_calls]
    return found


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
