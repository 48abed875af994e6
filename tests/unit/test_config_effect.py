"""No setting that does nothing: what would change nothing is refused, or a check says so, each with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL, MINIMAL_AGENTIC, changed
from pydantic import ValidationError
from tiny_model import make_tiny_model

from roll_like import (
    AgenticConfig,
    OnlineDPOConfig,
    OnPolicyDistillConfig,
    RewardModelRunConfig,
    RLVRConfig,
    SFTConfig,
)
from roll_like.check.machine import (
    check_engine,
    check_settings,
    ratio_settings_without_effect,
    seeds_across_updates,
    traces_without_effect,
)
from roll_like.check.model import layers_fit
from roll_like.check.plan import plan

EVALUATION = {"sources": [{"path": "eval.jsonl"}]}
ON_POLICY_DISTILL = {
    **{key: value for key, value in MINIMAL.items() if key != "rewards"},
    "pipeline": "on_policy_distill",
    "teachers": {"one": {"path": "org/teacher"}},
}
ONLINE_DPO = {
    **MINIMAL,
    "pipeline": "online_dpo",
    "rollout": {"prompts_per_iteration": 8, "samples_per_prompt": 4, "max_response_tokens": 32},
    "pairs": {"pairs_per_step": 4},
    "reference": {},
}
SFT = {
    "pipeline": "sft",
    "steps": 2,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "samples_per_step": 8, "max_tokens": 64},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        ({"training__optimizer": {"min_lr_ratio": 0.1}}, "training.optimizer.min_lr_ratio", "constant schedule keeps"),
        (
            {"critic__optimizer": {"min_lr_ratio": 0.1}, "algorithm": {"advantage": "gae"}},
            "critic.optimizer.min_lr_ratio",
            "constant schedule keeps",
        ),
        ({"rollout__max_oversampling": 2.0}, "rollout.max_oversampling", "no filter turns one down"),
        (
            {"algorithm": {"old_logprobs": "behaviour", "correction": {"cap": 3.0}}},
            "algorithm.correction.cap",
            "each importance weight",
        ),
        (
            {"algorithm": {"old_logprobs": "behaviour", "correction": {"reject": {"high": 2.0}}}},
            "algorithm.correction.reject",
            "each importance weight",
        ),
        (
            {"algorithm": {"correction": {"type": "none", "cap": 3.0}}},
            "algorithm.correction",
            "found cap: 3.0 with type: none, which has no importance weights; set type: truncated",
        ),
        (
            {"algorithm": {"correction": {"type": "none", "level": "sequence", "reject": {"high": 2.0}}}},
            "algorithm.correction",
            "remove level (reject has a level of its own)",
        ),
        ({"resources": {**MINIMAL["resources"], "cpus_per_device": 2}}, "resources.cpus_per_device", "device is cpu"),
        (
            {"evaluation": {"sources": [{"path": "eval.jsonl", "weight": 2.0}]}},
            "evaluation.sources.0.weight",
            "goes through every row once",
        ),
    ],
)
def test_what_has_no_effect_is_refused(changes: dict[str, Any], key: str, why: str) -> None:
    assert_refused(RLVRConfig, changed(MINIMAL, **changes), key, why)


@pytest.mark.parametrize(
    "changes",
    [
        {"training__optimizer": {"min_lr_ratio": 0.1, "schedule": "cosine"}},
        {"rollout__max_oversampling": 2.0, "rollout__drop_zero_variance_groups": True},
        {
            "rollout__max_oversampling": 2.0,
            "domains": {"train": {"rewards": ["ifeval"], "drop_zero_variance_groups": True}},
        },
        {"algorithm": {"old_logprobs": "behaviour"}},
        {"evaluation": {**EVALUATION, "top_p": 0.9}},
        {"algorithm": {"old_logprobs": "behaviour", "correction": {"type": "none"}}},
        {"algorithm": {"old_logprobs": "recompute", "correction": {"cap": 3.0}}},
        {"algorithm": {"correction": {"type": "none", "cap": 2.0, "level": "token"}}},
        {"algorithm": {"correction": {"type": "none", "reject": {"level": "turn_max", "high": 2.0}}}},
        {"evaluation": EVALUATION},
    ],
)
def test_what_has_an_effect_is_accepted_and_so_is_its_resolved_form(changes: dict[str, Any]) -> None:
    config = RLVRConfig.from_values(changed(MINIMAL, **changes))
    assert RLVRConfig.from_values(config.model_dump(mode="json", by_alias=True)) == config


@pytest.mark.parametrize(
    ("config_class", "minimal"),
    [(RLVRConfig, MINIMAL), (AgenticConfig, MINIMAL_AGENTIC), (OnPolicyDistillConfig, ON_POLICY_DISTILL)],
)
@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [("top_k", 1, "set it to 2 or more, or to 0"), ("min_p", 1.0, "set it below 1")],
)
def test_what_draws_the_likeliest_token_only_has_no_gradient(
    config_class: Any, minimal: dict[str, Any], key: str, value: float, remedy: str
) -> None:
    assert_refused(config_class, changed(minimal, **{f"rollout__{key}": value}), f"rollout.{key}", remedy)
    for name, kept in (("top_p", 0.9), ("top_k", 20), ("min_p", 0.1)):
        config = config_class.from_values(changed(minimal, **{f"rollout__{name}": kept}))
        assert config.replays_kept
        assert config.rollout.truncation == (name,)
    assert not config_class.from_values(minimal).replays_kept


def test_pairs_may_be_sampled_in_any_way() -> None:
    """Their losses compare the answers' probabilities before and after, and never how likely they were sampled."""
    values = changed(ONLINE_DPO, rollout__top_p=0.9, rollout__top_k=20)
    config = OnlineDPOConfig.from_values(values)
    assert config.rollout.top_p == 0.9
    assert not config.replays_kept


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [("weight", 2.0, "remove it"), ("seeds", 4, "evaluation.seeds"), ("first_seed", 7, "evaluation.first_seed")],
)
def test_an_evaluation_plays_every_seed_of_each_environment(setting: str, value: float, remedy: str) -> None:
    environment = {"id": "roll_like/FrozenLake-v0", setting: value}
    values = changed(MINIMAL_AGENTIC, evaluation={"environments": [environment]})
    assert_refused(AgenticConfig, values, f"evaluation.environments.0.{setting}", remedy)


