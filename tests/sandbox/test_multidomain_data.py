"""The data of three domains: made as committed, no task twice, every right answer worth 1 and every wrong one 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_like.builtin.rewards.code_block import last_program
from roll_like.sandbox import CallTest, CodeEvaluator, TestStatus

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "configs" / "data"
NAMES = ("math_train", "math_eval", "code_train", "code_eval")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def test_the_committed_files_are_what_the_script_writes(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_multidomain_data.py"
    subprocess.run([sys.executable, str(script), "--directory", str(tmp_path)], check=True, capture_output=True)
    for name in NAMES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (DATA / f"{name}.jsonl").read_bytes(), name


@pytest.mark.parametrize("domain", ["math", "code"])
def test_training_and_evaluation_share_no_task(domain: str) -> None:
    asked = [{row["prompt"][-1]["content"] for row in rows(f"{domain}_{part}")} for part in ("train", "eval")]
    assert asked[0].isdisjoint(asked[1])
    shown = {message["content"] for row in rows(f"{domain}_train") for message in row["prompt"][:-1]}
    assert shown.isdisjoint(asked[0] | asked[1])  # no solved example is asked


def test_sums_are_right() -> None:
    for row in rows("math_train") + rows("math_eval"):
        words = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert row["answer"] == str(sum(map(int, words)))


@pytest.mark.parametrize(
    "step", [pytest.param(1, id="all", marks=pytest.mark.slow), pytest.param(7, id="every seventh")]
)
def test_solutions_pass_their_calls_and_others_do_not(step: int) -> None:
    everything = (rows("code_train") + rows("code_eval"))[::step]
    with CodeEvaluator() as evaluator:
        for row, other in zip(everything, everything[1:] + everything[:1], strict=True):
            tests = [
                CallTest(test["entry_point"], tuple(test["args"]), expected=test["expected"]) for test in row["tests"]
            ]
            program, wrong = (last_program(one["solution"], language="python") for one in (row, other))
            assert program is not None
            assert wrong is not None
            assert evaluator.evaluate_sync(program.source, tests).status is TestStatus.PASSED, row["solution"]
            assert evaluator.evaluate_sync(wrong.source, tests).status is TestStatus.WRONG_ANSWER, other["solution"]
