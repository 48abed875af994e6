"""What the pipelines share that learn from given data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from roll_like.check import Finding, Report, check_run
from roll_like.check.model import check_window
from roll_like.config.offline import OfflineRunConfig
from roll_like.data.chat import Renderer
from roll_like.data.order import Order
from roll_like.data.reader import SampleT
from roll_like.data.samples import SampleSet
from roll_like.models.load import load_renderer
from roll_like.models.shape import ModelShape
from roll_like.offline.check import data_findings, offline_plan
from roll_like.offline.evaluator import OfflineEvaluator
from roll_like.offline.samples import samples_metrics
from roll_like.run.pipeline import Pipeline
from roll_like.run.state import RunContext
from roll_like.training.engine import TrainingEngine
from roll_like.values import Metric

ConfigT = TypeVar("ConfigT", bound=OfflineRunConfig)
StepT = TypeVar("StepT")
#: What is wrong, and what could be read of `data` and `evaluation`.
Findings: TypeAlias = Generator[Finding, None, dict[str, SampleSet[SampleT]]]


@dataclass(kw_only=True)
class OfflinePipeline(Pipeline[ConfigT], Generic[ConfigT, SampleT, StepT]):
    """Base of pipelines on given data: `epochs` become steps once the data was read.

    Attributes:
        samples: The data, in the order in which it is trained on.
        trainer: The ranks of the model.
        evaluator: Measures the model; None without an `evaluation` section.
    """

    samples: Order[SampleT]
    trainer: TrainingEngine[StepT]
    evaluator: OfflineEvaluator | None

    def run(self) -> None:
        """Train to the end: each step on the next samples of the data."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            samples = self.samples.take(self.config.items_per_step[0])
            batch = self.batch(samples)
            with state.timer("train"):
                report = self.trainer.train_step(batch)
            state.log(step, report, self.figures(samples))
            state.evaluate(self.evaluator)

    @abstractmethod
    def batch(self, samples: list[SampleT]) -> StepT:
        """Return what a step trains on, made of its samples."""

    def figures(self, samples: Sequence[SampleT]) -> dict[str, Metric]:
        """Return how much a step trains on."""
        return samples_metrics([sequence for sample in samples for sequence in sample.sequences])

    @classmethod
    @abstractmethod
    def load(cls, config: ConfigT, rows: Any, renderer: Renderer, section: str) -> SampleSet[SampleT]:
        """Return the samples of `rows`, sources with limits; `section` is their key, for messages."""

    @classmethod
    def trained_on(cls, config: ConfigT) -> SampleSet[SampleT]:
        """Return the samples that are trained on."""
        return cls.load(config, config.data, load_renderer(config.model, images=config.takes_images), "data")

    @classmethod
    def evaluated_on(cls, config: ConfigT) -> SampleSet[SampleT] | None:
        """Return those of the evaluation; None without one."""
        rows = config.evaluated_rows
        renderer = load_renderer(config.model, images=config.takes_images)
        return None if rows is None else cls.load(config, rows, renderer, "evaluation")

    @classmethod
    def read(cls, config: ConfigT, run: RunContext) -> SampleSet[SampleT]:
        """Return the samples that are trained on, and warn of rows that were left out or shortened."""
        run.state.metrics.phase("reading the data")
        data = cls.trained_on(config)
        for source in data.report:
            if source.left_out or source.shortened:
                run.state.metrics.warn(str(source))
        return data

    @classmethod
    def with_steps(cls, config: ConfigT) -> ConfigT:
        """Return the configuration with the steps that its `epochs` are, where it has those."""
        return config if config.epochs is None else config.lasting(len(cls.trained_on(config)))

    @classmethod
    def check(cls, config: ConfigT) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, offline_plan, cls.findings)

    @classmethod
    def findings(
        cls, config: ConfigT, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Findings[SampleT]:
        """Yield what is wrong with the data; tell the report what became of rows, and return what could be read."""
        yield from check_window(config, shape, "data")
        return (yield from data_findings(config, partial(cls.load, config), renderer, report))

    @property
    def trained(self) -> TrainingEngine[Any]:
        """The model that is trained."""
        return self.trainer
