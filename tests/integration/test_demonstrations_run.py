"""Whole runs on the tiny model with demonstrations and experience replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hygiene import nothing_left
from run_config import asynchronous, read_lines, run_here, write_run

from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import read_groups
from roll_like.types import Origin

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]

EVERYTHING: dict[str, Any] = {
    "demonstrations": {
        "off_policy": {},
        "sft": {"coefficient": 0.4, "final_coefficient": 0.1, "decay_steps": 4, "token_weight": "phi"},
    },
    "experience_replay": {"only_unsolved": False, "solved_reward": 0.2, "max_age": 3},
}


def write(directory: Path, tiny_model: Path, **changes: Any) -> Path:
    """A run of six prompts whose demonstrations the reward (the share of `e`) likes."""
    directory.mkdir(exist_ok=True)
    config = write_run(directory, tiny_model, evaluation=None, **changes)
    rows = [{"prompt": f"Say something about the number {n}.", "demonstration": "eeee eee"} for n in range(6)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def steps_of(directory: Path) -> list[dict[str, float]]:
    return read_lines(directory / "runs" / "tiny" / "metrics.jsonl")


def test_a_resumed_run_learns_the_same_to_the_bit(tmp_path: Path, tiny_model: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 12, "save_tokens": True}
    settings: dict[str, Any] = {
        **EVERYTHING,
        "rollout": rollout,
        "steps": 5,
        "checkpoint": {"every": 1, "export": False},
        "training": {"optimizer": {"lr": 3.0e-3}, "max_tokens_per_micro_batch": 256},
    }
    code, output = run_here(write(whole, tiny_model, **settings))
    assert code == 0, output
    config = write(halves, tiny_model, **settings)
    with nothing_left():
        code, output = run_here(config, "steps=3")
        assert code == 0, output
        code, output = run_here(config, "--resume")
        assert code == 0, output
    expected, found = steps_of(whole), steps_of(halves)
    names = [name for name in expected[0] if name.startswith(("train/", "demonstrations/", "replay/", "rollout/rew"))]
    names = [name for name in names if "tokens_per" not in name and "second" not in name]
    assert {"train/sft_loss", "train/off_policy_loss", "demonstrations/reward", "replay/kept"} <= set(names)
    for name in names:
        assert [step.get(name) for step in found] == [step.get(name) for step in expected], name
    assert [step["train/sft_coefficient"] for step in expected] == pytest.approx(
        [0.4, 0.356, 0.25, 0.144, 0.1], abs=1e-3
    )
    assert [step["demonstrations/groups"] for step in expected] == [1] * 5
    assert expected[0]["replay/groups"] == 0
    assert max(step["replay/groups"] for step in expected) > 0
    assert max(step.get("replay/age", 0) for step in expected) <= 3
    # demonstrations become likelier, and no mismatch comes of them
    assert expected[-1]["demonstrations/cross_entropy"] < expected[0]["demonstrations/cross_entropy"]
    assert max(step["mismatch/logprob_difference_max"] for step in expected) < 0.5
    groups = read_groups(tokens_stem(whole / "runs" / "tiny", 5))
    joined = [one for group in groups for one in group.off_policy]
    assert {one.trajectory.origin for one in joined} == {Origin.DEMONSTRATION, Origin.REPLAYED}
    demonstrations = [one for one in joined if one.trajectory.origin is Origin.DEMONSTRATION]
    assert len({round(one.reward, 6) for one in demonstrations}) == 1  # as the reward scores it
    assert all(np.isfinite(one.reward) for one in joined)


def test_asynchronous_rollouts_are_joined_too(tmp_path: Path, tiny_model: Path) -> None:
    run = asynchronous()
    code, output = run_here(write(tmp_path / "run", tiny_model, steps=4, **{**EVERYTHING, **run}))
    assert code == 0, output
    steps = steps_of(tmp_path / "run")
    assert [step["demonstrations/groups"] for step in steps] == [1] * 4
    assert all(step["train/off_policy_loss"] != 0 for step in steps)
    assert steps[-1]["replay/kept"] > 0
