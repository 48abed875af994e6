"""Layers that predict further tokens: they are in the files of every model that is written from one that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import changed
from guessing_models import COPIES, FILE, LAYER, make_mtp_family
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.disk import DiskUse
from roll_like.config.model import ModelConfig
from roll_like.models.export import save_hf_directory
from roll_like.models.load import load_tokenizer, resolve_model
from roll_like.models.modules import load_causal_lm
from roll_like.models.mtp import FurtherLayers, mtp_tensors
from roll_like.models.shape import load_model_shape


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_mtp_family("glm4_moe", tmp_path / "base")


def trained_model(base: Path) -> Any:
    """Return the base with other weights everywhere."""
    model = load_causal_lm(base, "float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def export(model: Any, base: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    tokenizer = load_tokenizer(ModelConfig(path=str(base)))
    save_hf_directory(dict(model.state_dict()), model.config, tokenizer, target, base_dir=base, **options)
    return load_file(target / FILE)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_an_export_has_them(tmp_path: Path, family: str) -> None:
    base = make_mtp_family(family, tmp_path / "base")
    before = load_file(base / FILE)
    model = trained_model(base)
    after = export(model, base, tmp_path / "out")
    assert after.keys() == before.keys()
    own = [name for name in before if name.startswith(LAYER) and name not in COPIES]
    assert len(own) > 10
    for name in own:
        assert torch.equal(after[name], before[name]), name
    for copy, whole in COPIES.items():  # what is one parameter stays one
        assert torch.equal(after[copy], after[whole])
        assert not torch.equal(after[copy], before[copy])
    assert load_model_shape(tmp_path / "out").further_layers == 1
    # an export of the export has them too
    assert export(model, tmp_path / "out", tmp_path / "again").keys() == before.keys()


def test_embeddings_of_their_own_stay(base: Path, tmp_path: Path) -> None:
    copy = next(iter(COPIES))
    weights = load_file(base / FILE)
    weights[copy] = weights[copy] + 1
    save_file(weights, base / FILE, metadata={"format": "pt"})
    after = export(trained_model(base), base, tmp_path / "out")
    assert torch.equal(after[copy], weights[copy])


def test_copies_in_another_precision_are_copies(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / FILE)
    for copy, whole in COPIES.items():
        weights[copy] = weights[whole].to(torch.bfloat16)
    save_file(weights, base / FILE, metadata={"format": "pt"})
    after = export(trained_model(base), base, tmp_path / "out")
    assert all(torch.equal(after[copy], after[whole]) for copy, whole in COPIES.items())


def test_they_have_the_precision_of_the_export(base: Path, tmp_path: Path) -> None:
    for target, model, options in [
        ("asked", trained_model(base), {"dtype": "bfloat16"}),
        ("trained", trained_model(base).to(torch.bfloat16), {}),
    ]:
        after = export(model, base, tmp_path / target, **options)
        assert after[f"{LAYER}eh_proj.weight"].dtype == torch.bfloat16
        # which experts are chosen by stays exact
        assert after[f"{LAYER}mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_a_classifier_has_none(base: Path, tmp_path: Path) -> None:
    """A reward model predicts no tokens."""
    from roll_like.models.classifier import load_classifier

    model = load_classifier(make_tiny_model(tmp_path / "tiny"), "float32", seed=0)
    after = export(model, tmp_path / "tiny", tmp_path / "out", task="text-classification")
    assert after.keys() == model.state_dict().keys()
    assert not FurtherLayers.of(load_causal_lm(tmp_path / "tiny", "float32"), tmp_path / "tiny").own


def test_fewer_layers_have_none(base: Path, tmp_path: Path) -> None:
    """They read what the last layer computes, which a smaller model does not have."""
    config = ModelConfig(path=str(base), keep_layers=(0,), cache_dir=tmp_path)
    smaller = resolve_model(config).path
    assert not any(".layers.1." in name or ".layers.2." in name for name in load_file(smaller / FILE))
    assert json.loads((smaller / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert load_model_shape(smaller).further_layers == 0


def test_they_are_not_counted(base: Path, tmp_path: Path) -> None:
    """No trainer holds them; files do."""
    model, shape = load_causal_lm(base, "float32"), load_model_shape(base)
    assert shape.parameters == sum(each.numel() for each in model.state_dict().values())
    everything = sum(each.numel() for each in load_file(base / FILE).values())
    assert shape.parameters + shape.further_parameters + shape.further_copies == everything
    values = changed(checkpoint={"export": True}, model__dtype="float32")
    assert DiskUse.of(RLVRConfig.from_values(values), shape).export == 4 * everything


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("DeepSeek-V3, GLM-4.5", ["model.layers.48.eh_proj.weight", "model.layers.48.embed_tokens.weight"]),
        ("GLM-4.5V", ["model.language_model.layers.46.eh_proj.weight", "model.language_model.layers.46.enorm.weight"]),
        ("Qwen3-Next", ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"]),
        ("MiMo", ["model.mtp_layers.0.input_proj.weight"]),
        ("ERNIE 4.5", ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"]),
        ("Step 3.7", ["model.layers.48.transformer.norm.weight", "model.layers.48.eh_proj.weight"]),
        ("LongCat", ["model.mtp.layers.0.eh_proj.weight", "model.mtp.embed_tokens.weight"]),
    ],
)
def test_names_of_published_checkpoints(family: str, names: list[str]) -> None:
    others = [
        *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 4, 47)),
        *("lm_head.weight", "visual.blocks.50.attn.qkv.weight", "model.visual.layers.60.norm.weight", "smtp.weight"),
    ]
    assert mtp_tensors([*others, *names]) == sorted(names), family
