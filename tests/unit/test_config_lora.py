"""What a configuration with adapters refuses, its plan, and what its check finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_files import Billion, changed, planned, refused
from engine_specs import engine_spec
from pydantic import BaseModel, ValidationError
from transformers import GPT2Config, GPT2LMHeadModel

from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.check.findings import Finding
from roll_like.check.model import check_adapters, check_model
from roll_like.check.plan import trained_parameters
from roll_like.config.inference import weight_backend
from roll_like.config.load import dump_config
from roll_like.config.training import LoRAConfig
from roll_like.errors import CheckpointError, ConfigError
from roll_like.inference.adapters import QUANTIZED, AdapterChoice, adapter_choice
from roll_like.inference.interface import AdapterSpec
from roll_like.inference.vllm.arguments import engine_arguments
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.plugin import VLLMPlugin
from roll_like.inference.vllm.served import adapter_layers
from roll_like.run.checkpoint import Checkpoint
from roll_like.run.launch import refuse_other_run

WITH_KL = changed(algorithm={"kl": {"use": "loss"}}, reference={"mode": "adapter_off"}, training={"lora": {}})
PAIRS: dict[str, Any] = {
    "pipeline": "dpo",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "pairs_per_step": 4, "max_tokens": 128},
    "training": {"lora": {"rank": 8}},
    "reference": {"mode": "adapter_off"},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}


@pytest.mark.parametrize(("kind", "base"), [(RLVRConfig, WITH_KL), (DPOConfig, PAIRS)], ids=["rlvr", "dpo"])
@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"training": {}}, "reference.mode", "switched off, and it has none; add `training.lora: {}`"),
        ({"reference__path": "org/other"}, "reference.path", "org/other would never be loaded"),
        ({"reference__workers": 2}, "reference.workers", "own ranks are the reference, so training.workers holds"),
        (
            {"reference__max_tokens_per_micro_batch": 4096},
            "reference.max_tokens_per_micro_batch",
            "so training.max_tokens_per_micro_batch holds; remove the key",
        ),
        (
            {"resources__device_mapping__reference": "0-1"},
            "resources.device_mapping.reference",
            "the trainer is its own reference",
        ),
        ({"training__lora__rank": 0}, "training.lora.rank", "greater than or equal to 1"),
        ({"training__lora__dropout": 1.0}, "training.lora.dropout", "less than 1"),
        ({"training__lora__target_modules": []}, "training.lora.target_modules", "at least 1 item"),
        ({"training__lora__init": "pissa"}, "training.lora.init", "'kaiming' or 'gaussian'"),
    ],
)
def test_what_cannot_work_is_refused(
    kind: type[BaseModel], base: dict[str, Any], changes: dict[str, Any], key: str, expected: str
) -> None:
    kind.from_values(base)
    found = refused(kind.from_values, changed(base, **changes))
    assert expected in found.get(key, ""), found


def test_policy_and_critic_may_have_adapters_and_a_reference_has_none() -> None:
    critic = changed(algorithm={"advantage": "gae"}, critic={"lora": {"rank": 8}})
    config = RLVRConfig.from_values(critic)
    assert config.critic is not None
    assert config.critic.lora == LoRAConfig(rank=8)
    assert config.training.lora is None
    with pytest.raises(ValidationError, match=r"reference\.lora"):
        RLVRConfig.from_values(changed(WITH_KL, reference={"lora": {}}))
    for kind in (RLVRConfig, AgenticConfig, SFTConfig, DPOConfig):
        assert "lora" in kind.model_fields["training"].annotation.model_fields


def test_memory_of_a_critic_is_that_of_its_own_adapters() -> None:
    whole = changed(algorithm={"advantage": "gae"}, critic={})
    few = changed(algorithm={"advantage": "gae"}, critic={"lora": {"rank": 8}})
    (line,) = (line for line in planned(RLVRConfig.from_values(few), Billion()).memory if line.role == "critic")
    assert dict(line.parts)["optimizer"] == 12 * 8 * 2**10
    (line,) = (line for line in planned(RLVRConfig.from_values(whole), Billion()).memory if line.role == "critic")
    assert dict(line.parts)["optimizer"] == 12 * 2**30


def test_a_reference_without_adapters_takes_no_devices_and_no_memory() -> None:
    config = RLVRConfig.from_values(WITH_KL)
    assert [role.name for role in config.roles] == ["training", "inference"]
    assert [role.name for role in DPOConfig.from_values(PAIRS).roles] == ["training"]
    beside = RLVRConfig.from_values(changed(WITH_KL, reference={}))
    assert [role.name for role in beside.roles] == ["training", "inference", "reference"]
    # its default budget is the trainer's business: samples may be longer than a reference model's micro-batch
    long = changed(WITH_KL, rollout__max_response_tokens=9000, training__max_tokens_per_micro_batch=10_000)
    RLVRConfig.from_values(long)


def test_memory_is_that_of_the_frozen_model_and_of_trained_adapters() -> None:
    config = RLVRConfig.from_values(changed(WITH_KL, training__lora__rank=8))
    parts = dict(planned(config, Billion()).memory[0].parts)
    adapters = 8 * 2**20
    assert trained_parameters(config, Billion()) == adapters
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (
        2 * (2**30 + adapters),
        2 * adapters,
        12 * adapters,
    )


def test_the_check_counts_adapters_and_names_the_layers_that_there_are(tiny_model: Path) -> None:
    def checked(**lora: Any) -> tuple[list[Finding], int]:
        findings: list[Finding] = []
        config = DPOConfig.from_values(changed(PAIRS, model={"path": str(tiny_model)}, training={"lora": lora}))
        _, shape = check_model(config, findings)
        assert shape is not None
        return findings, trained_parameters(config, shape)

    # two blocks: q 64→128, k and v 64→64, o 128→64, gate and up 64→128, down 128→64
    width = 2 * (192 + 2 * 128 + 192 + 2 * 192 + 192)
    assert checked(rank=4) == ([], 4 * width)
    assert checked(rank=4, target_modules=["q_proj"]) == ([], 4 * 2 * 192)
    [finding], _ = checked(target_modules=["q_proj", "qkv"])
    assert str(finding) == (
        "error: training.lora.target_modules: the model has no linear layer 'qkv' in its blocks; it has down_proj, "
        "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; use some of these, or leave the key out for all of them"
    )


class InFourBits(Billion):
    """The same model, most of which can be quantised."""

    quantized_parameters, critic_quantized_parameters = 2**29, 2**28


def test_memory_of_a_quantised_base_is_4_bits_and_its_scales() -> None:
    values = changed(training={"lora": {"rank": 8, "quantization": "nf4"}}, algorithm={"advantage": "gae"})
    values["critic"] = {"lora": {"rank": 8, "quantization": "fp4"}}
    memory = {line.role: dict(line.parts) for line in planned(RLVRConfig.from_values(values), InFourBits()).memory}
    scales = 1 / 64 + 4 / 64 / 256
    for role, quantised, width in (("training", 2**29, 2**20), ("critic", 2**28, 2**10)):
        rest = 2 * (2**30 - quantised + 8 * width)
        assert memory[role]["weights"] == pytest.approx(rest + quantised * (0.5 + scales), abs=1), role


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"training__zero_stage": 3}, "training.lora.quantization", "and training.zero_stage: 3 of 'deepspeed' shards"),
        (
            {"training__zero_stage": 3, "training__backend": "fsdp2"},
            "training.lora.quantization",
            "use training.backend: deepspeed with zero_stage 2 or less",
        ),
        (
            {"algorithm": {"advantage": "gae"}, "critic": {"lora": {"quantization": "nf4"}, "zero_stage": 3}},
            "critic.lora.quantization",
            "and critic.zero_stage: 3 of 'deepspeed' shards weights",
        ),
        ({"training__lora__quantization": "int8"}, "training.lora.quantization", "'nf4' or 'fp4'"),
        ({"inference": {"type": "vllm", "lora": True}}, "inference.lora", "set it to false, which sends the deq"),
        (
            {"evaluation": {"sources": [{"path": "eval.jsonl"}], "base_model": True}},
            "evaluation.base_model",
            "which have no base model then; remove training.lora.quantization",
        ),
    ],
)
def test_what_a_quantised_base_cannot_do_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    base = changed(training={"lora": {"quantization": "nf4"}}, inference={"type": "vllm"})
    RLVRConfig.from_values(base)
    found = refused(RLVRConfig.from_values, changed(base, **changes))
    assert expected in found.get(key, ""), found


def test_the_check_counts_what_is_quantised_and_names_what_is_missing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(model: Path) -> tuple[list[str], int]:
        findings: list[Finding] = []
        lora = {"target_modules": [layer], "quantization": "nf4"}
        values = changed(PAIRS, model={"path": str(model)}, training={"lora": lora})
        _, shape = check_model(DPOConfig.from_values(values), findings)
        assert shape is not None
        return [str(finding) for finding in findings], shape.quantized_parameters

    layer = "q_proj"
    assert checked(tiny_model) == ([], 2 * 64 * (128 + 64 + 64 + 128 + 3 * 128))
    monkeypatch.setattr("roll_like.models.quantized.find_spec", lambda _: None)
    (finding,), _ = checked(tiny_model)
    assert finding.startswith("error: training.lora.quantization: training.lora.quantization needs the package bitsand")
    monkeypatch.undo()
    layer = "c_attn"
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    (finding,), _ = checked(tmp_path)
    assert finding.startswith("error: training.lora.quantization: GPT2LMHeadModel has no nn.Linear in its numbered blo")


ALL = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def choice(model: Path, **changes: Any) -> AdapterChoice:
    values = changed(training={"lora": {"rank": 4}}, inference={}, model={"path": str(model)})
    return adapter_choice(RLVRConfig.from_values(changed(values, **changes)), model)


def test_adapters_are_sent_alone_wherever_the_engine_takes_them(tiny_model: Path) -> None:
    assert choice(tiny_model) == AdapterChoice(AdapterSpec(rank=4, modules=ALL))
    assert choice(tiny_model, inference__lora=True) == choice(tiny_model)
    assert choice(tiny_model, training={}) == AdapterChoice(None)
    assert choice(tiny_model, inference__lora=False).adapter is None
    assert choice(tiny_model, inference={"type": "hf"}).adapter is None
    assert choice(tiny_model, training__lora__quantization="nf4") == AdapterChoice(None, QUANTIZED)
    one = choice(tiny_model, training__lora={"rank": 4, "target_modules": ["0.self_attn.q_proj"]})
    assert one.adapter == AdapterSpec(rank=4, modules=("q_proj",))


def test_what_the_engine_does_not_take_is_merged_or_refused(tiny_model: Path, tmp_path: Path) -> None:
    expected = "the rank is 600, and vLLM takes adapters up to rank 512"
    assert choice(tiny_model, training__lora={"rank": 600}) == AdapterChoice(None, expected)
    with pytest.raises(ConfigError, match=f"inference.lora: adapters cannot be sent alone: {expected}") as caught:
        choice(tiny_model, training__lora={"rank": 600}, inference__lora=True)
    assert caught.value.fix == "set inference.lora: false, which sends merged weights, or remove the key"
    # GPT-2's model in vLLM takes none
    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, architectures=["GPT2LMHeadModel"]).save_pretrained(
        tmp_path
    )
    assert choice(tmp_path).reason == "the installed vLLM takes no adapters for GPT2LMHeadModel"
    experts = {"device": "cpu", "experts": True}
    reason = VLLMPlugin.adapter_obstacle("Qwen3MoeForCausalLM", AdapterSpec(rank=4, modules=("q_proj",)), **experts)
    assert reason == "beside adapters vLLM computes mixtures of experts with Triton, which it has no CPU version of"


def test_the_check_says_what_is_sent(tiny_model: Path) -> None:
    def found(**changes: Any) -> list[str]:
        values = changed(training={"lora": {}}, inference={}, model={"path": str(tiny_model)})
        config = RLVRConfig.from_values(changed(values, **changes))
        return [str(finding) for finding in check_adapters(config, config.model)]

    assert found() == ["note: inference.lora: adapters alone are sent to the engines"]
    assert found(inference__lora=False) == found(training={}) == found(inference={"type": "hf"}) == []
    (merged,) = found(training__lora={"rank": 600})
    assert merged.startswith("note: inference.lora: whole weights with merged adapters are sent: the rank is 600")
    (refused,) = found(training__lora={"rank": 600}, inference__lora=True)
    assert refused.startswith("error: inference.lora: adapters cannot be sent alone: the rank is 600")
    nodes = {"device": "cpu", "nodes": 2, "address": "auto", "devices_per_node": 2}
    nodes["device_mapping"] = {"training": "0-1", "inference": "2-3"}
    for inference, key in (({"weight_sync": "delta"}, "weight_sync"), ({"full_sync_every": 3}, "full_sync_every")):
        _, refused = found(resources=nodes, inference=inference)
        assert refused.startswith(f"error: inference.{key}: adapters are sent alone, and always whole, so this has no")
        assert found(resources=nodes, inference={**inference, "lora": False}) == []


def test_sending_adapters_that_there_are_not_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"true sends adapters, and the trainer has none"):
        RLVRConfig.from_values(changed(inference={"lora": True}))
    with pytest.raises(ValidationError, match=r"'max_lora_rank' is set by `training.lora.rank`"):
        RLVRConfig.from_values(changed(training={"lora": {}}, inference={"engine_args": {"max_lora_rank": 8}}))


def test_adapters_go_through_host_memory_also_between_gpus() -> None:
    values = changed(
        resources={"device": "cuda", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}}
    )
    config = RLVRConfig.from_values(values)
    assert weight_backend(config.inference, config.resources) == "nccl"
    assert weight_backend(config.inference, config.resources, adapters=True) == "shared_memory"
    values["resources"].update(nodes=2, devices_per_node=1, address="auto")
    config = RLVRConfig.from_values(values)
    assert weight_backend(config.inference, config.resources, adapters=True) == "object_store"


@pytest.mark.parametrize(
    ("architecture", "has", "lacks"),
    [
        ("LlamaForCausalLM", set(ALL), "lm_head"),
        ("MistralForCausalLM", set(ALL), "embed_tokens"),  # of a class in another file
        ("Qwen3MoeForCausalLM", {"q_proj", "o_proj", "gate"}, "w1"),
        # of a language model in another file
        ("Qwen2_5_VLForConditionalGeneration", set(ALL), "lm_head"),
        ("Qwen2VLForConditionalGeneration", set(ALL), "lm_head"),
        ("Qwen3VLForConditionalGeneration", set(ALL), "lm_head"),
        ("Phi3ForCausalLM", {"qkv_proj", "gate_up_proj", "down_proj"}, "lm_head"),
    ],
)
def test_layers_that_take_adapters_are_read_from_vllms_source(architecture: str, has: set[str], lacks: str) -> None:
    layers = adapter_layers(architecture)
    assert layers is not None
    assert has <= layers
    assert lacks not in layers


def test_vllm_is_told_of_the_adapter() -> None:
    spec = engine_spec("model", dtype="bfloat16", device="cuda", adapter=AdapterSpec(rank=9, modules=("q_proj",)))
    arguments = engine_arguments(VLLMConfig(), spec)
    told = {key: value for key, value in arguments.items() if "lora" in key}
    assert told == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,  # the next one that vLLM has
        "lora_target_modules": ["q_proj"],
    }
    assert not [key for key in engine_arguments(VLLMConfig(), replace(spec, adapter=None)) if "lora" in key]
    assert [VLLMConfig().reserved_rank(rank) for rank in (1, 2, 8, 200, 512)] == [1, 8, 8, 256, 512]


def test_adapters_of_another_scale_or_base_are_not_continued(tmp_path: Path) -> None:
    """Their tensors fit, and beside another base, or scaled otherwise, they are another model."""
    lora = {"rank": 8, "alpha": 16}
    (tmp_path / "config.yaml").write_text(
        dump_config(RLVRConfig.from_values(changed(training={"lora": lora}, inference={"type": "hf"})))
    )
    checkpoint = Checkpoint(path=tmp_path, step=1, state={})

    def resumed(**changes: Any) -> RLVRConfig:
        return RLVRConfig.from_values(changed(training={"lora": {**lora, **changes}}, inference={"type": "hf"}))

    refuse_other_run(resumed(dropout=0.1), checkpoint)
    for key, was, now in (("alpha", 16, 32), ("rslora", False, True), ("quantization", None, "nf4")):
        expected = f"were trained with training.lora.{key}: {was}, and this configuration has {now}"
        with pytest.raises(CheckpointError, match=expected) as caught:
            refuse_other_run(resumed(**{key: now}), checkpoint)
        assert str(tmp_path / "config.yaml") in caught.value.fix
