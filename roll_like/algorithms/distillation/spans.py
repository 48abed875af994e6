"""The same text in the tokens of two tokenizers: the shortest stretches that both divide alike.

A teacher with another tokenizer reads a student's answer in tokens of its own. What both assign a probability to is the
text: by the chain rule the product over a stretch's tokens, as far as stretches begin and end at the same characters in
both. TRL's GOLD trainer and NeMo-RL's X-token distillation align tokens in the same way (and go on to compare whole
distributions, which on-policy distillation does not need).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from roll_like.types import IntArray

#: What a decoder writes for bytes that are no whole character yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
#: Tokens before a token that a decoder is shown, because some write a token's space only after another one.
CONTEXT = 4


def character_ends(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int | None]:
    """Return how many characters the text has after each token; None within a character.

    Args:
        token_ids: The tokens.
        decode: Turns tokens into text, special ones too.
    """
    ends: list[int | None] = []
    total, clean, begin = 0, 0, 0
    for index in range(len(token_ids)):
        before = decode(token_ids[begin:clean])
        after = decode(token_ids[begin : index + 1])
        whole = after.startswith(before) and not after[len(before) :].endswith(INCOMPLETE)
        ends.append(total + len(after) - len(before) if whole else None)
        if whole:
            total, clean = total + len(after) - len(before), index + 1
            begin = max(clean - CONTEXT, 0)
    return ends


def common_spans(ours: Sequence[int | None], theirs: Sequence[int | None]) -> tuple[IntArray, IntArray]:
    """Return the stretch of text that each of our and of their tokens belongs to, counted from 0, shape [T] each.

    A stretch ends where a token ends in both. What is left at the end is one more.

        "Hugging" " Face" and "H" "ugging Face" end after 7, 12 and 1, 12 characters: 0, 0 and 0, 0
        "a" "b" "c" and "ab" "c" after 1, 2, 3 and 2, 3: 0, 0, 1 and 0, 1

    Args:
        ours: Characters after each token (`character_ends`).
        theirs: The same of the same text in other tokens.
    """
    common = sorted({end for end in ours if end is not None} & {end for end in theirs if end is not None})
    last = max(len(common) - 1, 0)

    def spans(ends: Sequence[int | None]) -> IntArray:
        reached, found = 0, []
        for end in reversed(ends):  # a token within a character belongs to what follows
            found.append(reached if end is None else int(np.searchsorted(common, end)))
            reached = found[-1] if end is not None else reached
        return np.minimum(np.array(found[::-1], np.int32), last)

    return spans(_closed(ours, common)), spans(_closed(theirs, common))


def _closed(ends: Sequence[int | None], common: Sequence[int]) -> list[int | None]:
    """Return the ends with tokens after the last common one in the last stretch."""
    limit = common[-1] if common else 0
    closed = list(ends)
    for index in range(len(closed) - 1, -1, -1):
        end = closed[index]
        if end is not None and end <= limit:
            break
        closed[index] = limit
    return closed
