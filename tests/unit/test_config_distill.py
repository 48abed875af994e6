"""Configurations of distillation: what they mean, and which mistakes they catch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL, changed
from pydantic import ValidationError

from roll_like.algorithms.kl import KLController
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.distill.objective import TopKObjective
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.on_policy_distill.objective import TaughtPolicyObjective
from roll_like.builtin.pipelines.on_policy_distill.pipeline import OnPolicyDistillPipeline
from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import teacher_objective
from roll_like.config.teachers import teacher_model, teacher_of
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.training.language_model import LanguageModelObjective

OFFLINE: dict[str, Any] = {
    "pipeline": "distill",
    "steps": 10,
    "model": {"path": "org/small"},
    "teachers": {"large": {"path": "org/large"}},
    "data": {"sources": [{"path": "train.jsonl"}], "samples_per_step": 8, "max_tokens": 64},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}
ON_POLICY = {
    **{key: value for key, value in MINIMAL.items() if key not in {"pipeline", "rewards"}},
    "pipeline": "on_policy_distill",
    "teachers": {"large": {"path": "org/large"}},
}


def refused(config: type, values: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        config.from_values(values)
    return "\n".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in caught.value.errors())


def test_teachers_are_found_by_domain() -> None:
    config = DistillConfig.from_values(
        changed(
            OFFLINE,
            resources__device_mapping={"training": "0"},
            teachers={"maths": {"path": "m", "domains": ["maths", "logic"], "devices": "1"}, "rest": {"path": "r"}},
            data__sources=[
                {"path": "a.jsonl", "domain": "maths"},
                {"path": "logic.jsonl"},
                {"path": "c.jsonl", "domain": "chat"},
            ],
        )
    )
    assert [teacher_of(config.teachers, name) for name in ("maths", "logic", "chat")] == ["maths", "maths", "rest"]
    roles = {role.name: (str(role.devices), role.workers) for role in config.roles[1:]}
    assert roles == {"teacher maths": ("1", 1), "teacher rest": ("0", 1)}


def test_a_teacher_is_no_part_of_the_student() -> None:
    config = DistillConfig.from_values(changed(OFFLINE, model__keep_layers=[0, 3], model__revision="abc"))
    teacher = teacher_model(config.model, config.teachers["large"])
    assert (teacher.path, teacher.keep_layers, teacher.revision) == ("org/large", None, None)
    assert config.evaluation is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teachers": {}}, "teachers"),
        (
            {"teachers": {"a": {"path": "x", "domains": ["maths"]}}},
            "no teacher covers the domains train",
        ),
        (
            {"teachers": {"a": {"path": "x"}, "b": {"path": "y"}}},
            "'a' and 'b' name no domains",
        ),
        (
            {"teachers": {"a": {"path": "x", "domains": ["train"]}, "b": {"path": "y", "domains": ["train"]}}},
            "'train' is a domain of 'b' too",
        ),
        ({"teachers": {"a": {"path": "x"}, "b": {"path": "y", "domains": ["cods"]}}}, "no data is of domain 'cods'"),
        ({"teachers__large__max_tokens_per_micro_batch": 32}, "32 tokens cannot hold one longest sample"),
        ({"training__max_tokens_per_micro_batch": 32}, "32 tokens cannot hold one longest sample"),
        ({"teachers__large__devices": "0-4"}, "0-4 ends after the last device"),
        ({"model__keep_layers": [3, 1]}, "named once each, in their order"),
        ({"algorithm__loss": {"type": "reverse_lk"}}, "reverse_kl"),
        ({"algorithm__top_k": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_taught(changes: dict[str, Any], message: str) -> None:
    assert message in refused(DistillConfig, changed(OFFLINE, **changes))


def test_ranks_are_for_tokens_that_only_one_vocabulary_has() -> None:
    ranked = changed(OFFLINE, algorithm={"loss": {"type": "js", "unmatched_weight": 0.5}})
    DistillConfig.from_values(changed(ranked, teachers__large__other_tokenizer=True))
    found = refused(DistillConfig, ranked)
    assert "algorithm.loss.unmatched_weight: " in found
    assert "no teacher has another tokenizer; remove it, or set other_tokenizer: true" in found
    negative = refused(DistillConfig, changed(OFFLINE, algorithm={"loss": {"type": "js", "unmatched_weight": -1}}))
    assert "algorithm.loss.unmatched_weight" in negative


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"top_k": None}}, "algorithm.top_k is null; set it to 64"),
        ({"training__sequence_parallel": 2, "training__workers": 2}, "a rank has a part of them"),
        ({"data__too_long": "cut"}, "data.too_long is cut; set it to skip or refuse"),
        ({"data__sources": [{"path": "a.jsonl", "streaming": True}]}, "set streaming: false"),
    ],
)
def test_what_texts_cannot_be_compared_with(changes: dict[str, Any], message: str) -> None:
    DistillConfig.from_values(changed(OFFLINE, teachers__large__other_tokenizer=True))
    found = refused(DistillConfig, changed(OFFLINE, teachers__large__other_tokenizer=True, **changes))
    assert "teachers.large.other_tokenizer: " in found
    assert message in found


def test_a_student_alone_needs_no_rewards_and_no_groups() -> None:
    config = OnPolicyDistillConfig.from_values(changed(ON_POLICY, rollout__samples_per_prompt=1))
    assert config.rewards.use == ()
    assert config.distillation.use == "advantage"
    assert [role.name for role in config.roles[1:]] == ["inference", "teacher large"]


def test_rewards_that_are_only_measured_need_no_groups_either() -> None:
    measured = changed(ON_POLICY, rewards={"use": [{"type": "ifeval"}]}, rollout__samples_per_prompt=1)
    assert not OnPolicyDistillConfig.from_values(measured).compares_groups
    trained = changed(measured, distillation__reward_weight=0.5, rollout__samples_per_prompt=2)
    whitened = changed(trained, algorithm__advantage_shaping={"whiten": True})
    assert OnPolicyDistillConfig.from_values(whitened).compares_groups


def test_the_loss_holds_the_teachers_divergence() -> None:
    config = OnPolicyDistillConfig.from_values(
        changed(ON_POLICY, distillation={"use": "loss", "weight": 0.5, "estimator": "k3"})
    )
    kl = config.with_teacher_in_loss().algorithm.kl
    assert (kl.use, kl.estimator, kl.straight_through, kl.coefficient) == ("loss", "k3", True, 0.5)
    assert config.algorithm.kl.use == "none"
    beside = OnPolicyDistillConfig.from_values(ON_POLICY)
    assert beside.with_teacher_in_loss() is beside


TOP_K = {"use": "loss", "signal": "top_k"}


def test_distributions_leave_the_kl_penalty_its_place() -> None:
    config = OnPolicyDistillConfig.from_values(
        changed(
            ON_POLICY,
            distillation={**TOP_K, "loss": {"type": "js", "beta": 0.3, "temperature": 2.0}},
            algorithm__kl={"use": "loss", "coefficient": 0.1},
            reference={},
        )
    )
    assert config.with_teacher_in_loss() is config
    assert config.distillation.top_k_settings == {"top_k": 100, "loss_temperature": 2.0}
    objective = OnPolicyDistillPipeline.objective(config, KLController(config.algorithm.kl))
    assert isinstance(objective, TaughtPolicyObjective)
    assert (objective.top_k, objective.rewarded, objective.temperature) == (100, False, 1.0)
    assert isinstance(teacher_objective(config, config.training), TopKObjective)
    # of samples of older policies too
    stale = {"algorithm__correction": {"type": "truncated"}, "rollout__schedule": {"type": "async"}}
    OnPolicyDistillConfig.from_values(changed(ON_POLICY, distillation=TOP_K, **stale))


@pytest.mark.parametrize("use", ["advantage", "loss"])
def test_a_run_that_compares_sampled_tokens_computes_nothing_else(use: str) -> None:
    config = OnPolicyDistillConfig.from_values(changed(ON_POLICY, distillation={"use": use}))
    kl = KLController(config.algorithm.kl)
    assert type(OnPolicyDistillPipeline.objective(config, kl)) is PolicyObjective
    assert type(teacher_objective(config, config.training)) is LanguageModelObjective


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation": {"signal": "top_k"}}, "distillation.use: an advantage is a number of the sampled token"),
        ({"distillation": {"top_k": 50}}, "distillation.top_k: teachers tell the log-probability of the sampled token"),
        ({"distillation": {"loss": {"type": "js"}}}, "distillation.loss: teachers tell the log-probability"),
        ({"distillation": {**TOP_K, "estimator": "k3"}}, "distillation.estimator: it is about sampled tokens"),
        ({"distillation": {**TOP_K, "discount": 0.5}}, "distillation.discount: it is about sampled tokens"),
        (
            {"distillation": {**TOP_K, "loss": {"type": "reverse_kl", "ce_weight": 0.1}}},
            "distillation.loss.ce_weight: the cross-entropy would make what the student itself sampled likelier",
        ),
        (
            {"distillation": {**TOP_K, "loss": {"type": "js", "unmatched_weight": 0.1}}},
            "distillation.loss.unmatched_weight: it compares tokens that only one of two vocabularies has",
        ),
        ({"distillation": TOP_K, "algorithm__loss": {"type": "raft"}}, "so that none would be left; use ppo"),
        (
            {
                "distillation": {**TOP_K, "reward_weight": 1.0},
                "rewards": {"use": [{"type": "ifeval"}]},
                "algorithm__loss": {"type": "raft"},
            },
            "algorithm.loss.type: raft chooses samples by their advantages, and the teachers' divergence "
            "(distillation.use: loss) would be lost for the others; use ppo",
        ),
        (
            {"distillation": TOP_K, "teachers__large__other_tokenizer": True},
            "set distillation.use: advantage, and signal: sampled_token",
        ),
        ({"distillation__reward_weight": 1.0}, "there are none; add `rewards.use`"),
        ({"rollout__drop_zero_variance_groups": True, "rollout__max_oversampling": 2.0}, "all would be dropped"),
        ({"rollout__temperature": 0}, "no distribution to compare"),
        ({"distillation": {"use": "loss", "discount": 0.5}}, "a loss looks at each token alone"),
        (
            {"distillation__use": "loss", "algorithm__kl__use": "loss", "reference": {}},
            "room for one divergence",
        ),
        (
            {"evaluation": {"sources": [{"path": "eval.jsonl"}], "temperature": 0.5}},
            "teachers score at the temperature that training samples at",
        ),
        ({"critic": {}}, "critic: it changes the advantages of rewards"),
        (
            {"rewards": {"use": [{"type": "ifeval"}]}, "algorithm__kl__use": "reward", "reference": {}},
            "algorithm.kl.use: it changes the advantages of rewards",
        ),
        (
            {
                "rewards": {"use": [{"type": "ifeval"}]},
                "rollout__samples_per_prompt": 1,
                "rollout__drop_zero_variance_groups": True,
                "rollout__max_oversampling": 2.0,
            },
            "rollout.samples_per_prompt: a group of one always has equal rewards",
        ),
        ({"rollout__samples_per_prompt": 4, "rollout__max_in_flight": 3}, "cannot hold one group of 4"),
        ({"teachers": {"a": {"path": "x", "domains": ["other"]}}}, "no teacher covers the domains train"),
        (
            {"teachers__large__other_tokenizer": True, "distillation__use": "loss"},
            "compared over stretches of several tokens",
        ),
        ({"data__curriculum": "difficulty"}, "a curriculum goes by how often tasks are solved"),
        ({"teachers": {}}, "there is nothing to learn from: name a teacher"),
        ({"distillation__demonstration": {"field": "good", "template": "{prompt}"}}, "template has no {demonstration}"),
        (
            {"distillation__demonstration": {"field": "good"}, "teachers__large__max_tokens_per_micro_batch": 512},
            "distillation.demonstration.max_prompt_tokens + rollout.max_response_tokens",
        ),
        (
            {
                "distillation__demonstration": {"field": "good"},
                "teachers": {},
                "training__max_tokens_per_micro_batch": 512,
            },
            "training.max_tokens_per_micro_batch",
        ),
        (
            {
                "distillation__demonstration": {"field": "good"},
                "teachers": {},
                "evaluation": {"sources": [{"path": "eval.jsonl"}], "temperature": 1.0},
            },
            "is no measure of itself",
        ),
        (
            {"rewards": {"use": [{"type": "ifeval", "sources": ["other"]}]}},
            "no reward scores the data source 'train'",
        ),
        (
            {
                "rewards": {"use": [{"type": "ifeval"}]},
                "distillation__reward_weight": 0.5,
                "rollout__samples_per_prompt": 1,
            },
            "a group of one has nothing to compare with",
        ),
        ({"algorithm__advantage_shaping": {"whiten": True}}, "algorithm.advantage_shaping: it changes the advantages"),
        (
            {"rewards": {"use": [{"type": "ifeval"}]}, "algorithm__reward_shaping": {"clip": 1.0}},
            "algorithm.reward_shaping: it changes the advantages",
        ),
    ],
)
def test_what_cannot_be_taught_on_policy(changes: dict[str, Any], message: str) -> None:
    assert message in refused(OnPolicyDistillConfig, changed(ON_POLICY, **changes))


def test_an_evaluation_of_the_training_data_is_a_warning(tiny_model: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": str(n)} for n in range(8)]
    config = DistillConfig.from_values(
        changed(
            OFFLINE,
            model={"path": str(tiny_model), "dtype": "float32"},
            teachers={"large": {"path": str(tiny_model)}},
            data__sources=[{"rows": rows, "name": "train"}],
            evaluation={"sources": [{"rows": rows[:2], "name": "again"}]},
        )
    )
    warnings = [str(each) for each in config.check().findings if each.level == "warning"]
    assert any("2 of 2 samples are also trained on, first evaluation.sources.0.rows[0]" in each for each in warnings)


def test_runs_lie_in_a_home_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert DistillConfig.from_values(changed(OFFLINE, output_dir="~/runs")).runs_dir == Path("/home/ada/runs")
    assert DistillConfig.from_values(changed(OFFLINE, output_dir="a~/runs")).runs_dir == Path("a~/runs")
    message = refused(DistillConfig, changed(OFFLINE, output_dir="~no.such.user/runs"))
    assert "output_dir: Value error, the home in ~no.such.user/runs is not known" in message
