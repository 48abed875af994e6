"""The `math` reward on answers in the shapes of real benchmarks, with the verdicts that a mathematician gives."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    limit = sys.get_int_max_str_digits()
    yield importlib.import_module("make_math_table")
    sys.path.remove(str(ROOT / "scripts"))
    sys.set_int_max_str_digits(limit)


@pytest.fixture(scope="module")
def pairs(script: Any) -> list[Any]:
    return list(script.graded())


def test_corpus_is_large_and_a_third_of_it_is_wrong() -> None:
    lines = (ROOT / "tests" / "data" / "math_answers.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    assert len({(row["reference"], row["response"]) for row in rows}) == len(rows) >= 400
    assert sum(row["verdict"] == 0 for row in rows) >= 0.35 * len(rows)
    assert {row["style"] for row in rows} >= {"GSM8K", "MATH", "AIME", "AMC", "Olympiad", "SciBench", "Gaokao"}


def test_no_wrong_answer_scores_1(pairs: list[Any]) -> None:
    assert [(pair.reference, pair.response) for pair in pairs if pair.verdict == 0 and pair.given == 1] == []


def test_at_most_1_percent_is_graded_wrong(pairs: list[Any]) -> None:
    wrong = [(pair.reference, pair.response, pair.given) for pair in pairs if pair.given != pair.verdict]
    assert len(wrong) <= 0.01 * len(pairs), wrong


def test_table_of_the_page_is_current(script: Any, pairs: list[Any]) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.with_table(page, script.table(pairs)) == page
