"""The configuration of `pipeline: rlvr`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.base import ConfigModel, PipelineConfig, PluginConfig, PluginSetting
from roll_like.config.domains import DomainConfig
from roll_like.config.rules import check_rlvr
from roll_like.config.sections import (
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    EvaluationConfig,
    Fraction,
    InferenceConfig,
    JudgeServerConfig,
    MetricsConfig,
    ModelConfig,
    PositiveFloat,
    PositiveInt,
    ReferenceConfig,
    ResourcesConfig,
    SamplingConfig,
    Span,
    TrainingConfig,
    VLLMConfig,
)
from roll_like.registry import PIPELINES, REWARDS

if TYPE_CHECKING:
    from roll_like.run import RunResult


class RolloutConfig(SamplingConfig):
    """What one step samples: `prompts_per_step × samples_per_prompt = samples_per_step`."""

    prompts_per_step: PositiveInt = Field(description="Groups that one step trains on.")
    samples_per_prompt: PositiveInt = Field(description="Samples of each group.")
    samples_per_step: PositiveInt | None = Field(
        default=None, description="Their product. Optional; checked when written."
    )
    drop_groups_without_signal: bool = Field(
        default=False, description="Replace groups whose rewards are all equal by other tasks' (DAPO)."
    )
    max_oversampling: Annotated[float, Field(ge=1)] = Field(
        default=1.0, description="Groups started per step at most, as a multiple of `prompts_per_step`."
    )
    max_in_flight: PositiveInt = Field(default=1024, description="Samples that may be generating at a time.")
    seeded: bool = Field(default=True, description="Give every sample a seed of its own, so a run can be repeated.")
    max_failure_fraction: Fraction = Field(
        default=0.1, description="End the run when more than this share of a step's samples is lost to failures."
    )
    retries: Annotated[int, Field(ge=0)] = Field(default=2, description="Further attempts after a lost replica.")

    @model_validator(mode="after")
    def _arithmetic(self) -> Self:
        product = self.prompts_per_step * self.samples_per_prompt
        if self.samples_per_step is not None and self.samples_per_step != product:
            raise ValueError(
                f"samples_per_step is {self.samples_per_step}, but prompts_per_step × samples_per_prompt = "
                f"{self.prompts_per_step} × {self.samples_per_prompt} = {product}"
            )
        if self.drop_groups_without_signal and self.max_oversampling == 1.0:
            raise ValueError(
                "drop_groups_without_signal replaces groups, but max_oversampling: 1.0 allows no replacement; "
                "set max_oversampling above 1 (2.0 is usual)"
            )
        return self


class RewardPoolConfig(ConfigModel):
    """Workers of their own for some rewards."""

    rewards: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Names of the rewards in `rewards.use` that its workers hold; no other pool does."
    )
    workers: PositiveInt = Field(default=1, description="Worker processes.")
    span: Span | None = Field(
        default=None, description="Devices that the workers share, for rewards with a model; none by default."
    )


class RewardsConfig(ConfigModel):
    """How answers are judged."""

    use: Annotated[tuple[Annotated[PluginConfig, PluginSetting(REWARDS)], ...], Field(min_length=1)] = Field(
        description="Rewards, weighted; each is reported on its own."
    )
    workers: PositiveInt = Field(default=1, description="Worker processes of the rewards that are in no pool.")
    pools: dict[str, RewardPoolConfig] = Field(
        default_factory=dict, description="Workers of their own for some rewards; none by default."
    )
    groups_per_worker: PositiveInt = Field(
        default=8, description="Groups that one worker judges side by side; further ones wait for room."
    )
    timeout_seconds: PositiveFloat = Field(default=60.0, description="Limit of one group's scoring.")
    retries: Annotated[int, Field(ge=0)] = Field(default=1, description="Further attempts after a failure.")


class RLVRConfig(PipelineConfig):
    """One RLVR run: everything a YAML file may say."""

    pipeline: Literal["rlvr"] = Field(default="rlvr", description="This pipeline.")
    name: str = Field(default="rlvr", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run and of its folder.")
    output_dir: Path = Field(default=Path("runs"), description="Folder of runs; this one is `output_dir/name`.")
    seed: Annotated[int, Field(ge=0)] = Field(default=0, description="Seed of data order, sampling and training.")
    steps: PositiveInt = Field(description="Steps to train.")
    import_: tuple[str, ...] = Field(
        default=(), alias="import", description="Modules to import first; they register plugins."
    )
    model: ModelConfig = Field(description="Which model is trained.")
    data: DataConfig = Field(description="What the policy is trained on.")
    rollout: RolloutConfig = Field(
        description="What one step samples: `prompts_per_step × samples_per_prompt = samples_per_step`."
    )
    inference: InferenceConfig = Field(default_factory=VLLMConfig, description="The engine that samples.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The DeepSpeed training engine.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="How rewards become a gradient.")
    reference: ReferenceConfig | None = Field(default=None, description="Needed by KL terms; none by default.")
    critic: CriticConfig | None = Field(
        default=None, description="Needed by advantage estimators that learn values; none by default."
    )
    rewards: RewardsConfig = Field(description="How answers are judged.")
    judge: JudgeServerConfig | None = Field(
        default=None, description="A model that judges, for `llm_judge` rewards; none by default."
    )
    domains: dict[str, DomainConfig] = Field(
        default_factory=dict,
        description="How the tasks of each domain (`data.sources[].domain`) are judged and chosen. Domains that are "
        "not named here are judged by every reward whose `sources` fit.",
    )
    resources: ResourcesConfig = Field(
        description="What hardware the run takes and how roles divide it. A device is a GPU, or a core with "
        "`device: cpu`."
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="How progress is measured on tasks that are not trained on; none by default."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When states are written and how many are kept."
    )
    metrics: MetricsConfig = Field(
        default_factory=MetricsConfig, description="Where figures go. `metrics.jsonl` is always written."
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_rlvr(self)
        return self

    def run(self, *, resume: str | None = None) -> RunResult:
        """Train, from a notebook or a script, and return the metrics.

        Args:
            resume: Name of a run to continue, or `""` for this configuration's own.
        """
        result: RunResult = PIPELINES.get(self.pipeline).launch(self, resume=resume)
        return result
