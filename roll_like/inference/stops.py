"""Responses as text, and what ends one, the same in every engine: token ids, and strings.

A string that is one special token ends a response by the token's id: engines decode without special tokens, so its
text would never be seen. A string that has a special token within is looked for in the text with special tokens.

Where a request says what delimits reasoning, strings are looked for behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from roll_like.data.reasoning import split_reasoning
from roll_like.types import ReasoningTags, StopReason


class ResponseDecoder:
    """Decodes responses without special tokens, but for those that carry meaning.

    Args:
        kept: Special tokens that stay in the text, such as those that delimit reasoning.
    """

    def __init__(self, tokenizer: Any, kept: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._left_out: frozenset[int] | None = None
        if kept:
            special = {token_id: token for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
            shown = {token_id for token_id, token in special.items() if token.content in kept}
            self._left_out = frozenset({*special, *tokenizer.all_special_ids} - shown)

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text of sampled tokens."""
        if self._left_out is None:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        shown = [token for token in tokens if token not in self._left_out]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False, spaces_between_special_tokens=False))


@dataclass(frozen=True, slots=True)
class RequestStops:
    """What ends a request's response.

    Attributes:
        ids: Tokens that end it, ascending.
        strings: Further strings that end it.
        special: Whether a string has a special token within, so that engines look for it in the whole text.
    """

    ids: tuple[int, ...]
    strings: tuple[str, ...]
    special: bool


class Stops:
    """What ends the responses of an engine.

    Args:
        ids: Tokens that end every response, beside the tokenizer's end of sequence.
        kept: Special tokens that stay in the text of a response (`EngineSpec.kept_tokens`).
    """

    def __init__(self, tokenizer: Any, ids: Collection[int] = (), *, kept: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._plain = ResponseDecoder(tokenizer, kept)
        self.ids = frozenset(ids) | ({tokenizer.eos_token_id} - {None})
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()  # vLLM's own tokenizers have none
        self._special = {str(token): int(token_id) for token_id, token in added if token.special}
        self._left_out = [token for token in self._special if token not in kept]
        self.of = lru_cache(maxsize=256)(self._of)

    def _of(self, strings: tuple[str, ...], ids: tuple[int, ...] | None = None) -> RequestStops:
        """Return what ends a response of a request with these stop strings, and tokens (`Sampling.stop_ids`)."""
        named = {self._special[string] for string in strings if string in self._special}
        others = tuple(string for string in strings if string not in self._special)
        special = any(token in string for string in others for token in self._special)
        return RequestStops(tuple(sorted((self.ids if ids is None else set(ids)) | named)), others, special)

    def text(
        self,
        tokens: Sequence[int],
        strings: tuple[str, ...],
        reason: StopReason,
        ids: tuple[int, ...] | None = None,
        reasoning: ReasoningTags | None = None,
    ) -> str:
        """Return a response as people and rewards see it: without special tokens, and without what ended it.

        Args:
            strings: The request's stop strings.
            ids: The request's stop tokens (`Sampling.stop_ids`).
            reasoning: The request's (`GenerateRequest.reasoning`).
        """
        stops = self.of(strings, ids)
        if reason is not StopReason.STOP:
            return self._plain(tokens)
        if tokens and tokens[-1] in stops.ids:
            return self._plain(tokens[:-1])
        if not stops.special:
            return before(self._plain(tokens), stops.strings, reasoning)
        whole = before(self._tokenizer.decode(tokens, skip_special_tokens=False), stops.strings, reasoning)
        for token in self._left_out:
            whole = whole.replace(token, "")
        return whole

    def found(
        self,
        tokens: Sequence[int],
        strings: tuple[str, ...],
        ids: tuple[int, ...] | None = None,
        reasoning: ReasoningTags | None = None,
    ) -> bool:
        """Return whether the last token, or a stop string in the text so far, ends a response."""
        stops = self.of(strings, ids)
        if tokens and tokens[-1] in stops.ids:
            return True
        if not stops.strings:
            return False
        text = self._tokenizer.decode(tokens, skip_special_tokens=False) if stops.special else self._plain(tokens)
        return len(before(text, stops.strings, reasoning)) < len(text)


def before(text: str, strings: Sequence[str], reasoning: ReasoningTags | None = None) -> str:
    """Return what stands before the first of some strings; all of it where there is none.

    >>> before("one two one", ("two", "ne t"))
    'o'
    >>> before("<think>one two</think>two", ("two",), ReasoningTags(open="<think>", close="</think>"))
    '<think>one two</think>'

    Args:
        reasoning: What delimits reasoning that is passed over; None: it is not.
    """
    start = 0
    if reasoning is not None:
        thought, answer = split_reasoning(text, reasoning)
        start = 0 if thought is None else text.rfind(answer) if answer else len(text)
    ends = [at for at in (text.find(string, start) for string in strings) if at >= 0]
    return text[: min(ends)] if ends else text