def test_given_data_shares_prompts_anyway() -> None:
    assert_refused(
        SFTConfig, changed(SFT, training={"share_prompts": False}), "training.share_prompts", "false has no effect"
    )


@pytest.mark.parametrize("setting", ["logprob_chunk_tokens", "logprob_chunk_vocab"])
def test_a_reward_model_has_no_logits(setting: str) -> None:
    values = changed(SFT, training={setting: 64}, pipeline="reward_model", data__pairs_per_step=8)
    del values["data"]["samples_per_step"]
    assert_refused(RewardModelRunConfig, values, f"training.{setting}", "computes no logits that could be cut")


@pytest.mark.parametrize(
    ("algorithm", "level", "key", "effect"),
    [
        ({}, "note", "clip_low", "clip_low, clip_high, dual_clip have no effect"),
        ({"loss": {"type": "ppo", "dual_clip": None}}, "note", "clip_low", "so clip_low, clip_high have no effect"),
        ({"loss": {"type": "ppo", "clip_high": 0.1}}, "warning", "clip_high", "clip_low, clip_high, dual_clip have"),
        ({"loss": "gspo", "old_logprobs": "recompute"}, "note", "clip_low", "clip_low, clip_high, unit have"),
        ({"loss": {"type": "gspo", "unit": "turn"}}, "warning", "unit", "clip_low, clip_high, unit have"),
        ({"loss": {"type": "dppo_kl", "ratio_cap": 5}}, "warning", "ratio_cap", "clip_low, clip_high, ratio_cap have"),
        ({"loss": "clip_cov"}, "note", "clip_low", "so clip_low, clip_high have no effect"),
        ({"loss": "kimi"}, "note", "tau", "so tau has no effect"),
        ({"loss": {"type": "kimi", "tau": 0.1}}, "warning", "tau", "so tau has no effect"),
        ({"loss": "dro", "old_logprobs": "recompute"}, "note", "beta", "so beta has no effect"),
        ({"loss": {"type": "kl_cov", "coefficient": 2}}, "warning", "coefficient", "fraction, coefficient have"),
        ({"loss": {"type": "reinforce", "importance_weight": True}}, "warning", "importance_weight", "_weight has no"),
    ],
)
def test_settings_that_act_through_a_ratio_that_is_always_1(
    algorithm: dict[str, Any], level: str, key: str, effect: str
) -> None:
    config = RLVRConfig.from_values(changed(MINIMAL, algorithm=algorithm))
    [finding] = ratio_settings_without_effect(config.algorithm)
    assert (finding.level, finding.key) == (level, f"algorithm.loss.{key}")
    assert "every ratio is 1, so " in finding.message
    assert effect in finding.message
    remedy = "set algorithm.updates_per_step to 2" if level == "warning" else "nothing needs to be changed"
    assert remedy in finding.message


@pytest.mark.parametrize(
    "algorithm",
    [
        {"updates_per_step": 2},
        {"old_logprobs": "behaviour"},
        {"loss": "kimi", "updates_per_step": 2},
        {"loss": "reinforce"},
        {"loss": "gpg"},
    ],
)
def test_settings_that_act_through_a_ratio_that_changes(algorithm: dict[str, Any]) -> None:
    config = RLVRConfig.from_values(changed(MINIMAL, algorithm=algorithm))
    assert [*ratio_settings_without_effect(config.algorithm)] == []


