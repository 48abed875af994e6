"""What every pipeline has: a check, a run in a folder of its own, an evaluation, an export.

A new pipeline derives from `Pipeline`, or from a class that has the loop already: `TrainerPipeline` below,
`OfflinePipeline` (`offline/pipeline.py`) or `PolicyGradientPipeline` (`policy_gradient/pipeline.py`). Its configuration
class is registered in `PIPELINES` and names it: `implementation = "my_package.my_pipeline:MyPipeline"`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from roll_like.check import Report, refuse_errors
from roll_like.cluster import ResourceManager
from roll_like.config.load import importing_plugins
from roll_like.config.run import RunConfig
from roll_like.errors import RollLikeError
from roll_like.metrics.summary import Summary, write_summary
from roll_like.models.load import fetch_config
from roll_like.models.of_run import download_models
from roll_like.models.precision import settled
from roll_like.run.card import model_card
from roll_like.run.evaluation import Evaluated
from roll_like.run.folder import as_begun
from roll_like.run.launch import measuring, running
from roll_like.run.recovery import Recovery
from roll_like.run.signals import StopRequested
from roll_like.run.state import Evaluates, RunContext, RunState
from roll_like.training.engine import PolicyCopy, TrainingEngine, follow
from roll_like.types import Callbacks, RunResult
from roll_like.values import Metrics, reduce

ConfigT = TypeVar("ConfigT", bound=RunConfig)
StepT = TypeVar("StepT")


@dataclass(kw_only=True)
class Pipeline(ABC, Generic[ConfigT]):
    """Base of a pipeline: a dataclass of its parts, `build` that makes them, and `run`, which is the algorithm.

    Attributes:
        config: The run's configuration.
        run_state: Steps, checkpoints, metrics.
    """

    config: ConfigT
    run_state: RunState

    @abstractmethod
    def run(self) -> None:
        """Train to the end."""

    @classmethod
    @abstractmethod
    def build(cls, config: ConfigT, run: RunContext) -> Self:
        """Start the workers and put the parts together, where a resumed run left them."""

    @classmethod
    @abstractmethod
    def check(cls, config: ConfigT) -> Report:
        """Return every problem that can be known before a run, and its plan."""

    @classmethod
    @abstractmethod
    def start_evaluator(cls, config: ConfigT, resources: ResourceManager, stack: ExitStack) -> Evaluates | None:
        """Start what an evaluation without training needs, and return the evaluator.

        Args:
            config: The configuration of the model to measure; it has an `evaluation` section.
            resources: Where workers go.
            stack: Ends them when it is closed.
        """

    @property
    @abstractmethod
    def trained(self) -> TrainingEngine[Any]:
        """The model that is trained."""

    @classmethod
    def with_steps(cls, config: ConfigT) -> ConfigT:
        """Return the configuration with its number of steps, where that follows from the data."""
        return config

    @classmethod
    def launch(cls, config: ConfigT, *, resume: str | None = None, callbacks: Callbacks | None = None) -> RunResult:
        """Check the configuration, then train in a folder of its own.

        Args:
            config: The validated configuration.
            resume: None starts anew; "" continues the latest run of this name; else the run to continue.
            callbacks: What is called after each step and each evaluation.

        Raises:
            ConfigError: The check found errors; nothing was started.
            RollLikeError: Something of the run failed; the message says what and how to go on.
            StopRequested: A signal ended the run while it started; nothing is left of it but its folder.
        """
        began = time.monotonic()
        report = refuse_errors(cls.check(config))
        if not report.complete:
            if report.gpus is None and config.resources.device == "cuda":
                fetch_config(config.model)  # its sizes say whether the run fits on its GPUs
                refuse_errors(cls.check(config))
            download_models(config)  # their files say the rest
            refuse_errors(cls.check(config))
        config, stopped = importing_plugins(settled(as_begun(cls.with_steps(config), resume))), False
        with running(config, resume, began=began, callbacks=callbacks) as run:
            state = run.state
            with state.interruptible():
                pipeline = cls.build(config, run)
            recovery = Recovery(state)
            while True:
                try:
                    pipeline.run()
                    if config.checkpoint.export:
                        state.metrics.phase("exporting")
                        pipeline.export(state.directory / "model", write_summary(state.directory))
                except StopRequested:
                    stopped = True
                    state.stop()
                except RollLikeError as error:
                    recovery.after(error)
                    continue
                break
        return RunResult(
            name=state.directory.name,
            directory=state.directory,
            summary=state.metrics.summary,
            metrics=[values for _, values in state.metrics.history],
            evaluations=state.metrics.evaluations,
            stopped=stopped,
        )

    @classmethod
    def evaluate(cls, config: ConfigT, model: str) -> dict[str, float]:
        """Measure a model by the configuration's evaluation, without training, and return the metrics.

        Args:
            config: The validated configuration.
            model: Directory, hub id or GGUF file of the model to measure.

        Raises:
            ConfigError: The configuration has no `evaluation` section.
        """
        metrics, _ = cls.measure(config, model)
        return reduce(metrics)

    @classmethod
    def measure(cls, config: ConfigT, model: str) -> Evaluated:
        """Return the same metrics, not reduced, and the scored answers where some were sampled."""
        measured = importing_plugins(config.evaluating(model))
        with measuring(measured) as (resources, stack):
            evaluator = cls.start_evaluator(measured, resources, stack)
            assert evaluator is not None, "there is an evaluation"
            return evaluator.evaluate()

    def export(self, directory: Path, summary: Summary) -> None:
        """Write the trained model as a Hugging Face directory, with a card of the run."""
        card = model_card(self.run_state.config, int(summary.figures["steps"]), summary)
        self.trained.export(directory, self.config.model, card)


@dataclass(kw_only=True)
class TrainerPipeline(Pipeline[ConfigT], Generic[ConfigT, StepT]):
    """Base of pipelines whose step trains on one batch: given data, or what was made of rollouts before.

    Attributes:
        trainer: The ranks of the model.
        evaluator: Measures the model; None without an evaluation.
        copies: Copies of the model's weights on its ranks, by name.
    """

    trainer: TrainingEngine[StepT]
    evaluator: Evaluates | None
    copies: Mapping[str, PolicyCopy] = field(default_factory=dict)

    def run(self) -> None:
        """Train to the end: draw a batch, with what other models say of it, and train on it."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            batch, figures = self.next_batch()
            with self.training():
                report = self.trainer.train_step(batch)
                moved = follow(self.copies, step + 1)
            state.log(step, report, moved, figures)
            state.evaluate(self.evaluator)

    @abstractmethod
    def next_batch(self) -> tuple[StepT, Metrics]:
        """Return what the next step trains on, and how much that is."""

    def training(self) -> AbstractContextManager[None]:
        """Time an update."""
        return self.run_state.timer("train")

    @property
    def trained(self) -> TrainingEngine[StepT]:
        """The model that is trained."""
        return self.trainer
