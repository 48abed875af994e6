"""Special tokens that mean something in a response: they mark tool calls and reasoning.

A response is decoded without special tokens, as they end turns and pad. Some models mark their calls by special tokens
too (Mistral's `[TOOL_CALLS]f[ARGS]{…}` would be `f{…}`, and gpt-oss' channels would run into one another), so these are
kept. Most tokenizers have none that is special: `<tool_call>` and `<think>` are ordinary added tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

MARKS = frozenset(
    [
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<seed:think>",
        "</seed:think>",
        "◁think▷",
        "◁/think▷",
        "<tool_call>",
        "</tool_call>",
        "<tool_calls>",
        "</tool_calls>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "｜DSML｜",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "<|action_start|>",
        "<|plugin|>",
        "<|action_end|>",
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
    ]
)
#: Of messages with channels (harmony); other models end turns with them.
_BETWEEN_CHANNELS = frozenset({"<|start|>", "<|end|>"})


def decode_response(tokenizer: Any, token_ids: Iterable[int]) -> str:
    """Return a response as text, without the special tokens that mark neither calls nor reasoning."""
    ids = list(token_ids)
    special, marks = _special(tokenizer)
    if not marks.intersection(ids):
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    kept = [token_id for token_id in ids if token_id in marks or token_id not in special]
    return str(tokenizer.decode(kept, skip_special_tokens=False))


@lru_cache(maxsize=8)
def _special(tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Return a tokenizer's special tokens, and which of them are marks."""
    added = getattr(tokenizer, "added_tokens_decoder", {})  # tokenizers of other libraries have none
    texts = {int(token_id): str(token) for token_id, token in added.items() if token.special}
    known = MARKS | _BETWEEN_CHANNELS if "<|channel|>" in texts.values() else MARKS
    marks = {token_id for token_id, text in texts.items() if text in known}
    return frozenset(texts), frozenset(marks)
