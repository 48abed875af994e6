"""Starts the ranks of a policy, of a frozen reference model, or of a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypedDict, TypeVar

from roll_like.algorithms.kl import KLController
from roll_like.cluster import Cluster, Placement, ResourceManager, thread_environment
from roll_like.config.run import RunConfig
from roll_like.config.sections import DeviceRange, Precision
from roll_like.models.load import ResolvedModel
from roll_like.models.precision import precision_of
from roll_like.training.critic import CriticEngine
from roll_like.training.critic_worker import CriticSpec, CriticWorker
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import DeepSpeedRank, RankSpec
from roll_like.training.worker import DeepSpeedWorker, TrainerSpec

Timer = Callable[[str], AbstractContextManager[None]]
RankT = TypeVar("RankT", bound=DeepSpeedRank)


class RankFields(TypedDict):
    """What `RankSpec` has, for the constructor of a model's own spec."""

    model_path: str
    dtype: Precision
    device: str
    threads: int
    seed: int
    total_updates: int
    trust_remote_code: bool
    imports: tuple[str, ...]


def rank_fields(
    config: RunConfig, model: ResolvedModel, devices: DeviceRange, workers: int, *, total_updates: int
) -> RankFields:
    """Return what the ranks of every model need to know.

    Args:
        config: The run's configuration.
        model: What they load.
        devices: Their devices, divided among them.
        workers: How many there are.
        total_updates: Optimizer steps of the whole run.
    """
    return RankFields(
        model_path=str(model.path),
        dtype=precision_of(config),
        device=config.resources.device,
        threads=len(devices) // workers,
        seed=config.seed,
        total_updates=total_updates,
        trust_remote_code=config.model.trust_remote_code,
        imports=config.import_,
    )


def start_trainer(
    role: str,
    spec: TrainerSpec,
    resources: ResourceManager,
    devices: DeviceRange,
    *,
    max_response_tokens: int,
    stack: ExitStack,
    kl_controller: KLController | None = None,
    timer: Timer = lambda name: nullcontext(),
) -> TrainingEngine:
    """Start the ranks of a training engine (or of a frozen reference model) on a device range.

    Raises:
        EngineError: A rank did not start.
    """
    cluster = start_ranks(role, DeepSpeedWorker, spec, spec.training.workers, resources, devices, stack=stack)
    return TrainingEngine(
        cluster,
        algorithm=spec.algorithm,
        max_response_tokens=max_response_tokens,
        max_tokens_per_micro_batch=spec.training.max_tokens_per_micro_batch,
        share_prompts=spec.training.share_prompts,
        kl_controller=kl_controller,
        timer=timer,
    )


def start_critic_engine(
    spec: CriticSpec,
    resources: ResourceManager,
    devices: DeviceRange,
    *,
    stack: ExitStack,
    timer: Timer = lambda name: nullcontext(),
) -> CriticEngine:
    """Start the ranks of a critic on a device range.

    Raises:
        EngineError: A rank did not start.
    """
    cluster = start_ranks("critic", CriticWorker, spec, spec.critic.workers, resources, devices, stack=stack)
    return CriticEngine(cluster, spec.critic, timer=timer)


def start_ranks(
    role: str,
    worker: type[RankT],
    spec: RankSpec,
    workers: int,
    resources: ResourceManager,
    devices: DeviceRange,
    *,
    stack: ExitStack,
) -> Cluster[RankT]:
    """Start the ranks of one model and have them meet.

    Args:
        role: The role, for messages and for the placement.
        worker: Their class; an instance takes the spec, its rank and the number of ranks.
        spec: What each rank needs to know.
        workers: How many.
        resources: Where workers go.
        devices: Devices to divide among them.
        stack: Ends them when it is closed.

    Raises:
        EngineError: A rank did not start.
    """
    placements = resources.place(devices, workers, role)
    cluster = Cluster(
        role,
        worker,
        placements,
        arguments=lambda rank: (spec, rank, len(placements)),
        environment=lambda rank: trainer_environment(placements[rank], spec.device),
    )
    stack.callback(cluster.close, worker.close)
    address = cluster.on(0, worker.address)
    cluster.everywhere(worker.start, address)
    return cluster


def trainer_environment(placement: Placement, device: str) -> Mapping[str, str]:
    """Return what a rank's process needs before it imports torch."""
    if device == "cpu":
        return {**thread_environment(len(placement.devices)), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {"DS_ACCELERATOR": "cuda", "TOKENIZERS_PARALLELISM": "false"}
