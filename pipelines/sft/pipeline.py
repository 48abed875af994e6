"""Supervised fine-tuning: make given answers likelier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Self

from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective, likelihood_metrics
from roll_like.cluster import ResourceManager
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.samples import SampleSet
from roll_like.models.load import resolve_model
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.pipeline import OfflinePipeline
from roll_like.offline.samples import numbered
from roll_like.run.state import RunContext
from roll_like.training.engine import Timer, TrainingEngine
from roll_like.training.start import start_trainer
from roll_like.types import TrainingSample

_Trainer = TrainingEngine[Sequence[TrainingSample]]


@dataclass(kw_only=True)
class SFTPipeline(OfflinePipeline[SFTConfig, TrainingSample, Sequence[TrainingSample]]):
    """The parts of a supervised run."""

    def batch(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Return the samples, whose answers become likelier."""
        return numbered(samples)

    @classmethod
    def build(cls, config: SFTConfig, run: RunContext) -> Self:
        """Start the trainer and put the parts together, where a resumed run left them."""
        samples = cls.read(config, run).order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        trainer = start_supervised(config, run.resources, run.stack, timer=run.state.timer)
        run.state.keep([trainer], examples=samples)
        evaluator = cls.evaluator_of(config, trainer)
        return cls(config=config, run_state=run.state, samples=samples, trainer=trainer, evaluator=evaluator)

    @classmethod
    def load(cls, config: SFTConfig, rows: Any, renderer: Renderer, section: str) -> SampleSet[TrainingSample]:  # noqa: ARG003
        """Return the conversations of `rows`."""
        return load_conversations(rows, renderer, section=section)

    @classmethod
    def start_evaluator(
        cls, config: SFTConfig, resources: ResourceManager, stack: ExitStack
    ) -> OfflineEvaluator | None:
        """Start a trainer that only computes log-probabilities."""
        return cls.evaluator_of(config, start_supervised(config, resources, stack, frozen=True))

    @classmethod
    def evaluator_of(cls, config: SFTConfig, trainer: _Trainer) -> OfflineEvaluator | None:
        """Return what measures how likely the model finds the evaluation's answers; None without an evaluation."""
        loaded = cls.evaluated_on(config)
        if config.evaluation is None or loaded is None:
            return None
        samples = numbered(loaded.samples)
        names = [source.name for source in loaded.sources for _ in source.items]
        return OfflineEvaluator(
            config.evaluation, lambda: likelihood_metrics(samples, trainer.logprobs(samples), names)
        )


def start_supervised(
    config: SFTConfig,
    resources: ResourceManager,
    stack: ExitStack,
    *,
    timer: Timer = lambda name: nullcontext(),
    frozen: bool = False,
) -> _Trainer:
    """Start the trainer's ranks; frozen ones only compute log-probabilities."""
    objective = SupervisedObjective(settings=config.training, packing=config.data.packing)
    model = resolve_model(config.model)
    return start_trainer(config, model, objective, resources, stack, timer=timer, frozen=frozen)
