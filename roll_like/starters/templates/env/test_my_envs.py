from __future__ import annotations

import json
from pathlib import Path

import pytest
from my_envs import HiddenWord

from roll_like import check_env

ROW = {"words": ["lamp", "river", "tiger"], "hidden": "tiger"}


@pytest.fixture
def env(tmp_path: Path) -> HiddenWord:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    env = HiddenWord(str(path))
    env.reset(seed=0)
    return env


def test_check_env_finds_nothing() -> None:
    path = Path(__file__).with_name("train.jsonl")
    report = check_env("mine/HiddenWord-v0", path=str(path))
    assert not report.findings
    assert report.figures["scripted: success rate"] == 1.0


def test_a_right_guess(env: HiddenWord) -> None:
    text, reward, terminated, _, info = env.step("Tiger!")
    assert (text, reward, terminated, info["success"]) == ("Right.", 1.0, True, True)


def test_a_wrong_guess_is_answered_with_a_hint(env: HiddenWord) -> None:
    text, reward, terminated, _, _ = env.step("lamp")
    assert (text, reward, terminated) == ("No. The hidden word begins with t.", 0.0, False)


@pytest.mark.parametrize("answer", ["", "bread", "lamp, river or tiger"])
def test_an_answer_that_is_no_guess(env: HiddenWord, answer: str) -> None:
    _, reward, terminated, _, info = env.step(answer)
    assert (reward, terminated, info["invalid_action"]) == (-0.1, False, True)
