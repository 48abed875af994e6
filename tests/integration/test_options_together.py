"""Whole runs with many of vLLM's options at once, for pairs of them (`tests/unit/test_option_pairs.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import by_value_engine
import pytest
import yaml
from hygiene import nothing_left
from run_config import read_lines, run_here, write_run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("warm_ray")]

CHANGES: dict[str, Any] = {
    "steps": 4,
    "rollout": {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_response_tokens": 12,
        "top_p": 0.95,
        "top_k": 64,
        "min_p": 0.01,
    },
    "training": {
        "lora": {"rank": 8, "alpha": 16},
        "optimizer": {"lr": 1.0e-3},
        "max_tokens_per_micro_batch": 512,
        "zero_stage": 1,
    },
}
ENGINE = {"kv_cache_gib": 0.1, "max_running": 16, "probe_every": 1}


def run(folder: Path, model: Path, **inference: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the steps, and what `--check` prints."""
    config = write_run(folder, model, **CHANGES, inference={**ENGINE, **inference})
    values = yaml.safe_load(config.read_text())
    values["model"] |= {"dtype": "bfloat16", "head_dtype": "float32"}
    values["import"].append("by_value_engine")
    shutil.copy(by_value_engine.__file__, folder)
    config.write_text(yaml.safe_dump(values))
    code, planned = run_here(config, "--check")
    assert code == 0, planned
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    return read_lines(folder / "runs" / "tiny" / "metrics.jsonl"), " ".join(planned.split())


def test_adapters_alone_with_kept_tokens_and_a_head_in_float32(tmp_path: Path, tiny_model: Path) -> None:
    steps, planned = run(tmp_path, tiny_model, type="vllm")
    assert "adapters alone are sent" in planned
    # bfloat16 is rounded otherwise on either side; other kept tokens would be off by 1 / top_p at least
    assert max(step["mismatch/logprob_difference"] for step in steps) < 0.04
    assert max(step["sync/probe"] for step in steps) < 0.04


def test_changes_of_8_bit_weights_with_merged_adapters_kept_tokens_and_a_head_in_float32(
    tmp_path: Path, tiny_model: Path
) -> None:
    steps, _ = run(tmp_path, tiny_model, type="vllm_by_value", quantization="int8", weight_sync="delta")
    assert max(step["mismatch/logprob_difference"] for step in steps) < 0.1
    assert max(step["sync/probe"] for step in steps) < 0.1
    assert all(0 < step["sync/changed_share"] < 1 for step in steps[1:])
