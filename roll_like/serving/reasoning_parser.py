"""Reasoning in vLLM's server, divided from answers as a run divides it: a plugin for `--reasoning-parser-plugin`.

vLLM has a parser for each family, which has to be chosen by hand and wants tags that are tokens. This one takes the
tags that the chat template or the tokenizer shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser, ReasoningParserManager

from roll_like.data.reasoning import after_prompt, known_tags, split_turn
from roll_like.serving.reasoning_stream import ReasoningStream
from roll_like.types import THINK, ReasoningTags

#: How what is forced into a format begins: such an answer has no reasoning, also where the prompt opens it.
_FORCED = ("{", "[")
#: Tokens that hold any tag.
_TAG_TOKENS = 64


class RunReasoningParser(ReasoningParser):  # type: ignore[misc]  # vLLM is not typed
    """Reads reasoning by text, whichever tokens spell its tags."""

    engine_based_streaming = True

    def __init__(self, tokenizer: Any, *args: Any, chat_template_kwargs: Any = None, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self._tags = known_tags(template, [str(token) for token in added]) or THINK
        self._special = any(token.special and str(token) in (self._tags.open, self._tags.close) for token in added)
        self._template_options = dict(chat_template_kwargs or {})
        self._stream: ReasoningStream | None = None
        self._opened: bool | None = None
        self._plain = False

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
        """Return whether a prompt has closed the reasoning: templates do so where it is turned off."""
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
        """Return the reasoning and the answer of a whole response."""
        del request
        if self.tags.opened and self._tags.close not in model_output and model_output.lstrip().startswith(_FORCED):
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
        """Return what a piece adds to the reasoning, and to the answer where it ends."""
        del previous_text, previous_token_ids, current_token_ids, delta_token_ids
        tags = self.tags
        if self._stream is None:
            self._plain = tags.opened and current_text.lstrip().startswith(_FORCED)
            self._stream = ReasoningStream(tags)
        return _delta(*(("", delta_text) if self._plain else self._stream.add(delta_text)))

    def finish_streaming(self) -> DeltaMessage | None:
        """Return what was held back."""
        return None if self._stream is None or self._plain else _delta(*self._stream.finish())

    def _opens(self, prompt: str) -> bool:
        tags = after_prompt(self._tags, prompt)
        return tags is not None and tags.opened

    def _end_of(self, token_ids: Sequence[int]) -> str:
        return str(self.model_tokenizer.decode(list(token_ids[-_TAG_TOKENS:]), skip_special_tokens=False))


def _delta(reasoning: str, content: str) -> DeltaMessage | None:
    if not reasoning and not content:
        return None
    return DeltaMessage(reasoning=reasoning or None, content=content or None)


ReasoningParserManager.register_module(name="roll_like", module=RunReasoningParser)
