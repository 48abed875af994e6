"""Who holds how much of a GPU in which phase, what is refused, and how long a step takes at least."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL, changed
from published_models import SHAPES, cache_published_models
from rich.console import Console

from roll_like import cli
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.rlvr.pipeline import RLVRPipeline
from roll_like.check import Report
from roll_like.check.activations import forward_bytes, head_bytes, layer_bytes, training_bytes
from roll_like.check.gpu_memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, GRAPH_BYTES, GPUPlan, gpu_plans
from roll_like.check.gpu_plan import GPUReport, check_gpus, gpu_report, measured_gpus
from roll_like.check.model import role_shapes
from roll_like.check.plan import plan, training_states
from roll_like.check.step_floor import StepFloor, step_floor
from roll_like.cluster.limits import usable_memory
from roll_like.config.base import Finding
from roll_like.config.inference import GPU_BUCKET_BYTES
from roll_like.config.load import load_config
from roll_like.config.run import RunConfig
from roll_like.config.training import TrainingConfig
from roll_like.errors import ConfigError
from roll_like.models.shape import PUBLISHED, ModelShape, load_model_shape

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
TRANSIT = ("tensor in transit", "tensors in transit")
EVERYWHERE = {"sampling", "training", "weight update"}
#: 2³⁰ parameters, and layers so small that they hardly matter.
BILLION = ModelShape(
    parameters=2**30,
    layers=2,
    hidden_size=16,
    intermediate_size=32,
    vocab_size=64,
    heads=2,
    kv_heads=1,
    head_dim=8,
    max_positions=None,
    tied_embeddings=True,
)


def gpus(count: int = 1, **changes: Any) -> RLVRConfig:
    """A trainer and engines on the same GPUs, with changes."""
    last = f"0-{count - 1}"
    resources = {
        "device": "cuda",
        "devices_per_node": count,
        "device_mapping": {"training": last, "inference": last},
    }
    base = changed(
        MINIMAL,
        resources=resources,
        training={"workers": count, "zero_stage": 3},
        inference={"type": "vllm", "replicas": count, "gpu_memory_utilization": 0.5},
        model={"path": "org/model", "dtype": "bfloat16"},
    )
    return RLVRConfig.model_validate(changed(base, **changes))


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, EVERYWHERE),
        ({"sleep": False}, EVERYWHERE),
        ({"enforce_eager": True}, set()),
        ({"engine_args": {"compilation_config": {"cudagraph_mode": "NONE"}}}, set()),
        ({"engine_args": {"compilation_config": {"cudagraph_mode": "none"}}}, set()),
        ({"engine_args": {"compilation_config": {"cudagraph_mode": None}}}, EVERYWHERE),
        ({"engine_args": {"compilation_config": 0}}, EVERYWHERE),
        ({"type": "sglang", "cuda_graphs": True}, EVERYWHERE),
        ({"type": "sglang"}, set()),
        ({"speculative": {"method": "draft", "model": str(SHAPES / "Qwen3-0.6B")}}, set()),
        ({"type": "hf"}, set()),
    ],
)
def test_cuda_graphs_stay_while_an_engine_sleeps(changes: dict[str, Any], held: set[str]) -> None:
    (made,) = plans(gpus(inference=changes))
    found = {phase.name: phase.parts.get(("inference", "CUDA graphs")) for phase in made.phases}
    assert {name for name, size in found.items() if size} == held


def test_graphs_are_in_the_share_of_vllm_and_beside_that_of_sglang() -> None:
    for kind, eager, graphs, beside in (
        ("vllm", {"enforce_eager": True}, {}, 0),
        ("sglang", {}, {"cuda_graphs": True}, GRAPH_BYTES),
    ):
        (without,), (made,) = (plans(gpus(inference={"type": kind, **keys})) for keys in (eager, graphs))
        (before, after) = (next(phase for phase in each.phases if phase.name == "sampling") for each in (without, made))
        assert after.total - before.total == beside
        assert without.cache is not None
        assert made.cache == without.cache - (GRAPH_BYTES - beside)


@pytest.mark.parametrize(("share", "told"), [(0.6, True), (0.7, False)])
def test_engines_that_may_not_stay_awake_are_not_told_to(share: float, told: bool) -> None:
    config = gpus(resources__gpu_memory_gib=141, inference__gpu_memory_utilization=share)
    awake = {"training__sleep": False, "inference__sleep": False}
    report = gpu_report(config, plan(config), dict.fromkeys(("training", "inference"), BILLION))
    assert report is not None
    assert any("fit on a GPU together" in finding.message for finding in check_gpus(config, report)) is told
    with nullcontext() if told else pytest.raises(ConfigError, match="and would keep 70% of their memory"):
        gpus(resources__gpu_memory_gib=141, inference__gpu_memory_utilization=share, **awake)


@pytest.mark.parametrize(
    ("memory", "changes", "told"),
    [
        (141, {}, True),
        (80, {}, False),  # half a GPU for the engine, and 18 GiB of states with a forward pass beside it
        (141, {"inference.gpu_memory_utilization": 0.9}, False),
        (141, {"training.sleep": False}, False),
        (141, {"inference.sleep": True}, False),
        (141, {"inference": {"type": "hf"}}, False),
        (None, {}, False),
    ],
)
def test_what_fits_together_is_told_to_stay(memory: int | None, changes: dict[str, Any], told: bool) -> None:
    size = {} if memory is None else {"resources.gpu_memory_gib": memory}
    shape = replace(BILLION, parameters=2**31)
    config = gpus(**{key.replace(".", "__"): value for key, value in {**changes, **size}.items()})
    report = gpu_report(config, plan(config), dict.fromkeys(("training", "inference"), shape))
    assert report is not None
    found = [finding.message for finding in check_gpus(config, report) if "fit on a GPU together" in finding.message]
    assert bool(found) is told


def shape_of(name: str) -> ModelShape:
    return load_model_shape(SHAPES / name)


def plans(config: RLVRConfig, shape: ModelShape = BILLION, memory: int | None = 80 * GIB) -> tuple[GPUPlan, ...]:
    roles = ("training", "inference", "reference", "critic")
    return gpu_plans(config, dict.fromkeys(roles, shape), memory)


def phases(made: GPUPlan) -> dict[str, dict[str, int]]:
    """Each phase's states, by `role part`."""
    shown = {"weights", "gradients", "optimizer", "KV cache", "CUDA", "server"}
    return {
        phase.name: {f"{role} {part}": size for (role, part), size in phase.parts.items() if part in shown}
        for phase in made.phases
    }


