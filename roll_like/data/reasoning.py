"""Where a response's reasoning ends and its answer begins: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What a model writes before and after its reasoning."""

    open: str = "<think>"
    close: str = "</think>"


THINK = ReasoningTags()


def split_reasoning(text: str, tags: ReasoningTags = THINK, *, opened: bool = False) -> tuple[str, str]:
    """Return the reasoning and the answer of a response, both without the tags.

    The answer is what follows the last closing tag. Reasoning that is not closed has no answer.

    >>> split_reasoning("<think>3? No.</think> 5")
    ('3? No.', ' 5')
    >>> split_reasoning("3? No.</think> 5")  # the prompt ended with <think>
    ('3? No.', ' 5')
    >>> split_reasoning("<think>3? No")
    ('3? No', '')

    Args:
        text: The response.
        tags: What stands before and after the reasoning.
        opened: The prompt ended with the opening tag.
    """
    reasoning, close, answer = text.rpartition(tags.close)
    if close:
        reasoning = reasoning.removeprefix(tags.open) if reasoning.startswith(tags.open) else reasoning
        opened = False
    if opened:
        return text, ""
    before, reopened, unfinished = answer.partition(tags.open)
    if reopened:
        return reasoning + before + unfinished, ""
    return reasoning, answer
