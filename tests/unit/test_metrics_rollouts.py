"""Rollouts as rows: what an episode's row holds, ids, which are picked, transcripts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episodes import episode, read_back, rows
from tests_support import group, task

from roll_like.metrics import files
from roll_like.metrics.rollout_text import rollout_lines
from roll_like.metrics.rollouts import (
    message_text,
    read_id,
    read_rollouts,
    rollout_steps,
    solved,
    subsample,
    transcript,
    with_ids,
)
from roll_like.rollout.metrics import rollout_rows


def test_an_answer_is_a_row_without_turns() -> None:
    (row,) = rollout_rows([group(task(3), [0.5])])
    assert (row["domain"], row["sample_index"], row["prompt"], row["text"]) == ("fake", 0, "task 3", "text")
    assert not {"turns", "success", "seed", "cuts", "return", "reference"} & row.keys()
    (known,) = rollout_rows([group(replace(task(3), answer="42"), [0.5])])
    assert known["reference"] == "42"
    text = "\n".join(line.plain for line in rollout_lines({"kind": "train", "step": 1, "id": "1/0.0", **known}, 80))
    assert text.splitlines()[-2:] == ["reference 42", "reward    0.5"]


def test_an_episode_is_a_row_that_says_what_happened() -> None:
    calls = ({"name": "calculator", "arguments": {"expression": "1+1"}, "result": "2", "error": False},)
    (row,) = rows([episode(["left", "<b>right</b>"], index=7, sample=2, tool_calls=calls, invalid=True)])
    assert row["prompt"] == "You are at 0.\nSF\nFG"
    assert row["text"] == "‹ left\n› You are at 1.\n  SF\n  FG\n‹ <b>right</b>\n› It is over."
    assert (row["seed"], row["cuts"], row["success"], row["return"], row["sample_index"]) == (7, 0, True, 1.0, 2)
    assert [one["reward"] for one in row["turns"]] == [0.0, 1.0]
    back = read_back(row)
    assert back["turns"][1] == {
        "shown": [{"role": "user", "content": "You are at 1.\nSF\nFG"}],
        "text": "<b>right</b>",
        "tokens": 4,
        "prompt_tokens": 30,
        "reward": 1.0,
        "state": "at 1",
        "tool_calls": [calls[0]],
        "invalid": True,
        "began": 1_800_000_001.0,
        "sampled": 1_800_000_001.5,
        "ended": 1_800_000_001.75,
        "after": [{"role": "user", "content": "It is over."}],
    }
    assert transcript(back["turns"]) == row["text"]


def named(*members: tuple[str, int | None]) -> list[str]:
    listed: list[dict[str, Any]] = [
        {"task_id": name} if sample is None else {"task_id": name, "sample_index": sample} for name, sample in members
    ]
    return [row["id"] for row in with_ids(12, "step", listed)]


def test_ids_count_groups_and_name_samples() -> None:
    assert named(("a", 0), ("a", 2), ("b", 1)) == ["12/0.0", "12/0.2", "12/1.1"]
    # the same task may be drawn twice in a step
    assert named(("a", 0), ("a", 1), ("a", 0)) == ["12/0.0", "12/0.1", "12/1.0"]
    # rows that do not know their sample are counted
    assert named(("a", None), ("a", None), ("b", None)) == ["12/0.0", "12/0.1", "12/1.0"]
    assert with_ids(0, "eval", [{"task_id": "a"}])[0]["id"] == "eval0/0.0"


@pytest.mark.parametrize(
    ("text", "found"),
    [("120/3.5", ("step", 120)), ("eval0/0.12", ("eval", 0)), ("3.5", None), ("1/2", None), ("test1/2.3", None)],
)
def test_an_id_says_where_its_rollout_lies(text: str, found: Any) -> None:
    assert read_id(text) == found


def test_rollouts_are_read_by_step_and_kind(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for step, kind in ((3, "step"), (12, "step"), (0, "eval")):
        row = {"task_id": "a", "prompt": "p", "text": "t", "reward": 1}
        files.replace(files.rollouts_path(tmp_path, step, kind=kind), [row])
    assert (rollout_steps(tmp_path, "step"), rollout_steps(tmp_path, "eval")) == ([3, 12], [0])
    assert [row["id"] for row in read_rollouts(tmp_path, 12, "step")] == ["12/0.0"]
    assert read_rollouts(tmp_path, 5, "step") == []


def grouped(*sizes: int) -> list[dict[str, Any]]:
    return [
        {"id": f"1/{number}.{sample}", "reward": 0.0} for number, size in enumerate(sizes) for sample in range(size)
    ]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((2, 2), None, "0.0 0.1 1.0 1.1"),
        ((2, 2), 4, "0.0 0.1 1.0 1.1"),
        ((2, 2), 0, ""),
        ((4, 4), 2, "0.0 1.0"),
        ((4, 4), 5, "0.0 0.1 0.2 1.0 1.1"),
        ((2, 2, 2, 2), 2, "0.0 2.0"),
        ((1, 3), 3, "0.0 1.0 1.1"),  # a group that lost samples leaves its room to others
    ],
)
def test_what_is_picked_is_spread_over_groups(sizes: tuple[int, ...], limit: int | None, expected: str) -> None:
    assert " ".join(row["id"].removeprefix("1/") for row in subsample(grouped(*sizes), limit)) == expected


def test_success_is_what_the_environment_says_else_full_reward() -> None:
    assert solved({"reward": 0.2, "success": True})
    assert not solved({"reward": 1.0, "success": False})
    assert solved({"reward": 1.0})
    assert not solved({"reward": 0.99})


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "hello"}, "hello"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, '{"id": "a"}'),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, 'a\n{"type": "image"}'),
        ({"role": "user"}, ""),
    ],
)
def test_a_message_of_any_form_has_a_text(message: dict[str, Any], text: str) -> None:
    assert message_text(message) == text