def errors(config: RLVRConfig, shape: ModelShape, memory: int = 80 * GIB) -> list[tuple[str, str]]:
    report = GPUReport(plans=plans(config, shape, memory), memory=memory, floor=None)
    return [(found.key, found.message) for found in check_gpus(config, report) if found.level == "error"]


def test_shared_gpus_hold_what_gpu_sharing_says() -> None:
    """Engines and models take turns; the weights of both meet during an update only."""
    (made,) = plans(gpus(2))
    found = phases(made)
    assert list(found) == ["sampling", "training", "weight update"]
    contexts = {"training CUDA": CONTEXT_BYTES + COMMUNICATOR_BYTES, "inference CUDA": CONTEXT_BYTES}
    cache = found["sampling"].pop("inference KV cache")
    assert found["sampling"] == {"inference weights": 2 * GIB, **contexts}
    # ZeRO-3 over two ranks: 2, 4 and 12 bytes a parameter, halved
    states = {"training weights": GIB, "training gradients": 2 * GIB, "training optimizer": 6 * GIB}
    assert found["training"] == {**states, **contexts}
    assert found["weight update"] == {"inference weights": 2 * GIB, "training weights": GIB, **contexts}
    assert made.host == 9 * GIB
    whole = next(phase for phase in made.phases if phase.name == "sampling")
    assert whole.total - sum(contexts.values()) == 40 * GIB, "vLLM fills its share"
    assert made.cache == cache