@pytest.mark.parametrize(
    ("critic", "levels"),
    [
        ({}, ["note"]),
        ({"value_clip": 0.5}, ["warning"]),
        ({"value_clip": None}, []),
        ({"value_clip": 0.5, "updates_per_step": 2}, []),
    ],
)
def test_values_that_have_not_moved_are_not_clipped(critic: dict[str, Any], levels: list[str]) -> None:
    values = changed(MINIMAL, critic=critic, algorithm={"advantage": "gae"})
    config = RLVRConfig.from_values(values)
    found = [finding for finding in check_settings(config, plan(config)) if finding.key == "critic.value_clip"]
    assert [finding.level for finding in found] == levels
    assert all("set critic.updates_per_step to 2 or more" in finding.message for finding in found)


@pytest.mark.parametrize(
    ("advantage", "longest", "expected"),
    [
        ({"length_adaptive": 0.05}, 48, "λ is 0 for responses of up to 20 tokens and 0.58 for the longest (48)"),
        ({"length_adaptive": 0.05}, 16, "λ is 0 for responses of up to 20 tokens and 0 for the longest (16)"),
        ({"length_adaptive": 0.05}, 200, ""),
        ({"length_adaptive": 0.05}, 16, "for these responses set 1.0 or more (λ = 0.94 for the longest)"),
        ({"length_adaptive": 1.0}, 16, ""),
        ({"length_adaptive": 1.0}, 3, "for these responses set 3.4 or more (λ = 0.9 for the longest)"),
        ({"length_adaptive": 3.4}, 3, ""),
        ({}, 16, ""),
    ],
)
def test_a_lambda_by_length_that_is_made_for_longer_responses(
    advantage: dict[str, Any], longest: int, expected: str
) -> None:
    algorithm = {"advantage": {"type": "gae", **advantage}}
    values = changed(MINIMAL, critic={}, algorithm=algorithm, rollout__max_response_tokens=longest)
    config = RLVRConfig.from_values(values)
    key = "algorithm.advantage.length_adaptive"
    found = [finding for finding in check_settings(config, plan(config)) if finding.key == key]
    assert [finding.level for finding in found] == ["warning"] * bool(expected)
    assert all(expected in finding.message for finding in found)


@pytest.mark.parametrize(
    ("inference", "device", "keys"),
    [
        ({"kv_cache_gib": 0.5}, "cpu", []),
        ({"kv_cache_gib": 0.5, "gpu_memory_utilization": 0.7}, "cpu", ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": 0.4}, "cuda", []),
        ({"gpu_memory_utilization": 0.4, "kv_cache_gib": 0.5}, "cuda", ["kv_cache_gib"]),
    ],
)
def test_the_cache_of_vllm_is_sized_by_one_key_on_cpus_and_another_on_gpus(
    inference: dict[str, Any], device: str, keys: list[str]
) -> None:
    resources = {"device": device, "devices_per_node": 1, "device_mapping": {"training": "0", "inference": "0"}}
    values = changed(MINIMAL, inference={"type": "vllm", **inference}, resources=resources)
    found = list(check_engine(RLVRConfig.from_values(values)))
    assert [finding.key for finding in found] == [f"inference.{key}" for key in keys]
    assert all(finding.level == "warning" for finding in found)


@pytest.mark.parametrize(
    ("metrics", "warned"),
    [
        ({"traces_per_step": 4}, False),
        ({"trackers": []}, False),
        ({"trackers": [], "traces_per_step": 4}, True),
        ({"trackers": ["tensorboard"], "traces_per_step": None}, True),
        ({"trackers": ["tensorboard", "mlflow"], "traces_per_step": 4}, False),
    ],
)
def test_traces_that_no_tracker_takes(metrics: dict[str, Any], warned: bool) -> None:
    config = RLVRConfig.from_values(changed(MINIMAL, metrics=metrics))
    assert [finding.key for finding in traces_without_effect(config)] == ["metrics.traces_per_step"] * warned


def test_seeds_do_not_repeat_what_weights_arrive_in() -> None:
    resources = {"device": "cuda", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}}

    def found(**inference: Any) -> list[tuple[str, str]]:
        rollout = {**MINIMAL["rollout"], "schedule": {"type": "async", "max_staleness": 1}}
        config = RLVRConfig.from_values(changed(MINIMAL, resources=resources, inference=inference, rollout=rollout))
        return [(finding.level, finding.key) for finding in seeds_across_updates(config)]

    assert found(type="vllm") == []
    assert found(type="vllm", deterministic=True) == [("warning", "inference.deterministic")]
    assert found(type="sglang", deterministic=True) == [("warning", "inference.deterministic")]


def test_a_text_model_has_no_vision_tower(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    values = changed(MINIMAL, model={"path": str(model)}, training={"freeze_vision": False})
    found = [*layers_fit(RLVRConfig.from_values(values), model)]
    assert [(finding.level, finding.key) for finding in found] == [("warning", "training.freeze_vision")]


def assert_refused(config_class: type[Any], values: dict[str, Any], key: str, why: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config_class.from_values(values)
    [error] = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == key
    assert why in error["msg"]
