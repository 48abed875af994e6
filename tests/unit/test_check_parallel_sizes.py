"""What ranks hold that divide a model by tensor, pipeline, expert and data-parallel sizes: against counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import MINIMAL, changed
from transformers import AutoConfig, AutoModelForCausalLM

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.activations import forward_bytes, layer_bytes, training_bytes
from roll_like.check.gpu_memory import gpu_plans
from roll_like.check.plan import training_states
from roll_like.config.training import TrainingConfig
from roll_like.models.shape import PUBLISHED, ModelShape, load_model_shape
from roll_like.models.stages import kept_passes, layers_of_stage, stage_layers

SHAPES = Path(__file__).parents[1] / "data" / "shapes"
GIB = 2**30
#: h, query heads, key heads, width of a head, inner width of an expert, experts, layers, vocabulary.
QWEN3_30B = (2048, 32, 4, 128, 768, 128, 48, 151_936)


def published(name: str) -> ModelShape:
    return load_model_shape(PUBLISHED / name)


@pytest.mark.parametrize(
    ("folder", "layers"),
    [
        (SHAPES / "Qwen2.5-7B-Instruct", 2),
        (SHAPES / "Qwen3-0.6B", 3),
        (PUBLISHED / "Qwen3-235B-A22B", 1),
        (PUBLISHED / "DeepSeek-V3", 4),
        (PUBLISHED / "DeepSeek-V3", 2),
    ],
)
def test_sizes_are_those_of_transformers_models(folder: Path, layers: int, tmp_path: Path) -> None:
    """Of fewer layers, since making them takes time: DeepSeek-V3's first three have no experts."""
    stated = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, "num_hidden_layers": layers}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    shape = load_model_shape(tmp_path)
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    of_layers = [sum(each.numel() for each in layer.parameters()) for layer in model.model.layers]
    assert shape.layer_parameters == pytest.approx(of_layers[-1], abs=shape.hidden_size)
    assert bool(shape.experts) == hasattr(model.model.layers[-1].mlp, "experts")
    if shape.dense_layers:
        assert [shape.dense_layer_parameters] * 3 == of_layers[:3]
    whole = {"norm", "layernorm", "gate.weight", "_a_proj"}  # what no backend divides by tensor ranks
    assert shape.undivided_parameters == sum(
        each.numel() for name, each in model.model.layers[-1].named_parameters() if any(part in name for part in whole)
    )