def test_a_draft_is_on_each_gpu_of_an_engine(tmp_path: Path) -> None:
    """Weights and cache of Qwen3-0.6B beside the policy, and with it in host memory; without its sizes, said."""
    draft = {"method": "draft", "model": str(SHAPES / "Qwen3-0.6B")}
    plain = gpus(2, inference={"replicas": 1, "enforce_eager": True})
    config = gpus(2, inference={"replicas": 1, "speculative": draft})
    own = role_shapes(config, BILLION)["draft"]
    shapes = {**dict.fromkeys(("training", "inference"), BILLION), "draft": own}
    (before,), (made,) = plans(plain), gpu_plans(config, shapes, 80 * GIB)
    weights = 596_049_920 * 2 // 2  # bfloat16, halved
    for name, phase, old in zip(("sampling", "training", "weight update"), made.phases, before.phases, strict=True):
        more = {("inference", "draft's weights"): weights} if name != "training" else {}
        assert phase.parts.keys() - old.parts.keys() == more.keys()
        assert all(phase.parts[key] == size for key, size in more.items())
    assert made.phases[2].total - before.phases[2].total == weights
    computed = ("inference", "activations")
    logits = made.phases[0].parts[computed] - before.phases[0].parts[computed]
    running = min(config.inference.max_running, config.rollout.max_in_flight)
    assert logits == 3 * 4 * running * 5 * BILLION.vocab_size, "of four guesses, and a place that a draft takes"
    assert (before.cache or 0) - (made.cache or 0) == weights + logits, "vLLM's share is one"
    assert (made.cache_per_token or 0) - (before.cache_per_token or 0) == 28 * (8 // 2) * 2 * 128 * 2
    assert made.left_out == ()
    small = GPUReport(plans=(made,), memory=before.phases[2].total, floor=None)
    assert any("guess tokens with a smaller model" in found.message for found in check_gpus(config, small))
    (tmp_path / "config.json").write_text("{}")
    unknown = gpus(2, inference={"replicas": 1, "speculative": {**draft, "model": str(tmp_path)}})
    assert "draft" not in role_shapes(unknown, BILLION)
    assert plans(unknown)[0].left_out == ("the draft of inference",)


def test_what_stays_awake_is_held_in_every_phase() -> None:
    (made,) = plans(gpus(inference__sleep=False, training__sleep=False))
    for phase in made.phases:
        assert ("inference", "KV cache") in phase.parts, phase.name
        assert ("training", "optimizer") in phase.parts, phase.name
    assert made.host == 0


def test_models_that_share_gpus_with_engines_take_turns_with_each_other() -> None:
    config = gpus(algorithm={"kl": {"use": "loss"}}, reference={})
    found = phases(plans(config)[0])
    assert list(found) == ["sampling", "training", "reference", "weight update"]
    assert "reference weights" not in found["training"]
    assert "training weights" not in found["reference"]
    assert found["reference"]["reference weights"] == 2 * GIB


def test_models_on_gpus_of_their_own_all_stay() -> None:
    config = gpus(
        2,
        resources__device_mapping={"training": "0", "inference": "1", "reference": "0"},
        training={"workers": 1},
        inference__replicas=1,
        algorithm={"kl": {"use": "loss"}},
        reference={},
    )
    models, engines = plans(config)
    assert [phase.name for phase in models.phases] == ["training", "reference", "weight update"]
    for phase in models.phases:
        assert {("training", "optimizer"), ("reference", "weights")} <= set(phase.parts)
    assert [phase.name for phase in engines.phases] == ["sampling", "weight update"]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "hf"])
def test_buckets_of_weights_lie_on_the_gpus_of_both_sides(kind: str) -> None:
    share = {"vllm": {"gpu_memory_utilization": 0.9}, "sglang": {"mem_fraction_static": 0.9}, "hf": {}}[kind]
    config = gpus(
        2,
        resources__device_mapping={"training": "0", "inference": "1"},
        training={"workers": 1},
        inference={"type": kind, "replicas": 1, **share},
    )
    embedding = 2 * 100_000 * 16
    trainer, engine = plans(config, replace(BILLION, vocab_size=100_000))
    found = {part: size for made in (trainer, engine) for part, size in made.phases[-1].parts.items()}
    moving = {part: size for part, size in found.items() if part[1] in ("transfer buffers", *TRANSIT)}
    bucket = GPU_BUCKET_BYTES + embedding
    expected = {
        ("training", TRANSIT[1]): bucket,
        ("training", "transfer buffers"): 2 * bucket,
        ("inference", "transfer buffers"): 2 * bucket,
    }
    if kind == "hf":  # by shared memory
        expected = {("training", TRANSIT[0]): embedding, ("inference", TRANSIT[0]): embedding}
    assert moving == expected
    # both in addition to all that they hold otherwise
    assert ("training", "optimizer") in found
    assert engine.phases[-1].total == engine.phases[0].total + sum(
        size for (role, _), size in moving.items() if role == "inference"
    )


def test_an_engine_that_leaves_no_room_for_buckets_is_refused() -> None:
    config = gpus(
        2,
        resources__device_mapping={"training": "0", "inference": "1"},
        training={"workers": 1},
        inference={"type": "vllm", "replicas": 1, "gpu_memory_utilization": 0.99},
    )
    ((key, message),) = errors(config, BILLION)
    assert key == "inference.gpu_memory_utilization"
    assert "in phase 'weight update'" in message


