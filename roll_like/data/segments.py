"""Tokens of texts that have much in common: what a chat template writes into every one of them is tokenised once.

Byte-level tokenizers cut a text at its added tokens (`<|im_end|>`) before they do anything else, and tokenise what is
between them by itself. So the tokens of a text are those of its parts, one after the other, and a part that comes
again, such as a system prompt, need not be tokenised again. Tokenizers for which that does not hold are left alone:
those that put a space before the first word of a text, and those whose added tokens take blanks around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from roll_like.data.foreign import any_of

#: What may stand in a tokenizer's pre-tokenisation: all of it looks at one part at a time, wherever that stands.
_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits"}
#: Unicode's normal forms: they compose nothing across an added token.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
#: Characters of a part that is remembered, and parts that are.
_MOST_CHARACTERS = 2000
_MOST_PARTS = 4096


class Segments:
    """A byte-level tokenizer that remembers parts.

    Args:
        tokenizer: Of `tokenizers`.
        model: The same as JSON.
    """

    def __init__(self, tokenizer: Any, model: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        # what is matched after the text was normalised is found within a part
        self._ids = {token["content"]: int(token["id"]) for token in model["added_tokens"] if not token["normalized"]}
        self._added = re.compile(f"({any_of(list(self._ids))})") if self._ids else None
        self._known: dict[str, list[int]] = {"": []}

    @classmethod
    def of(cls, tokenizer: Any) -> Segments | None:
        """Return one for a tokenizer of transformers; None where texts have to be tokenised as a whole."""
        if not getattr(tokenizer, "is_fast", False) or getattr(tokenizer, "split_special_tokens", False):
            return None
        model = json.loads(tokenizer.backend_tokenizer.to_str())
        plain = not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in model["added_tokens"])
        steps = _steps(model["pre_tokenizer"], "pretokenizers")
        forms = _steps(model["normalizer"], "normalizers")
        byte_level = any(step["type"] == "ByteLevel" for step in steps)
        if not plain or not byte_level or any(step.get("add_prefix_space") for step in steps):
            return None
        if {step["type"] for step in steps} - _PRE_TOKENIZERS or {step["type"] for step in forms} - _NORMALIZERS:
            return None
        return cls(tokenizer.backend_tokenizer, model)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts, to which nothing is added."""
        cut = [[text] if self._added is None else self._added.split(text) for text in texts]
        unknown = list(dict.fromkeys(part for parts in cut for part in parts[::2] if part not in self._known))
        encoded = self._tokenizer.encode_batch_fast(unknown, add_special_tokens=False) if unknown else []
        found = {part: each.ids for part, each in zip(unknown, encoded, strict=True)}
        result = []
        for parts in cut:
            ids: list[int] = []
            for place, part in enumerate(parts):
                if place % 2:
                    ids.append(self._ids[part])
                else:
                    ids += found[part] if part in found else self._known[part]
            result.append(ids)
        self._remember(cut, found)
        return result

    def _remember(self, cut: Sequence[Sequence[str]], found: dict[str, list[int]]) -> None:
        """Keep the parts that came more than once."""
        seen: set[str] = set()
        for parts in cut:
            for part in parts[::2]:
                again = part in seen and part in found and len(part) <= _MOST_CHARACTERS
                if again and len(self._known) < _MOST_PARTS:
                    self._known[part] = found[part]
                seen.add(part)


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's part, which may be a sequence of some."""
    if step is None:
        return []
    return step[name] if step["type"] == "Sequence" else [step]
