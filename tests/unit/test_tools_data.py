"""The data of the tools example: what the script writes, and that the scripts in it solve each task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from roll_like.envs import make_env, scripted_action

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "configs" / "data"
NAMES = ("tools_train.jsonl", "tools_eval.jsonl")


def test_the_script_writes_the_committed_files(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_tools_data.py"
    subprocess.run([sys.executable, str(script), "--directory", str(tmp_path)], check=True, capture_output=True)
    for name in NAMES:
        assert (tmp_path / name).read_text(encoding="utf-8") == (DATA / name).read_text(encoding="utf-8")


def test_training_and_evaluation_share_only_the_examples() -> None:
    prompts = [{json.loads(line)["prompt"] for line in (DATA / name).read_text().splitlines()} for name in NAMES]
    assert len(prompts[0] & prompts[1]) == 2
    assert [len(each) for each in prompts] == [302, 38]


@pytest.mark.parametrize("name", NAMES)
def test_each_task_can_be_solved_as_its_script_says(name: str) -> None:
    env = make_env("roll_like/Tools-v0", path=str(DATA / name), tools=["calculator"], style="text", examples=2)
    for seed in range(36):
        env.reset(seed=seed)
        for _ in range(2):
            action = scripted_action(env)
            assert action is not None
            *_, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["success"]) == (1.0, True, True)
    env.close()
