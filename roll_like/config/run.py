"""What every run has, whatever it trains on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like.config.base import (
    ConfigModel,
    PipelineConfig,
    PluginConfig,
    PluginSetting,
    PositiveFloat,
    PositiveInt,
    Violation,
    raise_violations,
)
from roll_like.config.evaluation import ScheduleConfig
from roll_like.config.model import ModelTask
from roll_like.config.named import NamedConfig
from roll_like.config.resources import ResourcesConfig, RolePlan
from roll_like.config.training import CopySection, TrainerConfig, TrainingConfig
from roll_like.errors import ConfigError
from roll_like.registry import CALLBACKS, TRACKERS

if TYPE_CHECKING:
    from roll_like.types import Callbacks, CheckReport, RunResult


#: What puts several samples into one row in pipelines that always do.
ALWAYS_SHARED = "the pipeline"


class CheckpointConfig(ConfigModel):
    """When states are written and how many are kept."""

    common: ClassVar[tuple[str, ...]] = ("every",)

    every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps between checkpoints; 0: only by time (`every_minutes`) and at the end."
    )
    every_minutes: Annotated[float, Field(ge=0)] = Field(
        default=10.0,
        description="Write a checkpoint between two steps when the last one is this old; later if the run would wait "
        "for checkpoints more than 2 % of the time; 0: never by time. Minutes.",
    )
    keep: PositiveInt = Field(default=2, description="How many of the latest to keep.")
    keep_best: bool = Field(default=True, description="Also keep the one with the best evaluation score.")
    at_end: bool | Literal["auto"] = Field(
        default="auto",
        description="Write one after the last step. `auto`: yes, unless the whole run took less than `every_minutes` "
        "and its model is exported. Such a run leaves `model/` and no checkpoint: it can be chatted with, served and "
        "trained further (`model.path`), but `--resume` with more `steps` repeats it.",
    )
    export: bool = Field(default=True, description="Write a Hugging Face directory after the last step.")


class MetricsConfig(ConfigModel):
    """Where figures go. `metrics.jsonl` is always written."""

    common: ClassVar[tuple[str, ...]] = ("trackers",)

    trackers: tuple[Annotated[PluginConfig, PluginSetting(TRACKERS)], ...] = Field(
        default_factory=lambda: (TRACKERS.get("mlflow").Config(),),
        description="Any of `mlflow`, `tensorboard`, `wandb`, `prometheus`, `trackio`, `swanlab`, or a registered one.",
    )
    console: Literal["auto", "live", "plain", "quiet"] = Field(
        default="auto", description="`auto` is a live view on a terminal, plain lines elsewhere."
    )
    sampled_rollouts: Annotated[int, Field(ge=0)] = Field(
        default=10, description="Rollouts shown at the end of the run, next to those of the first step."
    )
    traces_per_step: Annotated[int, Field(ge=0)] | None = Field(
        default=16,
        description="Rollouts of each step, and of each evaluation, that trackers get as traces, evenly over groups. "
        "`null`: all; 0: none. Rollouts.",
    )


class ProfileConfig(ConfigModel):
    """Steps that are recorded in detail: a trace of the driver, ranks, engines, environments and rewards.

    Other steps cost nothing. `roll-like profile RUN` asks a run under way for its next step.
    """

    steps: tuple[PositiveInt, ...] = Field(
        default=(), description="Steps to profile, from 1 on; the first ones also hold what is compiled once."
    )
    stacks: bool = Field(
        default=False, description="Record the lines of Python that each operator was called from. Traces get large."
    )
    memory: bool = Field(
        default=True, description="Record allocations; on GPUs also write a snapshot of each rank's memory."
    )

    def violations(self, steps: int) -> Iterator[Violation]:
        """Yield steps that do not come in a run of `steps` steps."""
        for index, step in enumerate(self.steps):
            if step > steps:
                yield Violation(
                    ("profile", "steps", index),
                    f"step {step} never comes: the run has {steps} steps; profile one of them",
                )


GuardName = Literal["mismatch", "grad_norm", "reward", "entropy", "truncation", "zero_variance"]


class GuardsConfig(ConfigModel):
    """Metrics that are watched for signs that training breaks down. Each guard warns; those in `stop` end the run."""

    stop: tuple[GuardName, ...] = Field(
        default=(),
        description="Guards that end the run: `mismatch` (engine and trainer disagree), `grad_norm` (one update 10 "
        "times the usual), `reward` (less than half of its best), `entropy` (a tenth of that at the start), "
        "`truncation` (nearly all answers cut), `zero_variance` (nothing to learn from). The others warn only.",
    )
    patience: PositiveInt = Field(
        default=20,
        description="Steps in a row that reward, entropy, truncation or zero variance must be bad. Steps.",
    )
    mismatch_limit: PositiveFloat = Field(
        default=1.0,
        description="`mismatch` finds a `mismatch/kl` above this, for three steps in a row. Nats per token.",
    )
    mismatch_growth: Annotated[float, Field(gt=1)] = Field(
        default=5.0,
        description="`mismatch` also finds a `mismatch/kl` above this many times the median of the first 20 steps. A "
        "median below 0.0001 nats counts as 0.0001.",
    )


def shared_prompt_violations(pipeline: str, training: TrainingConfig) -> Iterator[Violation]:
    """Yield `share_prompts: false` in a pipeline whose rows are always packed with their common prompts."""
    if not training.share_prompts:
        yield Violation(
            ("training", "share_prompts"),
            f"pipeline: {pipeline} lays out its rows itself and computes a common prompt once "
            "(gradients are the same), so false has no effect; remove it",
        )


class RunConfig(NamedConfig, PipelineConfig):
    """What runs have in common: a name, a model, a trainer, hardware, checkpoints, metrics."""

    common: ClassVar[tuple[str, ...]] = (
        "pipeline",
        "name",
        "seed",
        "training",
        "checkpoint",
        "metrics",
        "inference",
        "algorithm",
        "reference",
        "critic",
        "evaluation",
        "steps",
        "epochs",
    )

    #: Whether rows may have images, where the model sees them.
    takes_images: ClassVar[bool] = False

    training: TrainingConfig = Field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    guards: GuardsConfig = Field(default_factory=GuardsConfig)
    callbacks: tuple[Annotated[PluginConfig, PluginSetting(CALLBACKS)], ...] = Field(
        default=(), description="What is done after each step and evaluation: `stop_when`, or a registered one."
    )
    profile: ProfileConfig = Field(default_factory=ProfileConfig)

    if TYPE_CHECKING:  # declared by each pipeline, with more in them, among its own keys
        resources: ResourcesConfig
        evaluation: ScheduleConfig | None

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
    def task(self) -> ModelTask:
        """What the trained model is for."""
        return "text-generation"

    @property
    def stated_in_model(self) -> Mapping[str, Any]:
        """What the config.json of an exported model says beside what that of the starting model does."""
        return {}

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
    def copies(self) -> dict[str, CopySection]:
        """The sections of what the policy's ranks compute with copies of its weights, by their names."""
        reference = getattr(self, "reference", None)
        return {} if reference is None or reference.mode != "copy" else {"reference": reference}

    @property
    def frozen(self) -> dict[str, Any]:
        """The sections of the models that only score, by role; None where a run has no reference."""
        teachers = {f"teacher {name}": teacher for name, teacher in getattr(self, "teachers", {}).items()}
        return {"reference": getattr(self, "reference", None), **teachers}

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """Where the workers of each role are: the trainer; subclasses append theirs."""
        return (self.resources.role("training", self.training.workers, "training.workers"),)

    def starts_alone(self, name: str) -> bool:
        """Return whether a role that measures free GPU memory at its start has GPUs of other roles as well.

        What these took meanwhile, it would count as its own need.
        """
        own = [role.devices for role in self.roles if role.name == name]
        others = [role.devices for role in self.roles if role.name != name]
        return self.resources.device != "cpu" and any(devices.overlaps(other) for devices in own for other in others)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        raise_violations(type(self).__name__, self.violations())
        return self

    def violations(self) -> Iterator[Violation]:
        """Yield every combination of sections that cannot work; a subclass adds its own to those of its base."""
        device = self.resources.device
        yield from self.model.violations(device)
        yield from self.resources.violations(self.roles)
        for key, section in self.trained.items():
            yield from section.violations(key, device)
        steps = getattr(self, "steps", None)
        if steps is not None:
            yield from self.profile.violations(steps)
        for key in ("data", "evaluation", "pair_evaluation"):
            rows = getattr(self, key, None)
            if isinstance(rows, ScheduleConfig):
                yield from rows.violations(key)
            for index, source in enumerate(getattr(rows, "sources", ())):
                yield from source.violations(key, index, getattr(self, "epochs", None))

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

    def evaluate(self, model: str | Path | None = None) -> dict[str, float]:
        """Measure a model by the section `evaluation`, without training, as `roll-like eval` does.

        Args:
            model: Directory, hub id or GGUF file of the model to measure, such as a run's `model/`; default: `model`.

        Raises:
            ConfigError: There is no `evaluation` section.
        """
        figures: dict[str, float] = self.pipeline_class().evaluate(self, str(model or self.model.path))
        return figures

    def __repr__(self) -> str:
        """Return what tells one configuration from another; `dump_config` writes all of it."""
        run = self.output_dir / self.name
        return f"{type(self).__name__}({run}, model {self.model.path}, seed {self.seed})"

    __str__ = __repr__