def test_published_models_have_their_sizes() -> None:
    """Billions of parameters, and of those that compute a token: cards say 30.5 and 3.3, 235 and 22, 671 and 37."""
    sizes = {name: published(name) for name in ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3")}
    assert [round(each.parameters / 1e9, 1) for each in sizes.values()] == [30.5, 235.1, 671.0]
    assert [round(each.active_parameters / 1e9, 1) for each in sizes.values()] == [3.4, 22.2, 37.6]


@pytest.mark.parametrize(
    ("layers", "stages", "found"),
    [
        (94, 8, (11, *(12,) * 6, 11)),  # NeMo-RL's and verl's Qwen3-235B
        (61, 16, (3, *(4,) * 13, 3, 3)),  # NeMo-RL's DeepSeek-V3 has 3, 14 times 4, 2
        (61, 8, (7, *(8,) * 5, 7, 7)),
        (61, 2, (31, 30)),
        (48, 4, (12, 12, 12, 12)),
        (10, 8, (1, 1, 1, 2, 2, 1, 1, 1)),
        (4, 8, None),
    ],
)
def test_stages_have_layers_one_after_the_other(layers: int, stages: int, found: Any) -> None:
    assert stage_layers(layers, stages) == found
    if found is not None:
        own = [layers_of_stage(layers, stages, 1, stage) for stage in range(stages)]
        assert [layer for each in own for layer in each] == list(range(layers))


def test_virtual_stages_alternate() -> None:
    assert stage_layers(4, 2, 4) is None
    assert stage_layers(16, 2, 4) == (8, 8)
    assert [list(layers_of_stage(8, 2, 2, stage)) for stage in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def under_way(stages: int, micro_batches: int, stage: int) -> int:
    """The most forward passes without their backward pass in 1F1B, step by step."""
    order = ["F"] * min(stages - stage - 1, micro_batches)
    while order.count("B") < micro_batches:
        order += ["F"] * (order.count("F") < micro_batches) + ["B"]
    return max(order[:end].count("F") - order[:end].count("B") for end in range(len(order) + 1))


def test_stages_keep_the_micro_batches_that_are_under_way() -> None:
    assert [kept_passes(4, 1, stage) for stage in range(4)] == [(under_way(4, 9, stage), 1) for stage in range(4)]
    # interleaved, arXiv:2104.04473, figure 4: the first of 4 ranks with 2 parts has 10 passes before its first 1F1B
    assert [kept_passes(4, 2, stage)[0] for stage in range(4)] == [11, 9, 7, 5]


def test_megatron_divides_experts_by_other_ranks_than_the_rest() -> None:
    """Qwen3-30B-A3B on 16 ranks: 2 stages, of 8 ranks each; TP 2, so 4 with the same matrices; EP 4, so 2."""
    hidden, heads, groups, width, inner, experts, layers, vocabulary = QWEN3_30B
    model = published("Qwen3-30B-A3B")
    settings = TrainingConfig(
        backend="megatron", workers=16, zero_stage=1, tensor_parallel=2, pipeline_parallel=2, expert_parallel=4
    )
    attention = 2 * hidden * width * (heads + groups)
    whole = 2 * hidden + 2 * width + hidden * experts  # norms and router, on each tensor rank
    own = (layers // 2) * (attention // 2 + whole) + vocabulary * hidden // 2
    routed = (layers // 2) * 3 * hidden * inner * experts // 4
    for stage in (0, 1):
        found = training_states(settings, model, model.parameters, 2, stage=stage)
        assert found.weights == pytest.approx(2 * (own + routed), rel=1e-5)
        assert found.gradients == pytest.approx(4 * (own + routed), rel=1e-5)
        assert found.optimizer == pytest.approx(12 * own / 4 + 12 * routed / 2, rel=1e-5)
        assert found.buffers == 0
    whole_optimizer = training_states(settings.model_copy(update={"zero_stage": 0}), model, model.parameters, 4)
    assert whole_optimizer.optimizer == pytest.approx(8 * (own + routed), rel=1e-5)
    frozen = training_states(settings, model, 0, 2)
    assert (frozen.weights, frozen.gradients, frozen.optimizer) == (found.weights, 0, 0)
    within = settings.model_copy(update={"expert_parallel": 2, "expert_tensor_parallel": 2})
    assert training_states(within, model, model.parameters, 2, stage=1) == found


def test_tied_embeddings_are_on_both_ends_of_a_pipeline() -> None:
    model = load_model_shape(SHAPES / "Qwen3-0.6B")
    settings = TrainingConfig(backend="megatron", workers=4, zero_stage=1, pipeline_parallel=4)
    weights = [training_states(settings, model, model.parameters, 2, stage=stage).weights for stage in range(4)]
    layers = 2 * 7 * model.layer_parameters
    assert weights == [layers + 2 * model.embedding_parameters, layers, layers, layers + 2 * model.embedding_parameters]


def test_stages_without_experts_are_smaller() -> None:
    """DeepSeek-V3's first stage of 16 has its three dense layers; one of four in the middle 4 · 11.3 billion routed."""
    model = published("DeepSeek-V3")
    settings = TrainingConfig(backend="megatron", workers=256, zero_stage=1, pipeline_parallel=16, expert_parallel=16)
    first, middle = (training_states(settings, model, model.parameters, 2, stage=stage) for stage in (0, 1))
    attention = 187_107_328  # 7168·1536 + 1536·128·192 + 7168·576 + 512·128·256 + 128·128·7168 and two norms
    routed, shared, router = 256 * 3 * 7168 * 2048, 3 * 7168 * 2048, 256 * 7168
    dense = 3 * 7168 * 18432
    norms = 2 * 7168
    assert first.weights == pytest.approx(2 * (3 * (attention + dense + norms) + 129_280 * 7168), rel=1e-6)
    outside = attention + norms + shared + router
    assert middle.weights == pytest.approx(2 * 4 * (outside + routed / 16), rel=1e-5)
    assert middle.optimizer == pytest.approx(12 * 4 * (outside / 16 + routed / 16), rel=1e-5)


def test_activations_of_compressed_attention() -> None:
    """DeepSeek-V3: 128 heads with keys of 192 and values of 128; each token goes to 8 experts and the shared one."""
    hidden, heads, inner = 7168, 128, 2048
    norms = 8 * (2 * hidden + 1536 + 576)
    attention = 2 * heads * (192 + 192 + 128 + 128) + 4 * heads
    assert layer_bytes(published("DeepSeek-V3"), width=2) == norms + attention + 9 * (8 * inner + 4 * hidden)


def test_activations_of_a_stage() -> None:
    """12 of 48 layers, 4 micro-batches under way, on two tensor ranks that gather a layer's two inputs."""
    shape = published("Qwen3-30B-A3B")
    hidden, inner = 2048, 8 * 768
    layer = layer_bytes(shape, width=2) / 2 + 4 * hidden
    passing = (8 * hidden + 4 * inner) / 2 + 4 * hidden
    sizes: dict[str, Any] = {"width": 2, "ranks": 2, "layers": 12, "under_way": 4}
    sent = 4 * 2 * hidden / 2
    assert training_bytes(shape, 10, checkpointing=False, **sizes) == 10 * (4 * 12 * layer + passing + sent)
    kept = 4 * 12 * 2 * hidden / 2 + layer
    assert training_bytes(shape, 10, checkpointing=True, **sizes) == 10 * (kept + passing + sent)
    whole = forward_bytes(shape, 10, width=2)
    assert forward_bytes(shape, 10, width=2, ranks=2) == whole // 2 + 10 * 4 * hidden


@pytest.mark.parametrize(
    ("name", "gpus", "of_each"),
    [
        ("Qwen3-235B-A22B", 1, 94 * 4 * 256 * 2),
        ("Qwen3-235B-A22B", 4, 94 * 1 * 256 * 2),
        ("Qwen3-235B-A22B", 8, 94 * 1 * 256 * 2),  # four key heads: two GPUs have the same one
        ("DeepSeek-V3", 1, 61 * 576 * 2),
        ("DeepSeek-V3", 8, 61 * 576 * 2),  # compressed keys and values serve all heads
    ],
)
def test_caches_divide_heads_and_no_head(name: str, gpus: int, of_each: int) -> None:
    assert published(name).kv_bytes_per_token(2, gpus) == of_each


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Megatron-Core were installed: nothing of it is called here."""
    monkeypatch.setattr("roll_like.training.megatron._package", lambda: iter(()))


def layout(**training: Any) -> RLVRConfig:
    values = changed(
        MINIMAL,
        model={"path": "org/model", "dtype": "bfloat16"},
        training={"backend": "megatron", "zero_stage": 1, "workers": 8, "max_tokens_per_micro_batch": 4096, **training},
        resources={"device": "cuda", "devices_per_node": 8, "device_mapping": {"training": "0-7", "inference": "0-7"}},
        inference={"type": "vllm", "replicas": 1, "gpu_memory_utilization": 0.5},
    )
    return RLVRConfig.model_validate(values)


@pytest.mark.usefixtures("megatron")
def test_the_plan_shows_the_stage_that_holds_most() -> None:
    """With layers computed again the last one, which has the output layer; else the first, whose micro-batches wait."""
    shapes = dict.fromkeys(("training", "inference"), load_model_shape(SHAPES / "Qwen2.5-7B-Instruct"))
    (made,) = gpu_plans(layout(pipeline_parallel=4, gradient_checkpointing=True), shapes, 80 * GIB)
    assert made.stages == {"training": (3, 4)}
    parts = next(phase for phase in made.phases if phase.name == "training").parts
    assert parts["training", "logits"] > 0
    (made,) = gpu_plans(layout(pipeline_parallel=4), shapes, 80 * GIB)
    assert made.stages == {"training": (0, 4)}
    parts = next(phase for phase in made.phases if phase.name == "training").parts
    assert parts.get(("training", "logits"), 0) == 0
    assert gpu_plans(layout(tensor_parallel=4), shapes, 80 * GIB)[0].stages == {}


@pytest.mark.usefixtures("megatron")
def test_ranks_that_divide_the_vocabulary_hold_a_part_of_the_logits() -> None:
    shapes = dict.fromkeys(("training", "inference"), load_model_shape(SHAPES / "Qwen2.5-7B-Instruct"))

    def logits(ranks: int) -> int:
        (made,) = gpu_plans(layout(tensor_parallel=ranks), shapes, 80 * GIB)
        return next(phase for phase in made.phases if phase.name == "training").parts["training", "logits"]

    hidden, rows = 3584, 152_064 // 4
    states = 2 * 4096 * hidden * 2
    block = 1024 * rows * 2 + 2 * 4 * 1024 * rows
    assert logits(4) == max(block + 4 * rows * hidden + 6 * rows * hidden, 6 * rows * hidden) + states
    assert logits(4) < logits(1) / 2
