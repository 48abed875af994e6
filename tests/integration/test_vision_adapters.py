"""Adapters of vision-language models: engines and trainer agree on images, update after update, and so do exports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_thread import float_spec
from peft import LoraConfig, PeftModel, get_peft_model
from rank_specs import cpu_rank
from test_compatibility import Prompts, difference, mismatch, sample, sample_of
from tiny_vision import TORCHVISION, make_vision_model, plain_logprobs, unresized_prompts
from warm_workers import RESOURCES

from roll_like.algorithms.kl import KLController
from roll_like.cluster import Cluster, ResourceManager, thread_environment
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.inference import BASE
from roll_like.config.model import ModelConfig
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.inference.interface import AdapterSpec, FrozenAdapter, GenerateRequest, InferenceEngine, Sampling
from roll_like.inference.plugin import EnginePlugin
from roll_like.inference.weight_transfer.interface import SendReport
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.models.card import ModelCard
from roll_like.models.lora import linear_layers
from roll_like.models.modules import load_causal_lm
from roll_like.models.stored_adapter import StoredAdapter
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.registry import INFERENCE_ENGINES
from roll_like.training.engine import TrainingEngine, WithoutAdapters
from roll_like.training.rank import TrainingRank
from roll_like.training.start import start_engine
from roll_like.types import PolicySample

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]

#: Largest difference of a log-probability, in nats. Both sides compute in float32.
TOLERANCE = 2e-4
FAR = 0.05
DEVICES = DeviceRange.model_validate("0-1")
LORA = {"rank": 4, "alpha": 8}
MODULES = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@pytest.fixture(scope="module")
def hardware(warm_ray: None) -> Iterator[ResourceManager]:
    """Both cores, with time for vLLM to start."""
    with ResourceManager(RESOURCES.model_copy(update={"start_timeout_seconds": 300})) as manager:
        manager.allocate()
        yield manager


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(request.param, tmp_path_factory.mktemp("vision") / request.param)


@pytest.fixture(scope="module")
def frozen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> FrozenAdapter:
    """An adapter beside the policy's, as peft writes one of the language model."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=r".*language_model.*\.(q_proj|gate_proj)")
    adapted = get_peft_model(load_causal_lm(model, "float32"), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    adapted.save_pretrained(str(folder := tmp_path_factory.mktemp("frozen")))
    stored = StoredAdapter.read(folder, "key")
    return FrozenAdapter(name="other", path=str(stored.path), rank=stored.rank, modules=stored.modules)


@pytest.fixture(scope="module")
def prompts(model: Path) -> Prompts:
    return unresized_prompts(model)


@contextmanager
def engine_of(
    kind: str, model: Path, hardware: ResourceManager, adapter: AdapterSpec | None
) -> Iterator[Cluster[InferenceEngine]]:
    """An engine in an actor of its own, loaded."""
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(kind)
    config: Any = plugin.Config(**{"vllm": {"kv_cache_gib": 0.05, "max_running": 8}, "hf": {}}[kind])
    spec = replace(float_spec(model), adapter=adapter)
    path = {"PYTHONPATH": str(TORCHVISION)} if kind == "vllm" else {}
    cluster = Cluster(
        "inference",
        plugin.engine(),
        hardware.place(DEVICES, 1, "inference"),
        arguments=lambda rank: (config, spec),
        environment=lambda rank: {**thread_environment(1), **plugin.environment(config, spec), **path},
        concurrency=64,
    )
    try:
        cluster.everywhere(InferenceEngine.start)
        yield cluster
    finally:
        cluster.close(InferenceEngine.close)


@contextmanager
def trainer_of(model: Path, hardware: ResourceManager, **training: Any) -> Iterator[TrainingEngine[Any]]:
    settings = TrainingConfig(max_tokens_per_micro_batch=256, optimizer={"lr": 3e-2}, **training)
    algorithm = AlgorithmConfig()
    objective = PolicyObjective(
        settings=settings, algorithm=algorithm, max_response_tokens=16, kl=KLController(algorithm.kl)
    )
    with ExitStack() as stack:
        yield start_engine("training", cpu_rank(objective, model), hardware, DEVICES, stack=stack)


def sync_of(kind: str, trainer: TrainingEngine[Any], engine: Cluster[InferenceEngine], *, alone: bool) -> WeightSync:
    ranks = trainer.cluster
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(kind)
    transfer = plugin.weight_transfer("shared_memory", engine, 1, lambda: ranks.on(0, TrainingRank.address))
    ranks.everywhere(TrainingRank.connect_weights, transfer, alone)

    def send(seed: int) -> SendReport:
        return ranks.everywhere(TrainingRank.send_weights, seed)[0]

    return WeightSync(send, engine)


def asked_beside(engine: Cluster[InferenceEngine], prompts: Prompts, adapter: str) -> list[PolicySample]:
    """Samples that are computed without the policy's adapter."""
    requests = [
        GenerateRequest(
            request_id=f"{adapter}-{group}-0",
            prompt_ids=tokens,
            images=images,
            sampling=Sampling(max_tokens=16),
            seed=0,
            adapter=adapter,
        )
        for group, (tokens, images) in enumerate(prompts)
    ]
    engine.on(0, InferenceEngine.submit, requests)
    found: dict[str, Any] = {}
    while len(found) < len(requests):
        found |= {each.request_id: each for each in engine.on(0, InferenceEngine.poll, 30.0)}
    versions = {segment.policy_version for each in found.values() for segment in each.segments}
    return [sample_of(request, found[request.request_id], *versions) for request in requests]


def computed(loaded: Any, folder: Path, samples: Sequence[PolicySample]) -> list[np.ndarray]:
    """What transformers computes with a model, 0 where not sampled."""
    with torch.no_grad():
        found = [plain_logprobs(loaded, folder, each.token_ids, each.images).numpy() for each in samples]
    return [
        np.where(each.loss_mask, np.concatenate([[0.0], logprobs]), 0)
        for each, logprobs in zip(samples, found, strict=True)
    ]


def updated(
    trainer: TrainingEngine[Any],
    engine: Cluster[InferenceEngine],
    sync: WeightSync,
    prompts: Prompts,
    first: int,
    base: Any,
    *,
    alone: bool,
) -> list[PolicySample]:
    """Sample and update twice; return samples of the last policy. Every tensor arrives, and both sides agree."""
    tensors, layers = len(list(base.named_parameters())), len(linear_layers(base))
    samples = sample(engine, prompts, "before", first)
    assert mismatch(trainer, samples) < TOLERANCE
    for version in (first + 1, first + 2):
        trainer.train_step(samples)
        assert mismatch(trainer, samples) > FAR
        report = sync.push()
        assert report.unchecked == ()
        # of the base beside adapters all tensors are compared once
        known = tensors if version == 1 or not alone else 0
        assert report.checked == known + (2 * layers if alone else 0)
        samples = sample(engine, prompts, f"after-{version}", version)
        assert mismatch(trainer, samples) < TOLERANCE
    return samples


def case(family: str, kind: str, *, alone: bool = False, slow: bool = True, **training: Any) -> Any:
    sent = "adapters" if alone else "merged"
    marks = pytest.mark.slow if slow else ()
    return pytest.param(
        family, kind, alone, training, id=f"{family}-{kind}-{sent}{'-'.join(['', *training])}", marks=marks
    )


@pytest.mark.parametrize(
    ("model", "kind", "alone", "training"),
    [
        case("qwen2_5_vl", "hf", slow=False, workers=2, zero_stage=3),
        case("qwen2_5_vl", "hf", workers=2, zero_stage=2),
        case("qwen2_5_vl", "hf", lora=LORA | {"quantization": "nf4"}),
        case("qwen3_vl", "hf", backend="fsdp2", workers=2, zero_stage=3, gradient_checkpointing=True),
        case("qwen2_5_vl", "vllm", alone=True),
        case("qwen2_5_vl", "vllm"),
        case("qwen3_vl", "vllm", alone=True),
        case("qwen3_vl", "hf", lora=LORA | {"quantization": "nf4"}),
        case("qwen2_vl", "vllm", alone=True),
        case("qwen2_vl", "vllm"),
    ],
    indirect=["model"],
)
def test_engine_trainer_checkpoint_and_exports_agree(
    kind: str,
    alone: bool,
    training: dict[str, Any],
    model: Path,
    prompts: Prompts,
    frozen: FrozenAdapter,
    hardware: ResourceManager,
    tmp_path: Path,
) -> None:
    if kind == "vllm" and not TORCHVISION.is_dir():
        pytest.skip("vLLM needs torchvision for images: make torchvision")
    training = {"lora": LORA, **training}
    quantized = "quantization" in training["lora"]
    adapter = AdapterSpec(rank=4, modules=MODULES, frozen=(frozen,)) if alone else None
    base = load_causal_lm(model, "float32").eval()
    with engine_of(kind, model, hardware, adapter) as engine, trainer_of(model, hardware, **training) as trainer:
        sync, first = sync_of(kind, trainer, engine, alone=alone), 0
        if quantized:  # the engine has loaded the base as it is
            first = sync.push().version
        samples = updated(trainer, engine, sync, prompts, first, base, alone=alone)
        if not quantized:
            reference = WithoutAdapters(trainer).logprobs(samples)
            assert difference(reference, computed(base, model, samples)) < TOLERANCE
        if alone:
            other = PeftModel.from_pretrained(load_causal_lm(model, "float32"), frozen.path).eval().base_model.model
            for name, theirs in ((BASE, base), ("other", other)):
                beside = asked_beside(engine, prompts, name)
                told = [each.behaviour_logprobs for each in beside]
                assert difference(told, computed(theirs, model, beside)) < TOLERANCE
                assert mismatch(trainer, beside) > FAR
        trainer.save(tmp_path)
        trained = trainer.logprobs(samples)
        card = ModelCard(name="tiny", base_model=str(model), pipeline="rlvr", steps=2)
        trainer.export(tmp_path / "export", ModelConfig(path=str(model)), card)
    with trainer_of(model, hardware, **training) as trainer:
        trainer.load(tmp_path)
        assert difference(trainer.logprobs(samples), trained) < 1e-6
    merged = load_causal_lm(tmp_path / "export", "float32").eval()
    assert difference(computed(merged, tmp_path / "export", samples), trained) < TOLERANCE
    if not quantized:
        adapted = PeftModel.from_pretrained(base, tmp_path / "export" / "adapter").eval().base_model.model
        assert difference(computed(adapted, model, samples), trained) < TOLERANCE
