"""Every benchmark runs: at the sizes of `--smoke`, in a process of its own, to its table of figures.

What it measures there says nothing, so no figure is compared with another.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "def main(" in path.read_text())
#: What the tables of comparisons have to show, beside what is checked in all.
COLUMNS = {
    "async_learning": {"rlvr_quickstart_sync before", "rlvr_quickstart_control after", "rlvr_quickstart_control"},
    "async_rollouts": {"sync_steps_per_hour", "async_steps_per_hour", "ratio", "staleness_max", "staleness_mean"},
    "attention": {
        *("dense_256_mib", "varlen_256_mib", "dense_logprob_error", "dense_gradient_error"),
        *("varlen_logprob_error", "varlen_gradient_error"),
    },
    "data_check": {f"{which}_{what}" for which in ("first", "second") for what in ("seconds", "cpu_seconds", "gib")},
    "head_dtype": {f"{head}_{what}" for head in ("bfloat16", "float32", "engine_only") for what in ("mean", "kl")},
    "kept_tokens": {f"{kept}_{what}" for kept in ("all", "2") for what in ("seconds", "mib", "bytes")},
    "layout_scale": {"rows"},
    "memory_plan": {"Qwen2.5-0.5B-Instruct error", "Qwen2.5-0.5B-Instruct recomputed error"},
    "delta_sync": {"1e-05", "mbit"},
    "observations": {"0.1 before", "0.1 after"},
    "overhead": {"step_seconds", "waiting_seconds", "computing_seconds", "ratio"},
    "quantised_base": {f"{kind}_{name}" for kind in ("nf4", "fp4") for name in ("mb", "nll", "difference")},
    "recipes": {f"{run} {when}" for run in ("grpo", "vapo", "solve_rate") for when in ("before", "after")},
    "recovery": {f"{role}_{name}" for role in ("training", "inference") for name in ("to_next_step", "step", "stall")},
    "router_replay": {f"{row}_{name}" for row in ("dense", "own", "replayed") for name in ("mean", "p99", "max", "kl")},
    "rollout": {
        *("tokens_per_second", "bare_tokens_per_second", "ratio", "dtype", "matmul_gflops_per_second"),
        *("scheduler_gflops_per_second", "scheduler_mfu", "bare_gflops_per_second", "bare_mfu"),
    },
    "schedule_simulation": {"base_8_2_1", "think_8_4_2", "milliseconds_per_group", "milliseconds_per_group_of_a_tenth"},
    "trainer_variants": {"0_seconds"},
    "training": {
        *("engine_tokens_per_second", "bare_tokens_per_second", "ratio", "dtype", "matmul_gflops_per_second"),
        *("engine_gflops_per_second", "engine_mfu", "bare_gflops_per_second", "bare_mfu"),
    },
    "service_load": {"lost", "refused", "largest_loss_difference", "memory_after_mib", "added_ms"},
    "soak": {"memory", "descriptors", "threads", "shared_memory", "mlflow"},
    "vs_trl": {"samples_per_second", "trl_samples_per_second", "ratio", "dtype"},
    "weight_sync": {
        *("seconds", "plain_copy_seconds", "ratio", "tensors_checked", "dtype"),
        *("running_seconds", "recompute_seconds"),
        *("adapter_seconds", "adapter_bytes", "adapter_tokens_per_second", "merged_tokens_per_second"),
    },
}
WITH_TRL = {"trl_tokens_per_second", "trl_gflops_per_second", "trl_mfu", "ratio_to_trl"}

pytestmark = pytest.mark.integration


def smoke_figures(script: Path, *arguments: str, folder: Path) -> dict[str, object]:
    """Run a benchmark and return its last line; `folder` is where it works and keeps temporary files."""
    done = subprocess.run(
        [sys.executable, script, "--smoke", *arguments],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return figures


def some_slow(script: Path) -> Any:
    """Return a parameter of the script, marked slow if it is one of those that take longest."""
    slow = script.stem in {
        "service_load",
        "async_learning",
        "async_rollouts",
        "attention",
        "data_check",
        "delta_sync",
        "env_manager",
        "head_dtype",
        "kept_tokens",
        "memory_plan",
        "overhead",
        "quantised_base",
        "recipes",
        "recovery",
        "rollout",
        "router_replay",
        "soak",
        "traces",
        "trainer_variants",
        "training",
        "verifiers_cost",
        "vs_trl",
        "weight_sync",
    }
    return pytest.param(script, id=script.stem, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("script", [some_slow(script) for script in SCRIPTS])
def test_a_benchmark_runs_to_its_table(script: Path, tmp_path: Path) -> None:
    if script.stem == "verifiers_cost" and not (ROOT / ".verifiers").exists():
        pytest.skip("make verifiers installs what it plays in")
    figures = smoke_figures(script, folder=tmp_path)
    assert (figures["benchmark"], figures["smoke"]) == (script.stem, True)
    assert COLUMNS.get(script.stem, set()) <= figures.keys()
    measured = [value for value in figures.values() if isinstance(value, float)]
    assert measured
    assert all(map(math.isfinite, measured))


@pytest.mark.slow
def test_an_evaluation_is_measured_beside_bare_vllm(tmp_path: Path) -> None:
    figures = smoke_figures(ROOT / "benchmarks" / "rollout.py", "--evaluation", folder=tmp_path)
    assert COLUMNS["rollout"] <= figures.keys()
    assert all(math.isfinite(value) and value > 0 for value in figures.values() if isinstance(value, float))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_given_answers_are_trained_beside_trl(task: str, tmp_path: Path) -> None:
    figures = smoke_figures(ROOT / "benchmarks" / "training.py", "--task", task, folder=tmp_path)
    assert figures["task"] == task
    assert COLUMNS["training"] | WITH_TRL <= figures.keys()
