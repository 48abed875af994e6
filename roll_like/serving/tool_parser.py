"""Tool calls in vLLM's server, read as a run reads them: a plugin for `--tool-parser-plugin`.

vLLM has a parser for each format of calls, which has to be chosen by hand, and its parsers read some texts otherwise
than a run does. A policy is served as it was trained: `parse_tool_calls` reads its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from roll_like.data.reasoning import tags_of_tokenizer
from roll_like.tools.answers import openai_answer
from roll_like.tools.streaming import AnswerStream


class RunToolParser(ToolParser):  # type: ignore[misc]  # vLLM is not typed
    """Reads the calls of an answer once it is complete; what cannot be part of one is streamed as it comes."""

    @property
    def engine_based_streaming(self) -> bool:
        """Whether any text has come: then vLLM calls `finish_streaming` at the end of a stream.

        When vLLM asks first, there is none. So it keeps the text of a stream, out of which it reads forced calls.
        """
        return self._stream.holds

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        super().__init__(tokenizer, tools)
        self._reasoning = tags_of_tokenizer(tokenizer)
        self._schemas = [_schema(tool.model_dump(exclude_none=True)) for tool in self.tools]
        self._stream = AnswerStream(self._schemas, self._reasoning)

    def adjust_request(self, request: Any) -> Any:
        """Keep special tokens in the text: some formats mark calls by them."""
        request = super().adjust_request(request)
        if self._reads(request):
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Return an answer's calls, and the rest of it."""
        content, calls = self._read(model_output) if self._reads(request) else (model_output, [])
        read = [ToolCall(id=call["id"], function=FunctionCall(**call["function"])) for call in calls]
        return ExtractedToolCallInformation(tools_called=bool(read), tool_calls=read, content=content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Hold back what may be part of a call."""
        del previous_text, current_text, previous_token_ids, current_token_ids, delta_token_ids
        if not self._reads(request):
            return DeltaMessage(content=delta_text) if delta_text else None
        shown = self._stream.add(delta_text)
        return DeltaMessage(content=shown) if shown else None

    def finish_streaming(self) -> DeltaMessage | None:
        """Return what was held back."""
        content, calls = self._stream.finish()
        deltas = [
            DeltaToolCall(index=index, id=call["id"], type="function", function=DeltaFunctionCall(**call["function"]))
            for index, call in enumerate(calls)
        ]
        return DeltaMessage(content=content or None, tool_calls=deltas) if content or deltas else None

    def _reads(self, request: Any) -> bool:
        return bool(self._schemas) and request.tool_choice != "none"

    def _read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return openai_answer(text, self._schemas, reasoning=self._reasoning)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of the chat API, which the Responses API writes without `function`."""
    return tool if "function" in tool else {"type": "function", "function": tool}


ToolParserManager.register_module(name="roll_like", module=RunToolParser)
