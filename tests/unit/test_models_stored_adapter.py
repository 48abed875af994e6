"""Adapters in folders: what is read of them, and what is refused, with the key to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_files import changed
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.model import check_adapters
from roll_like.errors import ConfigError
from roll_like.inference.adapters import adapter_choice
from roll_like.inference.interface import FrozenAdapter
from roll_like.models.modules import empty_model, load_causal_lm, load_model_config
from roll_like.models.stored_adapter import StoredAdapter

KEY = "evaluation.adapters.sft"


@pytest.fixture(scope="module")
def stored(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that peft has written."""
    folder = tmp_path_factory.mktemp("adapter")
    lora = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "down_proj"])
    get_peft_model(load_causal_lm(tiny_model, "float32"), lora).save_pretrained(str(folder))
    return folder


def rewritten(stored: Path, folder: Path, **config: Any) -> Path:
    """A copy with other settings."""
    folder.mkdir()
    for file in stored.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_rank_layers_and_base_are_read(stored: Path, tiny_model: Path) -> None:
    found = StoredAdapter.read(stored, KEY)
    assert (found.rank, found.modules, found.path) == (3, ("down_proj", "q_proj"), stored.resolve())
    assert found.layers["model.layers.1.self_attn.q_proj"] == (64, 128)
    assert len(found.layers) == 4
    found.require_base(empty_model(load_model_config(tiny_model), False), str(tiny_model), KEY)


def test_folders_without_an_adapter_are_refused(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{KEY}: there is no directory .*missing") as said:
        StoredAdapter.read(tmp_path / "missing", KEY)
    assert said.value.fix == "correct the path to a directory that peft has written, or `model/adapter` of a run"
    with pytest.raises(ConfigError, match=rf"{KEY}: .* has no adapter_config.json"):
        StoredAdapter.read(tmp_path, KEY)
    damaged = rewritten(stored, tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=rf"{KEY}: the adapter in .* cannot be read: adapter_model.safetensors"):
        StoredAdapter.read(damaged, KEY)


@pytest.mark.parametrize(
    ("name", "value"), [("use_dora", True), ("peft_type", "IA3"), ("bias", "all"), ("modules_to_save", ["lm_head"])]
)
def test_adapters_that_are_not_plain_are_refused(stored: Path, tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{KEY}: .*adapter_config.json has {name}: "):
        StoredAdapter.read(rewritten(stored, tmp_path / "changed", **{name: value}), KEY)


def values(model: Path, **evaluation: Any) -> dict[str, Any]:
    section = {"sources": [{"path": "eval.jsonl"}], **evaluation}
    return changed(training={"lora": {"rank": 4}}, inference={}, model={"path": str(model)}, evaluation=section)


def test_the_engine_holds_the_adapters_that_evaluation_measures(tiny_model: Path, stored: Path) -> None:
    config = RLVRConfig.from_values(values(tiny_model, base_model=True, adapters={"sft": str(stored)}))
    choice = adapter_choice(config, tiny_model)
    assert choice.adapter is not None
    modules = ("down_proj", "q_proj")
    assert choice.adapter.frozen == (FrozenAdapter(name="sft", path=str(stored), rank=3, modules=modules),)
    assert choice.adapter.names == ("policy", "base", "sft")
    assert config.adapter_keys == ("evaluation.base_model", "evaluation.adapters")
    alone = config.evaluating("other/model").evaluation
    assert alone is not None
    assert (alone.base_model, alone.adapters) == (False, {})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training": {}}, "evaluation.base_model\n  engines have the base model beside the policy only where"),
        ({"inference__lora": False}, "evaluation.base_model\n  adapters are merged into the weights of these"),
        (
            {"inference": {"type": "hf"}},
            "evaluation.base_model\n  adapters are merged into the weights of these",
        ),
        ({"evaluation__adapters": {"policy": "x"}}, "'policy' has a meaning of its own"),
        ({"evaluation__adapters": {"a/b": "x"}}, "String should match pattern"),
    ],
)
def test_what_has_no_base_model_beside_the_policy_is_refused(
    tiny_model: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError) as said:
        RLVRConfig.from_values(changed(values(tiny_model, base_model=True), **changes))
    assert expected in str(said.value)


def test_adapters_that_do_not_fit_are_found_before_the_run(tiny_model: Path, stored: Path, tmp_path: Path) -> None:
    def found(path: Path, **changes: Any) -> str:
        settings = changed(values(tiny_model, adapters={"sft": str(path)}), **changes)
        config = RLVRConfig.from_values(settings)
        (finding,) = check_adapters(config, config.model)
        return str(finding)

    assert found(stored) == "note: inference.lora: adapters alone are sent to the engines"
    assert found(tmp_path / "missing").startswith(f"error: {KEY}: there is no directory")
    assert found(stored, training__lora={"rank": 600}) == (
        "error: evaluation.adapters: the engine would have no base model beside the policy, because adapters cannot be "
        "sent alone: the rank is 600, and vLLM takes adapters up to rank 512; remove the key"
    )


def test_an_adapter_of_another_model_is_refused(stored: Path, tiny_model: Path, tmp_path: Path) -> None:
    config = load_model_config(tiny_model)
    named = StoredAdapter.read(rewritten(stored, tmp_path / "named", base_model_name_or_path="org/other"), KEY)
    model = empty_model(config, False)
    named.require_base(model, str(tiny_model), KEY)  # a directory may have any model in it
    with pytest.raises(ConfigError, match=rf"{KEY}: the adapter in .* is of org/other .* model.path is org/this"):
        named.require_base(model, "org/this", KEY)
    config.intermediate_size = 96
    with pytest.raises(
        ConfigError, match=r"layer model\.layers\.\d\.mlp\.down_proj of 128 × 64, and org/this has one of 96 × 64"
    ):
        named.require_base(empty_model(config, False), "org/this", KEY)
    config.num_hidden_layers = 1
    config.intermediate_size = 128
    with pytest.raises(ConfigError, match=r"a layer model\.layers\.1\..*, and org/this has none of that name"):
        named.require_base(empty_model(config, False), "org/this", KEY)
