"""An answer that comes in pieces: what can be shown of it before it is known whether it calls tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import regex

from roll_like.tools.answers import openai_answer
from roll_like.tools.calls.functions import Functions
from roll_like.tools.parsing import call_beginnings
from roll_like.types import THINK, ReasoningTags


class AnswerStream:
    """Gives text on as long as it cannot be the beginning of a call; from there on it waits for the whole answer.

    Args:
        tools: Function schemas.
        reasoning: As `parse_tool_calls` takes it.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], reasoning: ReasoningTags = THINK) -> None:
        self._tools, self._reasoning = tools, reasoning
        self._begins = regex.compile("|".join(f"(?:{each})" for each in call_beginnings(Functions(tools))))
        self._text = ""
        self._shown = 0
        self._waits = False

    @property
    def holds(self) -> bool:
        """Whether there was any text."""
        return bool(self._text)

    def add(self, piece: str) -> str:
        """Return what can be shown after another piece of the answer."""
        self._text += piece
        if self._waits:
            return ""
        found = self._begins.search(self._text, self._shown, partial=True)
        self._waits = found is not None and not found.partial
        end = len(self._text) if found is None else found.start()
        # calls end an answer, and blanks before them are no part of it
        end = max(self._shown, len(self._text[:end].rstrip()))
        shown, self._shown = self._text[self._shown : end], end
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return what was not shown, and the calls in OpenAI's form."""
        content, calls = openai_answer(self._text, self._tools, reasoning=self._reasoning)
        if not calls:
            return self._text[self._shown :], []
        shown = self._text[: self._shown].lstrip()
        alike = next((at for at, (one, other) in enumerate(zip(content, shown, strict=False)) if one != other), None)
        return content[min(len(content), len(shown)) if alike is None else alike :], calls
