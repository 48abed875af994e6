"""Judges' answers as models write them: the object that is read, and those of which none may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_like.builtin.rewards.judge_answer import MalformedError, parse_object
from roll_like.builtin.rewards.jury import read_score
from roll_like.builtin.rewards.llm_judge import LLMJudge, LLMJudgeConfig, _read_winner

TABLE = Path(__file__).parent.parent / "data" / "judge_answers.jsonl"
ANSWERS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row["text"][:60])
def test_the_score_that_a_reader_finds(row: dict[str, Any]) -> None:
    if row["score"] is None:
        with pytest.raises(MalformedError):
            parse_object(row["text"], "score")
    else:
        assert parse_object(row["text"], "score")["score"] == row["score"]


@pytest.mark.parametrize("row", [row for row in ANSWERS if row["score"] is not None], ids=lambda row: row["text"][:60])
def test_no_prefix_of_an_answer_has_a_score_that_the_answer_does_not_have(row: dict[str, Any]) -> None:
    if row["text"].count('"score"') > 1:  # a cut in front of the last object leaves the ones before it
        return
    for end in range(len(row["text"])):
        try:
            found = parse_object(row["text"][:end], "score")
        except MalformedError:
            continue
        assert found["score"] == row["score"], row["text"][:end]


#: without half surrogate pairs, which are replaced, and characters whose escapes may begin a LaTeX command
TEXT = st.text(st.characters(exclude_characters="\b\f\n\r\t", codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(content=st.dictionaries(TEXT, JSON, min_size=1, max_size=4), indent=st.sampled_from([None, 2]))
def test_json_is_read_as_json_is(content: dict[str, Any], indent: int | None) -> None:
    assert parse_object(json.dumps(content, indent=indent)) == content


def test_latex_in_a_string_is_kept() -> None:
    latex = r"\frac12 \beta \boxed{4} \nu \rho \times \(x\) \sqrt2 \underline x"
    assert parse_object(f'{{"a": "{latex}", ' + r'"b": "1\n2\tnot\\frac\u00e9\"", "c": 0}') == {
        "a": latex,
        "b": '1\n2\tnot\\fracé"',
        "c": 0,
    }


@pytest.mark.parametrize("text", ['{"a": ' * 100_000, '{"a": "' * 20_000, "{" * 100_000, '{"a": 1, ' * 20_000])
def test_endless_openings_are_refused_at_once(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_object(text)


def judge(**settings: Any) -> LLMJudge:
    judges = [{"url": "http://localhost/v1", "model": "m"}]
    return LLMJudge(LLMJudgeConfig.model_validate({"judges": judges, **settings}))


@pytest.mark.parametrize(
    ("score", "value"),
    [
        (10, 1.0),
        (1, 0.0),
        (5.5, 0.5),
        ("10", 1.0),
        (" 5.5 ", 0.5),
        ("10/10", 1.0),
        ("1 / 10", 0.0),
        ("1 out of 10", 0.0),
    ],
)
def test_scores_as_numbers_and_texts(score: Any, value: float) -> None:
    assert read_score(score, 1, 10) == value


@pytest.mark.parametrize(
    "score",
    [
        0,
        11,
        -5,
        1e999,
        10**400,
        float("nan"),
        True,
        False,
        None,
        "",
        "NaN",
        "inf",
        "eight",
        "8/5",
        "80/100",
        "80%",
        "8 points",
        "7 or 8",
        "7-8",
        "8,5",
        "11/10",
        "8/0",
        [8],
        {"value": 8},
        "8/10/10",
    ],
)
def test_what_is_no_score(score: Any) -> None:
    with pytest.raises(MalformedError, match="a number from 1 to 10"):
        read_score(score, 1, 10)


@pytest.mark.parametrize(
    ("winner", "value"),
    [("A", 1.0), ("b", 0.0), ("Response B", 0.0), ("assistant_a", 1.0), ("[[A]]", 1.0), ("Tie", 0.5)],
)
def test_winners(winner: str, value: float) -> None:
    assert _read_winner(winner) == value


@pytest.mark.parametrize("winner", ["", "C", "A or B", "AB", "A tie", None, 1, True, ["A"], "not A"])
def test_what_is_no_winner(winner: Any) -> None:
    with pytest.raises(MalformedError, match="A, B or tie"):
        _read_winner(winner)
