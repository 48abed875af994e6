"""A reward is tried on a row before a run: what is said of its failures, and which rewards are not tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_like.errors import PluginError, RefusedAnswerError
from roll_like.registry import REWARDS
from roll_like.rewards import trial
from roll_like.rewards.base import Completion, Outcome, Reward, RewardConfig, register_reward, reward_class
from roll_like.rewards.trial import is_cheap, try_reward
from roll_like.types import Task

REFERENCE, EMPTY = "the reference answer", "an empty answer"


def task(answer: str | None = "42") -> Task:
    return Task(
        task_id="sums:1",
        source="sums",
        domain="sums",
        messages=({"role": "user", "content": "6 × 7?"},),
        prompt_ids=np.zeros(0, np.int32),
        answer=answer,
        metadata={"solution": "42", "topic": "products"},
        origin="sums.jsonl:1",
    )


def made(function: Callable[..., Any]) -> Reward:
    return reward_class(function)(RewardConfig(type="mine"))


def test_a_reward_that_scores_both_answers_has_no_failures() -> None:
    seen: list[Completion] = []

    def mine(completion: Completion) -> float:
        seen.append(completion)
        return float(completion.text == completion.metadata["solution"])

    found = try_reward(made(mine), task())
    assert (found.failures, found.tried) == ({}, (REFERENCE, EMPTY))
    assert [completion.text for completion in seen] == ["42", ""]
    assert try_reward(made(mine), task(None)).tried == (EMPTY,)


def test_a_missing_column_lists_those_that_are_there() -> None:
    def mine(completion: Completion) -> float:
        return float(completion.text == completion.metadata["answr"])

    failures = try_reward(made(mine), task()).failures
    assert failures.keys() == {REFERENCE, EMPTY}
    message = failures[REFERENCE]
    assert message.startswith("KeyError: 'answr' (")
    assert Path(__file__).name in message
    assert 'completion.metadata["answr"])`' in message  # the user's own line
    assert "completion.metadata has 'solution', 'topic'" in message
    assert "the reference answer is completion.answer" in message
    assert "\n" not in message


def test_a_reward_of_another_library_hears_what_one_takes_here() -> None:
    def trl(completions: Any, **columns: Any) -> list[float]:
        return [float(text == "42") for text in completions]

    message = try_reward(made(trl), task()).failures[REFERENCE]
    assert message.startswith("TypeError: 'Completion' object is not iterable")
    assert "a reward takes one completion and returns a number: `completion.text` is the response" in message
    with pytest.raises(PluginError, match=r"verl\(.*called with one completion \(.*test_rewards_trial\.py:\d+\)") as e:
        register_reward("verl")(verl)
    assert "`completion.text` is the response" in str(e.value.fix)
    assert "verl" not in REWARDS.names()


def verl(data_source: str, solution_str: str) -> float:
    return float(data_source == solution_str)


def test_a_reward_that_needs_an_answer_which_no_row_has_hears_how_it_is_named() -> None:
    def mine(completion: Completion) -> float:
        return float(completion.text == completion.answer.strip())  # type: ignore[union-attr]

    assert not try_reward(made(mine), task()).failures
    message = try_reward(made(mine), task(None)).failures[EMPTY]
    assert message.endswith("so completion.answer is None: set answer_field of its source")


def test_no_number_is_no_score() -> None:
    def mine(completion: Completion) -> float | None:
        return 1.0 if completion.text else None

    failures = try_reward(made(mine), task()).failures
    assert failures == {EMPTY: "the result should be a finite number, found None (NoneType)"}


def test_what_is_refused_on_purpose_is_no_failure() -> None:
    class Careful(Reward):
        def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            return [0.5 if completion.text else RefusedAnswerError("nothing to read") for completion in completions]

    assert try_reward(Careful(RewardConfig(type="careful")), task()).failures == {}


def test_a_reward_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.05)
    release = iter_until_released()

    def slow(completion: Completion) -> float:
        del completion
        return next(release)

    found = try_reward(made(slow), task())
    assert found.late == REFERENCE
    assert found.failures == {}


def iter_until_released() -> Iterator[float]:
    import time

    while True:
        time.sleep(0.3)
        yield 1.0


def test_what_needs_something_started_is_not_cheap() -> None:
    class Model(Reward):
        def start(self) -> None:
            """Loads a model."""

    async def asks_a_server(completion: Completion) -> float:
        return float(completion.text == "")

    assert not is_cheap(Model(RewardConfig(type="model")))
    assert not is_cheap(made(asks_a_server))
    assert is_cheap(made(lambda completion: 0.0))
    cheap = {name for name in REWARDS.names() if name in CHEAP | DEAR and is_cheap(example(name))}
    assert cheap == CHEAP


CHEAP = {"exact_match", "format", "length", "math", "multiple_choice", "repetition"}
DEAR = {"code", "llm_judge"}
SETTINGS: dict[str, dict[str, Any]] = {
    "llm_judge": {"rubric": "Is it good?", "judges": [{"url": "http://127.0.0.1:9", "model": "m"}]},
    "format": {"pattern": "x"},
}


def example(name: str) -> Any:
    plugin = REWARDS.get(name)
    return plugin(plugin.Config.model_validate({"type": name, **SETTINGS.get(name, {})}))
