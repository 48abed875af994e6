"""The data of `configs/reward_model_steps.yaml` is what its script writes, and its labels are right."""

from __future__ import annotations

import json
import re

from loose_modules import SCRIPTS, load_module

SCRIPT = SCRIPTS / "make_steps_data.py"


def test_the_files_are_what_the_script_writes() -> None:
    assert all(path.read_text(encoding="utf-8") == text for path, text in load_module(SCRIPT).files().items())


def test_a_step_is_right_as_long_as_all_before_are() -> None:
    train, held_out = load_module(SCRIPT).files().values()
    assert not set(train.splitlines()) & set(held_out.splitlines())
    for line in (train + held_out).splitlines():
        row = json.loads(line)
        by, first, count = map(int, re.findall(r"\d+", row["prompt"]))
        right = [int(step) == first + by * at for at, step in enumerate(row["completions"])]
        assert len(right) == count
        assert row["labels"] == [all(right[: at + 1]) for at in range(count)]
