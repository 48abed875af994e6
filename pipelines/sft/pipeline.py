"""Supervised fine-tuning: make given answers likelier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.builtin.pipelines.sft.examples import (
    LikelihoodEvaluator,
    conversations_of,
    evaluate_likelihood,
    samples_metrics,
    start_supervised,
    training_samples,
    warn_of_rows,
)
from roll_like.check import Report, check_run, refuse_errors
from roll_like.data.order import Order
from roll_like.data.samples import ConversationSample
from roll_like.metrics.summary import Summary
from roll_like.models.load import resolve_model
from roll_like.offline.check import conversation_findings, given_plan
from roll_like.policy_gradient.workers import export_model
from roll_like.registry import PIPELINES
from roll_like.run.launch import RunContext, RunResult, RunState, launch
from roll_like.training.engine import TrainingEngine
from roll_like.types import TrainingSample


@PIPELINES.register("sft")
@dataclass(kw_only=True)
class SFTPipeline:
    """The parts of a supervised run. `run` is the algorithm; everything else is a part's business."""

    Config: ClassVar[type[SFTConfig]] = SFTConfig

    config: SFTConfig
    run_state: RunState
    examples: Order[ConversationSample]
    trainer: TrainingEngine[Sequence[TrainingSample]]
    evaluator: LikelihoodEvaluator | None

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
        run.state.metrics.phase("reading the data")
        data = conversations_of(config)
        warn_of_rows(run.state.metrics, data.report)
        examples = data.order(seed=config.seed, shuffle=config.data.shuffle)
        run.state.metrics.phase("starting workers")
        model = resolve_model(config.model)
        trainer = start_supervised(config, model, run.resources, run.stack, timer=run.state.timer)
        run.state.keep([trainer], examples=examples)
        evaluator = None if config.evaluation is None else LikelihoodEvaluator(config, trainer)
        return cls(config=config, run_state=run.state, examples=examples, trainer=trainer, evaluator=evaluator)

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the trained model as a Hugging Face directory, with a card of the run."""
        export_model(self.trainer.cluster, self.config, directory, summary)

    @classmethod
    def launch(cls, config: SFTConfig, *, resume: str | None = None) -> RunResult:
        """Check the configuration, then train in a folder of its own.

        Args:
            config: The validated configuration.
            resume: None starts anew; "" continues the latest run of this name; else the run to continue.
        """
        refuse_errors(cls.check(config))
        lasting = config if config.epochs is None else config.lasting(len(conversations_of(config)))
        return launch(lasting, cls.build, resume=resume)

    @classmethod
    def check(cls, config: SFTConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, given_plan, conversation_findings)

    @classmethod
    def evaluate(cls, config: SFTConfig, model: str) -> dict[str, float]:
        """Measure a model by the evaluation's loss.

        Raises:
            ConfigError: The configuration has no `evaluation` section.
        """
        return evaluate_likelihood(config, model)
