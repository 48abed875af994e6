"""What a configuration of online DPO refuses, its plan, and what its check finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import changed, refused, write_rows

from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.builtin.pipelines.online_dpo.pipeline import OnlineDPOPipeline
from roll_like.check import Report

MINIMAL: dict[str, Any] = {
    "pipeline": "online_dpo",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "max_prompt_tokens": 64},
    "rollout": {"prompts_per_iteration": 8, "samples_per_prompt": 4, "max_response_tokens": 32},
    "rewards": {"use": [{"type": "ifeval"}]},
    "pairs": {"pairs_per_step": 4},
    "reference": {},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1", "inference": "0-1"}},
}
JUDGE = {"type": "llm_judge", "judges": [{"url": "judge", "model": "judge"}]}


def config(**changes: Any) -> OnlineDPOConfig:
    return OnlineDPOConfig.from_values(changed(MINIMAL, **changes))


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"pairs__epochs": 2, "pairs__steps": 3}, "pairs.steps", "both are set; set one"),
        ({"resources__device_mapping__inference": None}, "resources.device_mapping.inference", "Field required"),
        (
            {"resources__device_mapping__judge": "0-1"},
            "resources.device_mapping.judge",
            "because there is no `judge` section",
        ),
        ({"rollout__samples_per_prompt": 1}, "rollout.samples_per_prompt", "takes two answers"),
        ({"rollout__temperature": 0}, "rollout.temperature", "0 is greedy"),
        ({"rollout__max_in_flight": 3}, "rollout.max_in_flight", "one group of 4; set it to 4"),
        (
            {"training": {"max_tokens_per_micro_batch": 191}},
            "training.max_tokens_per_micro_batch",
            "2 × 96 = 192 (data.max_prompt_tokens + rollout.max_response_tokens = 64 + 32 = 96); set it to 192 or more",
        ),
        (
            {"inference": {"max_model_len": 90}},
            "inference.max_model_len",
            "90 tokens cannot hold the longest sample (data.max_prompt_tokens + rollout.max_response_tokens = 64 + 32",
        ),
        ({"rewards__use": [JUDGE]}, "rewards.use.0.judges", "there is no `judge` section"),
        (
            {"rewards__use": [{"type": "ifeval", "sources": ["trian"]}, "exact_match"]},
            "rewards.use.0.sources",
            "no data source is called 'trian'; known: train",
        ),
        (
            {"domains": {"train": {"rewards": ["ifeval"], "difficulty": {"of": "mean", "low": 0, "high": 1}}}},
            "domains.train.difficulty",
            "use pairs.min_margin",
        ),
        (
            {"evaluation": {"sources": [{"path": "eval.jsonl"}], "before": False, "after": False}},
            "evaluation",
            "it would never run",
        ),
        (
            {"pair_evaluation": {"sources": [{"path": "eval.jsonl"}], "before": False, "after": False}},
            "pair_evaluation",
            "it would never run",
        ),
        (
            {"resources__device_mapping": {"training": "0-1", "inference": "1-2"}, "resources__devices_per_node": 3},
            "resources.device_mapping.inference",
            "overlaps training's 0-1 only in part",
        ),
        (
            {"inference": {"replicas": 3}},
            "resources.device_mapping.inference",
            "cannot be divided evenly among 3 (inference.replicas)",
        ),
        (
            {"resources__device": "cuda", "training__workers": 2,
             "inference": {"sleep": False, "gpu_memory_utilization": 0.8}},
            "inference.sleep",
            "would keep 80% of their memory",
        ),
        ({"training": {"workers": 5}, "resources__devices_per_node": 5, "resources__device_mapping": {
            "training": "0-4", "inference": "0-4"}}, "training.workers", "raise pairs.pairs_per_step"),
        ({"algorithm": {"loss": "kto"}}, "algorithm.loss.type", "use a loss on pairs"),
        ({"algorithm": {"loss": "simpo"}}, "reference", "remove the section"),
        ({"reference": None}, "reference", "add `reference: {}`"),
        ({"reference__path": "org/other"}, "reference.path", "remove the path, or set mode: cluster"),
        ({"reference__mode": "adapter_off"}, "reference.mode", "add `training.lora: {}`"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    found = refused(config, **changes)
    assert expected in found.get(key, ""), found
    assert len(found) == 1, found


def test_everything_that_samples_and_judges_has_a_place() -> None:
    pooled = {"use": [{"type": "ifeval"}, JUDGE], "pools": {"slow": {"rewards": ["llm_judge"], "devices": "1"}}}
    run = config(
        rewards=pooled,
        judge={"path": "org/judge"},
        reference={"mode": "cluster"},
        resources__device_mapping={"training": "0", "inference": "1"},
    )
    found = {role.name: (str(role.devices), role.workers_key) for role in run.roles}
    assert found == {
        "training": ("0", "training.workers"),
        "inference": ("1", "inference.replicas"),
        "reference": ("0", "reference.workers"),
        "judge": ("1", "judge.replicas"),
        "rewards slow": ("1", "rewards.pools.slow.workers"),
    }


def test_losses_without_a_reference_compare_with_nothing() -> None:
    assert config(algorithm={"loss": "simpo"}, reference=None).reference is None


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ten prompts to train on and two others to evaluate."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, lambda number: {"prompt": f"Say {number}", "answer": str(number)})
    return tmp_path


def report(tiny_model: Path, **changes: Any) -> Report:
    settings = {
        "model": {"path": str(tiny_model)},
        "rewards": {"use": [{"type": "exact_match"}]},
        "data__sources": [{"path": "train.jsonl", "answer_field": "answer"}],
    }
    return OnlineDPOPipeline.check(config(**(settings | changes)))


def test_a_good_configuration_has_no_findings_and_a_plan(rows: Path, tiny_model: Path) -> None:
    evaluation = {"sources": [{"path": "eval.jsonl", "answer_field": "answer"}]}
    found = report(tiny_model, evaluation=evaluation)
    assert found.findings == []
    assert [role.name for role in found.plan.roles] == ["training", "inference"]
    assert dict(found.plan.processes) == {"reward workers": 1}
    assert (found.plan.steps, found.plan.placement) == (10, "colocated")
    assert (found.plan.samples_per_step, found.plan.units) == (4, ("pairs", "pairs"))
    assert [line.role for line in found.plan.memory] == ["training", "inference"]
    assert len(found.sources) == 2


def test_prompts_and_rewards_are_checked(rows: Path, tiny_model: Path) -> None:
    found = report(
        tiny_model,
        data__sources=[{"path": "train.jsonl"}],
        rollout__prompts_per_iteration=20,
        inference={"engine_args": {"no_such_argument": 1}},
        evaluation={"sources": [{"path": "missing.jsonl"}]},
    )
    texts = {finding.key: finding.message for finding in found.findings}
    assert "missing.jsonl" in texts["evaluation.sources.0"]
    assert "one iteration takes 20 prompts, and the data has 10" in texts["rollout.prompts_per_iteration"]
    assert "rewards.use.0" in texts
    assert "no such engine argument" in texts["inference.engine_args.no_such_argument"]


def test_given_pairs_may_be_evaluated_beside(rows: Path, tiny_model: Path) -> None:
    (rows / "pairs.jsonl").write_text('{"prompt": "Say x", "chosen": "x", "rejected": "y"}\n')
    pairs = {"sources": [{"path": "pairs.jsonl"}]}
    found = report(tiny_model, pair_evaluation=pairs, training__optimizer__warmup_steps=50)
    assert [(finding.level, finding.key) for finding in found.findings] == [
        ("warning", "training.optimizer.warmup_steps")
    ]
    assert len(found.sources) == 2


def test_the_models_that_score_are_checked(rows: Path, tiny_model: Path) -> None:
    scored = {"type": "reward_model", "path": str(rows / "none")}
    found = report(tiny_model, judge={"path": str(rows / "none"), "type": "vllm"}, rewards={"use": [JUDGE, scored]})
    assert {finding.key for finding in found.errors if "none" in finding.message} == {
        "judge.path",
        "rewards.use.1.path",
    }
