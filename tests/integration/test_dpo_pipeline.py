"""A preference run from its YAML: it learns, and one that was stopped and resumed is the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hygiene import nothing_left
from run_config import evaluated, kill_run, labelled_rows, losses, read_lines, run_here, write_dpo_run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def test_preferences_are_learned_and_a_resumed_run_keeps_its_reference(tmp_path: Path, tiny_model: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    precise = {"model": {"path": str(tiny_model), "dtype": "float32"}, "steps": 6}
    with nothing_left():
        config = write_dpo_run(whole, tiny_model, **precise, checkpoint={"export": True})
        code, output = run_here(config, curves=True)
    assert code == 0, output
    run = whole / "runs" / "tiny"
    found = losses(run)
    assert found[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is its reference
    before, after = read_lines(run / "evaluations.jsonl")
    assert after["eval/loss"] < before["eval/loss"] - 0.03  # of words that are not trained on
    assert read_lines(run / "metrics.jsonl")[-1]["preference/accuracy"] > 0.9
    assert (run / "curves.png").stat().st_size > 10_000
    assert json.loads((run / "summary.json").read_text())["eval_loss_after"] == after["eval/loss"]

    alone = evaluated(config, run / "model")
    assert alone["eval/loss"] == pytest.approx(after["eval/loss"], rel=1e-3)
    assert alone["eval/accuracy"] == after["eval/accuracy"]

    config = write_dpo_run(halves, tiny_model, **precise)
    code, output = run_here(config, "steps=3")
    assert code == 0, output
    code, output = run_here(config, "--resume")
    assert code == 0, output
    assert "computing the reference model" not in output  # what it said is in the run's folder
    assert losses(halves / "runs" / "tiny") == pytest.approx(found, rel=1e-4)


@pytest.mark.slow
def test_verdicts_are_learned_and_a_killed_run_goes_on_with_the_same_baseline(tmp_path: Path, tiny_model: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    configs = {}
    # the same numbers, whether a reference was asked before the first step or is asked in each
    for folder, mode in ((whole, "cluster"), (killed, "precomputed")):
        folder.mkdir()
        write_dpo_run(folder, tiny_model)  # the pairs that the labels are of
        configs[folder] = write_dpo_run(
            folder,
            tiny_model,
            model={"path": str(tiny_model), "dtype": "float32"},
            steps=8,
            data=labelled_rows(folder),
            reference={"mode": mode},
            algorithm={"loss": {"type": "kto", "beta": 0.5, "undesirable_weight": 2.0}},
        )
    with nothing_left():
        kill_run(configs[killed], "step 3/8")
    code, output = run_here(configs[killed], "--resume")
    assert code == 0, output
    assert "computing the reference model" not in output  # also of answers after other prompts
    code, output = run_here(configs[whole])
    assert code == 0, output
    steps = [read_lines(folder / "runs" / "tiny" / "metrics.jsonl") for folder in (whole, killed)]
    for name in ("train/loss", "preference/baseline", "preference/reward_margin", "train/tokens"):
        series = [[step[name] for step in of_run] for of_run in steps]
        assert series[1] == pytest.approx(series[0], rel=1e-3, abs=1e-3), name
    assert max(step["preference/baseline"] for step in steps[0]) > 0.05  # there is something to see of it
    assert {step["train/samples"] for step in steps[0]} == {8}
    before, after = read_lines(whole / "runs" / "tiny" / "evaluations.jsonl")
    assert after["eval/loss"] < before["eval/loss"] - 0.01  # of pairs that are not trained on
    assert (after["eval/samples"], "eval/pair_accuracy" in after) == (8, True)  # four pairs
