"""A reward of your own, for one short sentence that uses the words of its row.

A run uses it with `import: [my_rewards]` and `rewards: {use: [uses_words]}` in its YAML file.
"""

from __future__ import annotations

import re

from roll_like import Completion, StopReason, register_reward

SHORTEST, LONGEST = 5, 15  # words of an answer
COPIED = 4  # as many words in a row as the prompt has them are a copy of it


@register_reward("uses_words")
def uses_words(completion: Completion) -> float:
    """Return the share of the row's `words` that a finished sentence of 5 to 15 words uses; else 0.

    A policy learns whatever is rewarded. So an answer that repeats one of the words, or the prompt, gets less.

    Args:
        completion: The answer. `metadata` holds the fields of its row, `messages` the prompt.
    """
    said = words_of(completion.text)
    finished = completion.stop_reason is StopReason.STOP  # not cut at the maximum response length
    if not finished or not SHORTEST <= len(said) <= LONGEST:
        return 0.0
    if runs(said) & runs(words_of(completion.messages[-1]["content"])):
        return 0.0
    wanted = completion.metadata["words"]
    return sum(said.count(word) == 1 for word in wanted) / len(wanted)


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"[\w'-]+", text.lower())


def runs(words: list[str]) -> set[tuple[str, ...]]:
    """Return every run of `COPIED` words."""
    return {tuple(words[start : start + COPIED]) for start in range(len(words) - COPIED + 1)}
