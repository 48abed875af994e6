"""The whole agentic pipeline on real Ray, vLLM and DeepSpeed: it learns, counts what fails, and can be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copy2
from typing import Any

import pytest
from hygiene import nothing_left
from run_config import read_lines, run_here, write_episodes_run
from trace_rules import read_trace

from roll_like.metrics.profiles import read_profiles

TESTS = Path(__file__).parents[1]
VERIFIERS = TESTS.parent / ".verifiers" / "bin" / "python"
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]


@pytest.mark.slow
def test_many_turns_are_learned(tmp_path: Path, tiny_model: Path) -> None:
    config = write_episodes_run(
        tmp_path,
        tiny_model,
        steps=8,
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
    assert len(steps) == 8
    for step in steps:  # each fifth seed cannot begin: its group is lost and counted, nothing of it is trained on
        assert step["rollout/failures"] == 10
        assert step["rollout/samples"] == 32
        assert step["rollout/turns"] == 2
        assert step["mismatch/logprob_difference"] < 0.1
        assert step["staleness/max"] == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 8


def check_profile(run: Path, step: Mapping[str, Any]) -> None:
    """One trace of the second step: every role on one time axis, with the operators of the trainer."""
    (profile,) = read_profiles(run)
    (trace,) = (run / "profile").glob("*.gz")  # and no file of a rank is left
    assert len(list((run / "profile").iterdir())) == 2
    events = read_trace(trace)
    seconds = profile["seconds"]
    assert step["time/step"] < seconds < step["time/step"] + 60
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    timed: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            timed.setdefault(names[event["pid"]], []).append(event)
            assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= (seconds + 1) * 1e6, event
    assert {"driver", "engine", "environments", "rewards", "training rank 0"} < timed.keys(), names.values()
    (operators,) = (found for name, found in timed.items() if name.startswith("training rank 0:"))
    (backward,) = (event for event in timed["training rank 0"] if event["name"] == "forward_backward")
    (train,) = (event for event in timed["driver"] if event["name"] == "train")
    products = [event for event in operators if event["name"] == "aten::mm"]
    assert products
    assert train["ts"] <= backward["ts"] <= backward["ts"] + backward["dur"] <= train["ts"] + train["dur"]
    inside = [e for e in products if backward["ts"] <= e["ts"] <= backward["ts"] + backward["dur"]]
    assert len(inside) >= 0.9 * len(products)
    (generate,) = (event for event in timed["driver"] if event["name"] == "generate")
    assert sum(generate["ts"] <= event["ts"] <= generate["ts"] + generate["dur"] for event in timed["engine"]) >= 16
    assert 1 <= len(profile["waits"]) <= 3
    assert any(wait.startswith("the engines waited") for wait in profile["waits"]), profile["waits"]
    assert "training rank 0" in {lane["label"] for lane in profile["lanes"]}


def test_rewards_are_added_to_those_of_the_environment(tmp_path: Path, tiny_model: Path) -> None:
    copy2(TESTS / "tiny_rewards.py", tmp_path)
    config = write_episodes_run(
        tmp_path,
        tiny_model,
        **{"import": ["tiny_envs", "tiny_rewards"]},
        steps=2,
        rewards={
            "environment_weight": 0.5,
            "use": [
                {"type": "letter_e", "weight": 2.0},
                {"type": "repetition", "weight": 0.25, "sources": ["Letters"]},
            ],
        },
        rollout={
            "groups_per_step": 4,
            "episodes_per_group": 4,
            "redundant_episodes": 1,
            "max_turns": 4,
            "max_response_tokens": 12,
            "max_episode_tokens": 160,
        },
        evaluation={"environments": [{"id": "tiny/Letters-v0", "name": "other"}], "seeds": 2, "episodes_per_seed": 2},
        checkpoint={"at_end": False, "export": False},
        profile={"steps": [2]},
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    steps = read_lines(run / "metrics.jsonl")
    check_profile(run, steps[1])
    for step in steps:
        rows = read_lines(run / "rollouts" / f"step_{int(step['step']):06d}.jsonl")
        assert len(rows) == 16
        for row in rows:
            last = row["turns"][-1]["text"]
            values = row["rewards"]
            assert set(values) == {"return", "letter_e", "repetition"}
            assert values["return"] == pytest.approx(sum(turn["reward"] for turn in row["turns"]))
            assert values["letter_e"] == pytest.approx(last.count("e") / max(len(last), 1))
            total = 0.5 * values["return"] + 2.0 * values["letter_e"] + 0.25 * values["repetition"]
            assert row["reward"] == pytest.approx(total)
            assert row["return"] == pytest.approx(values["return"])
        assert step["rollout/reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 16)
        assert step["rollout/reward/letter_e"] == pytest.approx(sum(row["rewards"]["letter_e"] for row in rows) / 16)
    for evaluation in read_lines(run / "evaluations.jsonl"):  # of an environment that `repetition` does not score
        assert evaluation["eval/avg"] == pytest.approx(
            0.5 * evaluation["eval/reward/return"] + 2.0 * evaluation["eval/reward/letter_e"]
        )
        assert "eval/reward/repetition" not in evaluation
        assert {"eval/pass@1", "eval/pass@2"} <= evaluation.keys()
        assert "eval/maj@2" not in evaluation


@pytest.mark.slow
@pytest.mark.skipif(not VERIFIERS.exists(), reason="make verifiers installs what it plays in")
def test_two_players_of_one_policy_have_means_of_their_own_also_when_resumed(tmp_path: Path, tiny_model: Path) -> None:
    changes: dict[str, Any] = {
        "environments": [
            {
                "verifiers": {
                    "python": str(VERIFIERS),
                    "taskset": "duel",
                    "harness": "roll-like-direct",
                    "env": {"PYTHONPATH": str(TESTS / "verifiers_tasks")},
                }
            }
        ],
        "rollout": {"groups_per_step": 6, "episodes_per_group": 1, "max_response_tokens": 4, "max_episode_tokens": 160},
        "algorithm": {"advantage": {"type": "rae", "decay": 0.8}},
        "checkpoint": {"every": 1, "export": False},
    }
    with nothing_left():
        for steps, more in ((2, ()), (4, ("--resume",))):
            code, output = run_here(write_episodes_run(tmp_path, tiny_model, steps=steps, **changes), *more)
            assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    figures = read_lines(run / "metrics.jsonl")
    assert len(figures) == 4
    means = {"first": 0.0, "second": 0.0}
    for number, step in enumerate(figures, start=1):
        for row in read_lines(run / "rollouts" / f"step_{number:06d}.jsonl"):
            means[row["agent"]] = 0.8 * means[row["agent"]] + 0.2 * row["reward"]
        for agent, mean in means.items():
            assert step[f"advantage/baseline/duel/{agent}"] == pytest.approx(mean, abs=1e-6)
        assert step["rollout/agent/first/reward"] == pytest.approx(-step["rollout/agent/second/reward"])
        assert step["rollout/samples"] == 12
    assert any(means.values())  # somebody won
