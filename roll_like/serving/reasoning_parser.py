"""Reasoning in vLLM's server, divided from answers as a run divides it: a plugin for `--reasoning-parser-plugin`.

vLLM has a parser for each family, which has to be chosen by hand and wants tags that are tokens. This one takes the
tags that the chat template or the tokenizer shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser, ReasoningParserManager

from roll_like.data.reasoning import after_prompt, split_turn, tags_of_tokenizer
from roll_like.serving.reasoning_stream import ReasoningStream
from roll_like.types import ReasoningTags

#: How JSON objects and lists of them or of texts begin, and what may still become that.
_JSON, _PERHAPS_JSON = re.compile(r'\s*(?:\{\s*["}]|\[\s*[{"\]])'), re.compile(r"\s*(?:[{\[]\s*)?\Z")
#: More tokens than any tag has: so many are decoded where a tag is looked for.
_TAG_TOKENS = 64


class RunReasoningParser(ReasoningParser):  # type: ignore[misc]  # vLLM is not typed
    """Reads reasoning by text, whichever tokens spell its tags."""

    engine_based_streaming = True

    def __init__(self, tokenizer: Any, *args: Any, chat_template_kwargs: Any = None, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._tags = tags_of_tokenizer(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._special = any(token.special and str(token) in (self._tags.open, self._tags.close) for token in added)
        self._template_options = dict(chat_template_kwargs or {})
        self._stream: ReasoningStream | None = None
        self._opened: bool | None = None
        self._plain = False
        self._held = ""

    @property
    def tags(self) -> ReasoningTags:
        """What delimits the reasoning of the answer, and whether the prompt opened it."""
        if self._opened is None:
            prompt = self.model_tokenizer.apply_chat_template(
                [{"role": "user", "content": "."}],
                tokenize=False,
                **{"add_generation_prompt": True, **self._template_options},
            )
            self._opened = self._opens(str(prompt))
        return replace(self._tags, opened=self._opened)

    def adjust_request(self, request: Any) -> Any:
        """Keep special tokens in the text: some families mark reasoning by them."""
        if self._special:
            request.skip_special_tokens = False
        return request

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Note whether the prompt opens the reasoning."""
        self._opened = self._opens(self._end_of(prompt_token_ids))

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with the closing tag, as templates write it where reasoning is turned off."""
        return self._end_of(input_ids).rstrip().endswith(self._tags.close)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Return whether the answer so far is past its reasoning."""
        del input_ids, delta_ids
        return self.has_engine_confirmed_reasoning_end()

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Return the same; vLLM asks parsers that hold text back so."""
        return self._plain or (self._stream is not None and self._stream.ended)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Return tokens that are no reasoning: texts decide, so none are taken away."""
        return input_ids

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens are reasoning, tags included; 0 where no single token ends it."""
        ids, close = list(token_ids), self.vocab.get(self._tags.close)
        begun = self.tags.opened or self.model_tokenizer.decode(ids[:_TAG_TOKENS]).lstrip().startswith(self._tags.open)
        if close is None or not begun:
            return 0
        return ids.index(close) + 1 if close in ids else len(ids)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Return the reasoning and the answer of a whole response.

        What a request forces into a format has no reasoning, also where the prompt opens it.
        """
        if (
            self.tags.opened
            and _forces(request)
            and (self._tags.close not in model_output or _JSON.match(model_output))
        ):
            return None, model_output
        reasoning, content = split_turn(model_output, self.tags)
        return reasoning, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Return what a piece adds to the reasoning, and to the answer where it ends.

        vLLM shows the request only to another instance. So what begins as JSON, where the prompt opens the reasoning,
        counts as forced into that format.
        """
        del previous_text, current_text, previous_token_ids, current_token_ids, delta_token_ids
        self._held += delta_text
        if self._stream is None:
            if self.tags.opened and _PERHAPS_JSON.match(self._held):
                return None
            self._stream = ReasoningStream(self.tags)
            self._plain = self.tags.opened and _JSON.match(self._held) is not None
        piece, self._held = self._held, ""
        return _delta(*(("", piece) if self._plain else self._stream.add(piece)))

    def finish_streaming(self) -> DeltaMessage | None:
        """Return what was held back."""
        if self._plain:
            return None
        stream = self._stream or ReasoningStream(self.tags)
        shown, rest = stream.add(self._held), stream.finish()
        return _delta(shown[0] + rest[0], shown[1] + rest[1])

    def _opens(self, prompt: str) -> bool:
        tags = after_prompt(self._tags, prompt)
        return tags is not None and tags.opened

    def _end_of(self, token_ids: Sequence[int]) -> str:
        return str(self.model_tokenizer.decode(list(token_ids[-_TAG_TOKENS:]), skip_special_tokens=False))


def _forces(request: Any) -> bool:
    """Return whether a request forces the answer into a format: a schema, a pattern, or a call."""
    choice, formats = getattr(request, "tool_choice", None), getattr(request, "extract_structured_outputs", None)
    return choice not in (None, "auto", "none") or (formats is not None and formats() is not None)


def _delta(reasoning: str, content: str) -> DeltaMessage | None:
    if not reasoning and not content:
        return None
    return DeltaMessage(reasoning=reasoning or None, content=content or None)


ReasoningParserManager.register_module(name="roll_like", module=RunReasoningParser)
