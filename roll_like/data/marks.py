"""Special tokens that mark tool calls in a response.

A response is decoded without special tokens, as they end turns and pad. Some models mark their calls by special tokens
too (Mistral's `[TOOL_CALLS]f[ARGS]{…}` would be `f{…}`, and gpt-oss' channels would run into one another), so these are
kept. Most tokenizers have none that is special: `<tool_call>` is an ordinary added token.
"""

from __future__ import annotations

from typing import Any

_CALLS = """
<tool_call> </tool_call> <tool_calls> </tool_calls> <|tool_call|> <|/tool_call|> <|tool_call_start|> <|tool_call_end|>
<seed:tool_call> </seed:tool_call> <minimax:tool_call> </minimax:tool_call> <arg_key> </arg_key> <arg_value>
</arg_value> <|python_tag|> <|python_start|> <|python_end|> [TOOL_CALLS] [CALL_ID] [ARGS] <｜tool▁calls▁begin｜>
<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> ｜DSML｜ <|tool_calls_section_begin|>
<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|START_ACTION|> <|END_ACTION|>
<|action_start|> <|plugin|> <|action_end|> <|tools_prefix|> <|tools_suffix|> <|channel|> <|constrain|> <|message|>
<|tool_call> <tool_call|> <|"|> <start_function_call> <end_function_call> <escape> <dots_function_call>
</dots_function_call> <longcat_tool_call> </longcat_tool_call> <|function_call|> <｜tool_calls_begin｜>
<｜tool_calls_end｜> <｜tool_call_begin｜> <｜tool_call_end｜> <｜tool_sep｜> <|open|> <|close|> <|sep|>
<|content_invoke_tool_json|> <atem:function_calls> </atem:function_calls> ]<]minimax[>[
"""
MARKS = frozenset(_CALLS.split())
#: Of messages with channels (harmony); other models end turns with them.
_BETWEEN_CHANNELS = frozenset({"<|start|>", "<|end|>"})


def call_marks(tokenizer: Any) -> frozenset[str]:
    """Return a tokenizer's special tokens that mark calls, or the channels that they are in."""
    added = getattr(tokenizer, "added_tokens_decoder", {})  # tokenizers of other libraries have none
    texts = {str(token) for token in added.values() if token.special}
    return frozenset(texts & (MARKS | _BETWEEN_CHANNELS if "<|channel|>" in texts else MARKS))
