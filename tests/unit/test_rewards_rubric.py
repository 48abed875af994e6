"""Rubrics and votes against a judge on loopback; values are computed by hand."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, judge_server
from reward_support import completion, outcomes, row

from roll_like import RewardCase, RewardResult, check_reward
from roll_like.builtin.rewards.llm_judge import LLMJudge, LLMJudgeConfig
from roll_like.builtin.rewards.rubric import Rubric, RubricConfig
from roll_like.errors import ConfigError, DataError, RewardError
from roll_like.registry import REWARDS
from roll_like.rewards.calibration import Calibration, CriterionAgreement
from roll_like.rewards.cases import read_cases
from roll_like.rewards.check import RewardReport

#: A row of RaR's schema: essential, important, optional, pitfall.
ROW = [
    {"title": "Scattering", "description": "Names Rayleigh scattering.", "weight": 5},
    {"title": "Wavelength", "description": "Says that blue is scattered more.", "weight": 3},
    {"title": "Sunset", "description": "Explains red sunsets.", "weight": 2},
    {"title": "Sea", "description": "Says that the sky mirrors the sea.", "weight": -2},
]


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as judge:
        yield judge


def make(*servers: JudgeServer, judge: dict[str, Any] | None = None, **settings: Any) -> Rubric:
    judges = [{"url": server.url, "model": f"judge-{index}", **(judge or {})} for index, server in enumerate(servers)]
    settings = {"rubric_field": "rubric", "timeout_seconds": 60, **settings}
    return Rubric(RubricConfig.model_validate({"judges": judges, **settings}))


def said(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


def meets(*texts: str) -> Any:
    """A judge of single criteria that says these are met."""

    def answer(body: dict[str, Any]) -> str:
        (criterion,) = re.findall(r"^Criterion: (.*)$", said(body), re.M)
        return json.dumps({"reasoning": "so", "met": criterion in texts})

    return answer


def result(reward: Rubric, text: str = "An answer.", **metadata: Any) -> RewardResult:
    (outcome,) = outcomes(reward, [completion(text, **metadata)])
    assert isinstance(outcome, RewardResult), outcome
    return outcome


SCATTERING, WAVELENGTH, SUNSET, SEA = (each["description"] for each in ROW)


def test_is_registered_by_its_entry_point() -> None:
    assert REWARDS.get("rubric") is Rubric


@pytest.mark.parametrize(
    ("met", "value"),
    [
        ((), 0.0),
        ((SCATTERING, WAVELENGTH, SUNSET), 1.0),  # 10 of the 10 that can be earned
        ((SCATTERING, SEA), 0.3),  # (5 - 2) / 10
        ((SCATTERING, WAVELENGTH, SUNSET, SEA), 0.8),
        ((SEA,), 0.0),  # -2 / 10, clipped
    ],
)
def test_weights_of_what_is_met_out_of_all_that_can_be_earned(
    server: JudgeServer, met: tuple[str, ...], value: float
) -> None:
    server.answer = meets(*met)
    found = result(make(server), rubric=ROW)
    assert found.value == pytest.approx(value)
    assert found.verdicts == {each["title"]: float(each["description"] in met) for each in ROW}
    assert found.details["met"] == len(met) / 4
    assert len(server.bodies) == 4
    assert server.bodies[0]["response_format"]["json_schema"]["schema"]["required"] == ["reasoning", "met"]
    assert "weight" not in said(server.bodies[0])  # a judge of one criterion does not see what it is worth


def test_without_clipping_pitfalls_cost(server: JudgeServer) -> None:
    server.answer = meets(SEA)
    assert result(make(server, clip=False), rubric=ROW).value == pytest.approx(-0.2)


def test_criteria_of_all_rows_come_first_and_have_names(server: JudgeServer) -> None:
    server.answer = meets("Is polite.", SCATTERING)
    own = [{"criterion": "Is polite.", "weight": 1, "name": "polite"}]
    found = result(make(server, criteria=own), rubric=ROW[:2])
    assert found.value == pytest.approx(6 / 9)
    assert found.details["criterion/polite"] == 1.0
    assert found.verdicts == {"polite": 1.0, "Scattering": 1.0, "Wavelength": 0.0}
    assert result(make(server, criteria=own, rubric_field=None)).value == 1.0


def test_a_rows_criterion_with_the_title_of_one_of_all_rows_goes_by_its_text(server: JudgeServer) -> None:
    server.answer = meets("Is short.")
    reward = make(server, criteria=[{"criterion": "Is short.", "name": "short"}])
    rubric = [{"title": "short", "criterion": "Has <5 words."}]
    reward.check_row(row(rubric=rubric))
    found = result(reward, rubric=rubric)
    assert found.verdicts == {"short": 1.0, "Has <5 words.": 0.0}
    assert found.details["criterion/short"] == 1.0


@pytest.mark.parametrize(
    "rubric",
    [
        json.dumps(
            [{"criterion": "A.", "points": 3}, {"criterion": "B.", "points": 1}]
        ),  # HealthBench, a column of text
        [{"criterion": "A.", "points": 3, "tags": ["axis"]}, {"criterion": "B.", "points": 1.0}],
        [{"description": "A.", "weight": 3, "points": None}, "B."],  # Parquet fills what a row lacks with None
    ],
)
def test_rows_of_public_data_sets(server: JudgeServer, rubric: Any) -> None:
    server.answer = meets("A.")
    make(server).check_row(row(rubric=rubric))
    assert result(make(server), rubric=rubric).value == 0.75


def verdicts(*met: Any, numbers: Any = None) -> str:
    numbers = range(1, len(met) + 1) if numbers is None else numbers
    listed = [{"criterion": n, "reasoning": "so", "met": m} for n, m in zip(numbers, met, strict=True)]
    return json.dumps({"verdicts": listed})


def test_all_criteria_in_one_request(server: JudgeServer) -> None:
    server.answer = lambda body: verdicts(True, False, True, False)
    found = result(make(server, ask="together"), rubric=ROW)
    assert found.value == pytest.approx(0.7)
    assert list(found.verdicts.values()) == [1.0, 0.0, 1.0, 0.0]
    assert len(server.bodies) == 1
    assert "2. Says that blue is scattered more." in said(server.bodies[0])
    server.answer = lambda body: verdicts(False, True, False, True, numbers=[4, "3", 2, 1])  # in another order
    assert result(make(server, ask="together"), rubric=ROW).verdicts == found.verdicts
    server.answer = lambda body: '{"verdicts": ["yes", "No.", "met", "not met"]}'
    assert result(make(server, ask="together"), rubric=ROW).verdicts == found.verdicts


@pytest.mark.parametrize(
    "malformed",
    [
        verdicts(True, False, True),  # a criterion that is left out is not one that is not met
        verdicts(True, False, True, False, True),
        verdicts(True, False, True, False, numbers=[1, 2, 2, 4]),
        verdicts(True, False, True, "perhaps"),
        verdicts(True, False, True, 3),
        '{"verdicts": {"1": true}}',
        "All are met.",
        verdicts(True, False, True, False)[:-20],
    ],
)
def test_an_unreadable_verdict_is_asked_for_again_and_then_a_failure(server: JudgeServer, malformed: str) -> None:
    answers = iter([malformed, verdicts(True, True, True, False)])
    server.answer = lambda body: next(answers)
    assert result(make(server, ask="together", malformed_retries=1), rubric=ROW).value == 1.0
    server.answer = lambda body: malformed
    (lost,) = outcomes(make(server, ask="together", malformed_retries=1), [completion("x", rubric=ROW)])
    assert isinstance(lost, RewardError)
    assert "2 malformed answers" in str(lost)


def test_one_criterion_that_cannot_be_judged_loses_the_sample_alone(server: JudgeServer) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return 503 if f"Criterion: {SUNSET}" in said(body) and "broken" in said(body) else '{"met": true}'

    server.answer = answer
    lost, fine = outcomes(make(server), [completion(text, rubric=ROW) for text in ("broken", "fine")])
    assert isinstance(lost, RewardError)
    assert "answered 503" in str(lost)
    assert isinstance(fine, RewardResult)
    assert fine.value == pytest.approx(0.8)


def test_implicit_aggregation_is_one_score(server: JudgeServer) -> None:
    server.answer = lambda body: '{"reasoning": "", "score": 7}'
    found = result(make(server, aggregation="implicit"), rubric=ROW)
    assert found.value == pytest.approx(6 / 9)
    assert found.verdicts == {}
    assert len(server.bodies) == 1
    assert "4. (weight -2) Says that the sky mirrors the sea." in said(server.bodies[0])


def test_an_empty_response_costs_nothing(server: JudgeServer) -> None:
    assert result(make(server), " \n", rubric=ROW) == RewardResult(0.0, {"empty": 1.0})
    assert server.bodies == []


# ---- votes ---------------------------------------------------------------------------------------


def turns(*answers: Any) -> Any:
    """A judge that gives these answers in turn, whatever is asked."""
    said_next = itertools.cycle(answers)
    return lambda body: json.dumps(next(said_next))


WARM = {"temperature": 0.7}


@pytest.mark.parametrize(("vote", "value"), [("mean", 2 / 3), ("majority", 1.0)])
def test_votes_on_a_criterion(server: JudgeServer, vote: str, value: float) -> None:
    server.answer = turns({"met": True}, {"met": False}, {"met": True})
    found = result(make(server, judge=WARM, votes=3, vote=vote), rubric=["A."])
    assert found.value == pytest.approx(value)
    assert found.details["agreement"] == pytest.approx(2 / 3)
    assert len(server.bodies) == 3


def test_votes_of_two_judges_are_counted_together() -> None:
    with judge_server() as kind, judge_server() as strict:
        kind.answer, strict.answer = turns({"met": True}), turns({"met": True}, {"met": False})
        found = result(make(kind, strict, judge=WARM, votes=2), rubric=["A."])
        assert found.value == 0.75
        strict.answer = turns({"met": False})
        found = result(make(kind, strict, judge=WARM, votes=2, vote="majority"), rubric=["A."])
        assert found.value == 0.5  # two against two decide nothing
        strict.answer = lambda body: 500
        (lost,) = outcomes(make(kind, strict, judge=WARM, votes=2), [completion("x", rubric=["A."])])
        assert isinstance(lost, RewardError)


@pytest.mark.parametrize(("vote", "value"), [("mean", 5 / 9), ("majority", 1 / 3)])
def test_votes_on_a_score(server: JudgeServer, vote: str, value: float) -> None:
    server.answer = turns({"score": 4}, {"score": 4}, {"score": 10})  # (3/9 + 3/9 + 9/9) / 3
    config = {"judges": [{"url": server.url, "model": "m", **WARM}], "votes": 3, "vote": vote}
    (found,) = outcomes(LLMJudge(LLMJudgeConfig.model_validate(config)), [completion("x")])
    assert isinstance(found, RewardResult)
    assert found.value == pytest.approx(value)
    assert found.details == pytest.approx({"judge/0": value, "spread": 6 / 9, "empty": 0.0})


def by_order(forward: list[str], swapped: list[str]) -> Any:
    """A judge of pairs with these winners where "x" comes first, and those where "y" does."""
    said_next = {"x": itertools.cycle(forward), "y": itertools.cycle(swapped)}

    def answer(body: dict[str, Any]) -> str:
        first = re.findall(r"===== begin \w+ =====\n(.*?)\n", said(body))[0]
        return json.dumps({"winner": next(said_next[first])})

    return answer


@pytest.mark.parametrize(
    ("forward", "swapped", "vote", "value", "order_decides"),
    [
        # x wins 1, 1, 0 where it is A; where it is B, "B" is its win: 1, 1, 1
        (["A", "A", "B"], ["B", "B", "B"], "mean", 5 / 6, 0.0),  # 2/3 and 3/3: x wins in both orders
        (["A", "B", "B"], ["B", "B", "B"], "mean", 4 / 6, 1.0),  # y, then x
        (["A", "tie", "B"], ["B", "B", "B"], "mean", 4.5 / 6, 1.0),  # a tie, then x
        (["A", "A", "B"], ["B", "B", "B"], "majority", 1.0, 0.0),
        (["A", "A", "A"], ["A", "A", "A"], "majority", 0.5, 1.0),  # it prefers what comes first
        (["tie", "tie", "A"], ["tie", "B", "tie"], "majority", 0.5, 0.0),
    ],
)
def test_votes_on_pairs_in_both_orders(
    server: JudgeServer, forward: list[str], swapped: list[str], vote: str, value: float, order_decides: float
) -> None:
    server.answer = by_order(forward, swapped)
    config = {"judges": [{"url": server.url, "model": "m", **WARM}], "mode": "pairwise", "votes": 3, "vote": vote}
    x, y = outcomes(LLMJudge(LLMJudgeConfig.model_validate(config)), [completion("x"), completion("y")])
    assert isinstance(x, RewardResult)
    assert isinstance(y, RewardResult)
    assert (x.value, y.value) == (pytest.approx(value), pytest.approx(1 - value))
    assert x.details["order_decides"] == order_decides
    assert len(server.bodies) == 6


# ---- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rubric_field": None}, "there are no criteria; set rubric_field"),
        ({"votes": 3}, "at temperature 0 are the same answer"),
        ({"votes": 3, "judge": {**WARM, "extra_body": {"seed": 1}}}, "extra_body.seed"),
        ({"aggregation": "implicit", "ask": "together"}, "ask has no effect with aggregation: implicit"),
        ({"aggregation": "implicit", "clip": False}, "clip has no effect"),
        ({"highest": 5}, "highest has no effect with aggregation: explicit"),
        ({"aggregation": "implicit", "lowest": 10}, "lowest: 10 should be below highest: 10"),
        ({"criteria": [{"criterion": "A.", "weight": 0}]}, "weight 0 does not count"),
        ({"criteria": [{"criterion": "A.", "weight": -1}], "rubric_field": None}, "no weight is above 0"),
        ({"criteria": [{"criterion": "A.", "wieght": 1}]}, "wieght"),
        ({"criteria": [{"criterion": "A."}, {"criterion": "A."}]}, "two are called 'A.'"),
        ({"template": "$response"}, r"has to name \$criterion with mode: each"),
        ({"template": "$response $criteria $rubric", "ask": "together"}, r"names \$rubric, which is not known"),
    ],
)
def test_settings_that_contradict_themselves(settings: dict[str, Any], message: str) -> None:
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", **settings.get("judge", {})}
    settings = {key: value for key, value in settings.items() if key != "judge"}
    with pytest.raises(ConfigError, match=message):
        RubricConfig.model_validate({"judges": [judge], "rubric_field": "rubric", **settings})


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        (None, "'rubric' should hold criteria, found None"),
        ([], r"found \[\]"),
        ("Be good.", "found 'Be good.'"),
        ('[{"criterion": "A."', "a text that is not JSON"),
        ([3], r"rubric\[0\] should be a criterion, found 3"),
        ([{"weight": 1}], r"rubric\[0\] should have a text as 'criterion' or 'description'"),
        ([{"criterion": "A.", "description": "B."}], "should have a text"),
        (["A.", {"criterion": "B.", "weight": 0}], r"rubric\[1\] should have one number other than 0"),
        ([{"criterion": "B.", "weight": float("nan")}], "one number"),
        ([{"criterion": "B.", "weight": "5"}], "one number"),
        ([{"criterion": "B.", "weight": True}], "one number"),
        ([{"criterion": "B.", "weight": 1, "points": 2}], "one number"),
        ([{"criterion": "B.", "weight": -1}], "no weight above 0"),
        (["A.", {"criterion": "A.", "weight": 2}], "the criterion 'A.' twice"),
    ],
)
def test_rows_without_criteria_that_can_be_added(server: JudgeServer, rubric: Any, message: str) -> None:
    reward = make(server)
    with pytest.raises(DataError, match=rf"data\.jsonl:7: .*{message}"):
        reward.check_row(row(rubric=rubric))
    (lost,) = outcomes(reward, [completion("x", rubric=rubric)])
    assert isinstance(lost, RewardError)
    assert server.bodies == []  # nothing is asked for a sum that cannot be made


# ---- calibration ----------------------------------------------------------------------------------


def calibrated(server: JudgeServer, tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> RewardReport:
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return check_reward(make(server, **settings), path, slow_seconds=60)


def test_agreement_with_labels_of_criteria(server: JudgeServer, tmp_path: Path) -> None:
    """Four answers: the judge finds "Short." met in those of one letter, and "Kind." in all but one."""

    def answer(body: dict[str, Any]) -> str:
        text = re.findall(r"===== begin \w+ =====\n(.*?)\n", said(body))[0]
        return json.dumps({"met": len(text) == 1 if "Criterion: Short." in said(body) else text != "d d"})

    server.answer = answer
    labels = {"a": [True, True], "b": [False, False], "c c": [False, True], "d d": [True, True]}
    rows = [{"prompt": "Say it.", "rubric": ["Short.", "Kind."], "response": r, "met": m} for r, m in labels.items()]
    rows[3]["met"] = {"Kind.": True, "Short.": True}
    report = calibrated(server, tmp_path, rows)
    short, kind = report.calibration.criteria["Short."], report.calibration.criteria["Kind."]
    assert (short.met, short.wrongly_met, short.missed, short.unmet) == (1, 1, 1, 1)
    assert (kind.met, kind.wrongly_met, kind.missed, kind.unmet) == (2, 1, 1, 0)
    assert (short.accuracy, short.kappa) == (0.5, 0.0)
    # observed 2/4; by chance 3/4 · 3/4 + 1/4 · 1/4 = 10/16: (1/2 - 5/8) / (3/8)
    assert (kind.accuracy, kind.kappa) == (0.5, pytest.approx(-1 / 3))
    assert report.calibration.all_criteria.accuracy == 0.5
    assert report.suspicious == ["on all criteria together it agrees with the labels no more than chance would"]
    assert report.answers == ()  # rows with labels alone cost no further requests
    assert len(server.bodies) == 8
    assert re.search(r"│ Kind\. +│ +2 │ +1 │ +1 │ +0 │ +0 │ +50% │ -0\.33 │", str(report))


def test_agreement_with_labelled_pairs(server: JudgeServer, tmp_path: Path) -> None:
    server.answer = lambda body: json.dumps({"met": "fine" in said(body)})
    rows = [
        {"prompt": "1", "rubric": ["A."], "chosen": "fine", "rejected": "bad"},
        {"prompt": "2", "rubric": ["A."], "chosen": "fine", "rejected": "fine too"},
        {"prompt": "3", "rubric": ["A."], "chosen": "bad", "rejected": "fine"},
        {"prompt": "4", "rubric": ["A."], "chosen": "fine", "rejected": "bad, really"},
    ]
    pairs = calibrated(server, tmp_path, rows).calibration.pairs
    assert (pairs.better, pairs.tied, pairs.worse, pairs.lost, pairs.changed) == (2, 1, 1, 0, 0)
    assert pairs.accuracy == 2.5 / 4
    report = calibrated(server, tmp_path, rows[1:3])
    assert report.suspicious == ["of 2 labelled pairs it orders 25% as the labels do, no more than chance would"]
    server.answer = lambda body: 503 if "really" in said(body) else json.dumps({"met": "fine" in said(body)})
    report = calibrated(server, tmp_path, rows)
    assert (report.calibration.pairs.scored, report.calibration.pairs.lost) == (3, 1)
    assert any("row 4: a labelled pair cannot be scored" in line for line in report.suspicious)


def test_a_judge_that_changes_its_mind_is_counted(server: JudgeServer, tmp_path: Path) -> None:
    server.answer = turns({"met": True}, {"met": False}, {"met": False}, {"met": True})
    rows = [{"rubric": ["A."], "chosen": "x", "rejected": "y"}]
    pairs = calibrated(server, tmp_path, rows).calibration.pairs
    assert (pairs.better, pairs.changed) == (1, 1)


def test_half_of_the_votes_decides_nothing(server: JudgeServer, tmp_path: Path) -> None:
    server.answer = turns({"met": True}, {"met": False})
    rows = [{"rubric": ["A."], "response": "x", "met": [True]}]
    report = calibrated(server, tmp_path, rows, judge=WARM, votes=2)
    assert (report.calibration.criteria["A."].undecided, report.calibration.criteria["A."].accuracy) == (1, 0.5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "x"}, "'chosen' and 'rejected' should be two texts, found 'x' and None"),
        ({"chosen": ["x"], "rejected": ["y"]}, "'chosen' and 'rejected' should be two texts"),
        ({"response": "x", "met": "yes"}, "'met' should hold true or false"),
        ({"response": "x", "met": []}, "'met' should hold true or false"),
        ({"met": [True]}, "'met' should hold true or false"),
    ],
)
def test_labels_that_cannot_be_read(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=rf"labels\.jsonl:1: {message}"):
        read_cases(path)


def test_labels_that_do_not_fit_the_rubric(server: JudgeServer, tmp_path: Path) -> None:
    server.answer = lambda body: '{"met": true}'
    rows = [
        {"rubric": ["A.", "B."], "response": "x", "met": [True]},
        {"rubric": ["A."], "response": "x", "met": {"C": True}},
    ]
    found = calibrated(server, tmp_path, rows).suspicious
    assert found[0] == "row 1: `met` has 1 labels, and the rubric has 2: 'A.', 'B.'"
    assert found[1] == "row 2: `met` has 'C', and the rubric has 1: 'A.'"
    without = check_reward(lambda completion: 1.0, [RewardCase(gold=(), judged=(("x", (True,)),))])
    assert without.suspicious == ["row 1 labels criteria with `met`, and the reward judges no criteria"]
    empty = calibrated(server, tmp_path, [{"rubric": ["A."], "response": " ", "met": [False]}])
    assert empty.suspicious == ["row 1 labels criteria of an empty `response`, which no judge reads; remove it"]


ONE, ALL = "on the criterion 'A.' it agrees", "on all criteria together it agrees"


@pytest.mark.parametrize(
    ("criteria", "suspicious"),
    [
        # one label a criterion, as in rows with rubrics of their own, and one error in 100 answers
        ([(1, 0, 0, 0)] * 60 + [(0, 0, 0, 1)] * 39 + [(0, 0, 1, 0)], []),
        ([(19, 0, 1, 0)], []),  # all labels alike
        ([(19, 1, 0, 0)], []),  # nearly
        ([(1, 1, 0, 0)] + [(1, 0, 0, 1)] * 20, []),  # one error in two answers says nothing of a criterion
        ([(5, 5, 0, 0)] + [(1, 0, 0, 1)] * 20, [ONE]),
        ([(15, 5, 0, 0)], [ONE, ALL]),  # always met: 75 % right, and no judgement
        ([(0, 0, 1, 0)] * 20, [ALL]),  # all labels alike, and all are missed
        ([(0, 1, 1, 0)] * 5, [ALL]),
    ],
)
def test_good_judges_are_not_suspicious(criteria: list[tuple[int, int, int, int]], suspicious: list[str]) -> None:
    names = ["A.", *(f"B{number}." for number in range(len(criteria) - 1))]
    agreement = {name: CriterionAgreement(*counts) for name, counts in zip(names, criteria, strict=True)}
    found = list(Calibration(criteria=agreement).suspicions())
    assert [line.split(" with the labels")[0] for line in found] == suspicious
