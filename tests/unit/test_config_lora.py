"""What a configuration with adapters refuses, its plan, and what its check finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import changed
from pydantic import BaseModel, ValidationError

from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.check.findings import Finding
from roll_like.check.model import check_model
from roll_like.config.plan import plan, trained_parameters

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


class Billion:
    """A model of 2³⁰ parameters with layers of 2²⁰ inputs and outputs in all."""

    parameters = 2**30
    adapted_width = 2**20
    embedding_parameters = 2**20
    layers, layer_parameters = 2, 2**28

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        return 100 * bytes_per_value


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
    with pytest.raises(ValidationError) as caught:
        kind.from_values(changed(base, **changes))
    found = {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}
    assert expected in found.get(key, ""), found


def test_adapters_are_the_trainers_and_not_the_critics() -> None:
    critic = changed(algorithm={"advantage": "gae"}, critic={"lora": {}})
    with pytest.raises(ValidationError, match=r"critic\.lora"):
        RLVRConfig.from_values(critic)
    for kind in (RLVRConfig, AgenticConfig, SFTConfig, DPOConfig):
        assert "lora" in kind.model_fields["training"].annotation.model_fields


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
    parts = dict(plan(config, Billion()).memory[0].parts)
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
