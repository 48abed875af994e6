"""A whole run whose policy samples with the SGLang engine, on the stand-in for SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest
from hygiene import nothing_left
from run_config import read_lines, run_here, write_run
from sglang_engine import stand_in

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


@pytest.mark.slow
def test_rlvr_samples_with_sglang_and_probes_every_sync(tmp_path: Path, tiny_model: Path) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        name="run",
        steps=2,
        inference={"type": "sglang_stand_in", "deterministic": True},
        evaluation={"sources": [{"path": str(tmp_path / "eval.jsonl")}], "top_p": 0.9},
        checkpoint={"at_end": False, "export": False},
        **{"import": ["tiny_rewards", "sglang_on_cpu"]},
    )
    with stand_in(), nothing_left():  # `--check` looks for the package where the driver is
        code, output = run_here(config)
    assert code == 0, output
    steps = [step for step in read_lines(tmp_path / "runs" / "run" / "metrics.jsonl") if "train/loss" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["sync/tensors_checked"] == 0  # it tells no fingerprints, so that
        assert step["sync/probe"] < 0.05  # every sync is probed
        assert step["mismatch/logprob_difference"] < 0.05
        assert step["train/grad_norm"] > 0
