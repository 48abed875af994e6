"""Which mixtures ranks can divide the experts of; that they learn as before is tested on ranks (`integration`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import make_family
from transformers import AutoConfig, AutoModelForCausalLM, Llama4ForCausalLM, Llama4TextConfig

from roll_like.errors import ConfigError
from roll_like.models.experts import expert_layers, refuse_undivided_experts
from roll_like.models.shape import load_model_shape


@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 2), ("gpt_oss", 2), ("mixtral", 2), ("deepseek_v3", 1)])
def test_layers_with_experts(family: str, layers: int, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_family(family, tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = expert_layers(model)
    assert len(found) == layers
    assert {len(parameter) for experts in found for parameter in experts.parameters()} == {4}
    refuse_undivided_experts(config, 2)
    with pytest.raises(ConfigError, match="a layer of the model has 4") as caught:
        refuse_undivided_experts(config, 8)
    assert caught.value.fix == "set it to one of 1, 2, 4"


def test_experts_that_transformers_computes_in_a_way_of_their_own() -> None:
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_local_experts=4, head_dim=8
    )
    with torch.device("meta"):
        model = Llama4ForCausalLM(config)
    with pytest.raises(ConfigError, match="ranks cannot divide the experts of Llama4TextExperts"):
        expert_layers(model)


def test_models_without_experts(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_family("llama", tmp_path))
    refuse_undivided_experts(config, 1)
    with pytest.raises(ConfigError, match="2 divides experts among 2 ranks, and no layer of the model has any"):
        refuse_undivided_experts(config, 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="ranks cannot divide the experts of LlamaForCausalLM"):
        expert_layers(model)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("qwen3_moe", {"decoder_sparse_step": 3}),
        ("deepseek_v3", {"first_k_dense_replace": 2}),
    ],
)
def test_mixtures_whose_layers_are_all_dense(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_family(family, tmp_path), **changes)
    with pytest.raises(ConfigError, match="no layer of the model has any"):
        refuse_undivided_experts(config, 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert not any(hasattr(module, "experts") for module in model.modules())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    shape = load_model_shape(tmp_path, weights=False)
    assert shape.experts == shape.expert_parameters == 0
    assert shape.parameters == sum(each.numel() for each in model.parameters())
