"""Environments that set a task from each row of a dataset: which seed sets which row, and what is held out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from roll_like.envs import TaskRows, make_env, prompt_messages, read_task_rows
from roll_like.errors import DataError, EnvError
from roll_like.types import EVALUATION_SEED

ROWS = [{"prompt": f"{n} + 0?", "answer": str(n)} for n in range(10)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "sums.csv"
    path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS))
    return path


@pytest.mark.parametrize("held_out", [0, 1, 3, 9])
def test_no_seed_of_training_sets_what_is_held_out(held_out: int) -> None:
    rows = TaskRows(ROWS, held_out=held_out)
    trained = [rows.row(seed)["answer"] for seed in range(25)]
    evaluated = [rows.row(EVALUATION_SEED + seed)["answer"] for seed in range(25)]
    kept = 10 - held_out
    assert trained == [str(seed % kept) for seed in range(25)]
    if held_out:
        assert evaluated == [str(kept + seed % held_out) for seed in range(25)]
        assert not set(trained) & set(evaluated)
    else:
        assert set(evaluated) == set(trained)


def test_without_a_seed_any_row_that_is_trained_on_is_set() -> None:
    rows = TaskRows(ROWS, held_out=7)
    generator = np.random.default_rng(0)
    assert {rows.row(None, generator)["answer"] for _ in range(60)} == {"0", "1", "2"}
    assert rows.row(None)["answer"] in {"0", "1", "2"}


@pytest.mark.parametrize("held_out", [-1, 10, 11])
def test_a_row_is_left_to_train_on(held_out: int) -> None:
    with pytest.raises(EnvError, match=f"held_out is {held_out}, and there are 10 rows"):
        TaskRows(ROWS, held_out=held_out)


def test_rows_are_read_from_any_file(table: Path, tmp_path: Path) -> None:
    as_json = tmp_path / "sums.json"
    as_json.write_text(json.dumps(ROWS))
    for path, first in ((table, 2), (as_json, 1)):
        found = read_task_rows(str(path), ("prompt", "answer"))
        assert [row["answer"] for row in found] == [row["answer"] for row in ROWS]
        assert found[0]["origin"] == f"{path}:{first}"
    with pytest.raises(DataError, match="the field 'key' is missing; found prompt, answer"):
        read_task_rows(str(table), ("key",))


@pytest.mark.parametrize(("env_id", "options"), [("roll_like/QA-v0", {}), ("roll_like/Tools-v0", {"style": "tag"})])
def test_environments_hold_rows_out(env_id: str, options: dict[str, str], table: Path) -> None:
    env = make_env(env_id, path=str(table), held_out=4, **options)
    assert [env.reset(seed=seed)[0] for seed in (0, 5, 6)] == ["0 + 0?", "5 + 0?", "0 + 0?"]
    assert [env.reset(seed=EVALUATION_SEED + seed)[0] for seed in (0, 3, 4)] == ["6 + 0?", "9 + 0?", "6 + 0?"]
    env.step("<answer>6</answer>")
    env.close()


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("7 + 0?", "7 + 0?"),
        (7, "7"),
        (json.dumps([{"role": "user", "content": "7 + 0?"}]), "7 + 0?"),
        ('[{"role": "user"}] is what?', '[{"role": "user"}] is what?'),
    ],
)
def test_a_prompt_is_a_text_or_messages_as_json(prompt: object, shown: str) -> None:
    row = {"prompt": prompt, "origin": "sums.csv:2"}
    assert prompt_messages(row, "prompt") == [{"role": "user", "content": shown}]
