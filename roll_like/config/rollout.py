"""The section `rollout`: which groups a step samples, and when."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from roll_like.config.base import ConfigModel, Fraction, PluginConfig, PositiveFloat, PositiveInt, Violation
from roll_like.registry import ADVANTAGES


class SamplingConfig(ConfigModel):
    """How tokens are drawn."""

    common: ClassVar[tuple[str, ...]] = ("temperature", "max_response_tokens")

    temperature: Annotated[float, Field(ge=0, le=100)] = Field(default=1.0, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus; 1 keeps all tokens.")
    top_k: Annotated[int, Field(ge=0)] = Field(default=0, description="Keep the k likeliest tokens; 0 keeps all.")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="Keep tokens whose probability is at least this share of the likeliest token's; 0 keeps all.",
    )
    max_response_tokens: PositiveInt = Field(default=512, description="Longer responses are cut. Tokens.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end a response, also in its reasoning.")

    @property
    def truncation(self) -> tuple[str, ...]:
        """The keys that leave tokens out when answers are sampled."""
        return tuple(self.changed("top_p", "top_k", "min_p"))


class SyncSchedule(ConfigModel):
    """Sample a step's groups, then train on them."""

    type: Literal["sync"] = Field(default="sync", description="Generation and training take turns; the default.")


class AsyncSchedule(ConfigModel):
    """Sample while the policy is trained. No group is discarded for its age, and none is older than `max_staleness`."""

    type: Literal["async"] = Field(description="Generation goes on while the policy is trained.")
    max_staleness: PositiveInt = Field(
        default=1,
        description="Largest number of policy versions between the oldest token of a sample and the weights that are "
        "trained on it. 2 to 4 if some groups take much longer than others.",
    )
    ahead: PositiveFloat = Field(
        default=1.0,
        description="Groups in flight or waiting beyond those of the step, as a multiple of them; about the mean "
        "staleness of samples. At most `max_staleness`.",
    )
    stall_seconds: PositiveFloat = Field(
        default=1800.0, description="End the run when a step waits this long and no group ends. Seconds."
    )

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _samples_may_be_older(cls, value: Any) -> Any:
        if value == 0:
            raise ValueError(
                "found 0: no group may be older than the weights that it trains, so none can be sampled while the "
                "policy is trained; set type: sync, or max_staleness to 1 or more"
            )
        return value

    @model_validator(mode="after")
    def _bound_can_be_kept(self) -> Self:
        if self.ahead > self.max_staleness:
            raise ValueError(
                f"ahead: {self.ahead:g} keeps more groups waiting than can be trained while they are at most "
                f"max_staleness: {self.max_staleness} versions old; lower ahead to {self.max_staleness}, or raise "
                "max_staleness"
            )
        return self


class ReplaySchedule(ConfigModel):
    """Train on the groups that an earlier run recorded in the same step; nothing is sampled or scored."""

    type: Literal["replay"] = Field(default="replay", description="Recorded rollouts are trained on again.")
    path: Path = Field(description="Folder of a run with `rollout.save_tokens: true`, such as `runs/EARLIER`.")


def _type_of(value: Any) -> Any:
    """Return the type that a value names; the default where it names none."""
    return value.get("type", "sync") if isinstance(value, Mapping) else getattr(value, "type", None)


RolloutSchedule: TypeAlias = Annotated[
    Annotated[SyncSchedule, Tag("sync")]
    | Annotated[AsyncSchedule, Tag("async")]
    | Annotated[ReplaySchedule, Tag("replay")],
    Discriminator(
        _type_of,
        custom_error_type="schedule",
        custom_error_message="a schedule is a mapping with a type: sync, async or replay, as "
        "{type: async, max_staleness: 2}",
    ),
]


class GroupRolloutConfig(SamplingConfig):
    """What one step samples: groups, each of several samples of one task."""

    common: ClassVar[tuple[str, ...]] = ("schedule", "drop_zero_variance_groups", "max_turns", "max_episode_tokens")

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

    def replacement_violations(self, domains: Iterable[bool]) -> Iterator[Violation]:
        """Yield room for further groups where no group is ever turned down, and none where every group is.

        Args:
            domains: Which domains replace groups by a setting of their own.
        """
        replaces = self.drop_zero_variance_groups or any(domains)
        if self.samples_per_group == 1 and replaces:
            yield Violation(
                ("rollout", self.samples_key),
                "a group of one always has equal rewards, so drop_zero_variance_groups would drop every group; set "
                f"{self.samples_key} to 2 or more, or drop_zero_variance_groups: false",
            )
        if self.max_oversampling != 1.0 and not replaces:
            yield Violation(
                ("rollout", "max_oversampling"),
                f"{self.max_oversampling:g} makes room for groups that replace others, and no filter turns one down; "
                "remove it, or set drop_zero_variance_groups: true",
            )

    def ratio_violations(self) -> Iterator[Violation]:
        """Yield sampling that leaves ratios nothing to compare, or that prefers some answers."""
        for name in ("top_k", "min_p"):
            if getattr(self, name) == 1:
                yield Violation(
                    ("rollout", name),
                    "1 keeps the likeliest token alone: it is drawn with probability 1 whatever the policy, so no "
                    "gradient moves it; "
                    + ("set it to 2 or more, or to 0, which keeps all" if name == "top_k" else "set it below 1"),
                )
        if isinstance(self.schedule, AsyncSchedule) and getattr(self, "redundant_samples", None):
            yield Violation(
                ("rollout", "redundant_samples"),
                "keeping the first samples of a group prefers short answers, and with rollout.schedule: async no step "
                "waits for the slow ones; set it to 0",
            )

    def comparison_violations(self, advantage: PluginConfig) -> Iterator[Violation]:
        """Yield groups that leave an advantage estimator nothing, or too little, to compare a sample with."""
        estimator, plugin = advantage.type, ADVANTAGES.get(advantage.type)
        least, compared = plugin.minimum_samples_per_prompt, plugin.compares_with
        size, key = self.samples_per_group, self.samples_key
        if size < least:
            yield Violation(
                ("rollout", key),
                f"algorithm.advantage {estimator!r} compares a sample with {compared}, and a group of "
                f"{'one' if size == 1 else size} has nothing to compare with: every advantage would be 0; set "
                f"{key} to {least} or more (8 is usual), or use algorithm.advantage: reinforce_plus_plus",
            )
        elif size < plugin.least_samples(advantage):
            yield Violation(
                ("rollout", key),
                f"algorithm.advantage {estimator!r} compares {plugin.least_samples(advantage)} samples at a time, and "
                f"a group has {size}; raise this, or lower the estimator's settings",
            )
        if self.temperature == 0:
            yield Violation(
                ("rollout", "temperature"),
                "0 is greedy: nothing is explored and all samples of a prompt are equal, so every advantage would be "
                "0; use 1.0 for training (evaluation.temperature may be 0)",
            )

    def flight_violations(self) -> Iterator[Violation]:
        """Yield a limit of samples at a time that is less than one group."""
        size = self.samples_per_group
        if self.max_in_flight < size:
            yield Violation(
                ("rollout", "max_in_flight"),
                f"{self.max_in_flight} samples at a time cannot hold one group of {size}; set it to {size} or more",
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
        return self.prompts_per_step
