"""What a preference configuration on the policy's own answers refuses, its plan, and what its check finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_files import changed
from pydantic import ValidationError

from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.online_dpo.config import in_iterations, prompts_of
from roll_like.check import Report, check_run
from roll_like.config.plan import roles
from roll_like.offline.check import given_plan, preference_findings

MINIMAL: dict[str, Any] = {
    "pipeline": "dpo",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"pairs_per_step": 4, "max_tokens": 128},
    "iterations": {
        "prompts": {"sources": [{"path": "train.jsonl"}], "max_prompt_tokens": 64},
        "rollout": {"prompts_per_iteration": 8, "samples_per_prompt": 4, "max_response_tokens": 32},
        "rewards": {"use": [{"type": "ifeval"}]},
    },
    "reference": {"refresh": "iteration"},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1", "inference": "0-1"}},
}
JUDGE = {"type": "llm_judge", "judges": [{"url": "judge", "model": "judge"}]}


def config(**changes: Any) -> DPOConfig:
    return DPOConfig.model_validate(changed(MINIMAL, **changes))


def problems(**changes: Any) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        config(**changes)
    return {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"data__sources": [{"path": "p.jsonl"}]}, "data.sources", "(`iterations`), and both are set; set one"),
        (
            {"iterations": None, "reference": {}, "resources__device_mapping__inference": None},
            "data.sources",
            "(`iterations`), and neither is set; set one",
        ),
        ({"steps": None, "epochs": 2}, "epochs", "iterations.epochs or iterations.steps for one iteration"),
        ({"iterations__epochs": 2, "iterations__steps": 3}, "iterations.steps", "both are set; set one"),
        (
            {"resources__device_mapping__inference": None},
            "resources.device_mapping.inference",
            "the engines that sample for",
        ),
        (
            {"iterations": None, "data__sources": [{"path": "p.jsonl"}], "reference": {}},
            "resources.device_mapping.inference",
            "nothing is sampled from given pairs; remove the key",
        ),
        (
            {"resources__device_mapping__judge": "0-1"},
            "resources.device_mapping.judge",
            "because there is no `judge` section",
        ),
        ({"iterations__rollout__samples_per_prompt": 1}, "iterations.rollout.samples_per_prompt", "takes two answers"),
        ({"iterations__rollout__temperature": 0}, "iterations.rollout.temperature", "0 is greedy"),
        ({"iterations__rollout__max_in_flight": 3}, "iterations.rollout.max_in_flight", "one group of 4; set it to 4"),
        (
            {"data__max_tokens": 95},
            "data.max_tokens",
            "(iterations.prompts.max_prompt_tokens + iterations.rollout.max_response_tokens = 64 + 32 = 96); set it to",
        ),
        (
            {"iterations__inference": {"max_model_len": 90}},
            "iterations.inference.max_model_len",
            "90 tokens cannot hold the longest sample (iterations.prompts.max_prompt_tokens + "
            "iterations.rollout.max_response_tokens = 64 + 32 = 96)",
        ),
        ({"iterations__rewards__use": [JUDGE]}, "iterations.rewards.use.0.judges", "there is no `judge` section"),
        (
            {"iterations__rewards__use": [{"type": "ifeval", "sources": ["trian"]}, "exact_match"]},
            "iterations.rewards.use.0.sources",
            "no data source is called 'trian'; known: train",
        ),
        (
            {"iterations__evaluation": {"sources": [{"path": "eval.jsonl"}], "before": False, "after": False}},
            "iterations.evaluation",
            "it would never run",
        ),
        (
            {"resources__device_mapping": {"training": "0-1", "inference": "1-2"}},
            "resources.device_mapping.inference",
            "overlaps training's 0-1 only in part",
        ),
        (
            {"iterations__inference": {"replicas": 3}},
            "resources.device_mapping.inference",
            "cannot be divided evenly among 3 (iterations.inference.replicas)",
        ),
        (
            {"resources__device": "cuda", "training__workers": 2, "iterations__inference": {
                "sleep": False, "gpu_memory_utilization": 0.8}},
            "iterations.inference.sleep",
            "would keep 80% of their memory",
        ),
        ({"reference": {}}, "reference.mode", "set reference.mode: cluster"),
        ({"reference__mode": "cluster"}, "reference.mode", "'cluster' would answer with the starting policy"),
        ({"reference__path": "org/other"}, "reference.path", "remove the path, or set refresh: never"),
        (
            {"iterations": None, "data__sources": [{"path": "p.jsonl"}], "resources__device_mapping__inference": None},
            "reference.refresh",
            "given pairs have no iterations",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    found = problems(**changes)
    assert expected in found.get(key, ""), found
    assert len(found) == 1, found


def test_everything_that_samples_and_judges_has_a_place() -> None:
    pooled = {"use": [{"type": "ifeval"}, JUDGE], "pools": {"slow": {"rewards": ["llm_judge"], "devices": "1"}}}
    run = config(
        iterations__rewards=pooled,
        iterations__judge={"path": "org/judge"},
        reference={"mode": "cluster"},
        resources__device_mapping={"training": "0", "inference": "1"},
    )
    found = {role.name: (str(role.devices), role.workers_key) for role in roles(run)}
    assert found == {
        "training": ("0", "training.workers"),
        "inference": ("1", "iterations.inference.replicas"),
        "judge": ("1", "iterations.judge.replicas"),
        "rewards slow": ("1", "iterations.rewards.pools.slow.workers"),
        "reference": ("0", "reference.workers"),
    }
    assert roles(run)[3].devices_key == ("iterations", "rewards", "pools", "slow", "devices")


def test_what_samples_is_told_the_whole_section() -> None:
    run = config(
        seed=7,
        iterations__rollout__temperature=0.7,
        iterations__rollout__seeded=False,
        iterations__evaluation={"sources": [{"path": "eval.jsonl"}], "samples_per_prompt": 2},
    )
    prompts = prompts_of(run)
    assert (prompts.seed, prompts.model, prompts.resources.device) == (7, run.model, "cpu")
    assert (prompts.rollout.prompts_per_step, prompts.rollout.samples_per_prompt) == (8, 4)
    assert (prompts.rollout.temperature, prompts.rollout.seeded) == (0.7, False)
    assert (prompts.longest_sample, prompts.longest_response) == (96, 32)
    assert prompts.evaluation is not None
    assert prompts.evaluation.samples_per_prompt == 2


def test_losses_without_a_reference_compare_with_nothing() -> None:
    assert config(algorithm={"loss": "simpo"}, reference=None).reference is None


def test_keys_are_named_where_they_stand() -> None:
    assert in_iterations("set rollout.prompts_per_step: 4") == "set iterations.rollout.prompts_per_iteration: 4"
    assert in_iterations("data.jsonl:5 has no field") == "data.jsonl:5 has no field"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ten prompts to train on and two others to evaluate."""
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("train", range(10)), ("eval", range(10, 12))):
        lines = [json.dumps({"prompt": f"Say {number}", "answer": str(number)}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def report(tiny_model: Path, **changes: Any) -> Report:
    settings = {
        "model": {"path": str(tiny_model)},
        "iterations__rewards": {"use": [{"type": "exact_match"}]},
        "iterations__prompts__sources": [{"path": "train.jsonl", "answer_field": "answer"}],
    }
    return check_run(config(**(settings | changes)), given_plan, preference_findings)


def test_a_good_configuration_has_no_findings_and_a_plan(rows: Path, tiny_model: Path) -> None:
    evaluation = {"sources": [{"path": "eval.jsonl", "answer_field": "answer"}]}
    found = report(tiny_model, iterations__evaluation=evaluation)
    assert found.findings == []
    assert [role.name for role in found.plan.roles] == ["training", "inference"]
    assert dict(found.plan.processes) == {"reward workers": 1}
    assert (found.plan.steps, found.plan.placement) == (10, "colocated")
    assert [line.role for line in found.plan.memory] == ["training", "inference"]
    assert len(found.sources) == 2


def test_prompts_and_rewards_are_checked_under_their_keys(rows: Path, tiny_model: Path) -> None:
    found = report(
        tiny_model,
        iterations__prompts__sources=[{"path": "train.jsonl"}],
        iterations__rollout__prompts_per_iteration=20,
        iterations__inference={"engine_args": {"no_such_argument": 1}},
        iterations__evaluation={"sources": [{"path": "missing.jsonl"}]},
    )
    texts = {finding.key: finding.message for finding in found.findings}
    assert "missing.jsonl" in texts["iterations.evaluation.sources.0"]
    assert "an iteration takes 20 prompts, and the data has 10" in texts["iterations.rollout.prompts_per_iteration"]
    assert "iterations.rewards.use.0" in texts
    assert "no such engine argument" in texts["iterations.inference.engine_args.no_such_argument"]


def test_given_pairs_may_be_evaluated_beside(rows: Path, tiny_model: Path) -> None:
    (rows / "pairs.jsonl").write_text('{"prompt": "Say x", "chosen": "x", "rejected": "y"}\n')
    found = report(tiny_model, evaluation={"sources": [{"path": "pairs.jsonl"}]}, training__optimizer__warmup_steps=50)
    assert [(finding.level, finding.key) for finding in found.findings] == [
        ("warning", "training.optimizer.warmup_steps")
    ]
    assert len(found.sources) == 2
