"""Choice questions: what a reader of a response would say that it settles on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reward_support import value

from roll_like.builtin.rewards.choice import choice
from roll_like.builtin.rewards.multiple_choice import MultipleChoice, MultipleChoiceConfig

TABLE = Path(__file__).parent.parent / "data" / "choices.jsonl"
RESPONSES = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize("row", RESPONSES, ids=lambda row: row["text"][:60])
def test_the_option_that_a_reader_finds(row: dict[str, Any]) -> None:
    found = choice(row["text"], row["letters"], row.get("options", ()), question=row.get("question", ""))
    assert found == row["choice"]


def test_options_are_those_of_the_row() -> None:
    assert choice("The answer is C.", "ABCD", ["yes", "no"]) is None
    assert choice("The answer is I.", "ABCD") is None
    assert choice("The answer is F.", "ABCDEF") == "F"


@pytest.mark.parametrize(
    "row", [row for row in RESPONSES if row["choice"] in ("A", "B")], ids=lambda row: row["text"][:60]
)
def test_reasoning_in_front_changes_nothing(row: dict[str, Any]) -> None:
    """A reader takes the answer behind a paragraph of reasoning too; not a label or a text at its beginning."""
    if not row["text"].strip() or row["text"].lstrip()[:2] in ("B.", "B)", "B:", "A.", "A)", "**", "(B", "(b", "b)"):
        return
    text = "Let me think about the vitamins A and B first.\n\n" + row["text"]
    found = choice(text, row["letters"], row.get("options", ()), question=row.get("question", ""))
    assert found == row["choice"]


@pytest.mark.parametrize(
    "text", ["the answer is " * 3000, "\n" * 30_000, "<answer>" * 3000], ids=["the", "lines", "tags"]
)
def test_long_texts_end(text: str) -> None:
    assert choice(text, "ABCDEFGHIJ", ["x", "y z"]) is None  # where searches are quadratic, this takes minutes


def test_the_reward_reads_the_question_too() -> None:
    reward = MultipleChoice(MultipleChoiceConfig())
    for question, right in (("Which option is best?", 0.0), ("Which is the worst option?", 1.0)):
        assert value(reward, "The worst option is D.", "D", prompt=question) == right
