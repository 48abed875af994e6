"""What the pipelines share whose policy answers prompts, and whose answers are scored by rewards."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from roll_like.config.algorithm import DifficultyConfig
from roll_like.config.base import ConfigModel
from roll_like.config.inference import BASE, POLICY
from roll_like.config.policy_gradient import (
    EvaluationSchedule,
    GroupRolloutConfig,
    PolicyGradientConfig,
)
from roll_like.config.python_rows import as_section
from roll_like.config.rewards import RewardedRunConfig
from roll_like.config.sections import DataConfig, DataSource, PositiveInt, ResourcesConfig
from roll_like.registry import ADVANTAGES


class AnswerRolloutConfig(GroupRolloutConfig):
    """Groups whose samples are answers to one prompt."""

    samples_key: ClassVar[str] = "samples_per_prompt"

    samples_per_prompt: PositiveInt = Field(description="Samples of each group.")
    redundant_samples: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Further samples of each group; the first `samples_per_prompt` that finish are kept, the others "
        "aborted. This is faster if a few answers are long, but biased: short answers finish first, so they are "
        "trained on more often than the policy gives them.",
    )

    @property
    def samples_per_group(self) -> int:
        """Samples of each group."""
        return self.samples_per_prompt


class RolloutConfig(AnswerRolloutConfig):
    """What one step samples: `prompts_per_step × samples_per_prompt = samples_per_step`."""

    groups_key: ClassVar[str] = "prompts_per_step"
    product_key: ClassVar[str | None] = "samples_per_step"

    prompts_per_step: PositiveInt = Field(description="Groups that one step trains on.")
    samples_per_step: PositiveInt | None = Field(
        default=None, description="Their product. Optional; checked when written."
    )

    @property
    def groups(self) -> int:
        """Groups that one step trains on."""
        return self.prompts_per_step


class EvaluationConfig(EvaluationSchedule):
    """How progress is measured on tasks that are not trained on."""

    @model_validator(mode="before")
    @classmethod
    def _rows_alone(cls, value: Any) -> Any:
        return as_section(value)

    samples_key: ClassVar[str] = "samples_per_prompt"

    sources: Annotated[tuple[DataSource, ...], Field(min_length=1)] = Field(description="Datasets.")
    samples_per_prompt: PositiveInt = Field(default=4, description="k of avg@k and pass@k.")
    max_tasks: PositiveInt | None = Field(default=None, description="Use the first so many tasks; default: all.")
    base_model: bool = Field(
        default=False,
        description="With `training.lora`: also measure the model without adapters, as `eval/base/…`. The engine has "
        "it anyway. It is sampled at the first evaluation, and its figures are reported with each.",
    )
    adapters: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], str] = Field(
        default_factory=dict,
        description="With `training.lora`: further adapters of the same base model, by name, to measure as "
        "`eval/adapter/NAME/…`, as `base_model` is. Each is a directory in PEFT's format, such as the `model/adapter` "
        "of a run.",
    )

    @field_validator("adapters")
    @classmethod
    def _names_are_free(cls, adapters: dict[str, str]) -> dict[str, str]:
        for name in (POLICY, BASE):
            if name in adapters:
                raise ValueError(f"{name!r} has a meaning of its own; give the adapter another name")
        return adapters


class DomainConfig(ConfigModel):
    """How the tasks of one domain are scored and chosen."""

    rewards: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Names of the rewards in `rewards.use` that score it; no other does."
    )
    difficulty: DifficultyConfig | None = Field(
        default=None, description="Band of its groups that are trained on; default: `algorithm.mask.difficulty`."
    )
    drop_zero_variance_groups: bool | None = Field(
        default=None, description="Replace its groups of equal rewards; default: `rollout`'s setting of this name."
    )


class PromptRunConfig(RewardedRunConfig):
    """A run whose policy answers prompts, and whose answers get rewards."""

    data: DataConfig
    rollout: AnswerRolloutConfig
    domains: dict[str, DomainConfig] = Field(
        default_factory=dict,
        description="How the tasks of each domain (`data.sources[].domain`) are scored and chosen. Domains that are "
        "not named here are scored by every reward whose `sources` fit.",
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="How progress is measured on tasks that are not trained on; none by default."
    )

    def evaluating(self, model: str) -> Self:
        """Return the same configuration for another model, measured alone.

        Raises:
            ConfigError: There is no `evaluation` section.
        """
        config = super().evaluating(model)
        assert config.evaluation is not None
        alone = config.evaluation.model_copy(update={"base_model": False, "adapters": {}})
        return config.model_copy(update={"evaluation": alone})

    @property
    def adapter_keys(self) -> tuple[str, ...]:
        """Keys that need an engine with the base model beside the policy's adapter."""
        evaluation, asked = self.evaluation, dict[str, bool]()
        if evaluation is not None:
            asked = {"evaluation.base_model": evaluation.base_model, "evaluation.adapters": bool(evaluation.adapters)}
        return (*(key for key, value in asked.items() if value), *super().adapter_keys)

    @property
    def frozen_adapters(self) -> dict[str, str]:
        """Directories of the adapters that evaluation measures beside the policy, by name."""
        return {} if self.evaluation is None else self.evaluation.adapters

    @property
    def longest_sample(self) -> int:
        """Longest prompt plus longest response. Tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def longest_sample_terms(self) -> str:
        """The same as a sum of keys."""
        return (
            f"data.max_prompt_tokens + rollout.max_response_tokens = {self.data.max_prompt_tokens} + "
            f"{self.rollout.max_response_tokens} = {self.longest_sample}"
        )

    @property
    def longest_response(self) -> int:
        """Longest response. Tokens."""
        return self.rollout.max_response_tokens

    @property
    def longest_evaluated(self) -> tuple[int, str] | None:
        """Longest prompt plus longest evaluated response, where that has a limit of its own."""
        if self.evaluation is None or self.evaluation.max_response_tokens is None:
            return None
        longest = self.data.max_prompt_tokens + self.evaluation.max_response_tokens
        return longest, f"data.max_prompt_tokens + evaluation.max_response_tokens = {longest}"

    @property
    def greedy_baseline(self) -> bool:
        """Whether each group needs a greedy answer to compare with."""
        return False

    @property
    def domain_rewards(self) -> dict[str, tuple[str, ...]]:
        """The names of the rewards of each domain that names its own."""
        return {name: domain.rewards for name, domain in self.domains.items()}

    @property
    def domain_difficulty(self) -> dict[str, DifficultyConfig]:
        """The difficulty band of each domain that has its own."""
        return {name: domain.difficulty for name, domain in self.domains.items() if domain.difficulty is not None}

    @property
    def domain_filters(self) -> dict[str, bool]:
        """Of each domain that says so itself, whether its groups with zero reward variance are replaced."""
        settings = {name: domain.drop_zero_variance_groups for name, domain in self.domains.items()}
        return {name: setting for name, setting in settings.items() if setting is not None}


class PromptConfig(PromptRunConfig, PolicyGradientConfig):
    """The same, where rewards become the gradient."""

    rollout: RolloutConfig
    # pydantic takes a field from the first base that has it
    resources: ResourcesConfig

    @property
    def greedy_baseline(self) -> bool:
        """Whether the advantage estimator compares with a greedy answer."""
        greedy: bool = ADVANTAGES.get(self.algorithm.advantage.type).greedy_baseline
        return greedy
