"""The training backend `megatron` before ranks start: its rules, its families, and the order of converted weights."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll_like.config.training import TrainingConfig
from roll_like.errors import ConfigError
from roll_like.models.megatron_plan import CONVERTED, Mixture, layers_of_stages, window_of
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
    monkeypatch.setattr(megatron, "FOUND_PYTHON", (3, 12))
    assert found() == []
    monkeypatch.setattr(megatron, "FOUND_PYTHON", (3, 11))
    ((path, message),) = found()
    assert path == ("backend",)
    assert "megatron-core 0.20.0rc1 needs Python 3.12 or newer, and this is 3.11, where only 0.19.2" in message
    assert "run scripts/megatron.sh" in message

    def none(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(megatron, "version", none)
    assert found() == []
    monkeypatch.setattr(megatron, "find_spec", lambda _: None)
    ((_, message),) = found()
    assert "which is not installed; run scripts/megatron.sh" in message


def test_half_of_transformer_engine_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyPI's package `transformer-engine` alone raises when it is imported, and that is no ImportError."""
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(megatron, "find_spec", lambda name: spec if name == "transformer_engine" else object())
    ((path, message),) = found()
    assert path == ("backend",)
    assert "Transformer Engine is installed without its part for PyTorch" in message
    assert "pip uninstall transformer-engine" in message
    (tmp_path / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()
    assert found() == []


def model(kind: str = "qwen3", **changed: Any) -> Any:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    return AutoConfig.for_model(kind, **{**shape, **changed})


@pytest.mark.parametrize("kind", CONVERTED)
def test_models_with_a_converter_are_taken(kind: str) -> None:
    sizes = {"tensor_parallel": 4, "pipeline_parallel": 2, "virtual_pipeline": 2, "sequence_parallel": 2}
    more = {"moe_intermediate_size": 1408} if kind == "deepseek_v2" else {}
    MegatronBackend.refuse_model(model(kind, **more), TrainingConfig(backend="megatron", workers=16, **sizes))


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(61, 8, [7, 8, 8, 8, 8, 8, 7, 7]), (4, 2, [2, 2]), (5, 2, [3, 2]), (5, 4, [1, 2, 1, 1]), (3, 3, [1, 1, 1])],
)
def test_stages_in_the_middle_have_more_layers(layers: int, stages: int, counts: list[int]) -> None:
    assert layers_of_stages(layers, stages) == counts


def test_layers_with_experts_are_those_of_transformers() -> None:
    with torch.device("meta"):
        for kind, more in (
            ("deepseek_v3", {"first_k_dense_replace": 3}),
            ("glm4_moe", {"first_k_dense_replace": 1}),
            ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
            ("gpt_oss", {}),
        ):
            config = model(kind, **more)
            layers = AutoModelForCausalLM.from_config(config).model.layers
            found = Mixture.of(config)
            assert found is not None
            assert found.layers == tuple(hasattr(layer.mlp, "experts") for layer in layers), kind
    assert Mixture.of(model("llama")) is None


def test_groups_of_experts_and_shared_ones_are_those_of_deepseek_v3() -> None:
    found = Mixture.of(AutoConfig.for_model("deepseek_v3", n_shared_experts=2))
    assert found == Mixture(
        experts=256,
        active=8,
        width=2048,
        shared=4096,
        layers=(False,) * 3 + (True,) * 58,
        sigmoid=True,
        factor=2.5,
        groups=8,
        best=4,
    )


def test_windows_are_those_of_each_layer() -> None:
    types = ["sliding_attention", "full_attention"]
    mixed = model("gpt_oss", sliding_window=9, layer_types=types, num_hidden_layers=2)
    assert [window_of(mixed, layer) for layer in (0, 1)] == [9, None]
    assert window_of(model("mistral", sliding_window=9), 0) == 9
    assert window_of(model("mistral", sliding_window=None), 0) is None


