"""What the pipelines share that learn from given data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from roll_like.check import Finding, Report, check_run
from roll_like.check.model import check_window
from roll_like.cluster import ResourceManager
from roll_like.config.offline import OfflineRunConfig
from roll_like.data.chat import Renderer
from roll_like.data.order import Order
from roll_like.data.reader import SampleT
from roll_like.data.samples import SampleSet
from roll_like.models.load import load_renderer, resolve_model
from roll_like.models.shape import ModelShape
from roll_like.offline.check import data_findings, offline_plan
from roll_like.offline.samples import samples_metrics
from roll_like.run.pipeline import StepT, TrainerPipeline
from roll_like.run.state import Evaluates, RunContext
from roll_like.training.engine import PolicyCopy, Timer, TrainingEngine, untimed
from roll_like.training.interface import Objective
from roll_like.training.start import start_trainer
from roll_like.values import Metrics

ConfigT = TypeVar("ConfigT", bound=OfflineRunConfig)
#: What is wrong, and what could be read of `data` and `evaluation`.
Findings: TypeAlias = Generator[Finding, None, dict[str, SampleSet[SampleT]]]


@dataclass(kw_only=True)
class OfflinePipeline(TrainerPipeline[ConfigT, StepT], Generic[ConfigT, SampleT, StepT]):
    """Base of pipelines on given data: `epochs` become steps once the data was read.

    A pipeline says what `load` reads, the `objective`, what a step's `batch` is, and how an evaluation measures the
    model (`evaluation_of`).

    Attributes:
        samples: The data, in the order in which it is trained on.
    """

    #: What checkpoints call the position in the data.
    position: ClassVar[str]

    samples: Order[SampleT]

    @abstractmethod
    def batch(self, samples: Sequence[SampleT]) -> StepT:
        """Return what a step trains on, of its samples."""

    def figures(self, samples: Sequence[SampleT]) -> Metrics:
        """Return how much a step trains on."""
        return samples_metrics([sequence for sample in samples for sequence in sample.sequences])

    def next_batch(self) -> tuple[StepT, Metrics]:
        """Return what the next step trains on, and how much that is."""
        samples = self.samples.take(self.config.items_per_step[0])
        return self.batch(samples), self.figures(samples)

    @classmethod
    def build(cls, config: ConfigT, run: RunContext) -> Self:
        """Start the trainer and put the parts together, where a resumed run left them."""
        data = cls.read(config, run)
        run.state.metrics.phase("starting workers")
        trainer = cls.start_trainer(config, run.resources, run.stack, timer=run.state.timer)
        return cls.resumed(config, run, data, trainer, cls.evaluation_of(config, trainer))

    @classmethod
    def resumed(
        cls,
        config: ConfigT,
        run: RunContext,
        data: SampleSet[SampleT],
        trainer: TrainingEngine[StepT],
        evaluator: Evaluates | None,
        copies: Mapping[str, PolicyCopy] = MappingProxyType({}),
        **parts: Any,
    ) -> Self:
        """Return the pipeline of these parts, where a resumed run left them."""
        samples = data.order(seed=config.seed, shuffle=config.shuffles)
        run.state.keep([trainer], **{cls.position: samples}, **copies)
        parts = {"trainer": trainer, "evaluator": evaluator, "copies": copies, **parts}
        return cls(config=config, run_state=run.state, samples=samples, **parts)

    @classmethod
    def start_trainer(
        cls,
        config: ConfigT,
        resources: ResourceManager,
        stack: ExitStack,
        *,
        timer: Timer = untimed,
        frozen: bool = False,
    ) -> TrainingEngine[StepT]:
        """Start the ranks of the model that is trained; frozen ones are measured only."""
        objective = cls.objective(config)
        return start_trainer(
            config,
            resolve_model(config.model),
            objective,
            resources,
            stack,
            timer=timer,
            frozen=frozen,
            copies={} if frozen else config.copies,
        )

    @classmethod
    @abstractmethod
    def objective(cls, config: ConfigT) -> Objective[StepT, Any]:
        """Return what the model learns."""

    @classmethod
    def evaluation_of(cls, config: ConfigT, trainer: TrainingEngine[StepT]) -> Evaluates | None:  # noqa: ARG003
        """Return what measures the model; None without an evaluation."""
        return None

    @classmethod
    def start_evaluator(cls, config: ConfigT, resources: ResourceManager, stack: ExitStack) -> Evaluates | None:
        """Start a trainer that takes no step."""
        return cls.evaluation_of(config, cls.start_trainer(config, resources, stack, frozen=True))

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