def test_a_judge_keeps_its_share_in_every_phase() -> None:
    judge = {"type": "vllm", "path": "org/judge", "gpu_memory_utilization": 0.25}
    config = gpus(judge=judge, rewards={"use": [{"type": "llm_judge", "judges": [{"url": "judge", "model": "judge"}]}]})
    (made,) = plans(config)
    assert {found["judge server"] for found in phases(made).values()} == {20 * GIB + CONTEXT_BYTES}
    assert made.left_out == ()


def test_roles_that_together_claim_more_than_a_gpu_has_are_refused() -> None:
    judge = {"type": "vllm", "path": "org/judge", "gpu_memory_utilization": 0.5}
    rewards = {"use": [{"type": "llm_judge", "judges": [{"url": "judge", "model": "judge"}]}]}
    assert errors(gpus(), BILLION) == []
    ((key, message), *_) = errors(gpus(judge=judge, rewards=rewards), BILLION)
    assert key in ("judge.gpu_memory_utilization", "inference.gpu_memory_utilization")
    assert "'sampling' and has 80.0 GiB" in message
    assert "lower judge.gpu_memory_utilization" in message
    assert "lower inference.gpu_memory_utilization" in message


@pytest.mark.parametrize(
    ("changes", "key", "advice"),
    [
        ({"training__zero_stage": 1}, "training.zero_stage", "set training.zero_stage: 2"),
        ({}, "training.offload", "set training.offload: optimizer"),
        ({"training__offload": "optimizer", "training__max_tokens_per_micro_batch": 65536},
         "training.gradient_checkpointing", "set training.gradient_checkpointing: true"),
        ({"training__offload": "optimizer", "training__max_tokens_per_micro_batch": 262144,
          "training__gradient_checkpointing": True},
         "training.max_tokens_per_micro_batch", "lower training.max_tokens_per_micro_batch"),
    ],
)  # fmt: skip
def test_the_message_names_the_largest_part_and_the_key(changes: dict[str, Any], key: str, advice: str) -> None:
    """A 7B model on two GPUs of 80 GiB."""
    found = [error for error in errors(gpus(2, **changes), shape_of("Qwen2.5-7B-Instruct")) if "'training'" in error[1]]
    ((named, message),) = found
    assert named == key
    assert advice in message
    assert "each of the GPUs 0-1 would hold" in message


def test_an_engine_without_room_for_one_sample_is_refused() -> None:
    """Of 80 GiB 18 % are less than 14.2 GiB of weights and 1.4 of activations."""
    config = gpus(inference__gpu_memory_utilization=0.18, training__offload="optimizer")
    ((key, message),) = [each for each in errors(config, shape_of("Qwen2.5-7B-Instruct")) if "key-value" in each[1]]
    assert key == "inference.gpu_memory_utilization"
    assert "one sequence of 96 tokens needs" in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sft_quickstart", ["training"]),
        ("dpo_quickstart", ["training"]),  # its reference is computed before
        ("reward_model_quickstart", ["training"]),
        ("distill_quickstart", ["training", "teacher whole"]),
        ("online_dpo_quickstart", ["sampling", "training", "weight update"]),
        ("on_policy_distill", ["sampling", "training", "teacher whole", "weight update"]),
        ("agentic_frozenlake", ["sampling", "training", "weight update"]),
    ],
)
def test_every_pipeline_has_a_plan(name: str, expected: list[str]) -> None:
    mapping = {"training": "0"} | ({"inference": "0"} if "sampling" in expected else {})
    config = load_config(
        ROOT / "configs" / f"{name}.yaml",
        ["model.dtype=bfloat16", f"resources={{device: cuda, devices_per_node: 1, device_mapping: {mapping}}}"],
    )
    assert isinstance(config, RunConfig)
    shape = shape_of("Qwen2.5-0.5B-Instruct")
    shapes = dict.fromkeys(("training", "inference", "reference", "teacher whole"), shape)
    (made,) = gpu_plans(config, shapes, 80 * GIB)
    assert [phase.name for phase in made.phases] == expected
    assert made.left_out == ()
    for phase in made.phases:
        assert 0 < phase.total < 80 * GIB
        if phase.name in ("training", "reference", "teacher whole"):
            assert phase.parts[phase.name, "activations"] > 0


def published(gpus_: int, **changes: Any) -> RLVRConfig:
    """Rows of up to 2,048 tokens, as verl's examples for these models have; one engine over all GPUs up to 72B."""
    return gpus(
        gpus_,
        training__gradient_checkpointing=True,
        data__max_prompt_tokens=1024,
        rollout={"prompts_per_step": 64, "samples_per_prompt": 4, "max_response_tokens": 1024},
        inference={"type": "vllm", "replicas": 1, "gpu_memory_utilization": 0.6},
        **changes,
    )


