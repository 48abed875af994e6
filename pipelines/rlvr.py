"""Reinforcement learning with verifiable rewards: sample groups, judge them, update, hand the weights back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from roll_like.build import (
    Workers,
    build_evaluator,
    build_rollouts,
    build_weight_sync,
    start_workers,
)
from roll_like.config.rlvr import RLVRConfig
from roll_like.metrics.summary import Summary
from roll_like.registry import ADVANTAGES, PIPELINES
from roll_like.rollout.evaluate import Evaluator
from roll_like.rollout.metrics import rollout_metrics, rollout_rows
from roll_like.rollout.source import RolloutSource
from roll_like.run import RunContext, RunResult, RunState, launch
from roll_like.training.engine import TrainingEngine, with_reference
from roll_like.weights.sync import WeightSync


@PIPELINES.register("rlvr")
@dataclass(kw_only=True)
class RLVRPipeline:
    """The parts of an RLVR run. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[RLVRConfig]] = RLVRConfig

    run_state: RunState
    workers: Workers
    rollouts: RolloutSource
    advantages: Any
    actor: TrainingEngine
    reference: TrainingEngine | None
    weights: WeightSync
    evaluator: Evaluator | None

    def run(self) -> None:
        """Train to the end: the current policy samples, its samples are judged, the judgement moves it."""
        self.weights.push()
        self.evaluate(before=True)
        for step in self.run_state.steps():
            with self.devices.generating():
                collected = self.rollouts.collect(step)
            with self.devices.training():
                samples = self.advantages.assign(collected.groups)
                report = self.actor.train_step(with_reference(samples, self.reference))
            sync = self.weights.push()
            self.run_state.log(step, rollout_metrics(collected, sync.version - 1), report.metrics, sync.metrics)
            self.run_state.metrics.log_rollouts(step, rollout_rows(collected.groups))
            self.evaluate(step)
        self.evaluate(after=True)
