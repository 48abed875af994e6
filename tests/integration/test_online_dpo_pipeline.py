"""A preference run on its own answers: it learns, and after kill -9 it goes on within an iteration as it had before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hygiene import nothing_left
from run_config import kill_run, read_lines, run_here, write_online_dpo_run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]

SERIES = ("train/loss", "preference/reward_margin", "iteration/number", "iteration/pairs", "rollout/reward/mean")


def series(path: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: {name: line[name] for name in SERIES if name in line} for line in read_lines(path)}


@pytest.mark.slow
def test_its_own_answers_teach_it_and_a_killed_run_goes_on_within_an_iteration(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = write_online_dpo_run(
        tmp_path,
        tiny_model,
        steps=24,
        training={"optimizer": {"lr": 1.0e-2}, "max_tokens_per_micro_batch": 512},
        checkpoint={"every": 6, "keep": 2, "export": True},
    )
    run = tmp_path / "runs" / "tiny"
    with nothing_left():
        kill_run(config, "step 11/24")
    before = series(shutil.copy(run / "metrics.jsonl", tmp_path / "before.jsonl"))
    with nothing_left():
        code, output = run_here(config, "--resume")
    assert code == 0, output
    found = series(run / "metrics.jsonl")

    # the last checkpoint is of step 6: the second iteration's last two steps and what follows are run again
    assert [step for step, figures in found.items() if "iteration/number" in figures][:3] == [1, 5, 9]
    for step in range(1, 12):
        assert found[step] == pytest.approx(before[step], rel=1e-4, abs=1e-6), step
    assert list(found) == list(range(1, 25))

    # an iteration begins where the policy is its reference: log 2
    assert [round(f["train/loss"], 3) for f in found.values() if "iteration/number" in f] == [0.693] * 6
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_after"] > summary["eval_before"] + 0.1
    assert summary["reward_last"] > summary["reward_first"] + 0.05
    assert len(read_lines(run / "rollouts" / "step_000009.jsonl")) == 16 * 4
    assert not (run / "rollouts" / "step_000010.jsonl").exists()
    assert "eval/avg" in (run / "model" / "README.md").read_text()


def test_a_short_run_begins_a_second_iteration(tmp_path: Path, tiny_model: Path) -> None:
    config = write_online_dpo_run(
        tmp_path,
        tiny_model,
        steps=5,
        training={"optimizer": {"lr": 1.0e-2}, "max_tokens_per_micro_batch": 512},
        checkpoint={"at_end": False, "export": False},
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    found = series(run / "metrics.jsonl")
    starts = {step: round(figures["train/loss"], 3) for step, figures in found.items() if "iteration/number" in figures}
    assert starts == {1: 0.693, 5: 0.693}
    assert found[4]["preference/reward_margin"] > 0
    assert [len(read_lines(path)) for path in sorted((run / "rollouts").glob("step_*.jsonl"))] == [16 * 4] * 2
    assert len(read_lines(run / "evaluations.jsonl")) == 2