@pytest.mark.parametrize(
    ("model", "count", "memory", "lora"),
    [
        ("Qwen2.5-7B-Instruct", 2, 80, None),
        ("Qwen2.5-14B-Instruct", 4, 80, None),
        ("Qwen2.5-32B-Instruct", 8, 95, None),
        ("Qwen2.5-7B-Instruct", 1, 80, {"rank": 32}),
        ("Qwen2.5-72B-Instruct", 8, 80, {"rank": 32}),
    ],
)
def test_what_has_been_trained_elsewhere_fits(model: str, count: int, memory: int, lora: dict[str, Any] | None) -> None:
    """verl's documentation, "Hardware Resource Needed for RL": H800 and H100 of 80 GiB, H20 of 95 GiB."""
    shape = replace(shape_of(model), adapted_width=10**6)
    options = {"training__lora": lora} if lora else {"training__offload": "optimizer"}
    assert errors(published(count, **options), shape, memory * GIB) == []


@pytest.mark.parametrize(
    ("model", "count", "memory"),
    [("Qwen2.5-7B-Instruct", 1, 80), ("Qwen2.5-14B-Instruct", 2, 80), ("Qwen2.5-32B-Instruct", 4, 95)],
)
def test_half_of_those_gpus_are_too_few_without_offloading(model: str, count: int, memory: int) -> None:
    found = errors(published(count), shape_of(model), memory * GIB)
    assert any("'training'" in message for _, message in found)


def test_a_frozen_base_that_does_not_fit_may_be_kept_in_4_bits() -> None:
    shape = replace(shape_of("Qwen2.5-32B-Instruct"), adapted_width=10**6)
    whole = published(1, training__lora={"rank": 32}, training__zero_stage=2)
    found = errors(whole, shape, 64 * GIB)
    (advice,) = (text for key, text in found if key == "training.lora.quantization" and "phase 'training'" in text)
    assert "keep the frozen base in 4 bits (training.lora.quantization: nf4)" in advice
    smaller = replace(shape, quantized_parameters=31 * 10**9)
    kept = published(1, training__lora={"rank": 32, "quantization": "nf4"}, training__zero_stage=2)
    assert not [message for _, message in errors(kept, smaller, 64 * GIB) if "'training'" in message]


def test_without_the_gpus_memory_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.check.gpu_plan.measured_gpus", list)
    config = gpus(resources__address="auto")
    report = gpu_report(config, plan(config), {"training": BILLION, "inference": BILLION})
    assert report is not None
    (found,) = check_gpus(config, report)
    assert (found.level, found.key) == ("note", "resources.gpu")
    assert ("inference", "KV cache at most") in report.plans[0].phases[0].parts


H100, H200 = "0, GPU-aa0, NVIDIA H100 80GB HBM3, 81559", "1, GPU-bb1, NVIDIA H200, 143771"


def nvidia_smi(folder: Path, *lines: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    tool.chmod(0o755)


def test_memory_is_measured_without_a_context_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert measured_gpus() == []
    nvidia_smi(tmp_path, H100, H200)
    assert measured_gpus() == [("NVIDIA H100 80GB HBM3", 81559 * 2**20), ("NVIDIA H200", 143771 * 2**20)]
    config = gpus()
    report = gpu_report(config, plan(config), {"training": BILLION, "inference": BILLION})
    assert report is not None
    assert report.memory == 81559 * 2**20, "the smallest counts"
    assert report.floor is None, "of two kinds"
    assert report.host_memory == usable_memory()
    there = gpus(resources__gpu_memory_gib=24)
    report = gpu_report(there, plan(there), {"training": BILLION})
    assert report is not None
    assert report.memory == 24 * GIB, "what is configured comes first"


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("1", [143771]),
        ("0, 1", [81559, 143771]),
        ("GPU-bb", [143771]),
        ("", []),
        ("-1", []),
        ("MIG-aa0", []),
    ],
)
def test_hidden_gpus_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, found: list[int]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvidia_smi(tmp_path, H100, H200)
    assert [memory for _, memory in measured_gpus()] == [mib * 2**20 for mib in found]


