r"""Answers in steps, as a process reward model reads them.

    <|im_start|>user\n6 × 7 + 1?<|im_end|>\n<|im_start|>assistant\n6 × 7 is 42.\n\n42 + 1 is 44.\n\n
                                                                               ^^^^             ^^^^

The chat template writes the conversation; a separator follows every step, the last one too, and the score of a step is
read at the last token of its separator. What is before the answer, each step and each separator are tokenised by
themselves: the separator has the same tokens everywhere, and a step that spells it is not cut there.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from roll_like.data.chat import ChatMessage, Renderer, sentinel
from roll_like.data.turns import Piece
from roll_like.errors import EnvError
from roll_like.types import BoolArray, IntArray


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    r"""Return the steps of an answer, without white space around them, each with the character at which it ends.

    A step ends behind its separator. White space alone is no step; an answer without a word is one empty step.

    >>> split_steps("6 × 7 is 42.\n\n\n\nSo 43.", "\n\n")
    [('6 × 7 is 42.', 16), ('So 43.', 22)]
    """
    steps: list[tuple[str, int]] = []
    end = 0
    for part in text.split(separator):
        end = min(end + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part.strip(), end))
        elif steps:
            steps[-1] = (steps[-1][0], end)
    return steps or [("", len(text))]


def step_pieces(
    renderer: Renderer,
    prompt: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    steps: Sequence[str],
    separator: str,
) -> list[Piece]:
    """Return the text of an answer in steps after its prompt, in pieces; the separators are the trained ones.

    White space around a step is taken off.

    Raises:
        EnvError: The chat template refuses the messages, or does not write the answer as it is.
    """
    mark = sentinel(str((prompt, tools, steps)))
    content = "".join([mark, *(step.strip() + mark for step in steps)])
    messages = [*prompt, {"role": "assistant", "content": content}]
    # as other rewards write it: an answer that spells the end of its turn ends none
    text = renderer.render(messages, tools, generation_prompt=False, foreign_answers=True)
    before, *written = text.split(mark)
    if len(written) != len(steps) + 1:
        raise EnvError(
            f"the chat template does not write an answer of {len(steps)} steps as it is",
            fix="change the answer, or the chat template",
        )
    found = [Piece(before, False)]
    for step in written[:-1]:
        found += [Piece(step, False), Piece(separator, True)]
    return found


def last_tokens(
    token_ids: IntArray, text: str, ends: Sequence[int], *, spell: Callable[[int], bytes], special: Collection[int]
) -> list[int]:
    """Return at which sampled token the text up to each of some ends is complete.

    A step behind which no word follows ends with the last token: what ends the answer belongs to it.

    Args:
        token_ids: What was sampled, shape [A], at least one.
        text: What it says, as of `characters_told`.
        ends: Characters of the text up to each end, ascending.
        spell: As of `characters_told`.
        special: As of `characters_told`.
    """
    told = characters_told(token_ids, text, spell=spell, special=special)
    last = len(told) - 1
    return [last if not text[end:].strip() else min(bisect_left(told, end), last) for end in ends]


def characters_told(
    token_ids: IntArray, text: str, *, spell: Callable[[int], bytes], special: Collection[int]
) -> list[int]:
    """Return how many characters of a text are complete after each sampled token.

    Args:
        token_ids: What was sampled, shape [A].
        text: What it says to rewards: without the special tokens that are no part of an answer, and without what ended
            it.
        spell: Returns the bytes of a token (`Renderer.token_bytes`).
        special: Tokens that the text may lack.
    """
    # whole characters that the tokens up to each one spell; one that is divided counts where it is complete
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    reached, begun, told = 0, False, list[int]()
    for token_id in token_ids.tolist():
        spelled = spell(token_id)
        if token_id in special and not text.startswith(spelled.decode(errors="replace"), reached):
            spelled = b""
        if not begun and spelled[:1] == b" " and text[:1] != " ":  # a space that only the tokenizer knows of
            spelled = spelled[1:]
        begun = begun or bool(spelled)
        for character in decoder.decode(spelled):
            if character != "\ufffd":
                reached += text.startswith(character, reached) or text[reached - 1 : reached] != "\ufffd"
                continue
            while text.startswith(character, reached):  # some tokenizers write one each byte, also of characters behind
                reached += 1
        told.append(reached)
    return told


def last_of_runs(mask_T: BoolArray) -> BoolArray:
    """Return where each run of true values ends.

    >>> last_of_runs(np.array([False, True, True, False, True])).tolist()
    [False, False, True, False, True]
    """
    following_T = np.append(mask_T[1:], False)
    ends: BoolArray = mask_T & ~following_T
    return ends
