"""The run's own judge: a model served by vLLM beside the policy, asked by a reward, with answers held to a schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from hygiene import nothing_left
from run_config import read_lines, run_here, write_run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


@pytest.mark.slow
def test_a_judge_in_a_cluster_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=1,
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 8},
        judge={"path": str(tiny_model), "dtype": "float32", "kv_cache_gib": 0.2, "max_model_len": 1024},
        rewards={
            "use": [
                {
                    "type": "llm_judge",
                    "judges": [{"url": "judge", "model": "judge", "max_tokens": 256}],
                    "rubric": "Is it good?",
                    "template": "$prompt $response $rubric $lowest $highest",
                }
            ]
        },
        checkpoint={"at_end": False, "export": False},
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    (step,) = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert step["rollout/failures"] == 0
    assert 0 <= step["rollout/reward/llm_judge"] <= 1
