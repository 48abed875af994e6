"""Whole runs with environments of verifiers, on a tiny model: training, resuming, evaluation, rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy2, copytree
from typing import Any

import pytest
from hygiene import nothing_left
from run_config import command_here, evaluated, read_lines, run_here, write_episodes_run

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".verifiers" / "bin" / "python"
TASKS = ROOT / "tests" / "verifiers_tasks"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_ray"),
    pytest.mark.skipif(not PYTHON.exists(), reason="make verifiers installs what it plays in"),
]


def write_run_of(folder: Path, model: Path, verifiers: dict[str, Any], **changes: Any) -> Path:
    entry = {"python": str(PYTHON), "env": {"PYTHONPATH": str(TASKS)}, **verifiers}
    return write_episodes_run(
        folder, model, **{"import": [], "algorithm": {}, "environments": [{"verifiers": entry}], **changes}
    )


def seeds_of(run: Path, step: int) -> list[int]:
    rows = read_lines(run / "rollouts" / f"step_{step:06d}.jsonl")
    return [int(row["task_id"].rpartition(":")[2]) for row in rows]


def test_a_run_is_resumed_where_its_tasks_were(tmp_path: Path, tiny_model: Path) -> None:
    copy2(ROOT / "tests" / "tiny_rewards.py", tmp_path)
    config = write_run_of(
        tmp_path,
        tiny_model,
        {"taskset": {"id": "sums", "num_tasks": 40}, "harness": "roll-like-direct", "held_out": 4},
        **{"import": ["tiny_rewards"]},
        steps=2,
        rewards={"use": [{"type": "letter_e", "weight": 3.0}]},
        rollout={
            "groups_per_step": 3,
            "episodes_per_group": 2,
            "redundant_episodes": 1,
            "max_response_tokens": 8,
            "max_episode_tokens": 128,
            "schedule": {"type": "async", "max_staleness": 1},
        },
        evaluation={"seeds": 4, "episodes_per_seed": 1},
        resources={"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}},
    )
    run = tmp_path / "runs" / "tiny"
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    text = (
        config.read_text()
        .replace("steps: 2", "steps: 4")
        .replace("held_out: 4", "held_out: 4\n    timeout_seconds: 60")
    )
    config.write_text(text)  # what does not change the tasks may change
    code, output = run_here(config, "--resume")
    assert code == 0, output
    played = [seeds_of(run, step) for step in (1, 2, 3, 4)]
    groups = [seed for step in played for seed in dict.fromkeys(step)]
    assert [len(step) for step in played] == [6] * 4  # redundant episodes are not kept
    assert len(set(groups)) == 12  # no task twice
    assert max(groups) < 12 + 6  # and none is left out but those that were begun ahead
    for step in (1, 2, 3, 4):
        for row in read_lines(run / "rollouts" / f"step_{step:06d}.jsonl"):
            letters = row["rewards"]["letter_e"]
            assert row["reward"] == pytest.approx(row["rewards"]["return"] + 3.0 * letters)
            seed = int(row["task_id"].rpartition(":")[2])
            assert f"What is {seed + 4} + {seed + 4}?" in str(row["turns"][0]["shown"])  # the first four are held out
    for one in read_lines(run / "evaluations.jsonl"):
        assert {"eval/verifiers/correct", "eval/verifiers/length", "eval/reward/letter_e"} <= one.keys()
        assert one["eval/failures"] == 0
    figures = evaluated(config, tiny_model)
    assert figures["eval/reward/return"] == figures["eval/verifiers/correct"] == 0.0
    code, output = command_here(tmp_path, "rollouts", "tiny", "--step", "4")
    assert code == 0
    assert "4/0.0" in output
    assert "sums" in output


@pytest.mark.usefixtures("mini_swe_agent")
def test_mini_swe_agent_is_trained_on_a_repository(tmp_path: Path, tiny_model: Path) -> None:
    model = copytree(tiny_model, tmp_path / "model")
    shape = json.loads((model / "config.json").read_text())  # its instructions alone are longer than 1024 tokens
    (model / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 8192}))
    copy2(ROOT / "tests" / "tiny_rewards.py", tmp_path)
    config = write_run_of(
        tmp_path,
        model,
        {
            "taskset": "toy-repo",
            "harness": "local-swe",
            "held_out": 1,
            "env": {"PYTHONPATH": str(TASKS), "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"},
        },
        **{"import": ["tiny_rewards"]},
        steps=3,
        rewards={"use": [{"type": "letter_e"}]},
        rollout={
            "groups_per_step": 1,
            "episodes_per_group": 2,
            "max_turns": 2,
            "max_response_tokens": 12,
            "max_episode_tokens": 4096,
        },
        training={"optimizer": {"lr": 1.0e-3}, "max_tokens_per_micro_batch": 8192},
        evaluation={"seeds": 1, "episodes_per_seed": 1},
        checkpoint={"at_end": False, "export": False},
    )
    code, output = run_here(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [step["rollout/turns"] for step in steps] == [2.0] * 3
    assert all(step["rollout/failures"] == 0 for step in steps)
    for one in read_lines(tmp_path / "runs" / "tiny" / "evaluations.jsonl"):
        assert one["eval/verifiers/mended"] == 0.0
    row = read_lines(tmp_path / "runs" / "tiny" / "rollouts" / "step_000001.jsonl")[0]
    assert "times(5) of arithmetic.py should be 15. Mend it." in str(row["turns"][0]["shown"])


ENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "the reward nan; expected a finite number": (1, {"taskset": {"id": "sums", "task": {"fails": "nan"}}}),
    "never asked the policy, and is to be trained": (1, {"harness": {"id": "formats", "asks": "nothing"}}),
    "KeyError: 'the column is missing'": (2, {"taskset": {"id": "sums", "fails": "load"}}),
    "has 20 tasks, and 20 of them are held out": (2, {"held_out": 20}),
}


@pytest.mark.parametrize("words", ENDS)
def test_a_run_in_which_nothing_can_be_played_ends_with_what_is_wrong(
    words: str, tmp_path: Path, tiny_model: Path
) -> None:
    code, changes = ENDS[words]
    entry = {"taskset": "sums", "harness": "roll-like-direct", **changes}
    with nothing_left():
        ended, output = run_here(write_run_of(tmp_path, tiny_model, entry, steps=1))
    assert ended == code, output
    assert words in output.replace("\n", " ")
