"""The bytes that tokens spell, which need not be whole characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

#: What SentencePiece writes for a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
#: How it writes a byte that no piece spells.
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the tokens of a vocabulary spell bytes.

    Attributes:
        byte_level: Whether each character of a token stands for a byte; else tokens are written as SentencePiece does.
        takes_space: Whether decoding takes a space off the beginning of a text, which its first token spells.
    """

    byte_level: bool
    takes_space: bool = False

    def bytes_of(self, token: str) -> bytes:
        """Return what a token spells; nothing where encoding a text never gives it."""
        if self.byte_level:
            try:
                return bytes(map(_alphabet().__getitem__, token))
            except KeyError:
                return b""
        if (byte := _BYTE.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return token.replace(_SPACE, " ").encode()

    def is_byte(self, token: str) -> bool:
        """Return whether SentencePiece has a token for a byte that no piece spells."""
        return not self.byte_level and _BYTE.fullmatch(token) is not None


def spelling_of(tokenizer: Any) -> Spelling | None:
    """Return how a tokenizer's tokens spell bytes; None where it does not say."""
    decoders = decoders_of(tokenizer)
    if "ByteLevel" in decoders:
        return Spelling(byte_level=True)
    if "ByteFallback" in decoders and not {"Replace", "Metaspace"}.isdisjoint(decoders):
        return Spelling(byte_level=False, takes_space="Strip" in decoders or "Metaspace" in decoders)
    return None


def decoders_of(tokenizer: Any) -> list[str]:
    """Return the kinds of the decoders of a fast tokenizer, in their order."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return [] if backend is None else [*_types(json.loads(backend.to_str())["decoder"])]


def _types(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield from (each for part in decoder.get("decoders", ()) for each in _types(part))
        yield str(decoder["type"])


@cache
def _alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level tokenizers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
