"""Distillation from its YAML to a model that others load; killed and resumed it is the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hygiene import nothing_left
from run_config import (
    evaluated,
    kill_run,
    read_lines,
    run_here,
    write_distill_run,
    write_on_policy_distill_run,
)
from tiny_model import make_other_model, make_tiny_model
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]
PLAIN = {"trackers": [], "console": "plain"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another size."""
    make = tmp_path_factory.mktemp
    return make_tiny_model(make("student"), dtype="float32"), make_tiny_model(
        make("teacher"), dtype="float32", seed=1, layers=3
    )


def killed_and_resumed(config: Path, line_to_wait_for: str) -> None:
    with nothing_left():
        kill_run(config, line_to_wait_for)
    code, output = run_here(config, "--resume")
    assert code == 0, output


@pytest.mark.slow
def test_a_student_of_given_conversations(tmp_path: Path, models: tuple[Path, Path]) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    settings = {"steps": 8, "checkpoint": {"every": 1, "keep": 2, "export": True}, "metrics": PLAIN}
    with nothing_left():
        config = write_distill_run(whole, *models, **settings)
        code, output = run_here(config, curves=True)
    assert code == 0, output
    run = whole / "runs" / "tiny"
    before, after = (read_lines(run / "evaluations.jsonl")[place] for place in (0, -1))
    assert after["eval/kl"] < before["eval/kl"] - 0.02
    assert after["eval/top1_agreement"] > before["eval/top1_agreement"]
    assert (run / "curves.png").stat().st_size > 10_000
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.num_hidden_layers == 2
    assert evaluated(config, run / "model")["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-3)

    killed_and_resumed(write_distill_run(halves, *models, **settings), "step 3/8")
    figures = [
        [(line["train/loss"], line["distill/kl"]) for line in read_lines(folder / "runs" / "tiny" / "metrics.jsonl")]
        for folder in (whole, halves)
    ]
    assert len(figures[0]) == len(figures[1]) == 8
    for ours, theirs in zip(*figures, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def nearer_to_its_teacher(config: Path) -> Path:
    """Run a configuration, see that the student has come nearer to its teacher, and return the run's folder."""
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = config.parent / "runs" / "tiny"
    before, after = read_lines(run / "evaluations.jsonl")
    assert after["eval/kl"] < before["eval/kl"] - 0.005
    return run


def test_a_short_run_comes_nearer_to_its_teacher(tmp_path: Path, models: tuple[Path, Path]) -> None:
    config = write_distill_run(tmp_path, *models, steps=3, checkpoint={"at_end": False, "export": True}, metrics=PLAIN)
    run = nearer_to_its_teacher(config)
    assert len(read_lines(run / "metrics.jsonl")) == 3
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.num_hidden_layers == 2


@pytest.mark.slow
def test_a_student_of_its_own_answers(tmp_path: Path, models: tuple[Path, Path]) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    settings = {"steps": 6, "training": {"optimizer": {"lr": 3.0e-3}}, "metrics": PLAIN}
    with nothing_left():
        config = write_on_policy_distill_run(whole, *models, **settings)
        code, output = run_here(config)
    assert code == 0, output
    run = whole / "runs" / "tiny"
    before, after = (read_lines(run / "evaluations.jsonl")[place] for place in (0, -1))
    assert after["eval/reverse_kl"] < before["eval/reverse_kl"] - 0.02
    assert "eval/avg" not in after
    steps = read_lines(run / "metrics.jsonl")
    assert all("distill/reverse_kl" in step and "rollout/reward/mean" not in step for step in steps)

    killed_and_resumed(write_on_policy_distill_run(halves, *models, **settings), "step 2/6")
    again = read_lines(halves / "runs" / "tiny" / "metrics.jsonl")
    assert [step["distill/reverse_kl"] for step in again] == pytest.approx(
        [step["distill/reverse_kl"] for step in steps], rel=1e-4
    )


@pytest.mark.parametrize("signal", [pytest.param("sampled_token", marks=pytest.mark.slow), "top_k"])
def test_a_teacher_in_the_loss_beside_a_reward(tmp_path: Path, models: tuple[Path, Path], signal: str) -> None:
    config = write_on_policy_distill_run(
        tmp_path,
        *models,
        steps=2,
        distillation={"use": "loss", "signal": signal, "weight": 0.5, "reward_weight": 1.0},
        rewards={"use": [{"type": "letter_e"}]},
        metrics=PLAIN,
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    for step in read_lines(run / "metrics.jsonl"):
        if signal == "sampled_token":  # the loss is its two parts, and the divergence is that of the sampled tokens
            divergence = step["train/kl_loss"]
            assert divergence == pytest.approx(0.5 * step["train/kl"], rel=1e-3)
        else:
            divergence = step["train/distillation_loss"]
            assert divergence == pytest.approx(0.5 * step["distill/divergence"], rel=1e-3)
        assert step["train/loss"] == pytest.approx(step["train/policy_loss"] + divergence, abs=1e-5)
        assert "rollout/reward/letter_e" in step
    assert "eval/avg" in read_lines(run / "evaluations.jsonl")[-1]


@pytest.mark.slow
def test_distributions_of_the_policys_own_average_killed_and_resumed(tmp_path: Path, models: tuple[Path, Path]) -> None:
    settings = {
        "steps": 4,
        "teachers": {},
        "distillation": {
            "use": "loss",
            "signal": "top_k",
            "reward_weight": 1.0,
            "demonstration": {"field": "answer", "max_prompt_tokens": 200},
            "self_teacher": {"sync_steps": 1, "mixup_alpha": 0.3},
        },
        "rewards": {"use": [{"type": "letter_e"}]},
        "training": {
            "optimizer": {"lr": 3.0e-3},
            "max_tokens_per_micro_batch": 512,
            "workers": 2,
            "zero_stage": 3,
        },
        "checkpoint": {"every": 1, "keep": 1},
        "evaluation": None,
        "metrics": PLAIN,
    }
    series = []
    for name in ("whole", "halves"):
        folder = tmp_path / name
        folder.mkdir()
        config = write_on_policy_distill_run(folder, *models, **settings)
        rows = [{**row, "answer": "abcabc"} for row in read_lines(folder / "train.jsonl")]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if name == "halves":
            killed_and_resumed(config, "step 2/4")
        else:
            with nothing_left():
                code, output = run_here(config)
            assert code == 0, output
        steps = read_lines(folder / "runs" / "tiny" / "metrics.jsonl")
        assert [step["teacher/last_sync"] for step in steps] == [1, 2, 3, 4]
        for step in steps:
            parts = step["train/policy_loss"] + step["train/distillation_loss"]
            assert step["train/loss"] == pytest.approx(parts, abs=1e-6)
        series.append([(step["train/loss"], step["distill/divergence"], step["teacher/distance"]) for step in steps])
    assert len(series[0]) == len(series[1]) == 4
    for ours, theirs in zip(*series, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_a_policy_that_reads_demonstrations_teaches_itself(tmp_path: Path, models: tuple[Path, Path]) -> None:
    config = write_on_policy_distill_run(
        tmp_path,
        *models,
        steps=3,
        teachers={},
        distillation={"demonstration": {"field": "answer", "max_prompt_tokens": 200}},
        training={"optimizer": {"lr": 3.0e-3}, "max_tokens_per_micro_batch": 512},
        evaluation=None,
        metrics=PLAIN,
    )
    rows = [{**row, "answer": "abcabc"} for row in read_lines(tmp_path / "train.jsonl")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    # what it says with a demonstration is something else, and it moves there
    assert all(step["distill/reverse_kl"] != 0 and step["train/grad_norm"] > 0 for step in steps)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "Say abc"}) + "\n")
    code, output = run_here(config, "--check")
    assert code == 1
    assert "expected a demonstration, a text in 'answer'" in " ".join(output.split())


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path, models: tuple[Path, Path]) -> None:
    other = make_other_model(tmp_path / "other")
    code, output = run_here(write_distill_run(tmp_path, models[0], other), "--check")
    assert code == 1, output
    text = " ".join(output.split())
    assert "teachers.tiny.path" in text
    assert "2 tokens differ, the first is 'a'" in text
    assert "other_tokenizer: true" in text


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_texts_of_two_tokenizers_are_compared(tmp_path: Path, models: tuple[Path, Path], sharded: bool) -> None:
    teacher = {"path": str(make_other_model(tmp_path / "other")), "other_tokenizer": True}
    training = {"optimizer": {"lr": 3.0e-3}, "max_tokens_per_micro_batch": 256}
    config = write_distill_run(
        tmp_path,
        *models,
        teachers={"other": teacher},
        steps=3,
        training={**training, "workers": 2, "zero_stage": 3} if sharded else training,
        checkpoint={"at_end": False, "export": False},
        metrics=PLAIN,
    )
    run = nearer_to_its_teacher(config)
    steps = read_lines(run / "metrics.jsonl")
    assert all(0 < step["distill/teacher_mass"] < 1 and step["train/grad_norm"] > 0 for step in steps)