@pytest.mark.parametrize(
    ("config", "sizes", "says"),
    [
        (model("gemma2"), {}, "has converters for llama, mistral, qwen2, .*, gpt_oss models, and this one is gemma2"),
        (model("llama", mlp_bias=True), {}, r"does not compute the biases \(mlp_bias\)"),
        (model("deepseek_v3", attention_bias=True), {}, "attention_bias"),
        (model("llama", hidden_act="gelu"), {}, "hidden_act: gelu"),
        (model(attention_dropout=0.1), {}, "attention_dropout"),
        (model("mixtral", router_jitter_noise=0.1), {}, "router_jitter_noise"),
        (model("deepseek_v2", topk_method="group_limited_greedy"), {}, "topk_method: group_limited_greedy"),
        (model("deepseek_v3", norm_topk_prob=False), {}, "norm_topk_prob"),
        *(
            (model(kind, num_experts_per_tok=1, **more), {}, "num_experts_per_tok: 1")
            for kind, more in (
                ("mixtral", {}),
                ("gpt_oss", {}),
                ("qwen3_moe", {"norm_topk_prob": True}),
                ("glm4_moe", {}),
            )
        ),
        (model("deepseek_v3", num_experts_per_tok=12), {}, r"12 // topk_group = 3, and the model by its best 2|best 2"),
        (model("deepseek_v3", n_routed_experts=6), {"expert_parallel": 4}, "6 experts in a layer"),
        (
            model("glm4_moe", moe_intermediate_size=31, n_shared_experts=1),
            {"tensor_parallel": 2},
            "31 inner units of shared experts",
        ),
        (model("gpt_oss"), {"expert_tensor_parallel": 2}, "does not divide those that have biases"),
        (
            model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            {},
            "rope_type: dynamic",
        ),
        (model(), {"tensor_parallel": 8}, r"has 4 key heads\n  fix: set it to one of 1, 2, 4$"),
        (model(), {"tensor_parallel": 3}, "key heads"),
        (model(intermediate_size=97), {"tensor_parallel": 2}, "97 inner units"),
        (model(), {"tensor_parallel": 4, "sequence_parallel": 4}, "sequence_parallel: 16 divides .* 8 query heads"),
        (model(), {"pipeline_parallel": 5}, "5 stages divide 4 layers, and each needs one"),
        (model(), {"pipeline_parallel": 2, "virtual_pipeline": 4}, "pipeline_parallel times virtual_pipeline: 8"),
        (model(), {"expert_parallel": 2}, "no layer of the model has any"),
        (model("qwen3_moe", mlp_only_layers=[0, 1, 2, 3]), {"expert_parallel": 2}, "no layer of the model has any"),
        (model("qwen3_moe", decoder_sparse_step=5), {"expert_tensor_parallel": 2}, "no layer of the model has any"),
        (model("deepseek_v3", first_k_dense_replace=4), {"expert_parallel": 2}, "no layer of the model has any"),
        (model("glm4_moe", first_k_dense_replace=9), {"expert_parallel": 2}, "no layer of the model has any"),
        (model("qwen3_moe", num_experts=6), {"expert_parallel": 4}, "6 experts in a layer"),
        (model("qwen3_moe", moe_intermediate_size=31), {"expert_tensor_parallel": 2}, "31 inner units of an expert"),
    ],
)
def test_other_models_are_refused_by_name(config: Any, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MegatronBackend.refuse_model(config, TrainingConfig(backend="megatron", **sizes))


def test_an_optimizers_states_are_its_own_with_the_tensors_that_were_read() -> None:
    tensor = torch.ones(2)
    own = {"groups": [{"lr": 0.1}], "masters": [[None, None], []], "state": {0: None}}
    read = {"groups": [{"lr": 0.2}, {"lr": 0.3}], "masters": [[tensor, tensor], []], "state": {0: tensor}}
    assert megatron._with_tensors(own, read) == {**own, "masters": [[tensor, tensor], []], "state": {0: tensor}}


def test_one_expert_whose_score_is_not_normalised_is_taken() -> None:
    alone = model("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False)
    MegatronBackend.refuse_model(alone, TrainingConfig(backend="megatron"))


# ---- converted weights -----------------------------------------------------------------------------


def place(rank: int = 0, size: int = 1, experts: tuple[int, int] = (0, 1)) -> Place:
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    expert: Any = SimpleNamespace(rank=lambda: experts[0], size=lambda: experts[1])
    return Place(tensor=group, expert_tensor=group, expert=expert, queries=4, groups=2, vocabulary=5, family="llama")


#: Query, key and value heads of one row and one column each: 4, 2 and 2.
HEADS = [torch.tensor([[10.0], [11], [12], [13]]), torch.tensor([[20.0], [21]]), torch.tensor([[30.0], [31]])]
EXPERTS = torch.arange(2 * 4 * 3.0).view(2, 4, 3)
WHOLE: dict[Kind, list[torch.Tensor]] = {
    "whole": [torch.arange(3.0)],
    "heads": HEADS,
    "gated": [torch.tensor([[1.0], [2]]), torch.tensor([[3.0], [4]])],
    "columns": [torch.arange(8.0).view(4, 2)],
    "rows": [torch.arange(8.0).view(2, 4)],
    "vocabulary": [torch.arange(10.0).view(5, 2)],
    "expert_whole": [torch.arange(6.0).view(2, 3)],
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
    spread: dict[int, torch.Tensor] = {}

    def to_all(tensor: torch.Tensor, source: int, group: Any) -> None:
        if group.size() > 1 and group.rank() == source:
            spread[source] = tensor
        elif group.size() > 1 and source in spread:
            tensor.copy_(spread[source])

    def told(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
        if group.size() == 1:
            return [tensor]
        sent.append(tensor)
        return [tensor, tensor] if len(sent) == 1 else sent[-2:]

    monkeypatch.setattr(megatron_weights, "_told", told)
    monkeypatch.setattr(megatron_weights, "tell_all", to_all)
    for parts, each in zip(own, places, strict=True):  # the second rank hears the first one's
        whole = whole_of(kind, parts, each)
    for expected, got in zip(WHOLE[kind], whole, strict=True):
        assert torch.equal(expected, got)


def test_experts_of_gpt_oss_are_turned_over_and_sorted() -> None:
    """By hand: one expert with two inputs, whose gates 0, 1 and ups 10, 11 stand in turn."""
    stored = torch.tensor([[[0.0, 10, 1, 11], [100, 110, 101, 111]]])
    bundle = Bundle("expert_gated", ("mlp.experts.gate_up_proj",), "gpt_oss")
    plain = bundle.plain(stored)
    assert plain.tolist() == [[[0, 100], [1, 101], [10, 110], [11, 111]]]
    assert torch.equal(bundle.stored(plain), stored)
    biases = Bundle("expert_gated", ("mlp.experts.gate_up_proj_bias",), "gpt_oss")
    assert biases.plain(stored[:, 0]).tolist() == [[0, 1, 10, 11]]
    assert torch.equal(biases.stored(biases.plain(stored[:, 0])), stored[:, 0])
    down = Bundle("expert_rows", ("mlp.experts.down_proj",), "gpt_oss")  # also where it is square
    square = torch.tensor([[[1.0, 2], [3, 4]]])
    assert down.plain(square).tolist() == [[[1, 3], [2, 4]]]
    assert torch.equal(down.stored(down.plain(square)), square)
    other = Bundle("expert_gated", ("mlp.experts.gate_up_proj",), "qwen3_moe")
    assert other.plain(stored) is stored is other.stored(stored)


def test_every_family_has_a_name_for_what_it_has_otherwise() -> None:
    router = "decoder.layers.0.mlp.router.weight"
    assert bundle_of(router, 0, "gpt_oss")[0].names == ("layers.0.mlp.router.weight",)
    assert bundle_of(router, 0, "deepseek_v3")[0].names == ("layers.0.mlp.gate.weight",)


def test_names_are_those_of_transformers() -> None:
    assert bundle_of("decoder.layers.1.mlp.linear_fc1.weight", 4, "llama")[0] == Bundle(
        "gated", ("layers.5.mlp.gate_proj.weight", "layers.5.mlp.up_proj.weight"), "llama"
    )
    assert bundle_of(OUTPUT, 4, "llama")[0] == Bundle("vocabulary", (OUTPUT,), "llama")
    assert bundle_of("extra.1", 4, "llama")[0] == Bundle("whole", ("extra.1",), "llama")
    with pytest.raises(KeyError, match=r"decoder\.layers\.1\.mlp\.unknown"):
        bundle_of("decoder.layers.1.mlp.unknown", 0, "llama")
    names = [f"decoder.layers.0.mlp.experts.local_experts.{index}.linear_fc2.weight" for index in (1, 0)]
    (own,) = bundles([(names[0], torch.ones(1)), (names[1], torch.zeros(1))], 0, "llama").values()
    assert [float(each) for each in own] == [0, 1]
