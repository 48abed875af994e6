"""The training backend `megatron` before ranks start: its rules, its families, and the order of converted weights."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from roll_like.config.training import TrainingConfig
from roll_like.errors import ConfigError
from roll_like.models.megatron_plan import CONVERTED
from roll_like.training import megatron, megatron_weights
from roll_like.training.megatron import MegatronBackend
from roll_like.training.megatron_weights import OUTPUT, Bundle, Kind, Place, bundle_of, bundles, rank_part, whole_of


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda _: object())
    monkeypatch.setattr(megatron, "version", lambda _: "0.19.2")


def found(**values: Any) -> list[tuple[tuple[str | int, ...], str]]:
    settings = TrainingConfig.model_validate({"backend": "megatron", "zero_stage": 1, **values})
    return [(each.path, each.message) for each in MegatronBackend.violations(settings)]


def test_sizes_that_divide_the_ranks_are_taken() -> None:
    sizes = {"workers": 16, "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4, "sequence_parallel": 2}
    assert found(**sizes) == []
    assert MegatronBackend.data_ranks(TrainingConfig(backend="megatron", **sizes)) == 2


@pytest.mark.parametrize(
    ("values", "key", "says"),
    [
        ({"zero_stage": 3}, "zero_stage", "found zero_stage: 3. Set it to 1 or 0"),
        ({"offload": "optimizer"}, "offload", "megatron has no offload; remove the key, or set backend: deepspeed"),
        ({"lora": {}}, "lora", "megatron has no lora; remove the key, or set backend: fsdp2 or deepspeed"),
        ({"compile": True}, "compile", "megatron has no compile; remove the key, or set backend: fsdp2"),
        ({"attention": "dense"}, "attention", "use varlen or auto"),
        ({"workers": 6, "tensor_parallel": 2, "pipeline_parallel": 2}, "workers", "set it to a multiple of 4"),
        (
            {"workers": 4, "pipeline_parallel": 2, "expert_parallel": 4},
            "expert_parallel",
            "2 workers of a pipeline stage",
        ),
        ({"virtual_pipeline": 2}, "virtual_pipeline", "set pipeline_parallel: 2 or more"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], key: str, says: str) -> None:
    ((path, message),) = found(**values)
    assert path == (key,)
    assert says in message


def test_a_missing_or_old_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "version", lambda _: "0.16.1")
    ((path, message),) = found()
    assert path == ("backend",)
    assert "0.19.2 or newer, and 0.16.1 is installed" in message
    assert "scripts/megatron.sh" in message
    monkeypatch.setattr(megatron, "version", lambda _: "0.20.0rc1")
    assert found() == []

    def none(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(megatron, "version", none)
    assert found() == []
    monkeypatch.setattr(megatron, "find_spec", lambda _: None)
    ((_, message),) = found()
    assert "which is not installed; run scripts/megatron.sh" in message


def model(kind: str = "qwen3", **changed: Any) -> Any:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    return AutoConfig.for_model(kind, **{**shape, **changed})


@pytest.mark.parametrize("kind", CONVERTED)
def test_models_with_a_converter_are_taken(kind: str) -> None:
    sizes = {"tensor_parallel": 4, "pipeline_parallel": 2, "virtual_pipeline": 2, "sequence_parallel": 2}
    MegatronBackend.refuse_model(model(kind), TrainingConfig(backend="megatron", workers=16, **sizes))


@pytest.mark.parametrize(
    ("config", "sizes", "says"),
    [
        (model("gemma2"), {}, "has converters for llama, qwen2, qwen3, qwen3_moe models, and this one is gemma2"),
        (model("llama", mlp_bias=True), {}, r"does not compute the biases \(mlp_bias\)"),
        (model("llama", attention_bias=True), {}, "attention_bias"),
        (model("llama", hidden_act="gelu"), {}, "hidden_act: gelu"),
        (model(attention_dropout=0.1), {}, "attention_dropout"),
        (model("qwen3_moe", mlp_only_layers=[1]), {}, "layers without experts between"),
        (
            model(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
            {},
            "rope_type: yarn",
        ),
        (model(), {"tensor_parallel": 8}, r"has 4 key heads\n  fix: set it to one of 1, 2, 4$"),
        (model(), {"tensor_parallel": 3}, "key heads"),
        (model(intermediate_size=97), {"tensor_parallel": 2}, "97 inner units"),
        (model(), {"tensor_parallel": 4, "sequence_parallel": 4}, "sequence_parallel: 16 divides .* 8 query heads"),
        (model(), {"pipeline_parallel": 3}, "has 4 layers\n"),
        (model(), {"pipeline_parallel": 2, "virtual_pipeline": 4}, "pipeline_parallel times virtual_pipeline: 8"),
        (model(), {"expert_parallel": 2}, "the model has none"),
        (model("qwen3_moe", num_experts=6), {"expert_parallel": 4}, "6 experts in a layer"),
        (model("qwen3_moe", moe_intermediate_size=31), {"expert_tensor_parallel": 2}, "31 inner units of an expert"),
    ],
)
def test_other_models_are_refused_by_name(config: Any, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MegatronBackend.refuse_model(config, TrainingConfig(backend="megatron", **sizes))


# ---- converted weights -----------------------------------------------------------------------------


def place(rank: int = 0, size: int = 1, experts: tuple[int, int] = (0, 1)) -> Place:
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    expert: Any = SimpleNamespace(rank=lambda: experts[0], size=lambda: experts[1])
    return Place(tensor=group, expert_tensor=group, expert=expert, queries=4, groups=2, vocabulary=5)


#: Query, key and value heads of one row and one column each: 4, 2 and 2.
HEADS = [torch.tensor([[10.0], [11], [12], [13]]), torch.tensor([[20.0], [21]]), torch.tensor([[30.0], [31]])]
EXPERTS = torch.arange(2 * 4 * 3.0).view(2, 4, 3)
WHOLE: dict[Kind, list[torch.Tensor]] = {
    "whole": [torch.arange(3.0)],
    "heads": HEADS,
    "gated": [torch.tensor([[1.0], [2]]), torch.tensor([[3.0], [4]])],
    "rows": [torch.arange(8.0).view(2, 4)],
    "vocabulary": [torch.arange(10.0).view(5, 2)],
    "expert_gated": [EXPERTS],
    "expert_rows": [EXPERTS.transpose(1, 2)],
}


def test_parts_are_in_megatrons_order() -> None:
    """By hand: a key head after its queries and before its value; a rank's part of both halves of a gated pair."""

    def column(kind: Kind, rank: int) -> list[float]:
        (part,) = rank_part(kind, WHOLE[kind], place(rank, 2))
        return part[:, 0].tolist()

    assert column("heads", 0) == [10, 11, 20, 30]
    assert column("heads", 1) == [12, 13, 21, 31]
    assert column("gated", 1) == [2, 4]
    assert column("vocabulary", 0) == [0, 2, 4]
    assert column("vocabulary", 1) == [6, 8, 0]  # the last row fills up
    first, second = rank_part("expert_gated", [EXPERTS], place(1, 2))
    assert torch.equal(first, EXPERTS[0][[1, 3]])
    assert torch.equal(second, EXPERTS[1][[1, 3]])


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("divided", ["tensor", "experts"])
def test_what_ranks_have_is_the_whole_again(kind: Kind, divided: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [place(rank, 2) if divided == "tensor" else place(experts=(rank, 2)) for rank in range(2)]
    own = [list(rank_part(kind, WHOLE[kind], each)) for each in places]
    sent: list[torch.Tensor] = []

    def told(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
        if group.size() == 1:
            return [tensor]
        sent.append(tensor)
        return [tensor, tensor] if len(sent) == 1 else sent[-2:]

    monkeypatch.setattr(megatron_weights, "_told", told)
    for parts, each in zip(own, places, strict=True):  # the second rank hears the first one's
        whole = whole_of(kind, parts, each)
    for expected, got in zip(WHOLE[kind], whole, strict=True):
        assert torch.equal(expected, got)


def test_names_are_those_of_transformers() -> None:
    assert bundle_of("decoder.layers.1.mlp.linear_fc1.weight", 4)[0] == Bundle(
        "gated", ("layers.5.mlp.gate_proj.weight", "layers.5.mlp.up_proj.weight")
    )
    assert bundle_of(OUTPUT, 4)[0] == Bundle("vocabulary", (OUTPUT,))
    assert bundle_of("extra.1", 4)[0] == Bundle("whole", ("extra.1",))
    with pytest.raises(KeyError, match=r"decoder\.layers\.1\.mlp\.unknown"):
        bundle_of("decoder.layers.1.mlp.unknown", 0)
    names = [f"decoder.layers.0.mlp.experts.local_experts.{index}.linear_fc2.weight" for index in (1, 0)]
    (own,) = bundles([(names[0], torch.ones(1)), (names[1], torch.zeros(1))], 0).values()
    assert [float(each) for each in own] == [0, 1]
