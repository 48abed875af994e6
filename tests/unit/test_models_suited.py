"""What is no model to train is refused before a run, with what to change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import make_family
from tiny_model import make_tiny_model

from roll_like.errors import ConfigError
from roll_like.models.modules import load_causal_lm
from roll_like.models.stored import weight_files
from roll_like.models.suited import refuse_unsuited

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Weights = dict[str, torch.Tensor]


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


def edit(directory: Path, weights: Callable[[Weights], None] | None = None, **config: Any) -> None:
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, **config}))
    if weights is not None:
        found = load_file(directory / "model.safetensors")
        weights(found)
        save_file(found, directory / "model.safetensors", metadata={"format": "pt"})


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_unsuited(directory)
    return f"{caught.value.message} → {caught.value.fix}"


def test_a_model_is_one(copy: Path, tmp_path: Path) -> None:
    refuse_unsuited(copy)
    refuse_unsuited(make_family("qwen3_moe", tmp_path / "moe"))


def test_an_adapter_beside_the_weights(copy: Path) -> None:
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    assert "adapter (adapter_config.json) beside a model" in refused(copy)
    with pytest.raises(ConfigError, match="beside a model"):
        load_causal_lm(copy, "float32")
    (copy / "config.json").unlink()
    assert "holds an adapter of org/base, and no model → merge it" in refused(copy)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_weights(copy: Path, key: str) -> None:
    def quantise(weights: Weights) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.ones(1, 1)

    edit(copy, quantise, **{key: {"quant_method": "fp8"}})
    message = refused(copy)
    assert "are quantised (fp8), and cannot be trained" in message
    assert "training.lora.quantization: nf4" in message
    with pytest.raises(ConfigError, match="are quantised"):
        load_causal_lm(copy, "float32")
    edit(copy, **{key: None})
    assert "holds quantised weights" in refused(copy)
    assert "of which config.json says nothing" in refused(copy)


@pytest.mark.parametrize("part", ["qweight", "weight_packed", "weight.absmax"])
def test_integers_that_stand_for_weights(copy: Path, part: str) -> None:
    edit(copy, lambda weights: weights.update({f"model.layers.0.mlp.up_proj.{part}": torch.ones(2, 2).int()}))
    assert "holds quantised weights" in refused(copy)


def test_a_quantisation_that_the_files_do_not_have(copy: Path) -> None:
    edit(copy, quantization_config={"quant_method": "awq", "bits": 4})
    message = refused(copy)
    assert "quantised (awq), and the files hold ordinary ones → remove quantization_config from config.json" in message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "an encoder with a decoder, t5 (T5For"),
        ({"model_type": "bart", "architectures": ["BartModel"]}, "an encoder with a decoder, bart"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "holds an encoder, bert (BertForMaskedLM)"),
        ({"model_type": "vit"}, "holds vit"),
        ({"model_type": "llava"}, "vision-language model of a family whose images are not supported"),
    ],
)
def test_other_architectures(tmp_path: Path, copy: Path, config: dict[str, Any], expected: str) -> None:
    (copy / "config.json").write_text(json.dumps(config))
    message = refused(copy)
    assert expected in message
    assert "set model.path to a decoder-only language model" in message
    assert len(message) < 500  # and not transformers' list of all classes


def test_tied_embeddings_that_are_not_one(copy: Path) -> None:
    edit(copy, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    refuse_unsuited(copy)  # two copies of the same numbers are one
    edit(copy, lambda weights: weights[HEAD].mul_(2))
    message = refused(copy)
    assert f"says that {HEAD} is {EMBEDDING} (tie_word_embeddings: true), and the files hold both" in message
    assert "set tie_word_embeddings: false" in message
    with pytest.raises(ConfigError, match="the files hold both"):
        load_causal_lm(copy, "float32")
    edit(copy, tie_word_embeddings=False)
    refuse_unsuited(copy)


def test_an_output_that_is_not_there(copy: Path) -> None:
    edit(copy, tie_word_embeddings=False)
    message = refused(copy)
    assert f"holds no {HEAD}, and its config.json says tie_word_embeddings: false" in message
    assert "set tie_word_embeddings: true" in message


def test_tensors_that_are_missing_or_have_another_shape(copy: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit(copy, lambda weights: weights.update({name: weights[name][:, :-1].contiguous()}))
    assert f"first: {name} ([128, 63] in the files, [128, 64] by config.json)" in refused(copy)
    edit(copy, lambda weights: weights.__delitem__(name))
    assert f"1 of the model's tensors are missing in {copy}, or have another shape; first: {name}" in refused(copy)
    moe = make_family("qwen3_moe", tmp_path / "moe")
    edit(moe, lambda weights: weights.__delitem__("model.layers.1.mlp.experts.2.up_proj.weight"))
    assert "its experts are not those that config.json describes" in refused(moe)


def test_files_that_the_index_names_are_all_there(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    files = {f"model-0000{number}-of-00003.safetensors": names[number - 1 :: 3] for number in (1, 2, 3)}
    for file, own in files.items():
        save_file({name: weights[name] for name in own}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "consolidated.safetensors").touch()  # of another format: not read
    assert weight_files(directory) == [directory / file for file in files]
    refuse_unsuited(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    message = refused(directory)
    assert "lacks 1 of the 3 files that model.safetensors.index.json names: model-00002-of-00003.safetensors" in message
    (directory / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert "model.safetensors.index.json cannot be read" in refused(directory)


def test_shards_need_their_index(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    for number in (1, 2):
        own = {name: weights[name] for name in sorted(weights)[number - 1 :: 2]}
        save_file(own, directory / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
    message = refused(directory)
    assert "2 files of weights (model-00001-of-00002.safetensors, …) and no model.safetensors.index.json" in message
    assert "→ add model.safetensors.index.json" in message


def test_a_config_with_fewer_layers_than_the_files(copy: Path) -> None:
    edit(copy, num_hidden_layers=1)
    message = refused(copy)
    assert "num_hidden_layers: 1" in message
    assert "the files hold 2 layers" in message
    assert "→ set num_hidden_layers: 2 in config.json" in message
