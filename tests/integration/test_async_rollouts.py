"""Asynchronous rollouts on real Ray, engines and DeepSpeed: the bound, the overlap, resumption, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_config import read_lines, run_here, write_run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


def asynchronous(directory: Path, model: Path, *, staleness: int = 2, **changes: Any) -> Path:
    """Write a run whose trainer and engine have a core each."""
    rollout = {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_response_tokens": 12,
        "schedule": {"type": "async", "max_staleness": staleness, "ahead": 1.0},
    }
    resources = {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}}
    return write_run(directory, model, **{"rollout": rollout, "resources": resources, "steps": 6} | changes)


def test_groups_are_sampled_while_the_policy_is_trained(tmp_path: Path, tiny_model: Path) -> None:
    config = asynchronous(
        tmp_path, tiny_model, evaluation={"sources": [{"path": str(tmp_path / "eval.jsonl")}], "every": 2}
    )
    code, output = run_here(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert len(steps) == 6
    assert all(step["staleness/max"] <= 2 for step in steps)
    assert any(step["staleness/max"] > 0 for step in steps)