def test_the_kind_is_measured_where_it_is_not_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config, stated = gpus(), gpus(resources__gpu="H100")
    shapes = {"training": BILLION, "inference": BILLION}

    def floor(config: RLVRConfig) -> StepFloor | None:
        report = gpu_report(config, plan(config), shapes)
        assert report is not None
        return report.floor

    nvidia_smi(tmp_path, H200, H200)
    assert floor(config) == floor(gpus(resources__gpu="H200"))
    assert floor(stated) != floor(config), "what is configured comes first"
    nvidia_smi(tmp_path, "0, GPU-aa, NVIDIA A10G, 23028")
    assert floor(config) is None


@pytest.mark.parametrize("key", ["gpu", "gpu_memory_gib"])
def test_gpus_of_a_run_on_cpu_are_refused(key: str) -> None:
    value = "H100" if key == "gpu" else 24
    with pytest.raises(ConfigError, match=r"resources\.device is cpu, so this has no effect"):
        RLVRConfig.model_validate(changed(MINIMAL, **{f"resources__{key}": value}))


def test_a_plan_with_little_room_is_a_warning() -> None:
    config = gpus()
    total = max(phase.total for phase in plans(config)[0].phases if phase.name == "training")
    memory = int(total * 1.05)
    report = GPUReport(plans=plans(config, memory=memory), memory=memory, floor=None)
    (found,) = check_gpus(config, report)
    assert (found.level, found.key) == ("warning", "training.offload")
    assert "less than 8%" in found.message
    nearly_all = gpus(inference__gpu_memory_utilization=0.95)
    report = GPUReport(plans=plans(nearly_all), memory=80 * GIB, floor=None)
    assert list(check_gpus(nearly_all, report)) == [], "vLLM's share is one piece"


def test_more_in_host_memory_than_there_is_is_refused() -> None:
    """9 GiB of each of two GPUs."""
    config = gpus(2)
    found = [
        list(check_gpus(config, GPUReport(plans=plans(config), memory=80 * GIB, floor=None, host_memory=size)))
        for size in (17 * GIB, 18 * GIB)
    ]
    assert [(each.level, each.key) for each in found[0]] == [("error", "training.sleep")]
    assert "need 18.0 GiB of host memory on each machine, and this one has 17.0 GiB" in found[0][0].message
    assert found[1] == []


def test_floors_are_those_of_a_hand_count() -> None:
    """An H200 reads 4.8 · 10¹² bytes/s; the weights of 2 GiB, and a cache of 96 tokens at 64 · 2 bytes."""
    config = gpus(inference__max_running=16)
    floor = step_floor(config, plan(config), BILLION, 63 * 10**9, "H200")
    assert floor is not None
    assert floor.move == pytest.approx(2.0)
    assert floor.sync == pytest.approx(2 * 2 * 2**30 / 4.8e12)
    # 32 samples in two batches of 16, 32 steps each: 16 rows of (64 + 16) tokens in the cache on the way
    cache = 16 * (64 + 16) * BILLION.kv_bytes_per_token()
    assert floor.generate == pytest.approx(2 * 32 * (2 * 2**30 + cache) / 4.8e12, rel=1e-3)
    # 8 prompts of 64 tokens, computed once, and 32 responses, whose last tokens are not
    tokens = 8 * 64 + 32 * 31
    assert floor.train == pytest.approx(6 * tokens * 2**30 / 989.5e12, rel=0.01)
    whole = gpus(inference__max_running=16, model__dtype="float32")
    slower = step_floor(whole, plan(whole), BILLION, 0, "H200")
    assert slower is not None
    assert slower.train == pytest.approx(floor.train * 989.5 / 67), "without tensor cores"
    assert step_floor(gpus(), plan(gpus()), BILLION, 0, None) is None


