from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL, Billion, changed, planned
from guessing_models import make_mtp_family
from published_models import SHAPES
from pydantic import ValidationError
from rich.console import Console
from tiny_families import make_family

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.findings import Finding
from roll_like.check.model import check_draft, role_shapes
from roll_like.check.plan import Plan, plan
from roll_like.config.model import ModelConfig
from roll_like.models.shape import ModelShape, load_model_shape

TWO_NODES = changed(
    resources={
        "device": "cuda",
        "nodes": 2,
        "devices_per_node": 4,
        "address": "auto",
        "device_mapping": {"training": "0-3", "inference": "4-7"},
    },
    training__workers=4,
    training__zero_stage=3,
    inference={"type": "vllm", "replicas": 2, "max_running": 10},
    algorithm={"kl": {"use": "loss"}, "updates_per_step": 2},
    reference={"workers": 4},
)

ON_CPU = RLVRConfig.from_values(
    changed(
        TWO_NODES,
        resources={"device": "cpu", "devices_per_node": 8, "device_mapping": {"training": "0-3", "inference": "4-7"}},
        inference={"type": "hf", "replicas": 2, "max_running": 10},
        model__dtype="bfloat16",
    )
)


def text_of(made: Plan) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(made.render())
        return console.export_text()


def test_roles_divide_their_spans() -> None:
    training, inference, reference = RLVRConfig.from_values(TWO_NODES).roles
    assert [training.devices_of(worker) for worker in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [inference.devices_of(worker) for worker in range(2)] == [(4, 5), (6, 7)]
    assert [inference.node_of(worker) for worker in range(2)] == [1, 1]
    assert reference.devices == training.devices, "the reference model sits with the trainer unless told otherwise"
    assert (training.name, inference.name, reference.name) == ("training", "inference", "reference")
    with pytest.raises(IndexError, match="workers 0-1, not 2"):
        inference.devices_of(2)


def test_without_a_reference_model_there_are_two_roles() -> None:
    assert [role.name for role in RLVRConfig.from_values(MINIMAL).roles] == ["training", "inference"]


WITH_CRITIC = changed(
    TWO_NODES,
    algorithm={"advantage": "gae"},
    reference=None,
    critic={"workers": 2, "zero_stage": 1},
    resources__device_mapping={"training": "0-3", "inference": "4-5", "critic": "6-7"},
)


def test_a_critic_is_a_role_with_its_own_devices_and_memory() -> None:
    config = RLVRConfig.from_values(WITH_CRITIC)
    critic = config.roles[-1]
    assert (critic.name, critic.workers_key, str(critic.devices)) == ("critic", "critic.workers", "6-7")
    line = planned(config.model_copy(update={"resources": ON_CPU.resources}), Billion()).memory[-1]
    gib = 2**30
    assert line.role == "critic"
    # ZeRO-1 sums whole gradients in float32, beside those in 16 bit
    assert dict(line.parts) == {"weights": 2 * gib, "gradients": 6 * gib, "optimizer": 6 * gib}


def test_a_critic_sits_with_the_trainer_unless_told_otherwise() -> None:
    made = changed(algorithm={"advantage": "gae"}, critic={})
    training, _, critic = RLVRConfig.from_values(made).roles
    assert critic.devices == training.devices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic__max_tokens_per_micro_batch": 95}, "95 tokens cannot hold one longest sample"),
        ({"critic__workers": 1}, "2 GPUs for 1 critic workers"),
        ({"resources__device_mapping__critic": "7-8"}, "ends after the last device"),
        ({"resources__device_mapping__critic": "3-4"}, "overlaps training's 0-3 only in part"),
        ({"critic__warmup_steps": 10}, "the policy does not learn in the first 10 steps"),
        ({"critic": None, "algorithm": {}}, "there is no `critic` section"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RLVRConfig.from_values(changed(WITH_CRITIC, **changes))


def test_a_critic_on_cpu_offloads_nothing() -> None:
    wrong = changed(algorithm={"advantage": "gae"}, critic={"zero_stage": 1, "offload": "optimizer"})
    with pytest.raises(ValidationError, match="moves states from a GPU to host memory"):
        RLVRConfig.from_values(wrong)


def test_batch_arithmetic() -> None:
    made = plan(RLVRConfig.from_values(TWO_NODES))
    assert (made.samples_per_step, made.samples_per_update) == (32, 16)
    assert (made.steps, made.updates) == (10, 20)
    assert made.max_tokens_per_step == 32 * (64 + 32)
    assert made.placement == "disaggregated"
    assert made.devices == 8
    assert made.idle_devices == ()
    assert made.memory == ()


def test_colocated_and_idle_devices() -> None:
    made = plan(RLVRConfig.from_values(changed(resources__devices_per_node=4)))
    assert made.placement == "colocated"
    assert made.idle_devices == (2, 3)


def test_memory_follows_zero() -> None:
    training, inference, reference = planned(ON_CPU, Billion()).memory
    gib = 2**30
    # bfloat16, ZeRO 3 over 4 ranks: weights 2/4, gradients in float32 4/4, Adam and float32 weights 12/4
    assert dict(training.parts) | {"logits of a chunk": 0} == {
        "weights": gib // 2,
        "gradients": gib,
        "optimizer": 3 * gib,
        "logits of a chunk": 0,
    }
    # 10 sequences of 96 tokens at 200 bytes
    assert dict(inference.parts) == {"weights": 2 * gib, "KV cache at most": 10 * 96 * 200}
    assert dict(reference.parts) == {"weights": gib // 2}  # sharded over four ranks as the trainer's are
    assert training.total == sum(size for _, size in training.parts)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"), [(0, 4, 4, 8), (1, 4, 4, 6), (2, 4, 2, 6), (3, 2, 2, 6)]
)
def test_memory_in_float32_on_cpu(stage: int, weights: int, gradients: int, optimizer: int) -> None:
    config = changed(
        model__dtype="float32",
        training={"zero_stage": stage, "workers": 2},
        inference={"type": "vllm", "kv_cache_gib": 3},
    )
    training, inference = planned(RLVRConfig.from_values(config), Billion()).memory
    gib = 2**30
    found = dict(training.parts)
    assert (found["weights"], found["gradients"], found["optimizer"]) == (
        weights * gib,
        gradients * gib,
        optimizer * gib,
    )
    assert dict(inference.parts) == {"weights": 4 * gib, "KV cache at most": 3 * gib}


def test_memory_is_that_of_each_roles_own_model(tiny_model: Path) -> None:
    """Of a model that guesses tokens beside the policy, and of a reference of another size."""
    draft = {"method": "draft", "model": str(SHAPES / "Qwen3-0.6B")}
    config = changed(
        model__dtype="float32",
        inference={"type": "vllm", "kv_cache_gib": 3, "speculative": draft},
        algorithm={"kl": {"use": "loss"}},
        reference={"path": str(tiny_model)},
    )
    _, inference, reference = planned(RLVRConfig.from_values(config), Billion()).memory
    gib = 2**30
    assert dict(inference.parts) == {
        "weights": 4 * gib,
        "draft's weights": 4 * 596_049_920,
        "KV cache at most": 3 * gib,
    }
    assert dict(reference.parts) == {"weights": 4 * load_model_shape(tiny_model).parameters}


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    """Models of one family may have embeddings of other lengths (vllm#7252)."""
    policy = draft = load_model_shape(SHAPES / "Qwen3-0.6B")
    config = RLVRConfig.from_values(MINIMAL)

    def found_in(**shapes: ModelShape) -> list[Finding]:
        return [*check_draft(config, None, shapes)]

    assert found_in(inference=policy) == found_in(inference=policy, draft=draft) == []
    (found,) = found_in(inference=replace(policy, vocab_size=152_064), draft=draft)
    assert (found.level, found.key) == ("error", "inference.speculative.model")
    assert "its vocabulary has 151936 entries and the policy's 152064" in found.message


def test_layers_that_guess_are_in_the_files_and_known_to_vllm(tmp_path: Path) -> None:
    config = RLVRConfig.from_values(changed(inference={"type": "vllm", "speculative": {"method": "mtp"}}))

    def found_in(model: Path) -> list[str]:
        shapes = role_shapes(config, load_model_shape(model))
        findings = check_draft(config, ModelConfig(path=str(model)), shapes)
        assert all(each.key == "inference.speculative.method" for each in findings)
        return [each.message for each in check_draft(config, ModelConfig(path=str(model)), shapes)]

    guessing = make_mtp_family("glm4_moe", tmp_path / "guessing")
    assert found_in(guessing) == []
    (message,) = found_in(make_family("glm4_moe", tmp_path / "plain"))
    assert "that predict further tokens, and the files in" in message
    assert "hold none" in message
    stated = json.loads((guessing / "config.json").read_text())
    stated |= {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
    (guessing / "config.json").write_text(json.dumps(stated))
    (message,) = found_in(guessing)
    assert "vLLM has no layers that predict further tokens of olmo3; use method: ngram" in message


def test_layers_that_guess_are_in_the_plan(tmp_path: Path) -> None:
    """Their weights without copies of the embeddings, which vLLM shares; and the cache of one more layer."""
    shape = load_model_shape(make_mtp_family("glm4_moe", tmp_path / "guessing"))
    plain = load_model_shape(make_family("glm4_moe", tmp_path / "plain"))
    assert shape.parameters == plain.parameters
    deeper = load_model_shape(make_family("glm4_moe", tmp_path / "deeper", layers=3))
    joined = 2 * shape.hidden_size**2 + 3 * shape.hidden_size
    assert shape.further_parameters == deeper.parameters - plain.parameters + joined
    speculation = {"type": "vllm", "kv_cache_gib": 3, "speculative": {"method": "mtp"}}
    config = RLVRConfig.from_values(changed(model__dtype="float32", inference=speculation))
    shapes = role_shapes(config, shape)
    assert (shapes["draft"].layers, shapes["draft"].vocab_size) == (1, shape.vocab_size)
    (inference,) = [each for each in plan(config, shapes).memory if each.role == "inference"]
    assert dict(inference.parts)["draft's weights"] == 4 * shape.further_parameters
    assert config.inference.tokens_per_pass == 2


def test_render_shows_figures_workers_and_memory() -> None:
    text = text_of(planned(RLVRConfig.from_values(TWO_NODES), Billion()))
    assert "Memory" not in text, "GPUs have a plan of their own"
    assert "optimizer 3.00" in text_of(planned(ON_CPU, Billion()))
    assert "8 prompts × 4 = 32" in text
    assert "10 × 2 = 20" in text
    assert "at most 32 × 96 = 3,072" in text
    assert "disaggregated on 8 GPUs" in text
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    assert ["inference", "1", "0-1", "4-7", "2"] in rows


def test_render_on_cpu_counts_threads() -> None:
    text = text_of(plan(RLVRConfig.from_values(MINIMAL)))
    assert "threads of each" in text
    assert "colocated on 2 CPU cores" in text
