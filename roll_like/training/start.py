"""Starts the ranks of a training engine, or of a frozen reference model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

from roll_like.cluster import Cluster, Placement, ResourceManager, thread_environment
from roll_like.config.sections import Span
from roll_like.training.engine import TrainingEngine
from roll_like.training.worker import DeepSpeedWorker, TrainerSpec

Timer = Callable[[str], AbstractContextManager[None]]


def start_trainer(
    role: str,
    spec: TrainerSpec,
    resources: ResourceManager,
    span: Span,
    *,
    max_response_tokens: int,
    stack: ExitStack,
    span_timer: Timer = lambda name: nullcontext(),
) -> TrainingEngine:
    """Start the ranks of a training engine (or of a frozen reference model) on a span.

    Raises:
        EngineError: A rank did not start.
    """
    placements = resources.place(span, spec.training.workers, role)
    world = len(placements)
    cluster = Cluster(
        role,
        DeepSpeedWorker,
        placements,
        arguments=lambda rank: (spec, rank, world),
        environment=lambda rank: trainer_environment(placements[rank], spec.device),
    )
    stack.callback(cluster.close, DeepSpeedWorker.close)
    address = cluster.on(0, DeepSpeedWorker.address)
    cluster.everywhere(DeepSpeedWorker.start, address)
    return TrainingEngine(
        cluster,
        algorithm=spec.algorithm,
        max_response_tokens=max_response_tokens,
        max_tokens_per_micro_batch=spec.training.max_tokens_per_micro_batch,
        share_prompts=spec.training.share_prompts,
        span=span_timer,
    )


def trainer_environment(placement: Placement, device: str) -> Mapping[str, str]:
    """Return what a rank's process needs before it imports torch."""
    if device == "cpu":
        return {**thread_environment(len(placement.devices)), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {"DS_ACCELERATOR": "cuda", "TOKENIZERS_PARALLELISM": "false"}
