"""Where a response's reasoning ends and its answer begins: the one place that says so.

A tag that is only written about, `` `</think>` `` or "<think>" in quotation marks, neither begins nor ends reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

from roll_like.types import THINK, ReasoningTags

#: Tags that are not those of `_XML`, the ones that only one family writes first.
KNOWN_TAGS: tuple[ReasoningTags, ...] = (
    ReasoningTags(  # harmony, as gpt-oss writes it: messages of every kind end alike
        open="<|channel|>analysis<|message|>",
        close="<|end|>",
        final="<|channel|>final<|message|>",
        around=("<|start|>assistant", "<|end|>"),
    ),
    ReasoningTags(  # Kimi K3
        open="<|open|>think<|sep|>",
        close="<|close|>think<|sep|>",
        final="<|open|>response<|sep|>",
        around=("<|close|>message<|sep|>", "<|close|>response<|sep|>"),
    ),
    ReasoningTags(  # Muse Glimmer
        open="to=self<|message|>",
        close="<|eom|>",
        final="to=user<|message|>",
        around=("<|start|>assistant", "<|eot|>", "<|eom|>"),
    ),
    ReasoningTags(  # Inkling
        open="<|content_thinking|>",
        close="<|end_message|>",
        final="<|content_text|>",
        around=("<|message_model|>", "<|end_message|>"),
    ),
    ReasoningTags(open="<|channel>thought", close="<channel|>"),  # Gemma 4
    ReasoningTags(open="[THINK]", close="[/THINK]"),  # Magistral, Ministral 3
    ReasoningTags(open="<|START_THINKING|>", close="<|END_THINKING|>"),  # Command A
    ReasoningTags(open="<|inner_prefix|>", close="<|inner_suffix|>"),  # Apertus
    ReasoningTags(open="<|plamo:begin_think:plamo|>", close="<|plamo:end_think:plamo|>"),
    ReasoningTags(open="◁think▷", close="◁/think▷"),  # Kimi-VL
    ReasoningTags(open="Here is my thought process:", close="Here is my response:"),  # Granite 3.2
)

#: Names of tags in the form of XML: `think`, `seed:think`, `mm:think`, `longcat_think`, `thought`.
_NAMES = r"(?:[\w.-]+[:|_])?think(?:ing)?(?:[:|_][\w.-]+)?|thought|reasoning"
_XML = re.compile(rf"</({_NAMES})>")
# those that prompts ask models for, beside those of templates
_ANY_NAME = rf"(?:{_NAMES}|thoughts|reason|analysis|scratchpad|reflection)"
#: What begins and ends reasoning of a model whose tags are not known.
ANY_OPEN, ANY_CLOSE = (
    re.compile("|".join([xml, *(re.escape(mark) for mark in marks if not mark[0].isalpha())]), re.IGNORECASE)
    for xml, marks in (
        (rf"<{_ANY_NAME}>", [tags.open for tags in KNOWN_TAGS]),
        (rf"</{_ANY_NAME}>", [tags.final or tags.close for tags in KNOWN_TAGS]),
    )
)
#: What some templates ask for around the answer, after `</think>`.
_RESPONSE = ("<response>", "</response>")


def split_reasoning(text: str, tags: ReasoningTags | None = THINK) -> tuple[str | None, str]:
    """Return the reasoning and the answer of a response, both without the tags.

    The answer is what follows the last closing tag, without the line breaks before it. Reasoning that is not closed has
    no answer. A response without tags is an answer without reasoning, which is None.

    >>> split_reasoning("<think>3? No.</think> 5")
    ('3? No.', ' 5')
    >>> split_reasoning("3? No.</think> 5")  # the prompt ended with <think>
    ('3? No.', ' 5')
    >>> split_reasoning("<think>3? No")
    ('3? No', '')
    >>> split_reasoning("Write `<think>` first.")
    (None, 'Write `<think>` first.')

    Args:
        text: The response.
        tags: What stands before and after the reasoning; None where the model does not reason.
    """
    if tags is None:
        return None, text
    before, final, after = text.rpartition(tags.final) if tags.final else ("", "", "")
    if final:
        return split_reasoning(before, replace(tags, final=""))[0], _answer(after, tags)
    found = [
        (mark.start(), mark.end(), mark.lastgroup == "open")
        for mark in tag_pattern(tags.open, tags.close).finditer(text)
        if mark.lastgroup != "quoted"
    ]
    if tags.ends_messages and tags.final:  # then a mark alone ends a message that is no reasoning, as one with a call
        within = [tags.opened, *(each[2] for each in found)]
        found = [each for each, paired in zip(found, within, strict=False) if each[2] or paired]
    if not found and not tags.opened:
        return None, _answer(text, tags) if tags.around else text
    begin = found[0][1] if found and found[0][2] and text[: found[0][0]].strip() in ("", *tags.around) else 0
    start, end, opens = found[-1] if found else (0, 0, True)
    if opens:
        return text[begin : max(begin, start)] + text[max(begin, end) :], ""
    return text[begin:start].strip("\r\n"), _answer(text[end:], tags)


def split_turn(text: str, tags: ReasoningTags | None = THINK) -> tuple[str | None, str]:
    """Return the reasoning of a turn, and all that it says: also what it says before the reasoning.

    >>> split_turn("I look. <think>Which?</think>Two.")
    ('Which?', 'I look. Two.')
    """
    marks = [] if tags is None else [*tag_pattern(tags.open, tags.close).finditer(text)]
    first = next((mark for mark in marks if mark.lastgroup != "quoted"), None)
    if tags is None or tags.opened or first is None or first.lastgroup != "open":
        return split_reasoning(text, tags)
    reasoning, answer = split_reasoning(text[first.start() :], tags)
    before = _answer(text[: first.start()], tags)
    if not before.strip():
        return reasoning, answer
    return reasoning, before + answer if answer.strip() else before.rstrip()


def _answer(text: str, tags: ReasoningTags) -> str:
    text = text.lstrip("\r\n")
    for mark in tags.around:
        text = text.removeprefix(mark).lstrip("\r\n")
        if text.rstrip().endswith(mark):
            text = text.rstrip().removesuffix(mark)
    return text


@lru_cache
def tag_pattern(opening: str, closing: str) -> re.Pattern[str]:
    """Return a pattern of the two tags, in groups of these names; tags that are only quoted match outside of them."""
    begin, end = re.escape(opening), re.escape(closing)
    quoted = rf"(?:{begin}[^\n]{{0,200}}?{end}|{begin}|{end})"
    # a straight mark opens a quotation where no word ends before it; longer runs of ` quote nothing, and would take
    # quadratic time
    straight = rf"""(?<![^\s(\[{{=,:;`'"])(?P<mark>`{{1,16}}|["']){quoted}(?P=mark)"""
    curly = "|".join(f"{left}{quoted}{right}" for left, right in ("“”", "‘’", "«»", "「」"))
    return re.compile(rf"(?P<quoted>{straight}|{curly})|(?P<open>{begin})|(?P<close>{end})")


def after_prompt(tags: ReasoningTags | None, prompt: str) -> ReasoningTags | None:
    """Return a model's tags as they are for the response to a prompt: `opened` if it ends within reasoning.

    Args:
        prompt: What the chat template writes after the last message, or a prompt that ends with it.
    """
    if tags is None:
        return None
    return replace(tags, opened=prompt.rstrip().endswith(tags.open.rstrip()))


class Turn(str):
    """A policy's turn as environments are given it: the whole text, which knows what delimits its reasoning.

    Attributes:
        tags: What delimits its reasoning; None where the model does not reason.
    """

    tags: ReasoningTags | None

    def __new__(cls, text: str, tags: ReasoningTags | None = THINK) -> Self:
        """Return the text with its tags."""
        turn = super().__new__(cls, text)
        turn.tags = tags
        return turn


def tags_of(text: str) -> ReasoningTags | None:
    """Return what delimits the reasoning of a turn; of a plain text `<think>` and `</think>`."""
    return text.tags if isinstance(text, Turn) else THINK


def answer_of(text: str) -> str:
    """Return what a turn answers: what follows its reasoning. Empty where the reasoning has no end.

    >>> answer_of("<think>Left is a wall.</think>right")
    'right'
    """
    return split_reasoning(text, tags_of(text))[1]


def tags_of_tokenizer(tokenizer: Any) -> ReasoningTags:
    """Return the tags that a Hugging Face tokenizer's template or added tokens show; those of `think` without any."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return known_tags(str(getattr(tokenizer, "chat_template", None) or ""), [str(token) for token in added]) or THINK


def known_tags(template: str, tokens: Sequence[str] = ()) -> ReasoningTags | None:
    """Return the tags that a chat template writes or looks for, else those among the tokenizer's own tokens.

    None where neither shows any.
    """
    for text in (template, "\n".join(tokens)):
        for tags in KNOWN_TAGS:
            if tags.open in text and tags.close in text:
                return tags
        if (xml := _XML.search(text)) is not None:
            wrapped = all(tag in text for tag in _RESPONSE)
            return ReasoningTags(open=f"<{xml[1]}>", close=xml[0], around=_RESPONSE if wrapped else ())
    return None
