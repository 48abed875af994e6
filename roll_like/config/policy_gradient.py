"""What the pipelines share that train a policy on groups of its own samples: answers to prompts, or episodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeAlias

from pydantic import Field, model_validator

from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.base import ConfigModel, PipelineConfig
from roll_like.config.plan import RolePlan
from roll_like.config.rules import POLICY_GRADIENT_RULES
from roll_like.config.sections import (
    CheckpointConfig,
    CriticConfig,
    Fraction,
    InferenceConfig,
    MetricsConfig,
    ModelConfig,
    PositiveInt,
    ReferenceConfig,
    ResourcesConfig,
    SamplingConfig,
    TrainingConfig,
    VLLMConfig,
)
from roll_like.config.violations import Violation, raise_violations
from roll_like.registry import PIPELINES

if TYPE_CHECKING:
    from roll_like.run import RunResult

#: What a run's folder may be called.
NAME_PATTERN = r"^[A-Za-z0-9._-]+$"
#: Looks at a whole configuration and yields what cannot work together.
Rule: TypeAlias = Callable[..., Iterator[Violation]]


class GroupRolloutConfig(SamplingConfig):
    """What one step samples: groups, each of several samples of one task."""

    #: The keys that say how many groups a step has, and how many samples a group.
    groups_key: ClassVar[str]
    samples_key: ClassVar[str]

    drop_groups_without_signal: bool = Field(
        default=False, description="Replace groups whose rewards are all equal by other tasks' (DAPO)."
    )
    max_oversampling: Annotated[float, Field(ge=1)] = Field(
        default=1.0, description="Groups started per step at most, as a multiple of those that it trains on."
    )
    max_in_flight: PositiveInt = Field(default=1024, description="Samples that may be generating at a time.")
    seeded: bool = Field(default=True, description="Give every sample a seed of its own, so a run can be repeated.")
    max_failure_fraction: Fraction = Field(
        default=0.1, description="End the run when more than this share of a step's samples is lost to failures."
    )
    retries: Annotated[int, Field(ge=0)] = Field(default=2, description="Further attempts after a failure.")

    @property
    @abstractmethod
    def groups(self) -> int:
        """Groups that one step trains on."""

    @property
    @abstractmethod
    def samples_per_group(self) -> int:
        """Samples of each group."""

    def _refuse_wrong_product(self, product_key: str, written: int | None) -> None:
        product = self.groups * self.samples_per_group
        if written is not None and written != product:
            raise ValueError(
                f"{product_key} is {written}, but {self.groups_key} × {self.samples_key} = "
                f"{self.groups} × {self.samples_per_group} = {product}"
            )

    @model_validator(mode="after")
    def _replacing_is_possible(self) -> Self:
        if self.drop_groups_without_signal and self.max_oversampling == 1.0:
            raise ValueError(
                "drop_groups_without_signal replaces groups, but max_oversampling: 1.0 allows no replacement; "
                "set max_oversampling above 1 (2.0 is usual)"
            )
        return self


class EvaluationSchedule(ConfigModel):
    """When progress is measured, and how answers are sampled for it."""

    every: Annotated[int, Field(ge=0)] = Field(default=0, description="Steps between evaluations; 0: before and after.")
    before: bool = Field(default=True, description="Evaluate before the first step.")
    after: bool = Field(default=True, description="Evaluate after the last step.")
    temperature: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus.")
    max_response_tokens: PositiveInt | None = Field(default=None, description="Default: the training limit. Tokens.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end an evaluated response.")

    #: The key that says k of avg@k and pass@k.
    samples_key: ClassVar[str]

    @property
    @abstractmethod
    def samples_per_group(self) -> int:
        """K of avg@k and pass@k."""


class PolicyGradientConfig(PipelineConfig):
    """What runs have in common that sample groups, judge them and move the policy by what they earned."""

    #: Run after a configuration was read; each yields every violation that it finds.
    rules: ClassVar[tuple[Rule, ...]] = POLICY_GRADIENT_RULES

    name: str = Field(default="run", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    output_dir: Path = Field(default=Path("runs"), description="Folder of runs; this one is `output_dir/name`.")
    seed: Annotated[int, Field(ge=0)] = Field(default=0, description="Seed of data order, sampling and training.")
    steps: PositiveInt = Field(description="Steps to train.")
    import_: tuple[str, ...] = Field(
        default=(), alias="import", description="Modules to import first; they register plugins."
    )
    model: ModelConfig = Field(description="Which model is trained.")
    rollout: GroupRolloutConfig
    inference: InferenceConfig = Field(default_factory=VLLMConfig, description="The engine that samples.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The DeepSpeed training engine.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="How rewards become a gradient.")
    reference: ReferenceConfig | None = Field(default=None, description="Needed by KL terms; none by default.")
    critic: CriticConfig | None = Field(
        default=None, description="Needed by advantage estimators that learn values; none by default."
    )
    resources: ResourcesConfig = Field(
        description="What hardware the run takes and how roles divide it. A device is a GPU, or a core with "
        "`device: cpu`."
    )
    evaluation: EvaluationSchedule | None
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When states are written and how many are kept."
    )
    metrics: MetricsConfig = Field(
        default_factory=MetricsConfig, description="Where figures go. `metrics.jsonl` is always written."
    )

    @property
    @abstractmethod
    def longest_sample(self) -> int:
        """Most tokens of one sequence that is sampled or trained on, its prompt included."""

    @property
    @abstractmethod
    def longest_sample_terms(self) -> str:
        """The keys that `longest_sample` follows from, with their values, for messages."""

    @property
    @abstractmethod
    def longest_response(self) -> int:
        """Most tokens that the policy samples in one answer, or in all turns of one episode."""

    @property
    def longest_evaluated(self) -> tuple[int, str] | None:
        """As `longest_sample`, of the evaluation, with its terms; None where that is no longer."""
        return None

    @property
    def context_window(self) -> int:
        """Window of the inference engines, in tokens."""
        evaluated = self.longest_evaluated
        needed = max(self.longest_sample, 0 if evaluated is None else evaluated[0])
        return getattr(self.inference, "max_model_len", None) or needed

    @property
    def further_roles(self) -> tuple[RolePlan, ...]:
        """Roles with devices, beside trainer, engines, reference model and critic."""
        return ()

    @property
    def processes(self) -> dict[str, int]:
        """Worker processes without a device of their own, by what they are."""
        return {}

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        raise_violations(type(self).__name__, (violation for rule in self.rules for violation in rule(self)))
        return self

    def run(self, *, resume: str | None = None) -> RunResult:
        """Train, from a notebook or a script, and return the metrics.

        Args:
            resume: Name of a run to continue, or `""` for this configuration's own.
        """
        result: RunResult = PIPELINES.get(self.pipeline).launch(self, resume=resume)
        return result
