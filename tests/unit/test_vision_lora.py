"""Adapters of vision-language models: where they go, and what transformers and peft compute with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import changed
from dequantised import dequantised
from peft import LoraConfig, PeftModel, get_peft_model
from test_models_lora import move
from tiny_vision import make_vision_model, plain_logprobs, samples_of

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.model import check_adapters, check_model
from roll_like.config.model import ModelConfig
from roll_like.config.training import LoRAConfig
from roll_like.errors import ConfigError
from roll_like.inference.adapters import adapter_choice
from roll_like.inference.interface import AdapterSpec
from roll_like.models.export import save_hf_directory
from roll_like.models.load import load_tokenizer
from roll_like.models.lora import (
    Adapter,
    adapted_layers,
    adapter_parameters,
    adapters_off,
    add_adapters,
    linear_layers,
    named_weights,
    quantized_layers,
    targets,
)
from roll_like.models.modules import load_causal_lm
from roll_like.models.stored_adapter import StoredAdapter
from roll_like.models.vision import processor_files
from roll_like.training.backbone import use_row_attention
from roll_like.training.layout import micro_batches
from roll_like.training.policy import PolicyModule, tensors_of

SETTINGS = {"rank": 4, "alpha": 8}
MODULES = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
LANGUAGE = r".*\.language_model\..*_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose tower has other names."""
    return make_vision_model("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose language model sees features of the tower's inner layers."""
    return make_vision_model("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def adapted(folder: Path, *, trained: bool = True, **settings: Any) -> Any:
    """The tiny model with adapters, which have moved away from nothing where they are trained."""
    model = load_causal_lm(folder, "float32")
    add_adapters(model, LoRAConfig(**SETTINGS, **settings), seed=3)
    if trained:
        move(model)
    return model.eval()


def trainer_logprobs(model: Any, folder: Path) -> torch.Tensor:
    """What the trainer computes of every sampled token, by sample and place, shape [N]."""
    use_row_attention(model, row_sharing=None)
    policy = PolicyModule(model, chunk_tokens=64, chunk_vocab=512)
    places: dict[tuple[int, int], torch.Tensor] = {}
    ((batches),) = micro_batches(samples_of(folder), ranks=1, max_tokens=400, share_prompts=True)
    for batch in batches:
        logprobs, _ = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        places |= dict(
            zip(zip(batch.sample_ids.tolist(), batch.target_ids.tolist(), strict=True), logprobs, strict=True)
        )
    return torch.stack([places[place] for place in sorted(places)])


def transformers_logprobs(model: Any, folder: Path) -> torch.Tensor:
    """The same, each sample by itself, by transformers' own forward pass."""
    found = [
        plain_logprobs(model, folder, each.token_ids, each.images)[each.loss_mask[1:]] for each in samples_of(folder)
    ]
    return torch.cat(found)


def loss_of(logprobs_N: torch.Tensor) -> torch.Tensor:
    return (logprobs_N * torch.arange(1.0, 1 + len(logprobs_N)).sin()).sum()


def test_the_language_model_gets_adapters_and_the_tower_none(folder: Path) -> None:
    model = adapted(folder)
    with_adapters = {name for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    assert len(with_adapters) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in with_adapters)
    assert {name for name, each in model.named_parameters() if each.requires_grad} == {
        f"{name}.lora_{side}.default.weight" for name in with_adapters for side in "AB"
    }
    # the tower has layers of these names
    tower = {name.rpartition(".")[2] for name, _ in model.model.visual.named_modules()}
    assert {"gate_proj", "up_proj", "down_proj"} <= tower
    only = adapted(folder, target_modules=("gate_proj", "0.mlp.up_proj"))
    assert [name for name, layer in only.named_modules() if hasattr(layer, "lora_A")] == [
        "model.language_model.layers.0.mlp.gate_proj",
        "model.language_model.layers.0.mlp.up_proj",
        "model.language_model.layers.1.mlp.gate_proj",
    ]


@pytest.mark.parametrize("name", ["qkv", "visual.blocks.0.mlp.gate_proj", "fc1"])
def test_layers_of_the_tower_are_refused(name: str, folder: Path, qwen2_vl: Path) -> None:
    model = load_causal_lm(qwen2_vl if name == "fc1" else folder, "float32")
    assert any(each.endswith(name) for each, _ in model.named_modules())
    expected = (
        f"no linear layer '{name}' in the blocks of its language model; it has down_proj, gate_proj, k_proj, o_proj"
    )
    with pytest.raises(ConfigError, match=expected):
        add_adapters(model, LoRAConfig(target_modules=("q_proj", name)), seed=0)
    assert targets(model, LoRAConfig()) == MODULES
    assert len(linear_layers(model)) == len(adapted_layers(model, LoRAConfig())) == 14


def test_untrained_or_switched_off_the_model_computes_as_the_base(folder: Path) -> None:
    base = trainer_logprobs(load_causal_lm(folder, "float32").eval(), folder).detach()
    assert torch.equal(trainer_logprobs(adapted(folder, trained=False), folder), base)
    model = adapted(folder)
    assert float((trainer_logprobs(model, folder).detach() - base).abs().max()) > 0.05
    with adapters_off(model):
        assert torch.equal(trainer_logprobs(model, folder), base)


@pytest.mark.parametrize("family", ["folder", "qwen2_vl", "qwen3_vl"])
def test_logprobs_and_gradients_are_those_of_peft_and_of_the_merged_model(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(family)
    ours = adapted(folder)
    logprobs_N = trainer_logprobs(ours, folder)
    loss_of(logprobs_N).backward()

    config = LoraConfig(r=4, lora_alpha=8, target_modules=LANGUAGE, task_type="CAUSAL_LM")
    theirs = get_peft_model(load_causal_lm(folder, "float32"), config).eval()
    weights = {f"base_model.model.{name}": each for name, each in ours.named_parameters() if "lora_" in name}
    assert not theirs.load_state_dict(weights, strict=False).unexpected_keys
    expected_N = transformers_logprobs(theirs.base_model.model, folder)
    assert float((logprobs_N - expected_N).detach().abs().max()) < 1e-4
    loss_of(expected_N).backward()
    gradients = {name: each.grad for name, each in theirs.named_parameters() if each.requires_grad}
    assert gradients.keys() == weights.keys()
    largest = max(float(each.abs().max()) for each in gradients.values())
    for name, gradient in gradients.items():
        assert float((weights[name].grad - gradient).abs().max()) < 1e-4 * largest, name
    assert all(each.grad is None for name, each in ours.named_parameters() if "lora_" not in name)

    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    adapter = Adapter.of(
        ours, LoRAConfig(**SETTINGS), dict(adapter_parameters(ours)), base=str(folder), task="text-generation"
    )
    merged = ((weight.name, weight.merged(torch.float32)) for weight in named_weights(ours))
    out = save_hf_directory(
        merged, ours.config, tokenizer, tmp_path / "model", adapter=adapter, more_files=processor_files(folder)
    )
    with torch.no_grad():
        whole = transformers_logprobs(load_causal_lm(out, "float32").eval(), out)
        loaded = PeftModel.from_pretrained(load_causal_lm(folder, "float32"), out / "adapter").eval()
        beside = transformers_logprobs(loaded.base_model.model, folder)
    for found_N in (whole, beside):
        assert float((found_N - logprobs_N).detach().abs().max()) < 1e-4
    assert not [name for name, _ in loaded.named_parameters() if "visual" in name and "lora_" in name]
    stored = StoredAdapter.read(out / "adapter", "key")
    assert (stored.modules, stored.rank) == (MODULES, 4)
    stored.require_base(load_causal_lm(folder, "float32"), str(folder), "key")


def test_the_base_in_4_bits_leaves_the_tower_as_it_is(folder: Path, tmp_path: Path) -> None:
    model, lora = load_causal_lm(folder, "float32"), LoRAConfig(**SETTINGS, quantization="nf4")
    assert quantized_layers(model, lora) == adapted_layers(model, lora)
    tower = {name: each.clone() for name, each in model.model.visual.named_parameters()}
    add_adapters(model, lora, seed=3)
    for name, each in model.model.visual.named_parameters():
        assert torch.equal(each, tower[name])
    found = trainer_logprobs(model.eval(), folder).detach()
    (tmp_path / "to").mkdir()
    plain = load_causal_lm(dequantised(folder, tmp_path / "to" / "model"), "float32").eval()
    with torch.no_grad():
        expected = transformers_logprobs(plain, folder)
        base = transformers_logprobs(load_causal_lm(folder, "float32").eval(), folder)
    assert float((found - expected).abs().max()) < 1e-4
    assert float((found - base).abs().max()) > 1e-3


def test_an_adapter_of_the_tower_is_not_served(folder: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["gate_proj"], task_type="CAUSAL_LM")  # in both
    get_peft_model(load_causal_lm(folder, "float32"), config).save_pretrained(str(tmp_path))
    stored = StoredAdapter.read(tmp_path, "evaluation.adapters.sft")
    expected = r"evaluation\.adapters\.sft: .* changes 2 layers of the vision tower, such as model\.visual\.blocks\.0"
    with pytest.raises(ConfigError, match=expected):
        stored.require_base(load_causal_lm(folder, "float32"), str(folder), "evaluation.adapters.sft")


def test_the_check_says_what_engines_are_sent_and_counts_the_language_model(
    folder: Path, qwen2_vl: Path, qwen3_vl: Path
) -> None:
    def config(**changes: Any) -> RLVRConfig:
        values = changed(training={"lora": {"rank": 4}}, inference={}, model={"path": str(folder)})
        return RLVRConfig.from_values(changed(values, **changes))

    def said(**changes: Any) -> list[str]:
        return [str(finding) for finding in check_adapters(config(**changes), config().model)]

    assert said() == ["note: inference.lora: adapters alone are sent to the engines"]
    assert said(inference={"type": "hf"}) == []
    assert adapter_choice(config(inference__lora=True), folder).adapter == AdapterSpec(rank=4, modules=MODULES)
    assert adapter_choice(config(inference={"type": "hf"}), folder).adapter is None
    for other in (qwen2_vl, qwen3_vl):
        assert adapter_choice(config(), other).adapter == AdapterSpec(rank=4, modules=MODULES)

    findings: list[Any] = []
    _, shape = check_model(config(), findings)
    assert findings == []
    assert shape is not None
    assert shape.adapted_width == sum(map(sum, linear_layers(load_causal_lm(folder, "float32")).values()))
    check_model(config(training__freeze_vision=False), findings)
    (finding,) = findings
    assert "training.freeze_vision: false trains the vision tower, where training.lora trains adapters" in str(finding)
    assert "set training.freeze_vision: true, or remove training.lora" in str(finding)
