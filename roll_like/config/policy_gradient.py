"""What the pipelines share that train a policy on groups of its own samples: answers to prompts, or episodes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.inference import InferenceConfig, default_engine
from roll_like.config.roles import RolePlan, model_role
from roll_like.config.run import RunConfig, ScheduleConfig
from roll_like.config.schedule import ReplaySchedule, RolloutSchedule, SyncSchedule
from roll_like.config.sections import (
    CriticConfig,
    Fraction,
    PositiveInt,
    ReferenceConfig,
    ResourcesConfig,
    SamplingConfig,
    SamplingResourcesConfig,
    Steps,
    TrainerConfig,
)


class GroupRolloutConfig(SamplingConfig):
    """What one step samples: groups, each of several samples of one task."""

    #: The keys that say how many groups a step has, how many samples a group, and (optional) their product.
    groups_key: ClassVar[str]
    samples_key: ClassVar[str]
    product_key: ClassVar[str | None] = None

    drop_zero_variance_groups: bool = Field(
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
    schedule: RolloutSchedule = Field(
        default_factory=SyncSchedule,
        description="Whether sampling takes turns with training, goes on meanwhile, or is replaced by a recording.",
    )
    save_tokens: bool = Field(
        default=False,
        description="Write the groups of each step with tokens and log-probabilities to the run's `rollouts/`, so that "
        "`schedule: {type: replay}` can train on them again. 13 bytes a token, plus the text.",
    )
    save_logprobs: bool = Field(
        default=False,
        description="With `save_tokens`, also write each token's log-probability under the trainer's weights and its "
        "advantage, for the page of `roll-like rollouts RUN -o PAGE.html`. Costs one more forward pass a step, and 8 "
        "bytes a token.",
    )

    @property
    @abstractmethod
    def groups(self) -> int:
        """Groups that one step trains on."""

    @property
    @abstractmethod
    def samples_per_group(self) -> int:
        """Samples of each group."""

    @model_validator(mode="after")
    def _arithmetic(self) -> Self:
        written = None if self.product_key is None else getattr(self, self.product_key)
        product = self.groups * self.samples_per_group
        if written is not None and written != product:
            raise ValueError(
                f"{self.product_key} is {written}, but {self.groups_key} × {self.samples_key} = "
                f"{self.groups} × {self.samples_per_group} = {product}"
            )
        return self

    @model_validator(mode="after")
    def _logprobs_have_tokens(self) -> Self:
        if self.save_logprobs and not self.save_tokens:
            raise ValueError("save_logprobs adds to the tokens that save_tokens writes; set save_tokens: true as well")
        return self

    @model_validator(mode="after")
    def _replacing_is_possible(self) -> Self:
        if self.drop_zero_variance_groups and self.max_oversampling == 1.0:
            raise ValueError(
                "drop_zero_variance_groups replaces groups, but max_oversampling: 1.0 allows no replacement; "
                "set max_oversampling above 1 (2.0 is usual)"
            )
        return self


class EvaluationSchedule(ScheduleConfig):
    """When progress is measured, and how answers are sampled for it."""

    temperature: Annotated[float, Field(ge=0, le=100)] = Field(default=1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus.")
    max_response_tokens: PositiveInt | None = Field(default=None, description="Default: the training limit. Tokens.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end an evaluated response.")

    #: The key that says k of avg@k and pass@k.
    samples_key: ClassVar[str]

    @property
    def samples_per_group(self) -> int:
        """K of avg@k and pass@k."""
        return int(getattr(self, self.samples_key))


class SamplingRunConfig(RunConfig):
    """What runs have in common whose policy samples groups with inference engines of its own."""

    steps: Steps = Field(description="Steps to train.")
    rollout: GroupRolloutConfig
    inference: InferenceConfig = Field(default_factory=default_engine, description="The engine that samples.")
    resources: SamplingResourcesConfig
    evaluation: EvaluationSchedule | None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps

    @property
    def replay(self) -> ReplaySchedule | None:
        """The recorded rollouts that the run trains on; None where it samples its own."""
        schedule = self.rollout.schedule
        return schedule if isinstance(schedule, ReplaySchedule) else None

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the policy in one step."""
        return 1

    @property
    def may_send_adapters(self) -> bool:
        """Whether engines may be sent adapters alone: the base that they load is the one that the trainer has."""
        lora = self.training.lora
        return lora is not None and lora.quantization is None and self.inference.sends_adapters is not False

    @property
    def replays_routes(self) -> bool:
        """Whether engines tell the experts of each token, for training to use the same ones."""
        return False

    @property
    def adapter_keys(self) -> tuple[str, ...]:
        """Keys that need an engine with the base model beside the policy's adapter."""
        return ()

    @property
    def frozen_adapters(self) -> dict[str, str]:
        """Directories of adapters that engines hold beside the policy's, by name."""
        return {}

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
        return self.inference.max_model_len or needed

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """Where the workers of each role are: trainer and engines; a replay has no engines."""
        if self.replay is not None:
            return super().roles
        resources, engines = self.resources, self.resources.device_mapping.inference
        inference = model_role(resources, "inference", self.inference.replicas, "inference.replicas", engines)
        trainer, *others = super().roles
        return (trainer, inference, *others)

    @property
    def processes(self) -> dict[str, int]:
        """Worker processes without a device of their own, by what they are."""
        return {}


class PolicyGradientConfig(SamplingRunConfig):
    """What runs have in common that move the policy by the rewards of its samples."""

    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig | None = Field(default=None, description="Needed by KL terms; none by default.")
    critic: CriticConfig | None = Field(
        default=None, description="Needed by advantage estimators that learn values; none by default."
    )
    resources: ResourcesConfig

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the policy in one step."""
        return self.algorithm.updates_per_step

    @property
    def replays_routes(self) -> bool:
        """Whether `algorithm.router_replay` is on."""
        return self.algorithm.router_replay

    @property
    def trained(self) -> dict[str, TrainerConfig]:
        """The policy, and a critic where there is one."""
        return super().trained if self.critic is None else {**super().trained, "critic": self.critic}

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """The same, with reference model and critic, where they have ranks of their own."""
        reference = self.reference if self.reference is not None and self.reference.mode == "cluster" else None
        device_mapping, found = self.resources.device_mapping, []
        for name, section in {"reference": reference, "critic": self.critic}.items():
            if section is not None:
                devices = getattr(device_mapping, name) or device_mapping.training
                found.append(model_role(self.resources, name, section.workers, f"{name}.workers", devices))
        return (*super().roles, *found)
