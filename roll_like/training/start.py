"""Starts the ranks of a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from roll_like.cluster import Cluster, Placement, ResourceManager, thread_environment
from roll_like.config.load import notebook_plugins
from roll_like.config.resources import DeviceRange
from roll_like.config.run import RunConfig
from roll_like.config.training import CopySection, TrainerConfig
from roll_like.models.load import ResolvedModel
from roll_like.models.precision import precision_of
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.backend import TrainingBackend
from roll_like.training.engine import Timer, TrainingEngine, meet, untimed
from roll_like.training.interface import Objective, RankSpec, StepT
from roll_like.training.rank import TrainingRank


def rank_spec(
    config: RunConfig,
    model: ResolvedModel,
    devices: DeviceRange,
    objective: Objective[StepT, Any],
    *,
    total_updates: int | None,
    copies: Mapping[str, CopySection] = MappingProxyType({}),
) -> RankSpec[StepT]:
    """Return what the ranks of a model need to know.

    Args:
        config: The run's configuration.
        model: What they load.
        devices: Their devices, divided among them.
        objective: What they compute.
        total_updates: Optimizer steps of the whole run; None for a model that is not trained.
        copies: What is computed with copies of what they train, by name.
    """
    return RankSpec(
        objective=objective,
        model_path=str(model.path),
        dtype=precision_of(config),
        device=config.resources.device,
        threads=len(devices) // objective.settings.workers,
        seed=config.seed,
        total_updates=total_updates or 1,
        trust_remote_code=config.model.trust_remote_code,
        window=config.context_window,
        frozen=total_updates is None,
        imports=config.import_,
        plugins=notebook_plugins(config),
        float32_head=config.model.head_dtype == "float32",
        # a part of the policy's moves may be too small for 16 bits; all of it has its precision
        copies={name: section.mixup_alpha < 1.0 for name, section in copies.items()},
    )


def start_engine(
    role: str,
    spec: RankSpec[StepT],
    resources: ResourceManager,
    devices: DeviceRange,
    *,
    stack: ExitStack,
    timer: Timer = untimed,
    kind: type[TrainingRank] = TrainingRank,
) -> TrainingEngine[StepT]:
    """Start the ranks of one model and have them meet.

    Args:
        role: The role, for messages and for the placement.
        spec: What each rank needs to know.
        resources: Where they go.
        devices: Devices to divide among them.
        stack: Ends them when it is closed.
        timer: Times a named part of a step.
        kind: The class of each rank.

    Raises:
        EngineError: A rank did not start.
    """
    placements = resources.place(devices, spec.objective.settings.workers, role)
    cluster = Cluster(
        role,
        kind,
        placements,
        arguments=lambda rank: (spec, rank, len(placements)),
        environment=lambda rank: trainer_environment(placements[rank], spec.objective.settings, spec.device),
    )
    stack.callback(cluster.close, TrainingRank.close)
    meet(cluster)
    joined = cluster.on(0, TrainingRank.joins_rows)
    return TrainingEngine(
        cluster, spec.objective, timer=timer, joined=joined, frozen=spec.frozen, report=resources.report
    )


def start_trainer(
    config: RunConfig,
    model: ResolvedModel,
    objective: Objective[StepT, Any],
    resources: ResourceManager,
    stack: ExitStack,
    *,
    timer: Timer = untimed,
    frozen: bool = False,
    copies: Mapping[str, CopySection] = MappingProxyType({}),
) -> TrainingEngine[StepT]:
    """Start the ranks of the model that a run trains, one optimizer step a step; frozen ones only compute.

    Args:
        copies: `RunConfig.copies`, where they are computed with.

    Raises:
        EngineError: A rank did not start.
    """
    devices = config.resources.devices_of("training")
    updates = None if frozen else config.total_steps
    spec = rank_spec(config, model, devices, objective, total_updates=updates, copies=copies)
    return start_engine("training", spec, resources, devices, stack=stack, timer=timer)


def trainer_environment(placement: Placement, settings: TrainerConfig, device: str) -> Mapping[str, str]:
    """Return what a rank's process needs before it imports torch."""
    backend: type[TrainingBackend] = TRAINING_BACKENDS.get(settings.backend)
    own = backend.environment(device)
    if device == "cpu":
        return {**thread_environment(len(placement.devices)), **own, "CUDA_VISIBLE_DEVICES": ""}
    return {**own, "TOKENIZERS_PARALLELISM": "false"}