@pytest.mark.parametrize(("share_prompts", "row"), [(True, 8192), (False, 64 + 32)])
@pytest.mark.parametrize("masks", [1, 2])
def test_models_whose_rows_cannot_be_joined_have_masks(share_prompts: bool, row: int, masks: int) -> None:
    """As those with states or images. A row with a common prompt is as long as the budget, another one has a sample."""
    config = gpus(
        algorithm={"kl": {"use": "loss"}},
        reference={"max_tokens_per_micro_batch": 4096},
        training={"max_tokens_per_micro_batch": 8192, "share_prompts": share_prompts, "gradient_checkpointing": False},
    )
    shape = replace(BILLION, parameters=2**20, masked=True, masks=masks)
    held = {
        phase.name: phase.parts[phase.name, "activations"]
        for phase in plans(config, shape)[0].phases
        if phase.name in ("training", "reference")
    }
    trained = training_bytes(shape, 8192, width=2, checkpointing=False, dense_row=row)
    frozen = forward_bytes(shape, 4096, width=2, dense_row=min(row, 4096))
    assert held == {"training": trained, "reference": frozen}
    pairs = 4096 * min(row, 4096)
    assert frozen - forward_bytes(shape, 4096, width=2) == pairs * (masks + 2), "bools, and a copy in bfloat16"
    others = plans(config, replace(shape, masked=False))[0].phases
    assert all(
        phase.parts[phase.name, "activations"] < held[phase.name] - pairs for phase in others if phase.name in held
    )


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, (False, 1)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (False, 1)),
        ({"sliding_window": 4096}, (False, 2)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (False, 2)),
        ({"layer_types": ["linear_attention", "full_attention"]}, (True, 1)),
        ({"attention_dropout": 0.1}, (True, 1)),
        ({"model_type": "qwen2_5_vl"}, (True, 1)),
    ],
)
def test_a_configuration_says_whether_attention_has_masks(
    stated: dict[str, Any], expected: tuple[bool, int], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    stated = json.loads((SHAPES / "Qwen3-0.6B" / "config.json").read_text()) | {"sliding_window": None} | stated
    file.write_text(json.dumps(stated))
    shape = load_model_shape(tmp_path)
    assert (shape.masked, shape.masks) == expected


@pytest.mark.parametrize("kind", ["Qwen3NextConfig", "Lfm2Config", "FalconH1Config"])
def test_keys_of_layers_with_a_state_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Files as they were written before there were `layer_types`."""
    stated = getattr(importlib.import_module("transformers"), kind)().to_dict()
    stated.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert load_model_shape(tmp_path).masked


def test_a_layers_activations_are_those_of_a_hand_count() -> None:
    """h 3584, i 18944, 28 heads of 128, of which 4 have keys: in bfloat16 16h + 8i + 4q + 4k + 4H."""
    shape = shape_of("Qwen2.5-7B-Instruct")
    token = 16 * 3584 + 8 * 18944 + 4 * 3584 + 4 * 512 + 4 * 28
    assert layer_bytes(shape, width=2) == token
    # masks: keys and values for each of the 28 heads
    assert layer_bytes(shape, width=2, dense=True) == token + 4 * (3584 - 512)
    assert layer_bytes(shape, width=2, keys=3.0) == token + 2 * 4 * 512
    assert layer_bytes(replace(shape, query_norm=True), width=2) == token + 6 * (3584 + 512)
    passing = 8 * 3584 + 4 * 18944
    assert training_bytes(shape, 10, width=2, checkpointing=False) == 10 * (28 * token + passing)
    assert training_bytes(shape, 10, width=2, checkpointing=True) == 10 * (28 * 2 * 3584 + token + passing)
    assert training_bytes(shape, 10, width=2, checkpointing=True, dense_row=5) == pytest.approx(
        10 * (28 * 2 * 3584 + token + 4 * (3584 - 512) + passing) + 10 * 5 * 3
    )
    assert forward_bytes(shape, 10, width=2) < training_bytes(shape, 10, width=2, checkpointing=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with config.json of the published models, and nothing else."""
    cache_published_models(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("rlvr_8gpu_colocated", "Memory of each of the GPUs 0-7 of 79.6 GiB"),
        ("rlvr_16gpu_colocated", "Memory of each of the GPUs 0-15 of 79.6 GiB"),
        ("rlvr_1gpu_24gb", "Memory of GPU 0 of 24.0 GiB"),
        ("rlvr_gsm8k_1gpu_24gb", "Memory of GPU 0 of 24.0 GiB"),
        ("rlvr_1gpu_lora", "Memory of GPU 0 of 79.6 GiB"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_shipped_configurations_fit_and_show_the_plan_of_the_page(
    name: str, title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From config.json alone."""
    monkeypatch.setenv("COLUMNS", "110")
    page = (ROOT / "docs" / "gpu_memory.md").read_text(encoding="utf-8")
    block = page.partition(f"`configs/{name}.yaml`: ")[2].partition("```text\n")[2].partition("```")[0]
    command = ["run", "--config", str(ROOT / "configs" / f"{name}.yaml"), "--check"]
    assert cli.main([*command, f"output_dir={tmp_path}"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert block.startswith(title)
    assert block in "\n".join(line.rstrip() for line in shown.splitlines())


@pytest.mark.usefixtures("hub")
def test_a_run_on_gpus_that_are_too_small_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "--config", str(ROOT / "configs" / "rlvr_8gpu_colocated.yaml"), f"output_dir={tmp_path}"]
    assert cli.main([*command, "resources.gpu=RTX-4090"]) == 2
    error = capsys.readouterr().err
    assert "has 24.0 GiB" in error
    assert not list(tmp_path.glob("qwen*"))


@pytest.mark.parametrize(
    ("refused_with", "downloads"),
    [(1, [["config.json"]]), (2, [["config.json"], "the weights"])],
    ids=["too large by its configuration", "too large by its files"],
)
def test_the_weights_of_a_model_that_is_too_large_are_not_downloaded(
    refused_with: int, downloads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, fetched = gpus(), []
    fitting = GPUReport(plans=(), memory=None, floor=None)
    refused = Report(plan(config), [Finding("error", "training.zero_stage", "too large")], gpus=fitting)

    def check(cls: object, config: RLVRConfig) -> Report:
        return refused if len(fetched) == refused_with else Report(plan(config))

    def download(repo: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert (repo, revision) == ("org/model", config.model.revision)
        fetched.append(allow_patterns if len(allow_patterns) == 1 else "the weights")
        return str(SHAPES / "Qwen3-0.6B")

    monkeypatch.setattr(RLVRPipeline, "check", classmethod(check))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("roll_like.models.load._check_directory", lambda path, label, key: path)
    with pytest.raises(ConfigError, match="too large"):
        RLVRPipeline.launch(config)
    assert fetched == downloads


@pytest.mark.usefixtures("hub")
def test_the_table_shows_every_part(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "rlvr_8gpu_colocated.yaml")
    assert isinstance(config, RLVRConfig)
    shape = shape_of("Qwen2.5-7B-Instruct")
    report = gpu_report(config, plan(config), {"training": shape, "inference": shape})
    assert report is not None
    with (tmp_path / "out").open("w") as file:
        Console(file=file, width=200).print(report.render())
    text = (tmp_path / "out").read_text()
    assert "training: weights 1.8, gradients 3.5, optimizer 10.6" in text
    assert "in host memory meanwhile: at most" in text


def test_the_output_layers_memory_is_its_largest_moment() -> None:
    shape = replace(BILLION, vocab_size=1000, hidden_size=10)
    made = head_bytes(shape, 64, width=2, chunk_tokens=16, chunk_vocab=500, trained=True)
    block = 16 * 500 * (2 + 2 * 4)
    assert made == block + 1000 * 10 * (4 + 2) + 500 * 10 * 2 + 2 * 64 * 10 * 2


def test_states_of_fsdp2_are_in_float32_and_layers_travel() -> None:
    model = shape_of("Qwen2.5-7B-Instruct")
    settings = TrainingConfig(backend="fsdp2", zero_stage=3, workers=8)
    layer, outside = model.layer_parameters, model.parameters - model.layers * model.layer_parameters
    states = training_states(settings, model, model.parameters, width=2)
    assert states.weights == states.gradients == 4 * model.parameters // 8
    assert states.optimizer == 8 * model.parameters // 8
    # in 16 bit: what is outside of the layers, two layers, and its gradient; that in float32 as well
    assert states.buffers == 2 * (outside + 2 * layer) + 2 * outside + max(6 * layer, 4 * outside)
    frozen = training_states(settings, model, 0, width=2)
    assert frozen.weights == 2 * model.parameters // 8
    assert (frozen.gradients, frozen.optimizer, frozen.buffers) == (0, 0, 2 * (outside + 2 * layer))
    whole = training_states(settings.model_copy(update={"zero_stage": 0}), model, 0, width=2)
    assert (whole.weights, whole.buffers) == (2 * model.parameters, 0)


def test_divided_experts_are_not_gathered() -> None:
    """Qwen3-30B-A3B on eight ranks: 128 experts of 3 · 2048 · 768 parameters are 604 of the 623 million of a layer."""
    model = load_model_shape(PUBLISHED / "Qwen3-30B-A3B")
    assert model.expert_parameters == 128 * 3 * 2048 * 768
    settings = TrainingConfig(backend="fsdp2", zero_stage=3, workers=8)
    states = training_states(settings, model, model.parameters, width=2)
    divided = training_states(settings.model_copy(update={"expert_parallel": 8}), model, model.parameters, width=2)
    assert replace(states, buffers=0) == replace(divided, buffers=0)
    saved = model.expert_parameters * 7 // 8
    # two layers that travel, and one layer's gradient in 16 bit and in float32; that of the embedding is larger now
    outside = model.parameters - model.layers * model.layer_parameters
    assert states.buffers - divided.buffers == 2 * 2 * saved + (2 + 4) * model.layer_parameters - 4 * outside
