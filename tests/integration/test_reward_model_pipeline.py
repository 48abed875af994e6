"""A run that trains a reward model, from its YAML to a reward; killed and resumed it is the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hygiene import nothing_left
from reward_support import completion
from run_config import evaluated, finish_run, read_lines, start_run, write_reward_model_run

from roll_like.builtin.rewards.reward_model import RewardModel, RewardModelConfig

pytestmark = pytest.mark.integration


def losses(run: Path) -> list[float]:
    return [line["train/loss"] for line in read_lines(run / "metrics.jsonl")]


def scores(model: Path) -> list[float]:
    """Of an answer of the kind that is chosen, and of one that is not."""
    reward = RewardModel(RewardModelConfig(path=str(model)))
    answers = [completion(text, prompt="Say tea 2 times") for text in ("teatea", "aetaetaet")]
    results: Any = reward.score(answers)
    return [result.value for result in results]


@pytest.mark.slow
def test_a_reward_model_is_learned_and_one_that_was_killed_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    epochs = {"steps": None, "epochs": 4}  # 4 × 20 pairs, 8 a step
    with nothing_left():
        config = write_reward_model_run(whole, tiny_model, **epochs, checkpoint={"export": True})
        code, output = finish_run(config)
    assert code == 0, output
    run = whole / "runs" / "tiny"
    lines, (before, after) = read_lines(run / "metrics.jsonl"), read_lines(run / "evaluations.jsonl")
    assert len(lines) == 10
    assert lines[0]["train/loss"] == pytest.approx(0.6931, abs=0.02)  # log 2: scores begin near 0
    assert lines[-1]["preference/accuracy"] == 1.0
    assert after["eval/accuracy"] >= before["eval/accuracy"] + 0.25  # of words that are not trained on
    assert after["eval/loss"] < before["eval/loss"] - 0.05
    assert after["eval/margin"] > before["eval/margin"]
    assert (run / "curves.png").stat().st_size > 10_000
    assert "eval/accuracy" in (run / "model" / "README.md").read_text()

    good, bad = scores(run / "model")
    assert good > bad
    alone = evaluated(config, run / "model")
    assert alone["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-3)
    merged = tmp_path / "merged"
    command = ["export", "--checkpoint", str(run / "checkpoints" / "step_000010"), "-o", str(merged)]
    subprocess.run([sys.executable, "-m", "roll_like.cli", *command], check=True, cwd=whole, capture_output=True)
    assert scores(merged) == pytest.approx([good, bad], abs=1e-4)
    assert json.loads((merged / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]

    config = write_reward_model_run(halves, tiny_model, **epochs)
    with nothing_left():
        process = start_run(config, start_new_session=True)
        assert process.stdout is not None
        for line in process.stdout:
            if "step  4/10" in line:
                break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    code, output = finish_run(config, "--resume")
    assert code == 0, output
    assert losses(halves / "runs" / "tiny") == pytest.approx(losses(run), rel=1e-4)
