"""QA and Tools on rows as published data has them: prompts as messages, answers in objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll_like.agents.env_worker import HostedEnvironment
from roll_like.agents.episode import EnvironmentSpec
from roll_like.errors import DataError, EnvError

#: A row of verl's Parquet files.
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "6 times 7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 0, "question": "6 times 7?", "answer": "#### 42"},
}
SYSTEM = {"role": "system", "content": "You count."}
EARLIER = [{"role": "user", "content": "2 times 3?"}, {"role": "assistant", "content": "<answer>6</answer>"}]
KINDS = ["roll_like/QA-v0", "roll_like/Tools-v0"]


def environment(path: Path, kind: str, row: dict[str, Any], **kwargs: Any) -> HostedEnvironment:
    file = path / "rows.jsonl"
    file.write_text(json.dumps(row))
    options = {"path": str(file), "answer": "reward_model.ground_truth", "match": "number", **kwargs}
    return HostedEnvironment(EnvironmentSpec(name="e", env_id=kind, kwargs=options))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_verl_are_tasks(tmp_path: Path, kind: str) -> None:
    hosted = environment(tmp_path, kind, VERL)
    system, task = hosted.reset(0).messages
    assert system["role"] == "system"
    assert task == {"role": "user", "content": "6 times 7?"}
    assert hosted.step("<answer>42</answer>").reward == 1
    hosted.reset(0)
    assert hosted.step("<answer>41</answer>").reward == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_several_messages_is_shown_whole_with_one_system_message(tmp_path: Path, kind: str) -> None:
    row = {**VERL, "prompt": [SYSTEM, *EARLIER, *VERL["prompt"]]}
    hosted = environment(tmp_path, kind, row, system_prompt="Write <answer>…</answer>.")
    assert hosted.reset(0).messages == [
        {"role": "system", "content": "You count.\n\nWrite <answer>…</answer>."},
        *EARLIER,
        {"role": "user", "content": "6 times 7?"},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_an_object_is_a_task(tmp_path: Path, kind: str) -> None:
    hosted = environment(tmp_path, kind, VERL, prompt="extra_info.question")
    assert hosted.reset(0).messages[-1]["content"] == "6 times 7?"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("row", "kwargs", "problem"),
    [
        (VERL, {"answer": "reward_model.answer"}, "the field 'reward_model.answer' is missing"),
        ({**VERL, "prompt": EARLIER}, {}, "the last message in 'prompt' is of the role 'assistant', expected 'user'"),
        ({**VERL, "prompt": []}, {}, "expected a text or a list of messages in 'prompt'"),
        ({**VERL, "prompt": [{"role": "user"}]}, {}, "expected a text in 'content'"),
    ],
)
def test_rows_that_set_no_task_are_named(
    tmp_path: Path, kind: str, row: dict[str, Any], kwargs: dict[str, Any], problem: str
) -> None:
    with pytest.raises((DataError, EnvError), match=rf"rows\.jsonl:1: .*{problem}"):
        environment(tmp_path, kind, row, **kwargs)
