"""One contract for engines, training backends and families of models: the numbers of both sides agree throughout.

Engine and ranks are started and connected as in a run. In float32: log-probabilities of engine and trainer agree with
the model's own weights and after updates; every tensor arrives; a checkpoint resumes; the export is the same model in
transformers. `make compatibility` writes docs/compatibility.md from the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compatibility import CELLS, RESULTS, VISION, Cell, Found
from engine_thread import float_spec
from rank_specs import cpu_rank
from safetensors import safe_open
from sglang_engine import stand_in
from tiny_families import load_family, make_family
from tiny_vision import TORCHVISION, make_vision_model, plain_logprobs, unresized_prompts
from warm_workers import RESOURCES

from roll_like.algorithms.kl import KLController
from roll_like.cluster import Cluster, ResourceManager, thread_environment
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.model import ModelConfig
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.errors import RollLikeError
from roll_like.inference.interface import GenerateRequest, InferenceEngine, Sampling
from roll_like.inference.plugin import EnginePlugin, refuse_unserved_images
from roll_like.inference.weight_transfer.interface import SendReport
from roll_like.inference.weight_transfer.probe import LogprobProbe
from roll_like.inference.weight_transfer.sync import SyncReport, WeightSync
from roll_like.models.card import ModelCard
from roll_like.models.load import load_tokenizer
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.policy_gradient.probe import logprobs_on_ranks
from roll_like.registry import INFERENCE_ENGINES
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.training.start import start_engine
from roll_like.types import PlacedImage, PolicySample

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]

#: Largest difference of a log-probability, in nats. Both sides compute in float32.
TOLERANCE = 2e-4
#: What an update makes of one, at least.
FAR = 0.1
#: Tokens of the prompts: longer and shorter than the families' windows.
LENGTHS = (80, 40, 5)
RESPONSE = 16
DEVICES = DeviceRange.model_validate("0-1")
#: Those that `make test` runs.
ALWAYS = ("qwen3-hf-fsdp2", "qwen2_5_vl-sglang-deepspeed")
Prompts = Sequence[tuple[np.ndarray, tuple[PlacedImage, ...]]]


@pytest.fixture(scope="module")
def hardware(warm_ray: None) -> Iterator[ResourceManager]:
    """Both cores, with time for vLLM to start."""
    with ResourceManager(RESOURCES.model_copy(update={"start_timeout_seconds": 300})) as manager:
        manager.allocate()
        yield manager


def prompts_of(family: str, model: Path) -> Prompts:
    if family in VISION:
        return unresized_prompts(model)
    random = np.random.default_rng(1)
    return [(random.integers(5, 500, length).astype(np.int32), ()) for length in LENGTHS]


def needs_torchvision(cell: Cell) -> bool:
    return cell.family in VISION and cell.engine == "vllm"


@contextmanager
def engine_of(cell: Cell, model: Path, hardware: ResourceManager) -> Iterator[Cluster[InferenceEngine]]:
    """The engine in an actor of its own, loaded."""
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(cell.engine)
    own = {"vllm": {"kv_cache_gib": 0.05, "max_running": 8}, "hf": {}, "sglang": {"deterministic": True}}[cell.engine]
    config: Any = plugin.Config(**own)
    spec = float_spec(model)
    path = {"PYTHONPATH": str(TORCHVISION)} if needs_torchvision(cell) else {}
    with ExitStack() as stack:
        if cell.engine == "sglang":
            stack.enter_context(stand_in())
        cluster = Cluster(
            "inference",
            plugin.engine(),
            hardware.place(DEVICES, 1, "inference"),
            arguments=lambda rank: (config, spec),
            environment=lambda rank: {**thread_environment(1), **plugin.environment(config, spec), **path},
            concurrency=64,
        )
        stack.callback(cluster.close, InferenceEngine.close)
        cluster.everywhere(InferenceEngine.start)
        yield cluster


@contextmanager
def trainer_of(cell: Cell, model: Path, hardware: ResourceManager) -> Iterator[TrainingEngine[Any]]:
    """Two ranks that shard the model."""
    settings = TrainingConfig(
        backend=cell.backend,
        workers=2,
        zero_stage=3,
        max_tokens_per_micro_batch=256,
        optimizer={"lr": 1e-2},
    )
    algorithm = AlgorithmConfig()
    objective = PolicyObjective(
        settings=settings, algorithm=algorithm, max_response_tokens=RESPONSE, kl=KLController(algorithm.kl)
    )
    spec = cpu_rank(objective, model)
    with ExitStack() as stack:
        yield start_engine("training", spec, hardware, DEVICES, stack=stack)


def sample(engine: Cluster[InferenceEngine], prompts: Prompts, name: str, version: int) -> list[PolicySample]:
    """Two samples of each prompt, with made-up advantages."""
    requests = [
        GenerateRequest(
            request_id=f"{name}-{group}-{seed}",
            prompt_ids=tokens,
            images=images,
            sampling=Sampling(max_tokens=RESPONSE),
            seed=seed,
        )
        for group, (tokens, images) in enumerate(prompts)
        for seed in range(2)
    ]
    engine.on(0, InferenceEngine.submit, requests)
    found: dict[str, Any] = {}
    while len(found) < len(requests):
        finished: Any = engine.on(0, InferenceEngine.poll, 30.0)
        assert finished, "nothing finished within 30 s"
        found |= {each.request_id: each for each in finished}
    return [sample_of(request, found[request.request_id], version) for request in requests]


def sample_of(request: GenerateRequest, generation: Any, version: int) -> PolicySample:
    assert {segment.policy_version for segment in generation.segments} == {version}
    tokens, prompt_length = np.concatenate([request.prompt_ids, generation.token_ids]), len(request.prompt_ids)
    loss_mask = np.arange(len(tokens)) >= prompt_length
    return PolicySample(
        group_id=request.request_id.rpartition("-")[0],
        token_ids=tokens.astype(np.int32),
        prompt_length=prompt_length,
        loss_mask=loss_mask,
        images=request.images,
        turns=np.where(loss_mask, 0, -1).astype(np.int32),
        behaviour_logprobs=np.concatenate([np.zeros(prompt_length), generation.logprobs]).astype(np.float32),
        advantages=np.where(loss_mask, -1.0 if request.seed else 1.0, 0.0).astype(np.float32),
        reward=0.0,
        policy_version=version,
    )


def difference(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(one - two).max()) for one, two in zip(left, right, strict=True))


def mismatch(trainer: TrainingEngine[Any], samples: Sequence[PolicySample]) -> float:
    """The largest difference of what the engine told and what the trainer computes."""
    return difference(trainer.logprobs(samples), [each.behaviour_logprobs for each in samples])


def sync_of(
    cell: Cell, trainer: TrainingEngine[Any], engine: Cluster[InferenceEngine], tokens: np.ndarray, version: int = 0
) -> WeightSync:
    """As in a run, with a probe of each push."""
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(cell.engine)
    ranks = trainer.cluster
    transfer = plugin.weight_transfer("shared_memory", engine, 1, lambda: ranks.on(0, TrainingRank.address))
    ranks.everywhere(TrainingRank.connect_weights, transfer)

    def send(seed: int) -> SendReport:
        return ranks.everywhere(TrainingRank.send_weights, seed)[0]

    probe = LogprobProbe(tokens=tokens, trainer=logprobs_on_ranks(ranks), tolerance=TOLERANCE, every=1)
    return WeightSync(send, engine, version=version, probe=probe)


def tensors_in(directory: Path) -> set[str]:
    """Names of the tensors of a model."""
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names


def in_transformers(cell: Cell, model: Path, samples: Sequence[PolicySample]) -> list[np.ndarray]:
    """What transformers computes with a model, 0 where not sampled."""
    loaded = load_family(cell.family, model)
    with torch.no_grad():
        found = [plain_logprobs(loaded, model, each.token_ids, each.images).numpy() for each in samples]
    return [
        np.where(each.loss_mask, np.concatenate([[0.0], logprobs]), 0)
        for each, logprobs in zip(samples, found, strict=True)
    ]


def arrived(report: SyncReport, cell: Cell, model: Path) -> None:
    """Every tensor was compared; SGLang tells nothing of its tensors, so its probe has to do."""
    assert report.probe is not None
    assert report.probe < TOLERANCE
    names = tensors_in(model)
    assert (report.checked, len(report.unchecked)) == ((0, len(names)) if cell.engine == "sglang" else (len(names), 0))


def contract(cell: Cell, model: Path, folder: Path, hardware: ResourceManager) -> Found:
    """Run all of it; return the differences."""
    prompts = prompts_of(cell.family, model)
    probed = np.random.default_rng(2).integers(5, len(load_tokenizer(ModelConfig(path=str(model)))), 64)
    with engine_of(cell, model, hardware) as engine:
        with trainer_of(cell, model, hardware) as trainer:
            samples = sample(engine, prompts, "before", 0)
            before = mismatch(trainer, samples)
            assert before < TOLERANCE
            sync, after = sync_of(cell, trainer, engine, probed.astype(np.int32)), 0.0
            for version in (1, 2):
                trainer.train_step(samples)
                assert mismatch(trainer, samples) > FAR
                arrived(sync.push(), cell, model)
                samples = sample(engine, prompts, f"after-{version}", version)
                after = max(after, mismatch(trainer, samples))
                assert after < TOLERANCE
            trainer.save(folder)
            trainer.train_step(samples)
            uninterrupted = trainer.logprobs(samples)
        with trainer_of(cell, model, hardware) as trainer:
            trainer.load(folder)
            trainer.train_step(samples)
            resumed = difference(trainer.logprobs(samples), uninterrupted)
            assert resumed < TOLERANCE
            arrived(sync_of(cell, trainer, engine, probed.astype(np.int32), version=2).push(), cell, model)
            samples = sample(engine, prompts, "resumed", 3)
            after = max(after, mismatch(trainer, samples))
            assert after < TOLERANCE
            trained = trainer.logprobs(samples)
            card = ModelCard(name="tiny", base_model=str(model), pipeline="rlvr", steps=3)
            trainer.export(folder / "export", ModelConfig(path=str(model)), card)
    assert tensors_in(folder / "export") == tensors_in(model)
    exported = difference(in_transformers(cell, folder / "export", samples), trained)
    assert exported < TOLERANCE
    return Found(before=before, after=after, resumed=resumed, exported=exported)


def refused(cell: Cell, model: Path, hardware: ResourceManager) -> None:
    """Begin a run of a combination that is refused: before the engine starts, or at its first sync."""
    refuse_unserved_images(cell.engine, model)
    with engine_of(cell, model, hardware) as engine, trainer_of(cell, model, hardware) as trainer:
        sync_of(cell, trainer, engine, np.arange(5, 69, dtype=np.int32)).push()


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=str(cell), marks=() if str(cell) in ALWAYS else pytest.mark.slow) for cell in CELLS],
)
def test_engine_trainer_checkpoint_and_export_agree(cell: Cell, tmp_path: Path, hardware: ResourceManager) -> None:
    if needs_torchvision(cell) and not TORCHVISION.is_dir():
        pytest.skip("vLLM needs torchvision for images: make torchvision")
    model, folder = tmp_path / "model", tmp_path / "run"
    (make_vision_model if cell.family in VISION else make_family)(cell.family, model)
    folder.mkdir()
    if cell.refused:
        with pytest.raises(RollLikeError, match=re.escape(cell.refused)):
            refused(cell, model, hardware)
        RESULTS[cell.key] = Found()
        return
    found = RESULTS[cell.key] = contract(cell, model, folder, hardware)
    print(f"{cell}: {json.dumps({name: f'{getattr(found, name):.1e}' for name in found.__slots__})}")
