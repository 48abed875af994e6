"""The whole agentic pipeline on real Ray, vLLM and DeepSpeed: it learns, counts what fails, and can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hygiene import nothing_left
from run_config import read_lines, run_here, write_episodes_run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def test_many_turns_are_learned(tmp_path: Path, tiny_model: Path) -> None:
    config = write_episodes_run(
        tmp_path,
        tiny_model,
        steps=12,
        model={"path": str(tiny_model), "dtype": "bfloat16"},
        environments=[{"id": "tiny/Letters-v0", "kwargs": {"failing": 5}}],
        inference={"type": "vllm", "kv_cache_gib": 0.2, "max_running": 32},
        rollout={
            "groups_per_step": 5,
            "episodes_per_group": 8,
            "redundant_episodes": 2,
            "max_turns": 4,
            "max_response_tokens": 12,
            "max_episode_tokens": 160,
            "max_failure_fraction": 0.3,
            "retries": 0,
        },
        training={"zero_stage": 1, "optimizer": {"lr": 8.0e-3}, "max_tokens_per_micro_batch": 2048},
        evaluation={"environments": [{"id": "tiny/Letters-v0", "name": "steady"}], "seeds": 8, "episodes_per_seed": 2},
        checkpoint={"at_end": False, "export": False},
        metrics={"trackers": [{"type": "mlflow"}], "console": "plain"},
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    before, after = read_lines(run / "evaluations.jsonl")
    assert after["eval/avg"] > before["eval/avg"] + 0.1
    assert after["eval/success"] >= before["eval/success"]
    steps = read_lines(run / "metrics.jsonl")
    assert len(steps) == 12
    for step in steps:  # each fifth seed cannot begin: its group is lost and counted, nothing of it is trained on
        assert step["rollout/failures"] == 10
        assert step["rollout/samples"] == 32
        assert step["rollout/turns"] == 2
        assert step["mismatch/logprob_difference"] < 0.1
        assert step["staleness/max"] == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 12
