"""Runs of a vision-language model: engine and trainer agree after each sync, and rollouts name the pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_config import command_here, read_lines
from tiny_vision import quickstart

LARGEST = "mismatch/logprob_difference_max"
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.usefixtures("warm_ray")
def test_supervised_and_reinforced_runs_see_images(tmp_path: Path) -> None:
    made, root = quickstart(), Path(__file__).resolve().parents[2]
    made.make_model(tmp_path / "vision_quickstart" / "model")
    for name, count, seed in (("sft", 96, 0), ("rl", 32, 1), ("eval", 8, 2)):
        made.make_rows(tmp_path / "vision_quickstart", name, count, seed)
    runs = tmp_path / "runs"
    few = [
        "metrics.console=plain",
        f"output_dir={runs}",
        "resources.devices_per_node=1",
        "resources.device_mapping.training=0",
    ]
    code, output = command_here(
        tmp_path,
        "run",
        "--config",
        str(root / "configs" / "vision_sft.yaml"),
        "epochs=4",
        f"model.path={tmp_path / 'vision_quickstart' / 'model'}",
        *few,
    )
    assert code == 0, output
    losses = [line["train/loss"] for line in read_lines(tmp_path / "runs" / "vision_sft" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / "runs" / "vision_sft" / "model" / "preprocessor_config.json").is_file()
    few += [
        f"model.path={runs / 'vision_sft' / 'model'}",
        "resources.device_mapping.inference=0",
        "steps=2",
        "rollout.prompts_per_step=4",
    ]
    code, output = command_here(
        tmp_path, "run", "--config", str(root / "configs" / "vision_rlvr.yaml"), "rollout.samples_per_step=32", *few
    )
    assert code == 0, output
    run = tmp_path / "runs" / "vision_rlvr"
    assert "[image: vision_quickstart/eval/" in (run / "samples.md").read_text()
    lines = read_lines(run / "metrics.jsonl")
    assert len(lines) == 2
    # a step whose groups all have equal rewards compares nothing
    differences = [line[LARGEST] for line in lines if LARGEST in line]
    assert differences
    assert max(differences) < 1e-3
