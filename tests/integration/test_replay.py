"""A run that replays the rollouts of another trains exactly as that did, with a trainer and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hygiene import nothing_left
from run_config import read_lines, run_here, write_episodes_run, write_on_policy_distill_run, write_run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def trained(run: Path) -> list[dict[str, Any]]:
    """Each step's figures of the trainer and of the samples, without times."""
    parts = ("train/", "mismatch/", "correction/", "distill/", "advantage/", "rollout/reward/", "rollout/tokens")
    return [
        {name: value for name, value in step.items() if name.startswith(parts)}
        for step in read_lines(run / "metrics.jsonl")
    ]


def check_replay(directory: Path, config: Path, *changes: str) -> None:
    """Record two steps, replay the first, resume with the second, and compare."""
    runs = directory / "runs"
    code, output = run_here(config, "steps=2", "rollout.save_tokens=true", *changes)
    assert code == 0, output
    replay = (f"rollout.schedule={{type: replay, path: {runs / 'tiny'}}}", "name=again", *changes)
    with nothing_left():
        code, output = run_here(config, "steps=1", *replay)
        assert code == 0, output
        code, output = run_here(config, "steps=2", *replay, "--resume", "again")
        assert code == 0, output
    expected, found = trained(runs / "tiny"), trained(runs / "again")
    assert found == expected
    assert len(found) == 2
    assert found[0] != found[1]
    assert any(name.startswith("train/grad_norm") for name in found[0]), found[0]
    steps = read_lines(runs / "again" / "metrics.jsonl")
    assert all(step["staleness/max"] == 0 for step in steps)
    assert not [name for step in steps for name in step if name.startswith(("sync/", "time/sync"))]
    code, output = run_here(config, "steps=3", *replay)
    assert code != 0
    assert "has rollouts with tokens of 2 steps, and steps: 3 asks for more" in output


def test_answers_are_replayed(tmp_path: Path, tiny_model: Path) -> None:
    check_replay(tmp_path, write_run(tmp_path, tiny_model, algorithm={"updates_per_step": 2}))


def test_episodes_are_replayed(tmp_path: Path, tiny_model: Path) -> None:
    check_replay(tmp_path, write_episodes_run(tmp_path, tiny_model))


@pytest.mark.slow
def test_a_teacher_scores_replayed_answers(tmp_path: Path, tiny_model: Path) -> None:
    config = write_on_policy_distill_run(tmp_path, tiny_model, tiny_model)
    check_replay(tmp_path, config, "evaluation=null")
