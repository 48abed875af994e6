"""A run that trains a reward model, from its YAML to a reward; killed and resumed it is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hygiene import nothing_left
from reward_support import completion
from run_config import (
    evaluated,
    exported,
    kill_run,
    losses,
    read_lines,
    run_here,
    scored_rows,
    step_rows,
    write_reward_model_run,
)

from roll_like.builtin.rewards.reward_model import RewardModel, RewardModelConfig

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def scores(model: Path, bad: str = "aetaetaet") -> list[float]:
    """Of an answer of the kind that is chosen, and of one that is not."""
    reward = RewardModel(RewardModelConfig(path=str(model)))
    answers = [completion(text, prompt="Say tea 2 times") for text in ("teatea", bad)]
    results: Any = reward.score(answers)
    return [result.value for result in results]


@pytest.mark.slow
def test_a_reward_model_is_learned_and_one_that_was_killed_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    epochs = {"steps": None, "epochs": 4}  # 4 × 20 pairs, 8 a step
    with nothing_left():
        config = write_reward_model_run(whole, tiny_model, **epochs, checkpoint={"every": 10, "export": True})
        code, output = run_here(config, curves=True)
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
    exported(run / "checkpoints" / "step_000010", merged)
    assert scores(merged) == pytest.approx([good, bad], abs=1e-4)
    assert json.loads((merged / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]

    config = write_reward_model_run(halves, tiny_model, **epochs)
    with nothing_left():
        kill_run(config, "step  4/10")
    code, output = run_here(config, "--resume")
    assert code == 0, output
    assert losses(halves / "runs" / "tiny") == pytest.approx(losses(run), rel=1e-4)


def test_a_short_run_prefers_what_was_chosen(tmp_path: Path, tiny_model: Path) -> None:
    config = write_reward_model_run(tmp_path, tiny_model, steps=4, checkpoint={"at_end": False, "export": True})
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    assert losses(run)[0] == pytest.approx(0.6931, abs=0.02)  # log 2: scores begin near 0
    before, after = read_lines(run / "evaluations.jsonl")
    assert after["eval/loss"] < before["eval/loss"]
    assert after["eval/margin"] > before["eval/margin"]
    good, bad = scores(run / "model")
    assert good > bad


def write_scores_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """The same on single answers, each with the score 1 or 0."""
    write_reward_model_run(directory, model_path)
    return write_reward_model_run(directory, model_path, **scored_rows(directory), **changes)


@pytest.mark.slow
def test_scores_are_learned_from_single_answers_and_a_run_that_was_killed_goes_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    epochs = {"steps": None, "epochs": 16}  # 16 × 40 answers, 16 a step
    config = write_scores_run(whole, tiny_model, **epochs, checkpoint={"export": True})
    with nothing_left():
        code, output = run_here(config, curves=True)
    assert code == 0, output
    run = whole / "runs" / "tiny"
    lines, (before, after) = read_lines(run / "metrics.jsonl"), read_lines(run / "evaluations.jsonl")
    assert len(lines) == 40
    assert losses(run)[0] == pytest.approx(0.6931, abs=0.02)  # log 2: scores begin near 0
    assert lines[-1]["preference/accuracy"] > 0.9
    assert lines[0]["preference/samples"] == 16
    assert after["eval/auc"] > max(before["eval/auc"], 0.75)  # of words that are not trained on
    assert after["eval/loss"] < before["eval/loss"] - 0.05
    assert after["eval/error"] < before["eval/error"]
    good, bad = scores(run / "model", bad="AETAETAET")
    assert good > 0 > bad  # on either side of σ = ½
    alone = evaluated(config, run / "model")
    assert alone["eval/auc"] == pytest.approx(after["eval/auc"])
    assert alone["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-3)

    config = write_scores_run(halves, tiny_model, **epochs)
    with nothing_left():
        kill_run(config, "step  4/40")
    code, output = run_here(config, "--resume")
    assert code == 0, output
    assert losses(halves / "runs" / "tiny") == pytest.approx(losses(run), rel=1e-3)


def test_a_short_run_on_scores_tells_right_from_wrong(tmp_path: Path, tiny_model: Path) -> None:
    config = write_scores_run(tmp_path, tiny_model, steps=4, checkpoint={"at_end": False, "export": True})
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    assert losses(run)[0] == pytest.approx(0.6931, abs=0.02)
    before, after = read_lines(run / "evaluations.jsonl")
    assert after["eval/loss"] < before["eval/loss"]
    assert after["eval/error"] < before["eval/error"]
    good, bad = scores(run / "model", bad="AETAETAET")
    assert good > bad


def test_steps_are_learned_and_the_exported_model_finds_the_wrong_one(tmp_path: Path, tiny_model: Path) -> None:
    write_reward_model_run(tmp_path, tiny_model)
    config = write_reward_model_run(
        tmp_path, tiny_model, **step_rows(tmp_path), steps=40, checkpoint={"every": 40, "export": True}
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    lines, (before, after) = read_lines(run / "metrics.jsonl"), read_lines(run / "evaluations.jsonl")
    assert losses(run)[0] == pytest.approx(0.6931, abs=0.02)  # log 2: scores begin near 0
    assert lines[0]["preference/steps"] == 48  # 16 answers
    assert after["eval/loss"] < before["eval/loss"] - 0.1
    assert after["eval/accuracy"] > 0.9  # of words that are not trained on
    assert after["eval/first_wrong_f1"] > 0.9
    stated = json.loads((run / "model" / "config.json").read_text())
    assert stated["architectures"] == ["LlamaForTokenClassification"]
    assert (stated["step_separator"], stated["problem_type"]) == ("\n", "multi_label_classification")
    assert "AutoModelForTokenClassification" in (run / "model" / "README.md").read_text()
    assert evaluated(config, run / "model")["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-3)

    reward = RewardModel(RewardModelConfig(path=str(run / "model")))
    right, wrong = (completion(text, prompt="Say dog 3 times") for text in ("dog\ndog\ndog", "dog\nNOT THIS\ndog"))
    results: Any = reward.score([right, wrong])
    assert results[0].value > 0.5 > results[1].value
    assert [step.value > 0.5 for step in results[1].steps] == [True, False, True]
    assert [step.end for step in results[1].steps] == [4, 13, 16]
    merged = tmp_path / "merged"
    exported(run / "checkpoints" / "step_000040", merged)
    again: Any = RewardModel(RewardModelConfig(path=str(merged))).score([wrong])
    assert again[0].value == pytest.approx(results[1].value, abs=1e-4)
