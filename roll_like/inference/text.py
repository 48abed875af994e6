"""Sampled tokens to text, as rewards, environments and people read it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


class ResponseDecoder:
    """Decodes responses without special tokens, but for those that carry meaning.

    Args:
        tokenizer: The model's.
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
