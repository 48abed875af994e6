"""Supervised fine-tuning: make given answers likelier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from roll_like.builtin.pipelines.sft.check import conversation_findings
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.builtin.pipelines.sft.examples import conversations_of, likelihood_evaluator, start_supervised
from roll_like.check import Report, check_run
from roll_like.cluster import Cluster, ResourceManager
from roll_like.data.order import Order
from roll_like.data.samples import ConversationSample, SampleSet
from roll_like.models.load import resolve_model
from roll_like.offline.check import offline_plan
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.pipeline import OfflinePipeline
from roll_like.offline.samples import samples_metrics, training_samples
from roll_like.run.state import RunContext
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.types import TrainingSample


@dataclass(kw_only=True)
class SFTPipeline(OfflinePipeline[SFTConfig]):
    """The parts of a supervised run."""

    examples: Order[ConversationSample]
    trainer: TrainingEngine[Sequence[TrainingSample]]

    def run(self) -> None:
        """Train to the end: each step makes its samples' answers likelier."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            samples = training_samples(self.examples.take(self.config.data.samples_per_step))
            with state.timer("train"):
                report = self.trainer.train_step(samples)
            state.log(step, report, samples_metrics(samples))
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: SFTConfig, run: RunContext) -> Self:
        """Start the trainer and put the parts together, where a resumed run left them."""
        examples = cls.read(config, run).order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        model = resolve_model(config.model)
        trainer = start_supervised(config, model, run.resources, run.stack, timer=run.state.timer)
        run.state.keep([trainer], examples=examples)
        evaluator = likelihood_evaluator(config, trainer)
        return cls(config=config, run_state=run.state, examples=examples, trainer=trainer, evaluator=evaluator)

    @classmethod
    def load(cls, config: SFTConfig) -> SampleSet[ConversationSample]:
        """Return the conversations that are trained on."""
        return conversations_of(config)

    @classmethod
    def check(cls, config: SFTConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, offline_plan, conversation_findings)

    @classmethod
    def start_evaluator(cls, config: SFTConfig, resources: ResourceManager, stack: ExitStack) -> OfflineEvaluator:
        """Start a trainer that only computes log-probabilities."""
        trainer = start_supervised(config, resolve_model(config.model), resources, stack, frozen=True)
        evaluator = likelihood_evaluator(config, trainer)
        assert evaluator is not None, "there is an evaluation"
        return evaluator

    @property
    def trained(self) -> Cluster[TrainingRank]:
        """The trainer's ranks."""
        return self.trainer.cluster
