"""A supervised run from its YAML to a model that others load; killed and resumed it is the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hygiene import nothing_left
from run_config import evaluated, kill_run, losses, run_here, write_sft_run
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


@pytest.mark.slow
def test_a_run_learns_and_one_that_was_killed_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    precise = {"model": {"path": str(tiny_model), "dtype": "float32"}, "steps": None, "epochs": 4}
    export = {"every": 1, "keep": 2, "export": True}
    with nothing_left():
        config = write_sft_run(whole, tiny_model, **precise, checkpoint=export)
        code, output = run_here(config, curves=True)
    assert code == 0, output
    run = whole / "runs" / "tiny"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["total_steps"]) == (10, 10)  # 4 × 20 samples, 8 a step
    assert summary["eval_loss_after"] < summary["eval_loss_before"] - 0.5
    assert (run / "curves.png").stat().st_size > 10_000
    assert "eval/loss" in (run / "model" / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(run / "model").num_parameters() > 0

    alone = evaluated(config, run / "model")
    assert alone["eval/loss"] == pytest.approx(summary["eval_loss_after"], rel=1e-3)

    config = write_sft_run(halves, tiny_model, **precise, metrics={"trackers": [], "console": "plain"})
    with nothing_left():
        kill_run(config, "step  4/10")
    code, output = run_here(config, "--resume")
    assert code == 0, output
    assert losses(halves / "runs" / "tiny") == pytest.approx(losses(run), rel=1e-4)


def test_a_short_run_keeps_its_model_only_and_is_repeated_to_go_on(tmp_path: Path, tiny_model: Path) -> None:
    config = write_sft_run(tmp_path, tiny_model, steps=1, checkpoint={})
    code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    assert not (run / "checkpoints").exists()
    assert (run / "model" / "model.safetensors").is_file()
    (first,) = losses(run)

    code, output = run_here(config, "--resume")
    assert code == 2
    assert f"{run} is finished, and has no checkpoint to continue from" in output
    assert f"model.path: {run / 'model'}" in output
    assert losses(run) == [first]

    code, output = run_here(config, "--resume", "steps=2", "checkpoint.at_end=true")
    assert code == 0, output
    assert "has no checkpoint; the run starts from its first step" in output
    assert len(losses(run)) == 2
    assert losses(run)[0] == pytest.approx(first, rel=1e-3)
    assert (run / "checkpoints" / "step_000002").is_dir()
