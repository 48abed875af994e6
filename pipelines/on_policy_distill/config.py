"""The configuration of `pipeline: on_policy_distill`: a student samples, teachers say how likely they find it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from roll_like.config.algorithm import AlgorithmConfig, KLConfig
from roll_like.config.base import ConfigModel, Fraction, PositiveFloat, Violation
from roll_like.config.resources import RolePlan
from roll_like.config.rewards import OptionalRewardsConfig
from roll_like.config.rules import POLICY_GRADIENT_RULES
from roll_like.config.rules_algorithm import groups_can_be_compared
from roll_like.config.rules_rewards import PROMPT_RULES
from roll_like.config.run import NAME_PATTERN, Rule
from roll_like.config.sampling import PromptConfig
from roll_like.config.teachers import TeacherConfigs, teacher_roles, teachers_fit
from roll_like.registry import PIPELINES


class TeacherSignalConfig(ConfigModel):
    """How the teachers' opinion of sampled tokens becomes a gradient."""

    use: Literal["advantage", "loss"] = Field(
        default="advantage",
        description="`advantage`: the negative reverse KL of each token is its advantage, for the policy loss of "
        "`algorithm` with its ratios and clipping. `loss`: the reverse KL is added to the loss.",
    )
    weight: PositiveFloat = Field(default=1.0, description="Weight of the teachers.")
    reward_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Weight of the advantages of `rewards`; 0: rewards are measured, and train nothing."
    )
    estimator: Literal["k1", "abs", "k2", "k3"] = Field(
        default="k1", description="Of the reverse KL at a token, as in `algorithm.kl.estimator`; k1 is unbiased."
    )
    discount: Fraction = Field(
        default=0.0,
        description="How much of the later tokens' reverse KL a token answers for; 0: its own only. With "
        "`use: advantage`.",
    )


def _with_rewards(rule: Rule) -> Rule:
    """Return a rule that holds where the run has rewards."""

    def when_there_are_rewards(config: OnPolicyDistillConfig) -> Iterator[Violation]:
        if config.rewards.use:
            yield from rule(config)

    return when_there_are_rewards


def _rewards_are_used(config: OnPolicyDistillConfig) -> Iterator[Violation]:
    signal, has_rewards = config.distillation, bool(config.rewards.use)
    if signal.reward_weight and not has_rewards:
        yield Violation(
            ("distillation", "reward_weight"),
            f"{signal.reward_weight:g} of the advantages of rewards, and there are none; add `rewards.use`, or set it "
            "to 0",
        )
    if has_rewards:
        return
    if config.critic is not None or config.algorithm.kl.use == "reward":
        path = ("critic",) if config.critic is not None else ("algorithm", "kl", "use")
        yield Violation(path, "it belongs to rewards, and this run has none; remove it, or add `rewards.use`")
    filtering: list[tuple[str, ...]] = [
        ("domains", name) for name, domain in config.domains.items() if domain.drop_zero_variance_groups
    ]
    if config.rollout.drop_zero_variance_groups:
        filtering.append(("rollout", "drop_zero_variance_groups"))
    for key in filtering:
        yield Violation(
            key, "without rewards no group has a signal of its own, so that all would be dropped; set it to false"
        )


def _teacher_has_its_place(config: OnPolicyDistillConfig) -> Iterator[Violation]:
    signal = config.distillation
    if signal.use == "loss":
        if config.algorithm.kl.use != "none":
            yield Violation(
                ("distillation", "use"),
                "there is room for one divergence beside the advantages, and algorithm.kl has taken it; use "
                "`advantage`, or set algorithm.kl.use: none",
            )
        if signal.discount:
            yield Violation(
                ("distillation", "discount"),
                "a loss looks at each token alone; remove it, or set distillation.use: advantage",
            )
        if config.rollout.schedule.type == "async":
            yield Violation(
                ("rollout", "schedule", "type"),
                "with distillation.use: loss the teachers' divergence is not weighted for samples of older policies; "
                "set distillation.use: advantage, or type: sync",
            )
    if config.rollout.temperature == 0:
        yield Violation(
            ("rollout", "temperature"),
            "0 is greedy: there is no distribution to compare with a teacher's; use 1.0",
        )
    evaluation = config.evaluation
    if evaluation is not None and evaluation.temperature != config.rollout.temperature:
        yield Violation(
            ("evaluation", "temperature"),
            f"teachers score at the temperature that training samples at, {config.rollout.temperature:g}, and "
            f"{evaluation.temperature:g} would be another distribution; make them equal",
        )


#: Rules about rewards, for runs that have some.
_REWARD_RULES = tuple(_with_rewards(rule) for rule in (groups_can_be_compared, *PROMPT_RULES))


@PIPELINES.register("on_policy_distill")
class OnPolicyDistillConfig(PromptConfig):
    """One run of on-policy distillation: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.on_policy_distill.pipeline:OnPolicyDistillPipeline"
    rules: ClassVar[tuple[Rule, ...]] = (
        *(rule for rule in POLICY_GRADIENT_RULES if rule is not groups_can_be_compared),
        *_REWARD_RULES,
        _rewards_are_used,
        _teacher_has_its_place,
        teachers_fit,
    )

    pipeline: Literal["on_policy_distill"] = Field(default="on_policy_distill", description="This pipeline.")
    name: str = Field(
        default="on_policy_distill", pattern=NAME_PATTERN, description="Name of the run and of its folder."
    )
    teachers: TeacherConfigs = Field(
        description="Models that the student (`model`) learns from, by names of your choice."
    )
    distillation: TeacherSignalConfig = Field(default_factory=TeacherSignalConfig)
    rewards: OptionalRewardsConfig = Field(default_factory=OptionalRewardsConfig)

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """The same, with the teachers."""
        teachers = teacher_roles(self.resources, self.resources.device_mapping.training, self.teachers)
        return (*super().roles, *teachers)

    def with_teacher_in_loss(self) -> Self:
        """Return the configuration whose loss has the teachers' divergence, where that is their place.

        Its gradient at a token is (log π − log π_teacher)·∇ log π, that of the reverse KL (k2), whatever the estimator.
        """
        signal = self.distillation
        if signal.use != "loss":
            return self
        kl = KLConfig(
            use="loss",
            estimator=signal.estimator,
            straight_through=signal.estimator != "k2",
            coefficient=signal.weight,
        )
        changes: dict[str, Any] = {"kl": kl}
        algorithm: AlgorithmConfig = self.algorithm.model_copy(update=changes)
        return self.model_copy(update={"algorithm": algorithm})
