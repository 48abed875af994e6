"""The configuration of `pipeline: on_policy_distill`: a student samples, teachers say how likely they find it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from roll_like.config.algorithm import AlgorithmConfig, KLConfig
from roll_like.config.base import ConfigModel, Fraction, PositiveFloat, Violation
from roll_like.config.resources import RolePlan
from roll_like.config.rewards import OptionalRewardsConfig
from roll_like.config.run import NAME_PATTERN
from roll_like.config.sampling import PromptConfig
from roll_like.config.teachers import TeacherConfigs, teacher_roles, teacher_violations
from roll_like.registry import PIPELINES


class TeacherSignalConfig(ConfigModel):
    """How the teachers' opinion of sampled tokens becomes a gradient."""

    common: ClassVar[tuple[str, ...]] = ("use",)

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


@PIPELINES.register("on_policy_distill")
class OnPolicyDistillConfig(PromptConfig):
    """One run of on-policy distillation: everything a YAML file may say."""

    common: ClassVar[tuple[str, ...]] = ("distillation", "rewards")

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.on_policy_distill.pipeline:OnPolicyDistillPipeline"

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
        return (*super().roles, *teacher_roles(self.resources, self.teachers))

    @property
    def compares_groups(self) -> bool:
        """Whether advantages compare the samples of a group by their rewards: where there are some."""
        return bool(self.rewards.use)

    def violations(self) -> Iterator[Violation]:
        """Yield every combination of sections that cannot work."""
        yield from super().violations()
        yield from self._reward_violations()
        yield from self._teacher_violations()
        domains = [source.domain_label for source in self.sources]
        yield from teacher_violations(self.teachers, domains, self.longest_sample, self.longest_sample_terms)

    def _reward_violations(self) -> Iterator[Violation]:
        weight = self.distillation.reward_weight
        if self.rewards.use:
            return
        if weight:
            yield Violation(
                ("distillation", "reward_weight"),
                f"{weight:g} of the advantages of rewards, and there are none; add `rewards.use`, or set it to 0",
            )
        if self.critic is not None or self.algorithm.kl.use == "reward":
            path = ("critic",) if self.critic is not None else ("algorithm", "kl", "use")
            yield Violation(path, "it belongs to rewards, and this run has none; remove it, or add `rewards.use`")
        filtering = [("domains", name) for name, domain in self.domains.items() if domain.drop_zero_variance_groups]
        if self.rollout.drop_zero_variance_groups:
            filtering.append(("rollout", "drop_zero_variance_groups"))
        for key in filtering:
            yield Violation(
                key, "without rewards no group has a signal of its own, so that all would be dropped; set it to false"
            )

    def _teacher_violations(self) -> Iterator[Violation]:
        signal, temperature = self.distillation, self.rollout.temperature
        if signal.use == "loss":
            if self.algorithm.kl.use != "none":
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
            if self.rollout.schedule.type == "async":
                yield Violation(
                    ("rollout", "schedule", "type"),
                    "with distillation.use: loss the teachers' divergence is not weighted for samples of older "
                    "policies; set distillation.use: advantage, or type: sync",
                )
        if temperature == 0:
            yield Violation(
                ("rollout", "temperature"),
                "0 is greedy: there is no distribution to compare with a teacher's; use 1.0",
            )
        if self.evaluation is not None and self.evaluation.temperature != temperature:
            yield Violation(
                ("evaluation", "temperature"),
                f"teachers score at the temperature that training samples at, {temperature:g}, and "
                f"{self.evaluation.temperature:g} would be another distribution; make them equal",
            )

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
