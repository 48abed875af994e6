"""What every run has, whatever it trains on."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from roll_like.config.base import ConfigModel, PipelineConfig
from roll_like.config.guards import GuardsConfig
from roll_like.config.roles import RolePlan, model_role
from roll_like.config.sections import (
    CheckpointConfig,
    MetricsConfig,
    ModelConfig,
    ModelTask,
    TrainerConfig,
    TrainerResourcesConfig,
    TrainingConfig,
)
from roll_like.config.violations import Violation, raise_violations
from roll_like.errors import ConfigError

if TYPE_CHECKING:
    from roll_like.types import Callbacks, CheckReport, RunResult

#: What a run's folder may be called.
NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$"
#: What puts several samples into one row in pipelines that always do.
ALWAYS_SHARED = "the pipeline"
#: Looks at a whole configuration and yields what cannot work together.
Rule: TypeAlias = Callable[..., Iterator[Violation]]


def _of_known_home(path: Path) -> Path:
    """Return a path as it is.

    Raises:
        ValueError: The home that its `~` means is not known.
    """
    if os.path.expanduser(path).startswith("~"):
        raise ValueError(f"the home in {path} is not known; write the path in full")
    return path


class ScheduleConfig(ConfigModel):
    """When progress is measured."""

    every: Annotated[int, Field(ge=0)] = Field(default=0, description="Steps between evaluations; 0: before and after.")
    before: bool = Field(default=True, description="Evaluate before the first step.")
    after: bool = Field(default=True, description="Evaluate after the last step.")

    def due(self, finished: int, steps: int) -> bool:
        """Return whether to evaluate after so many of all steps."""
        if finished == 0:
            return self.before
        if finished == steps:
            return self.after
        return self.every > 0 and finished % self.every == 0


class RunConfig(PipelineConfig):
    """What runs have in common: a name, a model, a trainer, hardware, checkpoints, metrics."""

    #: Run after a configuration was read; each yields every violation that it finds.
    rules: ClassVar[tuple[Rule, ...]]
    #: What the trained model is for.
    task: ClassVar[ModelTask] = "text-generation"
    #: Whether rows may have images, where the model sees them.
    takes_images: ClassVar[bool] = False

    name: str = Field(default="run", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    output_dir: Annotated[Path, AfterValidator(_of_known_home)] = Field(
        default=Path("runs"), description="Folder of runs; this one is `output_dir/name`."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=0, description="Seed of data order, sampling and training."
    )
    import_: tuple[str, ...] = Field(
        default=(), alias="import", description="Modules to import first; they register plugins."
    )
    model: ModelConfig
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    guards: GuardsConfig = Field(default_factory=GuardsConfig)

    if TYPE_CHECKING:  # declared by each pipeline, with more in them, among its own keys
        resources: TrainerResourcesConfig
        evaluation: ScheduleConfig | None

    @property
    def runs_dir(self) -> Path:
        """The folder of runs on this machine: `output_dir` with `~` replaced."""
        return self.output_dir.expanduser()

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Steps of the whole run."""

    @property
    @abstractmethod
    def longest_sample(self) -> int:
        """Most tokens of one sequence that is sampled or trained on, its prompt included."""

    @property
    @abstractmethod
    def longest_sample_terms(self) -> str:
        """The keys that `longest_sample` follows from, with their values, for messages."""

    @property
    def context_window(self) -> int:
        """Tokens that the model has to see at a time."""
        return self.longest_sample

    @property
    def row_sharing(self) -> str | None:
        """What puts several samples into one row: a key that can be set to false, `ALWAYS_SHARED`, or None."""
        return "training.share_prompts" if self.training.share_prompts else None

    @property
    def trained(self) -> dict[str, TrainerConfig]:
        """The sections of the models that are trained, by their keys."""
        return {"training": self.training}

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """Where the workers of each role are: the trainer; subclasses append theirs."""
        resources, workers = self.resources, self.training.workers
        trainer = model_role(resources, "training", workers, "training.workers", resources.device_mapping.training)
        return (trainer,)

    def starts_alone(self, name: str) -> bool:
        """Return whether a role that measures free GPU memory at its start has GPUs of other roles as well.

        What these took meanwhile, it would count as its own need.
        """
        own = [role.devices for role in self.roles if role.name == name]
        others = [role.devices for role in self.roles if role.name != name]
        return self.resources.device != "cpu" and any(devices.overlaps(other) for devices in own for other in others)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        raise_violations(type(self).__name__, (violation for rule in self.rules for violation in rule(self)))
        return self

    def evaluating(self, model: str) -> Self:
        """Return the same configuration for another model, to evaluate it.

        Raises:
            ConfigError: There is no `evaluation` section.
        """
        if self.evaluation is None:
            raise ConfigError("this configuration has no `evaluation` section", fix="add one")
        return self.of_model(model)

    def of_model(self, model: str) -> Self:
        """Return the same configuration for another model."""
        return self.model_copy(update={"model": self.model.at(model)})

    def check(self) -> CheckReport:
        """Return every problem that can be known before a run, and its plan; printed, it is what `--check` prints."""
        report: CheckReport = self.pipeline_class().check(self)
        return report

    def run(self, *, resume: str | None = None, callbacks: Callbacks | None = None) -> RunResult:
        """Train, from a notebook or a script, and return the metrics.

        Args:
            resume: Name of a run to continue, or `""` for this configuration's own.
            callbacks: What is called after each step and each evaluation.
        """
        called = {} if callbacks is None else {"callbacks": callbacks}  # a pipeline of others may not know them
        result: RunResult = self.pipeline_class().launch(self, resume=resume, **called)
        return result

    def __repr__(self) -> str:
        """Return what tells one configuration from another; `dump_config` writes all of it."""
        run = self.output_dir / self.name
        return f"{type(self).__name__}({run}, model {self.model.path}, seed {self.seed})"

    __str__ = __repr__
