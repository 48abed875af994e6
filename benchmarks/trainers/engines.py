"""The engines of this package, through Ray and DeepSpeed: what a pipeline's `train_step` takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_like.cluster import RaySession, ResourceManager
from roll_like.models.load import resolve_model
from trainers.batches import Work

Turn = Callable[[], float]


@dataclass(frozen=True)
class Turns:
    """An engine, how it takes turns, and what it takes in one step.

    Attributes:
        turns: By name, functions that take every step of the work once and return the seconds.
        engine: A `TrainingEngine`.
        step: The first step.
    """

    turns: Mapping[str, Turn]
    engine: Any
    step: Any


@contextmanager
def engine_turns(task: str, work: Work[Any, Any]) -> Iterator[Turns]:
    """Yield the engine of a task, started."""
    start = {"grpo": _policy, "sft": _supervised, "dpo": _preference}[task]
    with ExitStack() as stack:
        stack.enter_context(RaySession(work.config.resources, Path("runs/benchmark-logs")))
        resources = stack.enter_context(ResourceManager(work.config.resources))
        resources.allocate()
        yield start(work, resources, stack)


def _timed(step: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> Turn:
    def turn() -> float:
        began = time.perf_counter()
        for each in arguments:
            step(*each)
        return time.perf_counter() - began

    return turn


def _policy(work: Work[Any, Any], resources: ResourceManager, stack: ExitStack) -> Turns:
    from roll_like.algorithms.kl import KLController
    from roll_like.policy_gradient.objective import PolicyObjective
    from roll_like.training.start import rank_spec, start_engine

    config = work.config
    devices = config.resources.devices_of("training")
    model = resolve_model(config.model)
    objective = PolicyObjective(
        settings=config.training,
        algorithm=config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
        kl=KLController(config.algorithm.kl),
    )
    spec = rank_spec(config, model, devices, objective, total_updates=1000)
    engine = start_engine("training", spec, resources, devices, stack=stack)
    return Turns({"engine": _timed(engine.train_step, [(batch,) for batch in work.batches])}, engine, work.batches[0])


def _supervised(work: Work[Any, Any], resources: ResourceManager, stack: ExitStack) -> Turns:
    from roll_like.builtin.pipelines.sft.pipeline import SFTPipeline
    from roll_like.training.engine import TrainingEngine

    packed = SFTPipeline.start_trainer(work.config, resources, stack)
    # the same ranks: packing is how the driver lays batches out
    padded = TrainingEngine(
        packed.cluster, replace(packed.objective, packing=False), joined=packed.layout.get("joined", False)
    )
    batches = [(batch,) for batch in work.batches]
    turns = {"engine": _timed(packed.train_step, batches), "engine, unpacked": _timed(padded.train_step, batches)}
    return Turns(turns, packed, work.batches[0])


def _preference(work: Work[Any, Any], resources: ResourceManager, stack: ExitStack) -> Turns:
    from roll_like.builtin.pipelines.dpo.objective import PairStep, whole_logprobs
    from roll_like.builtin.pipelines.dpo.pipeline import DPOPipeline
    from roll_like.types import Pair

    engine = DPOPipeline.start_trainer(work.config, resources, stack)
    batches = []
    for batch in work.batches:
        pairs = [Pair(chosen=one, rejected=two) for one, two in zip(batch[::2], batch[1::2], strict=True)]
        batches.append((PairStep(pairs=pairs, reference=whole_logprobs(engine, batch)),))
    return Turns({"engine": _timed(engine.train_step, batches)}, engine, batches[0][0])
