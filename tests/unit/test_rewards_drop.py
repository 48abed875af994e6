"""The reward `drop`: DROP's measures by hand. tests/unit/test_benchmark_protocols.py compares with the harness's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from reward_support import outcomes, row

from roll_like import RewardResult
from roll_like.builtin.rewards.drop import Drop, DropConfig, drop_references, overlap
from roll_like.errors import DataError, RewardError
from roll_like.rewards.base import given_completion

DATE = {"day": "", "month": "", "year": ""}
SPANS = {"number": "", "date": DATE, "spans": ["Tom Brady", "Moss"]}


def value(figure: Literal["em", "f1"], text: str, metadata: dict[str, Any]) -> float:
    reward = Drop(DropConfig(figure=figure))
    [outcome] = outcomes(reward, [given_completion(text, messages=[], answer=None, metadata=metadata)])
    assert isinstance(outcome, RewardResult), outcome
    return outcome.value


def known(**answer: Any) -> dict[str, Any]:
    return {"answer": {"number": "", "date": DATE, "spans": [], **answer}, "validated_answers": None}


@pytest.mark.parametrize(
    ("text", "answer", "f1", "em"),
    [
        ("3", known(number="3"), 1.0, 1.0),
        ("3.0", known(number=3), 1.0, 1.0),
        ("3,000 yards", known(number="3000"), 0.67, 0.0),
        ("4", known(number="3"), 0.0, 0.0),
        # without the number of the reference, words that are shared count nothing
        ("four yards", known(spans=["3 yards"]), 0.0, 0.0),
        ("the Tom-Brady!", known(spans=["tom brady"]), 1.0, 1.0),
        ("Brady", known(spans=["Tom Brady"]), 0.67, 0.0),
        # of two spans an answer of one text reaches half
        ("Tom Brady", known(spans=["Tom Brady", "Moss"]), 0.5, 0.0),
        ("9 May 2001", known(date={"day": "9", "month": "May", "year": "2001"}), 1.0, 1.0),
        ("May 2001", known(date={"day": "", "month": "May", "year": "2001"}), 1.0, 1.0),
        ("", known(number="3"), 0.0, 0.0),
    ],
)
def test_measures_by_hand(text: str, answer: dict[str, Any], f1: float, em: float) -> None:
    assert value("f1", text, answer) == f1
    assert value("em", text, answer) == em


@pytest.mark.parametrize(
    "others",
    [
        {"number": ["", "7"], "date": [DATE, DATE], "spans": [["Moss"], []], "hit_id": ["", ""]},
        [{"number": "", "date": DATE, "spans": ["Moss"]}, {"number": "7", "date": DATE, "spans": []}],
    ],
)
def test_the_best_of_all_annotators_counts(others: Any) -> None:
    for text in ("Moss", "7", "Brady"):
        expected = 0.0 if text == "Brady" else 1.0
        assert value("em", text, {"answer": SPANS, "validated_answers": others}) == expected


def test_halves_are_rounded_to_even_as_by_the_evaluator() -> None:
    assert overlap("a b c d", ("a", "x")) == 0.2
    assert overlap("a", ("a e f g h i j k l m", "x", "y", "z")) == round(100 * 2 / 11 / 4) / 100


@pytest.mark.parametrize("text", ["", "the"])
def test_an_answer_without_words_is_worth_nothing(text: str) -> None:
    others = [{"number": "", "date": DATE, "spans": spans} for spans in (["the"], ["the", "Moss"])]
    assert value("f1", text, {"answer": SPANS, "validated_answers": others}) == 0.0


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([{"number": "", "date": "1 May 2000", "spans": []}], "date .* should be a mapping .*found '1 May 2000'"),
        ([{"number": ["3"], "date": DATE, "spans": []}], "number .* should be a number or a text"),
        (["4"], "'validated_answers' should hold number, date and spans, found '4'"),
        ("4", "'validated_answers' should hold answers, found '4'"),
        ({"number": 4}, "'validated_answers' should hold a list for each key"),
    ],
)
def test_malformed_answers_of_annotators_are_refused(others: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drop_references({"answer": SPANS, "validated_answers": others})


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "3",
        {"number": "3"},
        {"number": "", "date": DATE, "spans": []},
        {"number": "", "date": DATE, "spans": ["the"]},
        {"number": "", "date": DATE, "spans": [1]},
        {"number": "", "date": DATE, "spans": [None]},
        {"number": "", "date": DATE, "spans": "Moss"},
    ],
)
def test_rows_without_answers_are_refused(answer: Any) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:7: .*answer.*(?s:.*)as in EleutherAI/drop"):
        Drop(DropConfig()).check_row(replace(row(), metadata={"answer": answer}))
    [outcome] = outcomes(
        Drop(DropConfig()), [given_completion("3", messages=[], answer=None, metadata={"answer": answer})]
    )
    assert isinstance(outcome, RewardError)
