"""Answers in pieces: what is sent before they are complete, and that it adds up to what is read of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roll_like.data.reasoning import split_reasoning
from roll_like.serving.reasoning_stream import ReasoningStream
from roll_like.tools.answers import openai_answer
from roll_like.tools.streaming import AnswerStream
from roll_like.types import THINK, ReasoningTags

ADD: dict[str, Any] = {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
JSON = '{"name": "add", "arguments": {"a": 1}}'
CALL = f"<tool_call>{JSON}</tool_call>"
SIZES = pytest.mark.parametrize("size", [1, 3, 7, 1000])


@SIZES
@pytest.mark.parametrize(
    ("text", "at_once"),
    [
        (f"I add. {CALL}{CALL}", "I add."),
        (f"I look.\n\n{CALL}\nSo.", "I look."),
        (f"Sure:\n```json\n{JSON}\n```", "Sure:"),
        (f"I call.\n{JSON}", "I call."),
        ('So add{"a": 1}', "So"),
        ("[add(a=1)]", ""),
        ("<|channel|>final<|message|>Hi<|end|>", ""),
        ("1 < 2, [a] (b) {c} `x` and <b>, address 5.", "1 < 2, [a] (b) {c} `x` and <b>, address 5."),
        ("Code:\n```python\nprint(1)\n```\nDone.", "Code:\n```python\nprint(1)\n```\nDone."),
        ("It ends with <tool", "It ends with"),
    ],
)
def test_text_is_sent_as_long_as_it_cannot_be_a_call(text: str, at_once: str, size: int) -> None:
    stream = AnswerStream([ADD])
    sent = "".join(stream.add(text[at : at + size]) for at in range(0, len(text), size))
    rest, calls = stream.finish()
    content, expected = openai_answer(text, [ADD])
    assert sent == at_once
    assert sent + rest == content
    assert [call["function"] for call in calls] == [call["function"] for call in expected]


@SIZES
@pytest.mark.parametrize(
    "tags", [THINK, replace(THINK, opened=True), ReasoningTags(open="[THINK]", close="[/THINK]")], ids=str
)
@pytest.mark.parametrize(
    "text",
    [
        "{open}\nhm\n\n{close}\n\nTwo.", "{open}hm{close}Two", "Two.", "", "{open}", "{open}hm",
        "  {open}a<b{close}x\n",
        "{open}\nI write `{close}` and \"{close}\" here.\n{close}Two", "{open}hm `{close}", "<b> it", "{open}a\nb\n",
        "{open}\nI write `{open}x{close}` first, and ``{open}x{close}``. ok{close}Answer", "{open}a `{open}b{close} c",
        "{open}{close}Ok", "{open}hm{close}It ends with {close}",
    ],
)  # fmt: skip
def test_reasoning_in_pieces_is_that_of_the_whole(text: str, tags: ReasoningTags, size: int) -> None:
    text = text.format(open=tags.open, close=tags.close)
    stream, pieces = ReasoningStream(tags), [text[at : at + size] for at in range(0, len(text), size)]
    found = [*map(stream.add, pieces), stream.finish()]
    reasoning, content = ("".join(parts) for parts in zip(*found, strict=True))
    if text.count(tags.close) == 2 and text.endswith(tags.close):  # what was sent as an answer cannot be taken back
        assert (reasoning, content) == ("hm", f"It ends with {tags.close}")
    else:
        expected = split_reasoning(text, tags)
        assert (reasoning, content) == (expected[0] or "", expected[1])


def test_reasoning_is_sent_before_it_ends() -> None:
    stream = ReasoningStream(THINK)
    assert [stream.add(piece) for piece in ("<thi", "nk>One", " two </", "b>", "\n</think>", "\n\nThree")] == [
        ("", ""), ("One", ""), (" two ", ""), ("</b>", ""), ("", ""), ("", "Three"),
    ]  # fmt: skip


def test_reasoning_has_ended_once_the_line_breaks_after_it_are_over() -> None:
    stream = ReasoningStream(THINK)
    ended = [(stream.add(piece)[1], stream.ended) for piece in ("<think>Hm</think>", "\n", "\nTwo", ".\n")]
    assert ended == [("", False), ("", False), ("Two", True), (".\n", True)]
