"""Smaller models out of larger ones, and whether two models speak the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_model import make_tiny_model, make_tiny_tokenizer
from transformers import AutoModelForCausalLM

from roll_like.config.model import ModelConfig
from roll_like.errors import ConfigError
from roll_like.models.load import load_tokenizer, resolve_model
from roll_like.models.teachers import refuse_other_tokenizer


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("large"), dtype="float32", layers=4)


def test_the_layers_that_are_kept_compute_what_they_did(large: Path, tmp_path: Path) -> None:
    said: list[str] = []
    config = ModelConfig(path=str(large), keep_layers=(0, 3), cache_dir=tmp_path)
    small = resolve_model(config, say=said.append).path
    assert len(said) == 1
    assert "2 of 4 layers" in said[0]
    assert resolve_model(config, say=said.append).path == small
    assert len(said) == 1, "made once"
    assert load_tokenizer(config).get_vocab() == make_tiny_tokenizer().get_vocab()

    whole, cut = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (large, small))
    whole.model.layers = torch.nn.ModuleList([whole.model.layers[0], whole.model.layers[3]])
    whole.config.num_hidden_layers = 2
    for index, layer in enumerate(whole.model.layers):
        layer.self_attn.layer_idx = index
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(cut(ids).logits, whole(ids, use_cache=False).logits)
    assert cut.config.num_hidden_layers == 2


def test_layers_that_are_not_there(large: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(large), keep_layers=(0, 4), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="keep_layers names layer 4, and the model has layers 0 to 3"):
        resolve_model(config, say=lambda line: None)


def test_other_models_of_a_run_have_all_their_layers() -> None:
    section = ModelConfig(path="a", keep_layers=(0, 2), revision="abc", dtype="float32").at("b")
    assert (section.path, section.keep_layers, section.revision, section.dtype) == ("b", None, None, "float32")


def test_tokenizers_that_differ_are_named(large: Path, tmp_path: Path) -> None:
    ours = make_tiny_tokenizer()
    refuse_other_tokenizer(ours, make_tiny_tokenizer(), key="teachers.t.path", path="x")
    other = make_tiny_model(tmp_path / "other", dtype="float32")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    theirs = load_tokenizer(ModelConfig(path=str(other)))
    with pytest.raises(ConfigError, match=r"teachers\.t\.path.*2 tokens differ, the first is 'a'") as caught:
        refuse_other_tokenizer(ours, theirs, key="teachers.t.path", path=str(other))
    assert "pipeline: sft" in str(caught.value)
