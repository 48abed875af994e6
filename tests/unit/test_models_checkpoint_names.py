"""Parameters in memory and tensors of the checkpoint format: experts above all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, load_family, make_family

from roll_like.config.model import ModelConfig
from roll_like.errors import WeightSyncError
from roll_like.inference.hf.weights import CheckpointWeights
from roll_like.models import checkpoint_names
from roll_like.models.checkpoint_names import TensorGroup, checkpoint_tensors, expert_tensors, tensor_groups
from roll_like.models.export import save_hf_directory
from roll_like.models.load import load_tokenizer
from roll_like.models.modules import load_causal_lm

MIXTURES = ["qwen3_moe", "mixtral", "gpt_oss"]


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def converted(model: Any) -> dict[str, torch.Tensor]:
    parameters = parameters_of(model)
    found: dict[str, torch.Tensor] = {}
    for group in tensor_groups(model, {name: tensor.shape for name, tensor in parameters.items()}):
        found.update(checkpoint_tensors(model, group, {name: parameters[name] for name in group.parameters}))
    return found


def stored(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_parameters_are_the_tensors_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    path = make_family(family, tmp_path)
    found, expected = converted(load_family(family, path)), stored(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_parameters_are_converted_one_at_a_time(tmp_path: Path) -> None:
    model = load_causal_lm(make_family("mixtral", tmp_path), "float32")
    groups = tensor_groups(model, {name: tensor.shape for name, tensor in parameters_of(model).items()})
    assert all(len(group.parameters) == 1 for group in groups)
    experts = next(group for group in groups if group.parameters == ("model.layers.0.mlp.experts.down_proj",))
    assert experts.tensors == tuple(
        f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(4)
    )
    assert not experts.unchanged
    assert TensorGroup(("lm_head.weight",), ("lm_head.weight",)) in groups


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_a_few_experts_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    path = make_family(family, tmp_path)
    model = load_family(family, path)
    parameters, expected, found = dict(parameters_of(model)), stored(path), {}
    groups = [each for each in tensor_groups(model, {n: t.shape for n, t in parameters.items()}) if each.experts]
    assert {each.experts for each in groups} == {4}
    for group in groups:
        experts = parameters[group.parameters[0]]
        for numbers in (range(1), range(1, 3), range(3, 4)):
            few = experts[numbers.start : numbers.stop]
            found.update(expert_tensors(model, group, numbers, few))
    assert found.keys() == {name for name in expected if ".experts." in name}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_checkpoint_that_has_all_experts_in_one_tensor(tmp_path: Path) -> None:
    model = load_family("gpt_oss", make_family("gpt_oss", tmp_path))
    groups = tensor_groups(model, {name: tensor.shape for name, tensor in parameters_of(model).items()})
    assert not any(group.experts for group in groups)


def test_parameters_that_one_tensor_holds_are_converted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverted(model: Any, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        fused = [parameters[name] for name in ("k", "q") if name in parameters]
        rest = {name: tensor for name, tensor in parameters.items() if name not in ("k", "q")}
        return {**({"qk": torch.cat(fused)} if fused else {}), **rest}

    monkeypatch.setattr(checkpoint_names, "_reverted", reverted)
    groups = tensor_groups(None, {"q": (2, 3), "norm": (3,), "k": (1, 3)})
    assert groups == [TensorGroup(("q", "k"), ("qk",)), TensorGroup(("norm",), ("norm",))]


def test_a_renaming_that_needs_all_names_converts_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverted(model: Any, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{name}.{len(parameters)}": tensor for name, tensor in parameters.items()}

    monkeypatch.setattr(checkpoint_names, "_reverted", reverted)
    assert tensor_groups(None, {"a": (1,), "b": (1,)}) == [TensorGroup(("a", "b"), ("a.2", "b.2"))]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_transformers_model_takes_checkpoint_tensors_and_gives_them_back(family: str, tmp_path: Path) -> None:
    sent = stored(make_family(family, tmp_path / "sent", seed=1))
    model = load_family(family, make_family(family, tmp_path / "held"))
    weights = CheckpointWeights(model)
    with torch.inference_mode():
        for name, tensor in sent.items():
            weights.write(name, tensor)
    held = dict(weights.read([*sent, "unknown"]))
    assert held.keys() == sent.keys()
    assert all(torch.equal(held[name], sent[name]) for name in sent)
    other = parameters_of(load_family(family, tmp_path / "sent"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in parameters_of(model).items())


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    weights = CheckpointWeights(load_causal_lm(make_family("qwen3_moe", tmp_path), "float32"))
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    with pytest.raises(WeightSyncError, match=rf"sent {name} with shape \(3, 4\); the engine has \(64, 64\)"):
        weights.write(name, torch.zeros(3, 4))
    with pytest.raises(WeightSyncError, match=r"sent lm_head\.weight with shape \(1,\); the engine has \(512, 64\)"):
        weights.write("lm_head.weight", torch.zeros(1))
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(WeightSyncError, match=r"the engine has nothing under that name"):
        weights.write(fused, torch.zeros(4, 128, 64))


@pytest.mark.parametrize("family", MIXTURES)
def test_an_exported_mixture_loads_back_equal(family: str, tmp_path: Path) -> None:
    path = make_family(family, tmp_path / "model")
    model = load_family(family, path)
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    out = save_hf_directory(parameters_of(model), model.config, tokenizer, tmp_path / "export")
    back = parameters_of(load_family(family, out))
    assert all(torch.equal(tensor, back[name]) for name, tensor in parameters_of(model).items())
    assert stored(out).keys() == stored(path).keys()


def test_a_rank_sends_checkpoint_tensors_and_exports_its_own(tmp_path: Path) -> None:
    from roll_like.training.rank import TrainingRank

    path = make_family("mixtral", tmp_path)
    model = load_causal_lm(path, "float32")
    spec: Any = SimpleNamespace(
        dtype="bfloat16",
        frozen=False,
        device="cpu",
        objective=SimpleNamespace(settings=None, hf_model=lambda module: module),
    )
    rank = TrainingRank(spec, 0, 1)
    gathered: list[int] = []

    def hold(parts: list[torch.Tensor]) -> Any:
        gathered.append(len(parts))
        return nullcontext(parts)

    def pairs(experts: torch.Tensor) -> Iterator[tuple[range, torch.Tensor]]:
        asked.append(experts)
        yield from ((range(first, first + 2), experts[first : first + 2]) for first in (0, 2))

    asked: list[torch.Tensor] = []
    backend: Any = SimpleNamespace(sharded=True, gathered=hold, streams_experts=False, experts=pairs)
    rank._backend, rank._model = backend, SimpleNamespace(module=model)  # type: ignore[assignment]
    expected = stored(path)
    for backend.streams_experts in (False, False, True):
        sent = dict(rank.full_weights())
        assert sent.keys() == expected.keys()
        assert all(torch.equal(sent[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert set(gathered) == {1}, "memory for one parameter at a time"
    assert len(asked) == 4, "two parameters of experts in each layer"
    assert [name for name, _ in rank._parameters()] == [name for name, _ in model.named_parameters()]
